"""Turns messages into the text of a prompt by a checkpoint's chat template.

It finds the template, and its guard keeps control tokens in messages from becoming real ones. It
knows no token ids: `tokenizer` encodes the text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from kvq.errors import ModelError
from kvq_models.conversation import Reconciler
from kvq_models.repairs import text_of
from kvq_models.template_process import TemplateProcess
from kvq_models.thinking import THOUGHT_NAMES

logger = logging.getLogger(__name__)

# Any character would do, since it is replaced where a message holds it.
_MARK = "\ue000"
_PLACEHOLDER = re.compile(f"{_MARK}([0-9]{{1,9}}){_MARK}")
_END = f"{_MARK}end{_MARK}"


class ChatTemplate:
    """Renders one template. Raises ModelError if it does not compile or refuses its messages.

    The template is code by whoever made the model, so it runs in a process of its own with limits.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._process = TemplateProcess(source)
        self._reconciler = Reconciler(self._process.render)
        self._logged: set[tuple[str, ...]] = set()

    def begin(self) -> None:
        """Starts the process that renders, without waiting for it."""
        self._process.begin()

    @property
    def variables(self) -> frozenset[str]:
        """Returns the names that the template looks up and does not set itself."""
        return self._process.variables()

    def prompt(self, context: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Returns the prompt for `context` (messages, add_generation_prompt, bos_token, ...).

        Messages are changed as far as the template needs it; what was changed is returned beside
        the text. If `continue_final_message` is true, the text ends with that of the last message.
        """
        variables = dict(context)
        if not variables.pop("continue_final_message", False):
            return self._reconciled(variables)
        *earlier, last = variables["messages"]
        for fields in _marked(last):
            rows = [*earlier, {**last, **fields}]
            text, changes = self._reconciled(
                variables | {"messages": rows, "add_generation_prompt": False}
            )
            head, mark, _ = text.rpartition(_END)
            if mark:
                return head, changes
        raise ModelError(
            "the model's chat template leaves out the last message, so it cannot be continued; "
            "end with a message of the user's"
        )

    def _reconciled(self, context: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
        messages, changes = self._reconciler.reconcile(context)
        if changes and changes not in self._logged:
            self._logged.add(changes)
            logger.warning(
                "the model's chat template does not take these messages as they are; changed: %s",
                ", ".join(changes),
            )
        if changes:
            context = {**context, "messages": messages}
        return self._process.render(context), changes


def _marked(message: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields the texts of a message with a mark at the end, which shows where it ends later."""
    text = text_of(message.get("content"))
    thoughts = [name for name in THOUGHT_NAMES if message.get(name)]
    if not text and thoughts:
        # The message ends in its thought, which not every template shows.
        yield {name: f"{message[name]}{_END}" for name in thoughts}
    yield {"content": f"{text}{_END}"}


class MessageGuard:
    """Replaces control tokens in a user's messages by placeholders, and finds these again.

    A placeholder is the token's number between two marks. A mark in a message becomes a placeholder
    itself, so no message can contain a false placeholder.
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
        """Yields the parts of a rendered text, and whether control tokens in them are real."""
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
