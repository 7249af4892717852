"""Changes a conversation so that a chat template can take it.

Clients send messages in forms that not every template knows: a late system message, two messages of
the user in a row, text beside calls. A template then refuses them, or leaves a message out. Which
form it takes is found by rendering short examples, in which each text is a word of its own: a
missing word was left out. The module knows no tokens and no protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvq.errors import ModelError
from kvq.json_values import is_array, is_object
from kvq_models.repairs import FEATURES, TOOL, Feature, Message, Messages, Repair, is_short
from kvq_models.template_process import LimitError
from kvq_models.thinking import THOUGHT_NAMES

# Shapes of conversations that are remembered.
_MOST_SHAPES = 256
_PYTHON_PARTS = "'type': 'text'"


class Reconciler:
    """Finds out what one template takes, as far as conversations need it."""

    def __init__(self, render: Callable[[Mapping[str, Any]], str]) -> None:
        self._render = render
        self._shown: dict[str, int] = {}
        self._chosen: dict[tuple[int, bool], Repair | None] = {}

    def reconcile(self, context: Mapping[str, Any]) -> tuple[Messages, tuple[str, ...]]:
        """Returns the messages of `context` as the template takes them, and what was changed.

        They are unchanged if the template takes them, and if nothing helps.
        """
        messages, tools = _messages(context), bool(context.get("tools"))
        if self._takes(_Shape(_telling(messages)), tools):
            return messages, ()
        shape = _Shape(messages)
        changed, names = self._repaired(shape.messages, tools)
        before = self._num_shown(shape.messages, shape.words, tools)
        if self._num_shown(changed, shape.words, tools) <= before:
            return messages, ()
        return self._repaired(messages, tools)[0], names

    def _takes(self, shape: _Shape, tools: bool) -> bool:
        return self._num_shown(shape.messages, shape.words, tools) == len(shape.words)

    def _num_shown(self, messages: Messages, words: Sequence[str], tools: bool) -> int:
        """Returns how many of `words` the template shows, -1 if it refuses the messages."""
        if not words:
            return 0
        key = json.dumps([messages, tools])
        if key not in self._shown:
            if len(self._shown) >= _MOST_SHAPES:
                self._shown.clear()
            self._shown[key] = self._tried(messages, words, tools)
        return self._shown[key]

    def _tried(self, messages: Messages, words: Sequence[str], tools: bool) -> int:
        context: dict[str, Any] = {"messages": messages, "add_generation_prompt": True}
        context |= {"bos_token": "", "eos_token": ""}
        function: dict[str, Any] = {"name": TOOL, "description": "", "parameters": {}}
        context |= {"tools": [{"type": "function", "function": function}]} if tools else {}
        try:
            text = self._render(context)
        except LimitError:
            raise
        except ModelError:
            return -1
        # A list in Python's notation means that the template shows no text of its parts.
        return 0 if _PYTHON_PARTS in text else sum(word in text for word in words)

    def _repaired(
        self, messages: Messages, tools: bool, first: int = 0
    ) -> tuple[Messages, tuple[str, ...]]:
        """Returns the messages after the repairs of the features from `first` on."""
        names: list[str] = []
        for number in range(first, len(FEATURES)):
            rows = FEATURES[number].repairs
            if all(change(messages) == messages for _, change in rows):
                continue
            repair = self._choice(number, tools)
            if repair is not None:
                name, change = repair
                changed = change(messages)
                names += [name] if changed != messages else []
                messages = changed
        return messages, tuple(dict.fromkeys(names))

    def _choice(self, number: int, tools: bool) -> Repair | None:
        """Returns the repair that a feature needs; None where it needs none, or none helps."""
        if (number, tools) not in self._chosen:
            self._chosen[number, tools] = self._chosen_for(FEATURES[number], number, tools)
        return self._chosen[number, tools]

    def _chosen_for(self, feature: Feature, number: int, tools: bool) -> Repair | None:
        shape = _Shape(feature.example)
        for repair in (None, *feature.repairs):
            changed = shape.messages if repair is None else repair[1](shape.messages)
            rows, _ = self._repaired(changed, tools, number + 1)
            if self._num_shown(rows, shape.words, tools) == len(shape.words):
                return repair
        return None


def _messages(context: Mapping[str, Any]) -> Messages:
    """Returns the messages that a template is given; none where these are no messages."""
    rows = context.get("messages")
    return rows if is_array(rows) and all(map(is_object, rows)) else ()


def _telling(messages: Messages) -> Messages:
    """Returns messages that tell whether a template takes them all.

    Of plain turns in order these are the first, which every answer to a chat has tested.
    """
    first = 1 if messages and messages[0].get("role") == "system" else 0
    roles = ("user", "assistant")
    in_order = all(
        row.get("role") == roles[place % 2]
        and isinstance(row.get("content"), str)
        and not row.get("tool_calls")
        for place, row in enumerate(messages[first:])
    )
    return messages[: first + 1] if in_order else messages


class _Shape:
    """Holds a conversation in which each text is a word of its own; `words` are those to be seen.

    All conversations of one form have the same shape.
    """

    def __init__(self, messages: Messages) -> None:
        self.words: list[str] = []
        self._identities: dict[Any, str] = {}
        self.messages = [self._message(message) for message in messages]

    def _word(self) -> str:
        self.words.append(f"kvq{len(self.words)}word")
        return self.words[-1]

    def _message(self, message: Message) -> dict[str, Any]:
        shape: dict[str, Any] = {"role": message.get("role"), "content": None}
        shape |= {"name": TOOL} if "name" in message else {}
        shape["content"] = self._content(message.get("content"))
        shape |= {name: "thought" for name in THOUGHT_NAMES if message.get(name)}
        if "tool_call_id" in message:
            shape["tool_call_id"] = self._identity(message["tool_call_id"])
        if message.get("tool_calls"):
            shape["tool_calls"] = [self._call(row) for row in message["tool_calls"]]
        if message.get("tool_responses"):
            rows = message["tool_responses"]
            shape["tool_responses"] = [{"name": TOOL, "response": self._word()} for _ in rows]
        return shape

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._word() if content.strip() else content
        return [self._part(part) for part in content] if is_array(content) else content

    def _part(self, part: Any) -> Any:
        if is_object(part) and part.get("type") == "text":
            return {"type": "text", "text": self._content(part.get("text"))}
        return {"type": "other"}

    def _call(self, row: Any) -> dict[str, Any]:
        function = {"name": TOOL, "arguments": {"a": self._word()}}
        identity = row.get("id") if is_object(row) else None
        return {"id": self._identity(identity), "type": "function", "function": function}

    def _identity(self, identity: Any) -> str:
        """Returns another id of the same kind."""
        short = is_short(identity)
        number = len(self._identities)
        made = f"call{number:05}" if short else f"call_{number}_of_some_length"
        return self._identities.setdefault(identity, made)
