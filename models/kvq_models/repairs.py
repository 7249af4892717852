"""Ways to change the messages of a conversation for a template, none of which loses a text.

Each takes messages and returns them unchanged if there is nothing to do. Each belongs to a form of
conversations, of which there is an example. `conversation` finds out which a template needs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvq.json_values import is_array, is_object
from kvq_models.thinking import THOUGHT_NAMES, assistant_message

Message = Mapping[str, Any]
Messages = Sequence[Message]

# The tool of all examples.
TOOL = "kvqtool"
_TEXTS = ("content", *THOUGHT_NAMES)
_SHORT_IDENTITY = re.compile("[A-Za-z0-9]{9}")


# A way to change messages, and how a log message calls it.
Change = Callable[[Messages], Messages]
Repair = tuple[str, Change]


class Feature:
    """Describes a form of conversations by an example, and its repairs, the best first."""

    def __init__(self, example: Messages, *repairs: Repair) -> None:
        self.example = example
        self.repairs = repairs


def joined(*texts: Any) -> str:
    """Returns the texts, or the texts in lists of parts, with a blank line between them."""
    return "\n\n".join(text for text in map(text_of, texts) if text)


def text_of(content: Any) -> str:
    """Returns the text of a message's content; for a list of parts, the texts in it."""
    if is_array(content):
        return "".join(str(part.get("text") or "") for part in content if is_object(part))
    return content if isinstance(content, str) else ""


def _role(message: Message) -> Any:
    return message.get("role")


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if is_array(calls) else ()


def _each(change: Callable[[Message], Message]) -> Change:
    return lambda messages: [change(message) for message in messages]


def _each_call_with_text(
    change: Callable[[Message], Messages], *, answered: bool = False
) -> Change:
    """Returns a change of the messages that have both calls and a text.

    With `answered` only messages before the last answer without calls are changed.
    """

    def changed(messages: Messages) -> Messages:
        answers = [
            place
            for place, row in enumerate(messages)
            if _role(row) == "assistant" and not _calls(row)
        ]
        last = max(answers, default=-1) if answered else len(messages)
        rows: list[Message] = []
        for place, message in enumerate(messages):
            both = _calls(message) and text_of(message.get("content"))
            rows += change(message) if both and place < last else [message]
        return rows

    return changed


def _developer_renamed(message: Message) -> Message:
    return {**message, "role": "system"} if _role(message) == "developer" else message


def _parts_joined(message: Message) -> Message:
    content = message.get("content")
    if not is_array(content) or any(
        not is_object(part) or part.get("type") != "text" for part in content
    ):
        return message
    return {**message, "content": text_of(content)}


def _parts_made(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _identities_shortened(message: Message) -> Message:
    """Gives ids of calls nine letters and digits, as Mistral's templates want them."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if _calls(message):
        changed["tool_calls"] = [{**row, "id": _short(row.get("id"))} for row in _calls(message)]
    return changed


def is_short(identity: Any) -> bool:
    """Returns whether an id of a call has nine letters and digits."""
    return isinstance(identity, str) and _SHORT_IDENTITY.fullmatch(identity) is not None


def _short(identity: Any) -> str:
    digest = hashlib.sha256(str(identity).encode("utf-8", "replace")).hexdigest()
    return identity if is_short(identity) else digest[:9]


def _results_renamed(messages: Messages) -> Messages:
    """Makes results that follow no calls messages of the user."""
    rows: list[Message] = []
    called = False
    for message in messages:
        is_result = _role(message) == "tool"
        called = called if is_result else bool(_calls(message))
        rows.append(_as_user(message) if is_result and not called else message)
    return rows


def _as_user(message: Message) -> Message:
    return {"role": "user", "content": text_of(message.get("content"))}


def _calls_parted(messages: Messages) -> Messages:
    """Gives each call a message of its own, followed by its result."""
    rows: list[Message] = []
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        results: list[Message] = []
        while len(_calls(message)) > 1 and place < len(messages):
            if _role(messages[place]) != "tool":
                break
            results.append(messages[place])
            place += 1
        rows += _pairs(message, results) if len(_calls(message)) > 1 else [message]
    return rows


def _pairs(message: Message, results: list[Message]) -> Messages:
    """Returns one message for each call, with what answers it behind it."""
    rows: list[Message] = []
    for number, call in enumerate(_calls(message)):
        first = message if number == 0 else {"role": "assistant", "content": ""}
        rows.append({**first, "tool_calls": [call]})
        answers = [row for row in results if row.get("tool_call_id") == call.get("id")]
        rows += answers
        results = [row for row in results if row not in answers]
    return [*rows, *results]


def _text_thought(message: Message) -> Messages:
    """Makes the text beside calls a part of the thought before them."""
    thought = joined(message.get("reasoning_content"), message.get("content"))
    return [{**message, **assistant_message(thought, "")}]


def _text_parted(message: Message) -> Messages:
    """Makes the text beside calls a message of its own before them."""
    return [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}]


def _text_turned(message: Message) -> Messages:
    """Makes the text beside calls a message of its own, with an empty message of the user after it.

    Some templates count turns.
    """
    text, calls = _text_parted(message)
    return [text, {"role": "user", "content": ""}, calls]


def _content_nulled(message: Message) -> Message:
    empty = _calls(message) and not text_of(message.get("content"))
    return {**message, "content": None} if empty else message


def _calls_written(message: Message) -> Message:
    """Writes calls as JSON into the text of their message."""
    if not _calls(message):
        return message
    texts = [
        json.dumps({name: call["function"].get(name) for name in ("name", "arguments")},
            ensure_ascii=False)
        for call in _calls(message)
    ]  # fmt: skip
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": joined(message.get("content"), "\n".join(texts))}


def _calls_and_results_written(message: Message) -> Message:
    """Writes calls as JSON into their message, and makes results messages of the user."""
    return _as_user(message) if _role(message) == "tool" else _calls_written(message)


def _assistant_added(messages: Messages) -> Messages:
    """Adds an empty answer between a result, or a call without one, and a message of the user."""
    rows: list[Message] = []
    for message in messages:
        open_call = bool(rows) and (_role(rows[-1]) == "tool" or bool(_calls(rows[-1])))
        if _role(message) == "user" and open_call:
            rows.append({"role": "assistant", "content": ""})
        rows.append(message)
    return rows


def _system_moved(messages: Messages) -> Messages:
    """Moves system messages to the beginning; the order of the others stays."""
    return sorted(messages, key=lambda message: _role(message) != "system")


def _system_folded(messages: Messages) -> Messages:
    """Adds system messages to the user's message that follows, else after the last message."""
    rows: list[Message] = []
    waiting: list[Any] = []
    for message in messages:
        if _role(message) == "system":
            waiting.append(message.get("content"))
        elif _role(message) == "user" and waiting:
            rows.append({**message, "content": joined(*waiting, message.get("content"))})
            waiting = []
        else:
            rows.append(message)
    if not waiting:
        return rows
    return _merged("user")([*rows, {"role": "user", "content": joined(*waiting)}])


def _system_beside_calls_folded(messages: Messages) -> Messages:
    return _system_folded(messages) if any(map(_calls, messages)) else messages


def _merged(role: str) -> Change:
    """Joins messages of one role that follow each other; calls stay messages of their own."""

    def merged(messages: Messages) -> Messages:
        rows: list[Message] = []
        for message in messages:
            before = rows[-1] if rows else {}
            same = _role(before) == _role(message) == role
            if same and not _calls(before) and not _calls(message):
                rows[-1] = {**before, **_joined_texts(before, message)}
            else:
                rows.append(message)
        return rows

    return merged


def _joined_texts(first: Message, second: Message) -> Message:
    return {
        name: joined(first.get(name), second.get(name))
        for name in _TEXTS
        if name in first or name in second
    }


def _user_added(messages: Messages) -> Messages:
    """Adds an empty message of the user before an answer or result that comes first."""
    roles = [_role(message) for message in messages]
    first = next((place for place, role in enumerate(roles) if role != "system"), len(roles))
    if roles[first : first + 1] not in ([], ["assistant"], ["tool"]):
        return messages
    return [*messages[:first], {"role": "user", "content": ""}, *messages[first:]]


def _user(text: str = "a") -> Message:
    return {"role": "user", "content": text}


def _system(text: str = "a") -> Message:
    return {"role": "system", "content": text}


def _assistant(text: str = "a", calls: Sequence[str] = ()) -> Message:
    rows = [
        {"id": identity, "type": "function", "function": {"name": TOOL, "arguments": {"a": "a"}}}
        for identity in calls
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": rows} if rows else {})


def _result(identity: str) -> Message:
    return {"role": "tool", "name": TOOL, "tool_call_id": identity, "content": "a"}


_SHORT, _OTHER, _LONG = "call00001", "call00002", "call_0001_of_some_length"
_THOUGHT = dict.fromkeys(THOUGHT_NAMES, "a")
_CALL = _assistant("", [_SHORT])
_CALL_WITH_TEXT = _assistant("a", [_SHORT])


_PARTED = "text parted from calls"
_TEXT_MOVED: tuple[Repair, ...] = (
    ("text moved into the thought", _each_call_with_text(_text_thought)),
    (_PARTED, _each_call_with_text(_text_parted)),
    (_PARTED, _each_call_with_text(_text_turned)),
)
_SYSTEM_FOLDED: Repair = ("system folded", _system_folded)
_USER_ADDED: Repair = ("user added", _user_added)

# A conversation is repaired in this order; a feature is tested with the repairs after it.
FEATURES = (
    Feature(
        [{"role": "developer", "content": "a"}, _user()],
        ("developer renamed", _each(_developer_renamed)),
    ),
    Feature(
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        ("parts joined", _each(_parts_joined)),
    ),
    Feature(
        [_user(), _assistant("", [_LONG]), _result(_LONG)],
        ("call ids shortened", _each(_identities_shortened)),
    ),
    Feature(
        [_user(), _assistant(), _result(_SHORT)], ("results told by the user", _results_renamed)
    ),
    Feature(
        [_user(), _assistant("", [_SHORT, _OTHER]), _result(_SHORT), _result(_OTHER)],
        ("calls parted", _calls_parted),
    ),
    Feature(
        [_user(), {**_CALL_WITH_TEXT, **_THOUGHT}, _result(_SHORT), _assistant(), _user()],
        (_PARTED, _each_call_with_text(_text_parted, answered=True)),
        (_PARTED, _each_call_with_text(_text_turned, answered=True)),
    ),
    Feature([_user(), {**_CALL_WITH_TEXT, **_THOUGHT}, _result(_SHORT)], *_TEXT_MOVED),
    Feature([_user(), _CALL_WITH_TEXT, _result(_SHORT)], *_TEXT_MOVED),
    Feature(
        [_user(), _CALL, _result(_SHORT)],
        ("content of calls null", _each(_content_nulled)),
        ("calls written as text", _each(_calls_written)),
        ("calls and results written as text", _each(_calls_and_results_written)),
    ),
    Feature([_user(), _CALL, _result(_SHORT), _user()], ("assistant added", _assistant_added)),
    Feature(
        [_user(), _assistant(), _system(), _user()],
        ("system moved", _system_moved),
        _SYSTEM_FOLDED,
    ),
    Feature([_system(), _system(), _user()], ("systems merged", _merged("system"))),
    Feature(
        [_system(), _user(), _CALL, _result(_SHORT)],
        ("system folded", _system_beside_calls_folded),
    ),
    Feature([_system(), _user()], _SYSTEM_FOLDED),
    Feature(
        [_user(), _assistant(), _assistant(), _user()],
        ("assistants merged", _merged("assistant")),
    ),
    Feature([_system()], _USER_ADDED),
    Feature([_assistant(), _user()], _USER_ADDED),
    Feature([_user(), _user()], ("users merged", _merged("user"))),
    Feature([_user()], ("parts made", _each(_parts_made))),
)
