"""What the language server knows of each document that is open, and how its suggestions are shown.

Knows positions and items of the protocol, no thread and no model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvq_apps.completion.document import Document, Encoding, Position
from kvq_apps.completion.drafts import Completion


class TypedThrough:
    """The last suggestions of a document, and the line they were made for.

    Somebody may be typing one of them: its rest is what is shown next, and no engine is asked.
    """

    def __init__(self, document: Document, place: tuple[int, int], found: Completion) -> None:
        self._line, column = place
        line = document.line(self._line)
        self._before, self._rest = line[:column], line[column:]
        self._found = found

    def survives(self, first_line: int, last_line: int, text: str) -> bool:
        """Whether a change of these lines leaves all but the line itself as it was."""
        return first_line == last_line == self._line and not set(text) & set("\r\n")

    def rest(self, document: Document, place: tuple[int, int]) -> Completion | None:
        """What is left of those that begin with what was typed; None: it is none of them."""
        line = document.line(place[0])
        before, rest = line[: place[1]], line[place[1] :]
        if place[0] != self._line or rest != self._rest or not before.startswith(self._before):
            return None
        typed = before[len(self._before) :]
        left = tuple(
            replace(draft, text=draft.text[len(typed) :])
            for draft in self._found.drafts
            if draft.text.startswith(typed) and len(draft.text) > len(typed)
        )
        return replace(self._found, drafts=left, encoded_tokens=0, ms=0.0) if left else None


@dataclass(slots=True)
class OpenDocument:
    """A document, its version, and the list shown at one place of it until the next edit."""

    document: Document
    version: int
    shown: dict[tuple[int, int], Completion] = field(
        default_factory=dict[tuple[int, int], Completion]
    )
    typed: TypedThrough | None = None
    request: "Request | None" = None
    last: Completion | None = None
    binary: bool = False
    # A change could not be made: this is not the editor's text until all of it comes again.
    lost: bool = False
    # What somebody took of the suggestions shown last: nothing, part or all; None: none were shown.
    taken: str | None = None
    # Where somebody was last, as far as is known.
    place: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, text: str, version: int) -> "OpenDocument":
        """One of this text."""
        return cls(Document(text), version, binary="\0" in text)

    def why_not(self) -> str | None:
        """Why this text is not completed, or None."""
        if self.lost:
            return "changes came out of order: close and open the document"
        return "the document is no text" if self.binary else None

    def supersede(self) -> None:
        """Whoever waits for a completion of it waits in vain."""
        if self.request is not None:
            self.request.superseded = True

    def change(self, changes: list[dict[str, Any]], version: Any, encoding: Encoding) -> None:
        """Makes `changes` one after the other; a version that does not go up loses the text.

        So does any error, which parameters that make no sense raise.
        """
        self.supersede()
        self.shown.clear()
        # Until every change is made.
        self.lost, lost = True, self.lost
        number = int(version)
        lost |= number <= self.version
        for one in changes:
            lost &= not self._changed(one, encoding)
        self.version, self.lost = number, lost

    def _changed(self, change: dict[str, Any], encoding: Encoding) -> bool:
        """Makes one change; whether it was all of the text."""
        text = change["text"]
        if not isinstance(text, str):
            raise TypeError("the text of a change is not a string")
        if change.get("range") is None:
            self.document, self.typed, self.binary = Document(text), None, "\0" in text
            return True
        self.binary |= "\0" in text
        start, end = (position_of(change["range"][side]) for side in ("start", "end"))
        if self.typed and not self.typed.survives(start.line, end.line, text):
            self.typed = None
        self.document.replace(start, end, text, encoding)
        self.place = self.document.place(start, encoding)
        return False

    def known_at(self, place: tuple[int, int]) -> Completion | None:
        """What is known already to come at `place`: shown there, or the rest of what is typed."""
        shown = self.shown.get(place)
        if shown is None and self.typed is not None:
            shown = self.typed.rest(self.document, place)
        return shown


@dataclass(slots=True)
class Request:
    """A completion somebody waits for."""

    id: int | str
    uri: str
    version: int
    place: tuple[int, int]
    selected: "Selected | None" = None
    as_list: bool = False
    cancelled: bool = False
    superseded: bool = False

    def ends(self) -> bool:
        """Whether nobody waits any more."""
        return self.cancelled or self.superseded


@dataclass(frozen=True, slots=True)
class Selected:
    """What the editor's own list would put in place of a range."""

    text: str
    start: Position
    end: Position
    range: dict[str, Any]

    @classmethod
    def read(cls, value: dict[str, Any] | None) -> "Selected | None":
        """`selectedCompletionInfo` of a request."""
        if not value:
            return None
        start, end = (position_of(value["range"][side]) for side in ("start", "end"))
        return cls(str(value["text"]), start, end, value["range"])

    def put_into(self, document: Document, encoding: Encoding) -> tuple[int, int]:
        """Puts it in its place; the place behind it."""
        line, column = document.place(self.start, encoding)
        document.replace(self.start, self.end, self.text, encoding)
        before, ended, last = self.text.rpartition("\n")
        return line + before.count("\n") + len(ended), len(last) + (0 if ended else column)


@dataclass(slots=True)
class Counts:
    """Lists of suggestions shown so far, and those of which one was taken, all or a part."""

    shown: int = 0
    accepted: int = 0
    partly: int = 0

    def take(self, known: OpenDocument, taken: str) -> None:
        """A suggestion of those shown last was put into the document: `all` of it, or a `part`."""
        if known.taken in (None, "all", taken):
            return
        self.partly += 1 if taken == "part" else -(known.taken == "part")
        self.accepted += taken == "all"
        known.taken = taken


def position_of(value: dict[str, Any]) -> Position:
    """A place as the protocol has it."""
    return Position(int(value["line"]), int(value["character"]))


def items(texts: list[str], replaced: dict[str, Any], uri: str, *, as_list: bool) -> dict[str, Any]:
    """The answer that shows `texts`, each in place of the range `replaced`."""
    command = {"title": "kvq: accepted", "command": "kvq.accepted", "arguments": [uri, "all"]}
    shown: Callable[[str, dict[str, Any]], dict[str, Any]] = _list_item if as_list else _inline_item
    found = [shown(text, replaced) | {"command": command} for text in texts]
    return {"isIncomplete": True, "items": found} if as_list else {"items": found}


def before_place(
    document: Document, place: tuple[int, int], encoding: Encoding
) -> tuple[str, dict[str, Any]]:
    """What stands from the beginning of the word before `place` to it, and that range."""
    line, column = place
    start = _word_start(document.line(line), column)
    rows = [
        {"line": line, "character": document.units(line, at, encoding)} for at in (start, column)
    ]
    return document.line(line)[start:column], {"start": rows[0], "end": rows[1]}


def explained(last: Completion) -> dict[str, Any]:
    """What the last completion cost, or why there was none."""
    return {
        "reusedTokens": last.reused_tokens,
        "encodedTokens": last.encoded_tokens,
        "ms": last.ms,
        "drafts": [{"text": one.text, "logprob": one.logprob} for one in last.drafts],
        "whyNot": last.why_not,
    }


def _inline_item(text: str, replaced: dict[str, Any]) -> dict[str, Any]:
    """An item of `textDocument/inlineCompletion`."""
    return {"insertText": text, "range": replaced}


def _list_item(text: str, replaced: dict[str, Any]) -> dict[str, Any]:
    """An item of `textDocument/completion`."""
    edit = {"range": replaced, "newText": text}
    return {"label": text.strip(), "filterText": text, "detail": "kvq", "textEdit": edit}


def _word_start(line: str, column: int) -> int:
    """Where the word that ends at `column` begins; the line's own beginning on a blank one."""
    if not line[:column].strip():
        return 0
    start = column
    while start > 0 and (line[start - 1].isalnum() or line[start - 1] == "_"):
        start -= 1
    return start
