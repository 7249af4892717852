"""Renders a checkpoint's chat template in a sandbox.

Owns the template environment (the functions and tags templates on the hub expect), where a
template is found, and the guard that keeps control tokens in messages from becoming real. Knows
no token ids: `tokenizer` encodes what comes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from kvq.errors import ModelError
from kvq_models.bounded_templates import BoundedEnvironment

# Characters of a template's own complaint that are passed on.
_TOLD = 500


class ChatTemplate:
    """One compiled template. Raises ModelError when it does not compile or refuses its messages.

    Whoever made the model wrote it: what it may use and how much is bounded.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._environment = BoundedEnvironment([_GenerationTag, loopcontrols])
        self._environment.filters["tojson"] = _tojson
        self._environment.bound_filters()
        names: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._environment.globals.update(names)
        with self._environment.within(source), _said("does not compile"):
            self._template = self._environment.from_string(source)
            # Names that it looks up besides those it sets itself.
            self.variables = frozenset(
                meta.find_undeclared_variables(self._environment.parse(source))
            )

    def render(self, context: Mapping[str, Any]) -> str:
        """The prompt text for `context` (messages, add_generation_prompt, bos_token, ...)."""
        with self._environment.within(context), _said("refuses these messages"):
            return self._template.render(**context)


@contextmanager
def _said(what: str) -> Generator[None]:
    """Turns whatever a template raises into a `ModelError`."""
    try:
        yield
    except Exception as error:
        told = error if isinstance(error, TemplateError) else f"{type(error).__name__} {error}"
        raise ModelError(f"the model's chat template {what}: {str(told)[:_TOLD]}") from error


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template text from chat_template.jinja, else from tokenizer_config.json, else None.

    Raises ModelError for one that cannot be read.
    """
    path = folder / "chat_template.jinja"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template: Any = tokenizer_config.get("chat_template")
        if not isinstance(template, list):
            return template
        entries = cast(list[dict[str, str]], template)
        return {entry["name"]: entry["template"] for entry in entries}.get("default")
    except (OSError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ModelError(f"the chat template of {folder} cannot be read: {error!r}") from error


# Any character would do: where a message holds it, it is replaced too.
_MARK = "\ue000"
_PLACEHOLDER = re.compile(f"{_MARK}([0-9]{{1,9}}){_MARK}")


class MessageGuard:
    """Replaces control tokens in a user's messages by placeholders, and finds these again.

    A placeholder is the token's number between two marks. A mark in a message becomes a
    placeholder itself, so that no message can spell one.
    """

    def __init__(
        self,
        contents: Iterable[str],
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> None:
        self._contents = [*sorted(contents, key=len, reverse=True), _MARK]
        self._numbers = {content: number for number, content in enumerate(self._contents)}
        self._pattern = re.compile("|".join(map(re.escape, self._contents)))
        self.messages = _mapped(messages, self._hidden)
        self.variables = _mapped(variables, self._hidden)

    def _hidden(self, text: str) -> str:
        return self._pattern.sub(lambda match: f"{_MARK}{self._numbers[match[0]]}{_MARK}", text)

    def split(self, text: str) -> Iterable[tuple[str, bool]]:
        """Parts of a rendered text, and whether control tokens in them are meant."""
        plain, start = "", 0
        for match in _PLACEHOLDER.finditer(text):
            number = int(match[1])
            plain += text[start : match.start()]
            start = match.end()
            if number < len(self._contents) - 1:
                yield from [(plain, True)] if plain else []
                yield self._contents[number], False
                plain = ""
            else:
                plain += _MARK
        if rest := plain + text[start:]:
            yield rest, True


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a class attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {
            change(key) if isinstance(key, str) else key: _mapped(item, change)
            for key, item in items
        }
    if isinstance(value, Sequence):
        return [_mapped(item, change) for item in cast(Sequence[Any], value)]
    return value
