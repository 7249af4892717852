"""How the supported families write calls of tools, and how such a call is read while it comes.

A chat template that takes `tools` tells its model a form to answer in. A call is a JSON object of
a name and arguments; families differ in the marks around it. Knows text, no token and no protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolForm:
    """One form. `opening` and `closing` are the marks around a call, or around a list of calls.

    A form without an opening is the whole answer; it may stand after the mark `before`.
    `known_by` stands in the templates that ask for it, `not_by` in those of another form.
    """

    known_by: str
    opening: str = ""
    closing: str = ""
    gap: str = ""
    listed: bool = False
    arguments: str = "arguments"
    before: str = ""
    not_by: str = "\0"

    @property
    def marks(self) -> tuple[str, ...]:
        """What may be a control token of the model."""
        return tuple(filter(None, (self.opening, self.closing, self.before)))


FORMS = (
    # Qwen 2.5 and 3, Hermes, SmolLM 3
    ToolForm(known_by="<tool_call>", opening="<tool_call>", closing="</tool_call>", gap="\n",
        not_by="<function="),
    # Phi 4
    ToolForm(known_by="<|tool_call|>", opening="<|tool_call|>", closing="<|/tool_call|>",
        listed=True),
    # Mistral 0.3
    ToolForm(known_by="[TOOL_CALLS]", opening="[TOOL_CALLS]", listed=True, not_by="[ARGS]"),
    # Llama 3.1 to 3.3
    ToolForm(known_by='"parameters": ', arguments="parameters", before="<|python_tag|>"),
)  # fmt: skip


def tool_form(template: str | None) -> ToolForm | None:
    """The form that a chat template asks for, None when it takes no tools or asks for another."""
    if template is None or not re.search(r"\btools\b", template):
        return None
    fitting = (form for form in FORMS if form.known_by in template and form.not_by not in template)
    return next(fitting, None)


@dataclass(kw_only=True, slots=True)
class CallPiece:
    """Some of call number `index`: its `name` where it begins, more of its `arguments` (JSON)."""

    index: int
    name: str | None = None
    arguments: str = ""


Piece = str | CallPiece


class CallReader:
    """Tells the calls in an answer from its text, piece by piece.

    What looks like a call and is none is text. All pieces together are the answer, without the
    marks and without spaces beside them.
    """

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._calls = 0
        self._held = ""
        self._object: _Object | None = None
        self._inside = False
        self._began = False

    @property
    def calls(self) -> int:
        """Calls so far."""
        return self._calls

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds; some of it may be held back until it is plain what it is."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, once no more text comes."""
        pieces: list[Piece] = []
        if not self._held and self._object is None:
            return pieces
        if self._object is not None:
            self._give_up(pieces)
        elif self._inside:
            held, self._held = self._held.strip(), ""
            pieces += [held] if held.strip("[], \n") and held != self._form.closing else []
        else:
            # Spaces at the end of a text are its own, those after a call are nobody's.
            pieces += [self._held] if self._held.strip() or not self._calls else []
        self._held = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """One thing more of what is held; False when that is not enough."""
        if self._object is not None:
            return self._read_object(self._object, pieces)
        if self._inside:
            return self._between_calls()
        return self._text_before(pieces) if self._form.opening else self._whole_answer(pieces)

    def _text_before(self, pieces: list[Piece]) -> bool:
        """Text up to the opening mark; its last spaces, and what may be the mark, are held."""
        mark = self._form.opening
        before, found, after = self._held.partition(mark)
        if found:
            pieces += [before.rstrip()] if before.strip() else []
            self._held, self._inside, self._began = after, True, True
            return True
        kept = max((n for n in range(1, len(mark)) if before.endswith(mark[:n])), default=0)
        cut = len(before[: len(before) - kept].rstrip())
        if before[:cut].strip():
            pieces.append(before[:cut])
            self._held = before[cut:]
        return False

    def _whole_answer(self, pieces: list[Piece]) -> bool:
        """Whether the answer is a call shows at its first character."""
        begun = self._held.lstrip()
        if self._began or not begun:
            if self._began and self._held:
                pieces.append(self._held)
                self._held = ""
            return False
        if self._form.before.startswith(begun):
            return False
        begun = begun.removeprefix(self._form.before).lstrip()
        self._began = True
        if begun.startswith("{"):
            self._held, self._inside = begun, True
        return True

    def _between_calls(self) -> bool:
        """Past brackets and commas to a next call, or out by the closing mark."""
        rest = self._held.lstrip(" \n\r\t,[]" if self._form.listed else " \n\r\t")
        self._held = rest
        closing = self._form.closing
        if rest.startswith("{"):
            self._object = _Object(self._calls, self._form.arguments)
            return True
        if closing and rest.startswith(closing):
            self._held, self._inside = rest[len(closing) :], False
            return True
        if not rest or (closing and closing.startswith(rest)):
            return False
        self._inside = False
        return True

    def _read_object(self, one: _Object, pieces: list[Piece]) -> bool:
        used = one.feed(self._held)
        self._held = self._held[used:]
        pieces += one.pieces()
        if not one.closed:
            return False
        if one.named:
            self._calls += 1
            self._object = None
        else:
            self._give_up(pieces)
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        """The object was no call, or did not come to its end."""
        one, self._object, self._inside = self._object, None, False
        assert one is not None
        if one.named:
            self._calls += 1
        else:
            pieces.append(f"{self._form.opening}{one.text}")


class _Object:
    """One JSON object of a call while it comes: where it ends, its name, its arguments."""

    def __init__(self, index: int, arguments: str) -> None:
        self.text = ""
        self.closed = False
        self.named = False
        self._index = index
        self._key = arguments
        self._depth = 0
        self._quoted = self._escaped = self._entered = False
        self._head = re.compile(
            r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"' + arguments + r'"\s*:\s*(?=\{)'
        )
        self._sent: int | None = None  # of the text, up to where arguments have been passed on
        self._end: int | None = None  # where they end

    def feed(self, text: str) -> int:
        """Takes the object's part of `text`; how many characters these are."""
        for place, character in enumerate(text):
            self._note(character)
            if self._depth == 1 and character == "}" and self._sent is not None:
                self._end = self._end or len(self.text) + place + 1
            if self._depth == 0:
                self.closed = True
                self.text += text[: place + 1]
                return place + 1
            if self._depth == 2 and not self._entered:
                self._entered = True
                self._begin(self.text + text[: place + 1])
        self.text += text
        return len(text)

    def pieces(self) -> list[Piece]:
        """What has come since the last call."""
        if self._sent is not None:
            start, self._sent = self._sent, self._end or len(self.text)
            name = None if self.named else self._name
            self.named = True
            more = self.text[start : self._sent]
            return [CallPiece(index=self._index, name=name, arguments=more)] if more else []
        if self.closed and (found := self._parsed()) is not None:
            self.named = True
            name, arguments = found
            return [CallPiece(index=self._index, name=name, arguments=arguments)]
        return []

    def _note(self, character: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _begin(self, text: str) -> None:
        """Notes name and place of arguments that come right after the name."""
        found = self._head.match(text)
        if found is not None and found.end() == len(text) - 1:
            name = _loaded(found[1])
            if isinstance(name, str):
                self._name, self._sent = name, found.end()

    def _parsed(self) -> tuple[str, str] | None:
        """Name and arguments of a whole object, in whatever order they came."""
        found: Any = _loaded(self.text)
        if not isinstance(found, Mapping):
            return None
        rows = cast(Mapping[str, Any], found)
        name, arguments = rows.get("name"), rows.get(self._key)
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            return None
        return name, json.dumps(arguments, ensure_ascii=False)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
