"""Reads tool calls as the supported families write them, while the answer comes.

A chat template that takes `tools` tells its model in which form to answer. Most forms are a JSON
object of a name and arguments; families differ in the marks around it. Small models leave the marks
out or write others; what llama-server reads as a call is read here too. Some forms have another
notation between their marks, which `call_texts` reads. The module knows text, no tokens and no
protocol.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn, cast

from kvq_models.call_texts import (
    GEMMA,
    HARMONY,
    MISTRAL,
    PYTHON,
    XML,
    Call,
    Notation,
    Schemas,
    python_text,
)
from kvq_models.marks import PendingText, TextUpToMark, begun_mark, in_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """Describes one form of calls.

    Args:
        known_by: Text in the templates that ask for this form.
        opening: The mark before a call, or before a list of calls; empty: the call is the whole
            answer.
        closing: The mark after it.
        gap: Text between a mark and the call.
        listed: Whether the marks stand around a list of calls.
        arguments: The key of the arguments.
        before: For a form without an opening, a mark that may stand before the call.
        not_by: Text in the templates of another form that also have `known_by`.
        calls: The notation between the marks if it is not JSON.
        bare: Other marks of this notation; the text between them, with them, is read too.
        tokens: Marks within calls, and parts of marks, that may be control tokens of a vocabulary.
        plain_marks: Marks around plain text, which do not belong to it.
        last: Whether a call is the last of an answer; its closing mark may be a token that ends
            one.
    """

    known_by: str
    opening: str = ""
    closing: str = ""
    gap: str = ""
    listed: bool = False
    arguments: str = "arguments"
    before: str = ""
    not_by: str = "\0"
    calls: Notation | None = None
    bare: tuple[str, str] | None = None
    tokens: tuple[str, ...] = ()
    plain_marks: tuple[str, ...] = ()
    last: bool = False


FORMS = (
    # Qwen 2.5 and 3, Hermes, SmolLM 3
    ToolForm(known_by="<tool_call>", opening="<tool_call>", closing="</tool_call>", gap="\n",
        not_by="<function="),
    # Granite 3, whose lists end with the answer
    ToolForm(known_by="<|start_of_role|>", opening="<|tool_call|>", listed=True),
    # Phi 4
    ToolForm(known_by="<|tool_call|>", opening="<|tool_call|>", closing="<|/tool_call|>",
        listed=True),
    # Mistral 0.3
    ToolForm(known_by="[TOOL_CALLS]", opening="[TOOL_CALLS]", listed=True, not_by="[ARGS]"),
    # Mistral Small 3.2, Devstral and Ministral 3, whose calls end with the answer
    ToolForm(known_by="[ARGS]", opening="[TOOL_CALLS]", closing="</s>", last=True, calls=MISTRAL,
        tokens=("[ARGS]", "[CALL_ID]")),
    # Qwen 3.5 and Qwen 3 Coder
    ToolForm(known_by="<parameter=", opening="<tool_call>", closing="</tool_call>", gap="\n",
        calls=XML, bare=("<function=", "</function>")),
    # Gemma 4
    ToolForm(known_by="<|tool_call>", opening="<|tool_call>", closing="<tool_call|>",
        calls=GEMMA, tokens=('<|"|>',)),
    # LFM 2 and 2.5
    ToolForm(known_by="List of tools: ", opening="<|tool_call_start|>",
        closing="<|tool_call_end|>", listed=True, calls=PYTHON),
    # gpt-oss, whose call is a message to a function; the recipient may stand before the channel
    ToolForm(known_by="<|call|>", opening="<|channel|>commentary to=functions.",
        closing="<|call|>", last=True, calls=HARMONY, bare=(" to=functions.", "<|call|>"),
        tokens=("<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|start|>"),
        plain_marks=("<|start|>assistant", "<|end|>", "<|channel|>commentary<|message|>",
            "<|channel|>final<|message|>")),
    # Llama 3.1 to 3.3
    ToolForm(known_by='"parameters": ', arguments="parameters", before="<|python_tag|>"),
)  # fmt: skip


def tool_form(template: str | None) -> ToolForm | None:
    """Returns the form that a chat template asks for, None if it takes no tools or another form."""
    if template is None or not re.search(r"\btools\b", template):
        return None
    fitting = (form for form in FORMS if form.known_by in template and form.not_by not in template)
    return next(fitting, None)


def with_calls_as_text(
    messages: Sequence[Mapping[str, Any]], template: str
) -> Sequence[Mapping[str, Any]]:
    """Returns `messages` with calls written into their text, if the template leaves calls out.

    Some templates take tools and results, and of calls only the text of an answer, so the model
    would not see what it had called.
    """
    form = tool_form(template)
    if form is None or "tool_calls" in template:
        return messages
    return [
        _with_call_text(message, form)
        if message.get("tool_calls") and isinstance(message["content"], str)
        else message
        for message in messages
    ]


def _with_call_text(message: Mapping[str, Any], form: ToolForm) -> Mapping[str, Any]:
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{message['content']}{_call_text(form, message['tool_calls'])}"}


def _call_text(form: ToolForm, rows: Sequence[Mapping[str, Any]]) -> str:
    """Writes calls, as chat templates take them, as they stand in an answer of this form."""
    calls = [(row["function"]["name"], row["function"]["arguments"]) for row in rows]
    if form.calls is PYTHON:
        return f"{form.opening}{python_text(calls)}{form.closing}"
    texts = [
        json.dumps({"name": name, form.arguments: arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    if form.listed:
        return f"{form.opening}[{', '.join(texts)}]{form.closing}"
    gap = form.gap
    return gap.join(f"{form.opening}{gap}{text}{gap}{form.closing}" for text in texts)


# Opening and closing marks of calls: those of the families, and tags that some models write
# instead of <tool_call>.
_TAGS = ("function_call", "tool", "tools", "response", "json", "JSON", "xml")
MARKS = {form.opening or form.before: form.closing for form in FORMS if form.calls is None} | {
    f"<{tag}>": f"</{tag}>" for tag in _TAGS
}
_FENCE = "```"
# Words that may follow the backticks of a fence that holds calls.
_FENCED = ("", "json", "xml", "tool_call")
_PLACE = re.compile(
    "|".join(map(re.escape, MARKS)) + rf"|(?:(?<=\n)|\A)[ \t]*(?:(?P<fence>{_FENCE})|\{{)"
)
_FENCE_HEAD = re.compile(r"```[ \t]*(\w*)\s*")
# The first keys of an object that may be a call.
_KEYS = ("name", "arguments", "parameters", "type", "id")
_STRING = r'("(?:[^"\\]|\\.)*")'
_OBJECT_HEAD = re.compile(rf"\{{\s*{_STRING}(?:\s*:\s*{_STRING})?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPiece:
    """Holds call number `index`: the `name` of a tool and its `arguments` as a JSON text."""

    index: int
    name: str
    arguments: str


Piece = str | CallPiece


class Reader(ABC):
    """Separates calls from the text of an answer, piece by piece; it returns `most` calls at most.

    All pieces together are the answer, without the marks of calls and the spaces beside them.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._calls = 0

    @property
    def calls(self) -> int:
        """Returns the number of calls so far."""
        return self._calls

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that `text` completes; the rest is held back until more has come."""
        pieces: list[Piece] = []
        for piece in in_pieces(text):
            rest = self._after_pending(piece)
            while rest:
                rest = self._step(rest, pieces)
        return pieces

    @abstractmethod
    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Returns what was held back, at the end of the text, without a call that was `cut` off."""

    def _after_pending(self, text: str) -> str:
        """Returns what was held back, followed by `text`; nothing while that is undecided."""
        return text

    @abstractmethod
    def _step(self, text: str, pieces: list[Piece]) -> str:
        """Reads one more thing and returns the rest of `text`."""

    def _add(self, call: tuple[str, str], pieces: list[Piece]) -> None:
        """Adds a call, its name and its arguments, unless there are `most`."""
        if self._most is None or self._calls < self._most:
            pieces.append(CallPiece(index=self._calls, name=call[0], arguments=call[1]))
            self._calls += 1


def reader_of(form: ToolForm, schemas: Schemas, most: int | None = None) -> Reader:
    """Returns a reader of answers in `form`; `schemas` are those of arguments, by tool name.

    It returns at most `most` calls.
    """
    if form.calls is not None:
        return MarkedReader(form, form.calls.read, schemas, most)
    return CallReader(form, schemas, most)


class MarkedReader(Reader):
    """Reads calls in another notation than JSON, which stand between the marks of `form`.

    A call is complete when its closing mark has come. If what stands there is no call, it is text,
    and so is a call between bare marks of a tool that was not offered.
    """

    def __init__(
        self,
        form: ToolForm,
        read: Callable[[str, Schemas], list[Call] | None],
        schemas: Schemas,
        most: int | None = None,
    ) -> None:
        super().__init__(most)
        self._family_mark = form.opening
        self._closings = {form.opening: form.closing} | dict([form.bare] if form.bare else [])
        self._plain_marks = form.plain_marks
        self._read = read
        self._schemas = schemas
        self._plain = TextUpToMark((*self._closings, *self._plain_marks))
        # Spaces and the opening mark before a call, None outside of one.
        self._before: str | None = None
        self._opening = ""
        # The call so far, and its last characters, which may begin its closing mark.
        self._inside: list[str] = []
        self._last = ""

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Returns what was held back; an answer that ends inside a call may end the call."""
        pieces: list[Piece] = []
        if self._before is None:
            text = self._plain.flush()
            if self._calls == 0 or text.strip():
                pieces += [text] if text else []
        elif not cut:
            self._end("".join([*self._inside, self._last]), "", pieces)
        return pieces

    def _step(self, text: str, pieces: list[Piece]) -> str:
        return self._text(text, pieces) if self._before is None else self._call(text, pieces)

    def _text(self, text: str, pieces: list[Piece]) -> str:
        """Reads text up to a call; the last spaces, and the beginning of a mark, are held back."""
        plain, mark, rest = self._plain.feed(text)
        pieces += [plain] if plain else []
        spaces = self._plain.flush() if mark else ""
        if mark and mark not in self._plain_marks:
            self._before, self._opening = spaces + mark, mark
        return rest

    def _call(self, text: str, pieces: list[Piece]) -> str:
        """Reads a call up to its closing mark, of which a beginning is held back."""
        closing = self._closings[self._opening]
        body, mark, rest = f"{self._last}{text}".partition(closing)
        keep = len(closing) - 1
        if not mark:
            self._inside.append(body[:-keep])
            self._last = body[-keep:]
            return ""
        self._end("".join([*self._inside, body]), closing, pieces)
        return rest

    def _end(self, body: str, closing: str, pieces: list[Piece]) -> None:
        """Adds the call `body`, which ended, perhaps by `closing`."""
        is_family_form = self._opening == self._family_mark
        calls = self._read(
            body if is_family_form else f"{self._opening}{body}{closing}", self._schemas
        )
        written = [] if calls is None else list(map(_written, calls))
        offered = is_family_form or all(name in self._schemas for name, _ in calls or ())
        if not written or not offered or None in written:
            pieces.append(f"{self._before}{body}{closing}")
        for call in written if offered and None not in written else ():
            if call is not None:
                self._add(call, pieces)
        self._before, self._inside, self._last = None, [], ""


def _written(call: Call) -> tuple[str, str] | None:
    """Returns a call with the text of its arguments; None if JSON cannot write them."""
    try:
        return call[0], json.dumps(call[1], ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


class CallReader(Reader):
    """Reads calls that are JSON objects.

    A call stands between the marks of a family, in a Markdown fence, or bare at the beginning of a
    line. Between the model's own marks any name is that of a call; elsewhere it must be one of
    `names`, those of the offered tools. A call is returned when it is complete. What looks like a
    call and is none is text.
    """

    def __init__(self, form: ToolForm, names: Collection[str], most: int | None = None) -> None:
        super().__init__(most)
        self._family_mark = form.opening or form.before
        self._names = frozenset(names)
        # Text that is held back, and whether a line begins after its white space.
        self._pending = PendingText()
        self._line_begins = True
        # A fence that may hold calls, which is not known yet, and its shortened form.
        self._fence: list[str] = []
        self._short_fence = ""
        # What was read since the last call, in a place that may hold calls; None outside.
        self._before: list[str] | None = None
        self._closings: list[str] = []
        self._has_call = self._trusted = False
        self._object: _Object | None = None

    def flush(self, *, cut: bool = False) -> list[Piece]:
        pieces: list[Piece] = []
        unfinished, self._object = self._object, None
        pending = self._pending.flush() + "".join(self._fence)
        self._fence, self._short_fence = [], ""
        if self._before is None:
            # Spaces at the end of a text belong to it; spaces after a call are dropped.
            text = pending if self._calls == 0 else pending.strip() and pending
            pieces += [text] if text else []
        elif unfinished is not None:
            if not (cut and (self._trusted or unfinished.named)):
                self._give_back(pieces, unfinished.text)
        elif not self._has_call and not (cut and self._trusted):
            self._give_back(pieces, pending)
        return pieces

    def _after_pending(self, text: str) -> str:
        if not self._fence:
            text, self._pending.end = f"{self._pending.end}{text}", ""
            return text
        self._fence.append(text)
        self._short_fence = _shortened(f"{self._short_fence}{text}")
        if _opening(self._short_fence) is None:
            return ""
        text, self._fence = "".join(self._fence), []
        return text

    def _hold(self, text: str) -> None:
        """Holds back what begins like a mark or a fence until more has come."""
        if _FENCE_HEAD.match(text):
            self._fence, self._short_fence = [text], _shortened(text)
        else:
            self._pending.end = text

    def _step(self, text: str, pieces: list[Piece]) -> str:
        if self._object is not None:
            return self._read_object(self._object, text, pieces)
        if self._before is not None:
            return self._between_calls(self._before, text, pieces)
        return self._read_text(text, pieces)

    def _read_text(self, text: str, pieces: list[Piece]) -> str:
        """Reads text up to a possible call; last spaces and a mark's beginning are held back."""
        place, is_call = _call_place(text, line_begins=self._line_begins)
        plain = self._pending.feed(text[:place])
        pieces += [plain] if plain else []
        line = text[text.rfind("\n", 0, place) + 1 : place]
        whole_line = self._line_begins or "\n" in text[:place]
        self._line_begins = whole_line and not line.strip(" \t")
        if is_call:
            self._before = [self._pending.flush()]
            self._closings, self._has_call, self._trusted = [], False, False
            return text[place:]
        if self._line_begins:
            self._hold(text[place:])
        else:
            self._pending.end = text[place:]
        return ""

    def _between_calls(self, before: list[str], text: str, pieces: list[Piece]) -> str:
        """Skips marks, brackets and commas to the next call, or ends at the closing mark."""
        rest = text.lstrip(" \n\r\t,[]" if self._closings else " \n\r\t")
        before.append(text[: len(text) - len(rest)])
        closing = self._closings[-1] if self._closings else ""
        if rest.startswith("{"):
            self._object = _Object(None if self._trusted else self._names)
            return rest
        if closing and rest.startswith(closing):
            before.append(self._closings.pop())
            if not self._closings:
                self._leave(pieces)
            return rest.removeprefix(closing)
        opening = _opening(rest)
        if opening is None or (closing and closing.startswith(rest)):
            self._hold(rest)
            return ""
        if opening:
            self._closings.append(MARKS.get(opening, _FENCE))
            self._trusted = self._trusted or opening == self._family_mark
            before.append(opening)
            return rest.removeprefix(opening)
        self._leave(pieces)
        return rest

    def _read_object(self, json_object: _Object, text: str, pieces: list[Piece]) -> str:
        rest = text[json_object.feed(text) :]
        if not json_object.ended:
            return ""
        self._object = None
        call = json_object.call()
        if call is None:
            self._give_back(pieces, json_object.text)
            self._has_call = False
            self._before = []
            self._leave(pieces)
            return rest
        self._add(call, pieces)
        self._before, self._has_call = [], True
        if not self._closings:
            self._leave(pieces)
        return rest

    def _give_back(self, pieces: list[Piece], text: str) -> None:
        """Adds what was read since the last call, with `text`, as text."""
        text = "".join([*(self._before or ()), text])
        pieces += [text] if text else []

    def _leave(self, pieces: list[Piece]) -> None:
        """Ends a place of calls: without a call it is text; after one a line begins."""
        if not self._has_call:
            self._give_back(pieces, "")
        self._line_begins = self._has_call
        self._before = None


class _Object:
    """Reads one JSON object while it comes, and stops when it is clear that it is no call.

    `names` are the possible names of a call, None: any.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.ended = False
        self.named = False
        self._names = names
        self._parts: list[str] = []
        self._head: list[str] = []
        self._strings = 0
        self._refused = False
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def text(self) -> str:
        """Returns the text so far."""
        return "".join(self._parts)

    def feed(self, text: str) -> int:
        """Takes the object's part of `text` and returns its number of characters."""
        for place, character in enumerate(text):
            # The first key and value decide; after them only brackets are counted.
            if self._strings < 2:
                self._head.append(character)
            self._note(character)
            if self._depth == 0 or self._refused:
                self.ended = True
                self._parts.append(text[: place + 1])
                return place + 1
        self._parts.append(text)
        return len(text)

    def call(self) -> tuple[str, str] | None:
        """Returns name and arguments (JSON), in whatever order they came, or None for no call."""
        parsed: Any = None if self._refused else _loaded(self.text)
        if not isinstance(parsed, Mapping):
            return None
        rows = cast(Mapping[str, Any], parsed)
        name, arguments = rows.get("name"), rows.get("arguments", rows.get("parameters"))
        if (
            not isinstance(name, str)
            or not isinstance(arguments, Mapping)
            or not self._is_allowed(name)
        ):
            return None
        try:
            return name, json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            return None

    def _is_allowed(self, name: Any) -> bool:
        return self._names is None or name in self._names

    def _note(self, character: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            if not self._quoted and self._depth == 1:
                self._strings += 1
                self._decide()
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
            self._refused = self._strings == 0 and self._depth > 1
        elif character in "}]":
            self._depth -= 1
        elif self._strings == 0 and not character.isspace():
            self._refused = True

    def _decide(self) -> None:
        """Decides by the first key, or by a name that comes first, whether it may be a call."""
        head = "".join(self._head) if self._strings <= 2 else ""
        match = _OBJECT_HEAD.fullmatch(head)
        if match is None:
            return
        key = _loaded(match[1])
        if match[2] is None:
            self._refused = key not in _KEYS
        elif key == "name":
            self.named = self._is_allowed(_loaded(match[2]))
            self._refused = not self.named


def _call_place(text: str, *, line_begins: bool) -> tuple[int, bool]:
    """Returns where a call may begin in `text` and True, or the length of plain text and False.

    `line_begins`: only spaces and tabs of its line stand before `text`.
    """
    for match in _PLACE.finditer(text):
        if match[0] not in MARKS:
            if match.start() == 0 and not line_begins:
                continue
            opens = _opening(text, match.start("fence")) if match["fence"] else "{"
            if opens is None:
                return match.start("fence"), False
            if not opens:
                continue
        return match.start(), True
    return len(text) - begun_mark(text, (*MARKS, _FENCE)), False


def _opening(text: str, place: int = 0) -> str | None:
    """Returns the mark or the head of a fence that opens calls at `place` of `text`.

    It is empty if nothing does, and None if more text decides.
    """
    head = _FENCE_HEAD.match(text, place)
    if head is None:
        return None if _begins(_FENCE, text, place) else _mark(text, place)
    word = head[1]
    if head.end() == len(text):
        return None if any(label.startswith(word) for label in _FENCED) else ""
    if word not in _FENCED:
        return ""
    inside = "{" if text[head.end()] in "{[" else _mark(text, head.end())
    return head[0] if inside else inside


def _mark(text: str, place: int) -> str | None:
    """Returns the mark at `place` of `text`, or as `_opening` says."""
    mark = next((mark for mark in MARKS if text.startswith(mark, place)), "")
    return None if not mark and any(_begins(mark, text, place) for mark in MARKS) else mark


def _begins(mark: str, text: str, place: int) -> bool:
    """Returns whether all of `text` from `place` on is a beginning of `mark`."""
    return len(text) - place <= len(mark) and mark.startswith(text[place:])


def _shortened(fence: str) -> str:
    """Returns the fence with each run of white space in its head as one character."""
    head = _FENCE_HEAD.match(fence)
    assert head is not None
    before = fence[len(_FENCE) : head.start(1)][:1]
    after = "\n" * (head.end() > head.end(1))
    return f"{_FENCE}{before}{head[1]}{after}{fence[head.end() :]}"


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    number = float(text)
    return number if isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} cannot be written in JSON")
