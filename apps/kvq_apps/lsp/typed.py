"""Suggestions that somebody is typing: their rest is what is shown next, and no engine is asked."""

from dataclasses import replace

from kvq_apps.completion.document import Document
from kvq_apps.completion.drafts import Completion


class TypedThrough:
    """The last suggestions of a document, and the line they were made for."""

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
