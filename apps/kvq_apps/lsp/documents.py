"""The open documents of the language server, and how their suggestions are shown.

Knows positions and items of the protocol, no thread and no model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any
from urllib.parse import unquote, urlsplit

from kvq_apps.completion.document import Encoding, LineChange, Position, TextDocument
from kvq_apps.completion.edit_history import NextEdit
from kvq_apps.completion.other_files import Block, blocks_of, short_name
from kvq_apps.completion.suggestions import Completion

# A word that changed less than this ago is being typed.
WORD_S = 0.5


class TypedSuggestions:
    """Holds the last suggestions of a document, and the line they were made for.

    Somebody may be typing one of them: then its rest is shown next, and no engine is asked.
    """

    def __init__(
        self, document: TextDocument, place: tuple[int, int], completion: Completion
    ) -> None:
        self._line, column = place
        line = document.line(self._line)
        self._before, self._rest = line[:column], line[column:]
        self._completion = completion

    def survives(self, first_line: int, last_line: int, text: str) -> bool:
        """Tells whether a change of these lines leaves all but the line itself as it was."""
        return first_line == last_line == self._line and not set(text) & set("\r\n")

    def remaining(self, document: TextDocument, place: tuple[int, int]) -> Completion | None:
        """Returns the rest of the suggestions that begin with the typed text, or None."""
        line = document.line(place[0])
        before, rest = line[: place[1]], line[place[1] :]
        if place[0] != self._line or rest != self._rest or not before.startswith(self._before):
            return None
        typed = before[len(self._before) :]
        drafts = tuple(
            draft.after(len(typed))
            for draft in self._completion.drafts
            if draft.text.startswith(typed) and len(draft.text) > len(typed)
        )
        return (
            replace(self._completion, drafts=drafts, encoded_tokens=0, ms=0.0) if drafts else None
        )


@dataclass(slots=True)
class OpenDocument:
    """Holds a document, its version, and the suggestions at one place until the next edit."""

    document: TextDocument
    version: int
    shown: dict[tuple[int, int], Completion] = field(
        default_factory=dict[tuple[int, int], Completion]
    )
    typed: TypedSuggestions | None = None
    request: "CompletionRequest | None" = None
    edit_request: "CompletionRequest | None" = None
    last: Completion | None = None
    binary: bool = False
    # A change could not be made: the text differs from the editor's until all of it comes again.
    lost: bool = False
    # The last known place of the cursor, and when the text last changed.
    place: tuple[int, int] = (0, 0)
    changed_s: float = 0.0
    next_edit: NextEdit | None = None
    # Its blocks, and the version of which they are.
    _blocks: tuple[int, tuple[Block, ...]] = (-1, ())

    def blocks(self, uri: str) -> tuple[Block, ...]:
        """Returns the blocks of its text, whose file has this address."""
        version, blocks = self._blocks
        if version != self.version:
            blocks = blocks_of(short_name(unquote(urlsplit(uri).path)), self.document)
            self._blocks = self.version, blocks
        return blocks

    @classmethod
    def of(cls, text: str, version: int) -> "OpenDocument":
        """Makes a document of this text."""
        return cls(TextDocument(text), version, binary="\0" in text)

    def why_not(self) -> str | None:
        """Says why this text is not completed, or None."""
        if self.lost:
            return "changes came out of order: close and open the document"
        return "the document is no text" if self.binary else None

    def supersede(self) -> None:
        """Marks the waiting request as superseded."""
        if self.request is not None:
            self.request.superseded = True

    def supersede_edit(self) -> None:
        """Marks the waiting request for a next edit as superseded."""
        if self.edit_request is not None:
            self.edit_request.superseded = True

    def edit_wait_s(self, place: tuple[int, int], delay_s: float) -> float:
        """Returns for how long a next edit must wait: until typing rests, longest in a word."""
        line, column = self.document.line(place[0]), place[1]
        in_word = _is_word(line[column - 1 : column]) or _is_word(line[column : column + 1])
        rest_s = max(delay_s, WORD_S) if in_word else delay_s
        return max(0.0, self.changed_s + rest_s - monotonic())

    def change(
        self,
        changes: list[dict[str, Any]],
        version: Any,
        encoding: Encoding,
        record: Callable[[LineChange], None] = lambda change: None,
    ) -> None:
        """Makes `changes` one after the other; a version that does not go up loses the text.

        So does any error, which parameters that make no sense raise. `record` gets each change.
        """
        self.supersede()
        self.supersede_edit()
        self.shown.clear()
        self.changed_s = monotonic()
        # Until every change is made.
        self.lost, lost = True, self.lost
        number = int(version)
        lost |= number <= self.version
        for change in changes:
            lost &= not self._apply(change, encoding, record)
        self.version, self.lost = number, lost

    def _apply(
        self, change: dict[str, Any], encoding: Encoding, record: Callable[[LineChange], None]
    ) -> bool:
        """Makes one change; returns whether it replaced the whole text."""
        text = change["text"]
        if not isinstance(text, str):
            raise TypeError("the text of a change is not a string")
        if change.get("range") is None:
            before = self.document.lines()
            self.document, self.typed, self.binary = TextDocument(text), None, "\0" in text
            record(LineChange.between(0, before, self.document.lines()))
            return True
        self.binary |= "\0" in text
        start, end = (position_of(change["range"][side]) for side in ("start", "end"))
        if self.typed and not self.typed.survives(start.line, end.line, text):
            self.typed = None
        record(self.document.replace(start, end, text, encoding))
        self.place = self.document.place(start, encoding)
        return False

    def known_completion(self, place: tuple[int, int]) -> Completion | None:
        """Returns the completion known for `place`: the one shown there, or a typed one's rest."""
        completion = self.shown.get(place)
        if completion is None and self.typed is not None:
            completion = self.typed.remaining(self.document, place)
        return completion


@dataclass(slots=True)
class CompletionRequest:
    """Holds a request for a completion, or for a next edit, that waits for its answer."""

    id: int | str
    uri: str
    version: int
    place: tuple[int, int]
    selected: "SelectedCompletion | None" = None
    as_list: bool = False
    automatic: bool = False
    next_edit: bool = False
    cancelled: bool = False
    superseded: bool = False

    def is_over(self) -> bool:
        """Tells whether nobody waits for the answer any more."""
        return self.cancelled or self.superseded


@dataclass(frozen=True, slots=True)
class SelectedCompletion:
    """Holds what the editor's own list would put in place of a range."""

    text: str
    start: Position
    end: Position
    range: dict[str, Any]

    @classmethod
    def read(cls, value: dict[str, Any] | None) -> "SelectedCompletion | None":
        """Reads `selectedCompletionInfo` of a request."""
        if not value:
            return None
        start, end = (position_of(value["range"][side]) for side in ("start", "end"))
        return cls(str(value["text"]), start, end, value["range"])

    def insert_into(self, document: TextDocument, encoding: Encoding) -> tuple[int, int]:
        """Inserts the text; returns the place after it."""
        line, column = document.place(self.start, encoding)
        document.replace(self.start, self.end, self.text, encoding)
        before, newline, last = self.text.rpartition("\n")
        return line + before.count("\n") + len(newline), len(last) + (0 if newline else column)


def position_of(value: dict[str, Any]) -> Position:
    """Reads a position of the protocol."""
    return Position(int(value["line"]), int(value["character"]))


def items(texts: list[str], replaced: dict[str, Any], *, as_list: bool) -> dict[str, Any]:
    """Makes the answer that shows `texts`, each in place of the range `replaced`."""
    if not as_list:
        return {"items": [{"insertText": text, "range": replaced} for text in texts]}
    return {"isIncomplete": True, "items": [_list_item(text, replaced) for text in texts]}


def edit_items(
    changes: Iterable[LineChange],
    document: TextDocument,
    uri: str,
    version: int,
    encoding: Encoding,
) -> dict[str, Any]:
    """Makes the answer of `textDocument/copilotInlineEdit`: each change as a range and its text."""
    edits: list[dict[str, Any]] = []
    for change in changes:
        first, stop, text = change.first, change.first + len(change.old), "".join(change.new)
        begin, end = (first, 0), (stop, 0)
        if change.old and change.new:
            # Whole lines, without the last one's end.
            end = (stop - 1, document.units(stop - 1, len(document.line(stop - 1)), encoding))
            text = "".join(change.new[:-1]) + change.new[-1].rstrip("\r\n")
        rows = [{"line": line, "character": character} for line, character in (begin, end)]
        edits.append(
            {
                "textDocument": {"uri": uri, "version": version},
                "range": {"start": rows[0], "end": rows[1]},
                "text": text,
            }
        )
    return {"edits": edits}


def word_before(
    document: TextDocument, place: tuple[int, int], encoding: Encoding
) -> tuple[str, dict[str, Any]]:
    """Returns the word before `place`, up to it, and its range."""
    line, column = place
    start = _word_start(document.line(line), column)
    rows = [
        {"line": line, "character": document.units(line, code_points, encoding)}
        for code_points in (start, column)
    ]
    return document.line(line)[start:column], {"start": rows[0], "end": rows[1]}


def explanation(last: Completion) -> dict[str, Any]:
    """Describes the cost of the last completion, or why there was none."""
    return {
        "reusedTokens": last.reused_tokens,
        "encodedTokens": last.encoded_tokens,
        "ms": last.ms,
        "drafts": [{"text": draft.text, "logprob": draft.logprob} for draft in last.drafts],
        "whyNot": last.why_not,
    }


def _list_item(text: str, replaced: dict[str, Any]) -> dict[str, Any]:
    edit = {"range": replaced, "newText": text}
    label = text.strip().partition("\n")[0]
    return {"label": label, "filterText": text, "detail": "kvq", "textEdit": edit}


def _word_start(line: str, column: int) -> int:
    """Returns where the word that ends at `column` begins; on a blank line its beginning."""
    if not line[:column].strip():
        return 0
    start = column
    while start > 0 and _is_word(line[start - 1]):
        start -= 1
    return start


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"
