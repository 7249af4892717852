"""Finds marks in a text that comes in pieces; no character is read again when more text comes.

It knows marks and white space, but not what they mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

# A reader takes its text in pieces of this many characters, since it copies what is left of one.
_PIECE_CHARACTERS = 1 << 10


def in_pieces(text: str) -> Iterator[str]:
    """Yields `text` piece by piece."""
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]


def begun_mark(text: str, marks: Collection[str]) -> int:
    """Returns how many of the last characters of `text` may be the beginning of one of `marks`."""
    longest = min(len(text), max(map(len, marks)) - 1)
    ends = (n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks))
    return next(ends, 0)


class PendingText:
    """Holds back white space at the end of a text, and what may begin a mark after it."""

    def __init__(self) -> None:
        self._spaces: list[str] = []
        self.end = ""

    def feed(self, text: str) -> str:
        """Returns what is ready once `text` follows; its last white space is held back."""
        ready = text.rstrip()
        if ready:
            ready = f"{''.join(self._spaces)}{ready}"
            self._spaces = []
        self._spaces.append(text[len(text.rstrip()) :])
        return ready

    def flush(self) -> str:
        """Returns all text that is held back."""
        text = f"{''.join(self._spaces)}{self.end}"
        self._spaces, self.end = [], ""
        return text


class TextUpToMark:
    """Finds the first of several marks in a text that comes in pieces."""

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = marks
        self._pending = PendingText()

    def feed(self, text: str) -> tuple[str, str, str]:
        """Returns the text that is ready, the mark that was found or "", and what follows the mark.

        White space at the end, and the beginning of a mark, are held back.
        """
        text, self._pending.end = f"{self._pending.end}{text}", ""
        places = [(text.find(mark), mark) for mark in self._marks]
        place, mark = min((row for row in places if row[0] >= 0), default=(-1, ""))
        if not mark:
            place = len(text) - begun_mark(text, self._marks)
            self._pending.end = text[place:]
        return self._pending.feed(text[:place]), mark, text[place + len(mark) :] if mark else ""

    def flush(self) -> str:
        """Returns all text that is held back, white space first."""
        return self._pending.flush()
