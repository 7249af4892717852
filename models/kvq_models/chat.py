"""Renders a checkpoint's chat template in a sandbox.

Owns the template environment (the functions and tags templates on the hub expect), where a
template is found, and the guard that keeps control tokens in messages from becoming real. Knows
no token ids: `tokenizer` encodes what comes out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvq.errors import ModelError


class ChatTemplate:
    """One compiled template. Raises ModelError when it does not compile or refuses its messages."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        names: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.globals.update(names)
        self.source = source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(self, context: Mapping[str, Any]) -> str:
        """The prompt text for `context` (messages, add_generation_prompt, bos_token, ...)."""
        try:
            return self._template.render(**context)
        except (TemplateError, TypeError, ValueError) as error:
            raise ModelError(
                f"the model's chat template refuses these messages: {error}"
            ) from error


def find_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template text from chat_template.jinja, else from tokenizer_config.json, else None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template: Any = tokenizer_config.get("chat_template")
    if not isinstance(template, list):
        return template
    entries = cast(list[dict[str, str]], template)
    return {entry["name"]: entry["template"] for entry in entries}.get("default")


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
        items = cast(Mapping[str, Any], value).items()
        return {key: _mapped(item, change) for key, item in items}
    if isinstance(value, Sequence):
        return [_mapped(item, change) for item in cast(Sequence[Any], value)]
    return value
