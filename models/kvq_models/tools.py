"""How the supported families write calls of tools, and how such a call is read while it comes.

A chat template that takes `tools` tells its model a form to answer in. Most write a call as a JSON
object of a name and arguments; families differ in the marks around it, and small models leave them
out or write others: what llama-server reads as a call is read so here. Others have a notation of
their own between their marks, which `call_texts` reads. Knows text, no token and no protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn, Protocol, cast

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """One form. `opening` and `closing` are the marks around a call, or around a list of calls.

    A form without an opening is the whole answer; it may stand after the mark `before`.
    `known_by` stands in the templates that ask for it, `not_by` in those of another form. `calls`
    is the notation of what stands between the marks where that is no JSON. Then what
    stands between the marks `bare`, with them, is read too. `tokens`: marks within calls, and
    parts of marks, that a vocabulary may have as control tokens. `unsaid`: marks around what is
    said, which are no part of it. `last`: a call is the last of an answer, and its closing mark may
    be a token that ends one.
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
    unsaid: tuple[str, ...] = ()
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
        unsaid=("<|start|>assistant", "<|end|>", "<|channel|>commentary<|message|>",
            "<|channel|>final<|message|>")),
    # Llama 3.1 to 3.3
    ToolForm(known_by='"parameters": ', arguments="parameters", before="<|python_tag|>"),
)  # fmt: skip


def tool_form(template: str | None) -> ToolForm | None:
    """The form that a chat template asks for, None when it takes no tools or asks for another."""
    if template is None or not re.search(r"\btools\b", template):
        return None
    fitting = (form for form in FORMS if form.known_by in template and form.not_by not in template)
    return next(fitting, None)


def told_calls(messages: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """`messages` with their calls in what they say, where the template would leave these out.

    Some take tools and results, and only what an answer says of calls: the model would not see
    what it had called.
    """
    form = tool_form(template)
    if form is None or "tool_calls" in template:
        return messages
    return [
        {**message, "content": f"{message['content']}{_told(form, message['tool_calls'])}"}
        if message.get("tool_calls") and isinstance(message["content"], str)
        else message
        for message in messages
    ]


def _told(form: ToolForm, rows: Sequence[Mapping[str, Any]]) -> str:
    """Calls as chat templates take them, as an answer in `form` has them."""
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


# Marks that hold calls, and what closes each: those of the families, and tags that models told of
# <tool_call> write in its place.
_TAGS = ("function_call", "tool", "tools", "response", "json", "JSON", "xml")
MARKS = {form.opening or form.before: form.closing for form in FORMS if form.calls is None} | {
    f"<{tag}>": f"</{tag}>" for tag in _TAGS
}
_FENCE = "```"
# What may stand behind the backticks of a fence that holds calls.
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
    """Call number `index`: the `name` of a tool and its `arguments`, the text of a JSON object."""

    index: int
    name: str
    arguments: str


Piece = str | CallPiece


class Reader(Protocol):
    """Tells the calls in an answer from its text, piece by piece."""

    @property
    def calls(self) -> int:
        """Calls told so far."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds; some of it may be held back until it is plain what it is."""
        ...

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, once no more text comes; a call that was `cut` off is left out."""
        ...


def reader_of(form: ToolForm, schemas: Schemas, most: int | None = None) -> Reader:
    """Reads answers in `form`; `schemas` are those of the tools' arguments, by their names.

    At most `most` calls are told.
    """
    if form.calls is not None:
        return MarkedReader(form, form.calls.read, schemas, most)
    return CallReader(form, schemas, most)


class MarkedReader:
    """Reads calls in a notation of their own, which stand between the marks of `form`.

    A call is told once its closing mark came. What stands there and is no call is text, and so is
    what stands between the bare marks and calls no tool that was offered. All pieces together are
    the answer, without the marks and without spaces before them.
    """

    def __init__(
        self,
        form: ToolForm,
        read: Callable[[str, Schemas], list[Call] | None],
        schemas: Schemas,
        most: int | None = None,
    ) -> None:
        self._own = form.opening
        self._closings = {form.opening: form.closing} | dict([form.bare] if form.bare else [])
        self._unsaid = form.unsaid
        self._read = read
        self._schemas = schemas
        self._most = most
        self._calls = 0
        self._held = ""
        # Spaces and the opening mark before what is read as a call, None outside of one.
        self._before: str | None = None
        self._opening = ""
        self._inside: list[str] = []

    @property
    def calls(self) -> int:
        """Calls told so far."""
        return self._calls

    def feed(self, text: str) -> list[Piece]:
        """See `Reader.feed`."""
        self._held += text
        pieces: list[Piece] = []
        while self._text(pieces) if self._before is None else self._call(pieces):
            pass
        return pieces

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """See `Reader.flush`. An answer that ends inside of a call may end it so."""
        pieces: list[Piece] = []
        if self._before is None:
            if self._calls == 0 or self._held.strip():
                pieces += [self._held] if self._held else []
        elif not cut:
            self._end("".join([*self._inside, self._held]), "", pieces)
        self._held = ""
        return pieces

    def _text(self, pieces: list[Piece]) -> bool:
        """Text up to where a call opens; its last spaces, and what may be a mark, are held."""
        places = {mark: self._held.find(mark) for mark in self._marks}
        found = [(place, mark) for mark, place in places.items() if place >= 0]
        place, mark = min(found, default=(len(self._held) - self._half(), ""))
        text = self._held[:place].rstrip()
        pieces += [text] if text else []
        if mark in self._unsaid:
            self._held = self._held[place + len(mark) :]
        elif mark:
            self._before, self._opening = self._held[len(text) : place] + mark, mark
            self._held = self._held[place + len(mark) :]
        else:
            self._held = self._held[len(text) :]
        return bool(mark)

    def _half(self) -> int:
        """How many of the last characters may be the beginning of a mark."""
        longest = min(len(self._held), max(map(len, self._marks)) - 1)
        ends = (n for n in range(longest, 0, -1) if self._opens(self._held[-n:]))
        return next(ends, 0)

    def _opens(self, text: str) -> bool:
        return any(mark.startswith(text) for mark in self._marks)

    @property
    def _marks(self) -> tuple[str, ...]:
        return (*self._closings, *self._unsaid)

    def _call(self, pieces: list[Piece]) -> bool:
        """The call up to its closing mark, of which a beginning stays held."""
        closing = self._closings[self._opening]
        body, found, rest = self._held.partition(closing)
        if not found:
            keep = len(closing) - 1
            self._inside.append(self._held[:-keep])
            self._held = self._held[-keep:]
            return False
        self._held = rest
        self._end("".join([*self._inside, body]), closing, pieces)
        return True

    def _end(self, body: str, closing: str, pieces: list[Piece]) -> None:
        """The call `body` ended, perhaps by `closing`."""
        own = self._opening == self._own
        calls = self._read(body if own else f"{self._opening}{body}{closing}", self._schemas)
        told = [] if calls is None else list(map(_written, calls))
        offered = own or all(name in self._schemas for name, _ in calls or ())
        if not told or not offered or None in told:
            pieces.append(f"{self._before}{body}{closing}")
        for one in told if offered and None not in told else ():
            if one is not None and (self._most is None or self._calls < self._most):
                pieces.append(CallPiece(index=self._calls, name=one[0], arguments=one[1]))
                self._calls += 1
        self._before, self._inside = None, []


def _written(call: Call) -> tuple[str, str] | None:
    """A call with the text of its arguments; None for what JSON cannot write."""
    try:
        return call[0], json.dumps(call[1], ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


class CallReader:
    """Tells the calls in an answer from its text, piece by piece.

    A call stands between the marks of a family, in a fence of Markdown, or bare at the start of a
    line. Between the model's own marks any name is a call's; elsewhere it is one of `names`, those
    of the tools that were offered. A call is told once it is whole, so that none is told in part,
    and at most `most` are. What looks like a call and is none is text. All pieces together are the
    answer, without the marks and without spaces beside them.
    """

    def __init__(self, form: ToolForm, names: Collection[str], most: int | None = None) -> None:
        self._own = form.opening or form.before
        self._names = frozenset(names)
        self._most = most
        self._calls = 0
        # Text that is not told yet, and whether the line it begins with was told in part.
        self._held = ""
        self._goes_on = False
        # Of a place that may hold calls: what was read there since the last one, None outside.
        self._before: str | None = None
        self._closings: list[str] = []
        self._told = self._trusted = False
        self._object: _Object | None = None

    @property
    def calls(self) -> int:
        """Calls told so far."""
        return self._calls

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds; some of it may be held back until it is plain what it is."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, once no more text comes; a call that was `cut` off is left out."""
        pieces: list[Piece] = []
        one = self._object
        if self._before is None:
            # Spaces at the end of a text are its own, those after a call are nobody's.
            told = self._held if self._calls == 0 else self._held.strip() and self._held
            pieces += [told] if told else []
        elif one is not None:
            if not (cut and (self._trusted or one.named)):
                self._give_back(pieces, one.text)
        elif not self._told and not (cut and self._trusted):
            self._give_back(pieces, self._held)
        self._held, self._object = "", None
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """One thing more of what is held; False when that is not enough."""
        if self._object is not None:
            return self._read_object(self._object, pieces)
        if self._before is not None:
            return self._between_calls(self._before, pieces)
        return self._read_text(pieces)

    def _read_text(self, pieces: list[Piece]) -> bool:
        """Text up to where a call may begin; its last spaces, and what may be a mark, are held."""
        place, found = _call_place(self._held, line_begins=not self._goes_on)
        text = self._held[:place].rstrip()
        if text:
            pieces.append(text)
            self._goes_on = True
        if found:
            self._before, self._held = self._held[len(text) : place], self._held[place:]
            self._closings, self._told, self._trusted = [], False, False
        else:
            self._held = self._held[len(text) :]
        return found

    def _between_calls(self, before: str, pieces: list[Piece]) -> bool:
        """Past marks, brackets and commas to a next call, or out by the closing mark."""
        rest = self._held.lstrip(" \n\r\t,[]" if self._closings else " \n\r\t")
        self._before = before + self._held[: len(self._held) - len(rest)]
        self._held = rest
        closing = self._closings[-1] if self._closings else ""
        if rest.startswith("{"):
            self._object = _Object(None if self._trusted else self._names)
            return True
        if closing and rest.startswith(closing):
            self._closings.pop()
            self._pass(closing)
            if not self._closings:
                self._leave(pieces)
            return True
        opening = _opening(rest)
        if opening is None or (closing and closing.startswith(rest)):
            return False
        if opening:
            self._closings.append(MARKS.get(opening, _FENCE))
            self._trusted = self._trusted or opening == self._own
            self._pass(opening)
            return True
        self._leave(pieces)
        return True

    def _pass(self, mark: str) -> None:
        self._before = f"{self._before}{mark}"
        self._held = self._held.removeprefix(mark)

    def _read_object(self, one: _Object, pieces: list[Piece]) -> bool:
        self._held = self._held[one.feed(self._held) :]
        if not one.ended:
            return False
        self._object = None
        call = one.call()
        if call is None:
            self._give_back(pieces, one.text)
            self._told = False
            self._before = ""
            self._leave(pieces)
            return True
        if self._most is None or self._calls < self._most:
            pieces.append(CallPiece(index=self._calls, name=call[0], arguments=call[1]))
            self._calls += 1
        self._before, self._told = "", True
        if not self._closings:
            self._leave(pieces)
        return True

    def _give_back(self, pieces: list[Piece], text: str) -> None:
        """What was read since the last call was none."""
        text = f"{self._before}{text}"
        pieces += [text] if text else []

    def _leave(self, pieces: list[Piece]) -> None:
        """The place ends: without a call it is text, and behind one a line begins."""
        if not self._told:
            self._give_back(pieces, "")
        self._goes_on = not self._told
        self._before = None


class _Object:
    """One JSON object while it comes: where it ends, and as soon as that shows that it is no call.

    `names` are those that a call may have, None: any.
    """

    def __init__(self, names: Collection[str] | None) -> None:
        self.ended = False
        self.named = False
        self._names = names
        self._parts: list[str] = []
        self._head = ""
        self._strings = 0
        self._refused = False
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def text(self) -> str:
        """What came of it."""
        return "".join(self._parts)

    def feed(self, text: str) -> int:
        """Takes the object's part of `text`; how many characters these are."""
        for place, character in enumerate(text):
            # A key and a value decide; what follows them is only counted.
            if self._strings < 2:
                self._head += character
            self._note(character)
            if self._depth == 0 or self._refused:
                self.ended = True
                self._parts.append(text[: place + 1])
                return place + 1
        self._parts.append(text)
        return len(text)

    def call(self) -> tuple[str, str] | None:
        """Name and arguments (JSON) once it has ended, in whatever order they came."""
        found: Any = None if self._refused else _loaded(self.text)
        if not isinstance(found, Mapping):
            return None
        rows = cast(Mapping[str, Any], found)
        name, arguments = rows.get("name"), rows.get("arguments", rows.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, Mapping) or not self._may(name):
            return None
        try:
            return name, json.dumps(arguments, ensure_ascii=False)
        except RecursionError:
            return None

    def _may(self, name: Any) -> bool:
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
        """Whether its first key, or the name that comes first, says that it is no call."""
        found = _OBJECT_HEAD.fullmatch(self._head) if self._strings <= 2 else None
        if found is None:
            return
        key = _loaded(found[1])
        if found[2] is None:
            self._refused = key not in _KEYS
        elif key == "name":
            self.named = self._may(_loaded(found[2]))
            self._refused = not self.named


def _call_place(text: str, *, line_begins: bool) -> tuple[int, bool]:
    """Where in `text` a call may begin, and whether it may; else up to where it is plainly text."""
    for found in _PLACE.finditer(text):
        if found[0] not in MARKS:
            if found.start() == 0 and not line_begins:
                continue
            opens = _opening(text[found.start("fence") :]) if found["fence"] else "{"
            if opens is None:
                return found.start(), False
            if not opens:
                continue
        return found.start(), True
    marks = (*MARKS, _FENCE)
    longest = min(len(text), max(map(len, marks)) - 1)
    held = (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks))
    return len(text) - next(held, 0), False


def _opening(text: str) -> str | None:
    """The mark or the head of a fence that opens calls at the start of `text`.

    Empty: none does; None: that shows later.
    """
    head = _FENCE_HEAD.match(text)
    if head is None:
        return None if _FENCE.startswith(text) else _mark(text)
    word, rest = head[1], text[head.end() :]
    if not rest:
        return None if any(one.startswith(word) for one in _FENCED) else ""
    if word not in _FENCED:
        return ""
    inside = rest[0] if rest[0] in "{[" else _mark(rest)
    return head[0] if inside else inside


def _mark(text: str) -> str | None:
    """The mark at the start of `text`, as `_opening` says it."""
    mark = next(filter(text.startswith, MARKS), "")
    return None if not mark and any(one.startswith(text) for one in MARKS) else mark


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
