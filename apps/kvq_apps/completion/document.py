"""A text in an editor: positions in UTF-8, UTF-16 or UTF-32 units, and edits between two of them.

Lines end where the Language Server Protocol says: at LF, CR LF and CR, and nowhere else.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

# A file's name and a text of it.
NamedText = tuple[str, str]
Encoding = Literal["utf-8", "utf-16", "utf-32"]
_UNITS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}
# A part of a text begins at a multiple of this many lines.
_FIRST_LINES = 64
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


class Position(NamedTuple):
    """Gives a place: line and unit within it, both from 0."""

    line: int
    character: int


class LineChange(NamedTuple):
    """Says that the lines `new` stand in place of `old`, from line `first` on."""

    first: int
    old: tuple[str, ...]
    new: tuple[str, ...]

    @classmethod
    def between(cls, first: int, old: Sequence[str], new: Sequence[str]) -> "LineChange":
        """Returns the change from `old` to `new`, without lines that both begin or end with."""
        # A line end that is typed behind a line adds the line below: lines below are equal first.
        tail = _shared(old[::-1], new[::-1])
        old, new = old[: len(old) - tail], new[: len(new) - tail]
        head = _shared(old, new)
        return cls(first + head, tuple(old[head:]), tuple(new[head:]))


class TextDocument:
    """Holds lines of text with their ends. Places past a line's or the text's end are clamped."""

    def __init__(self, text: str) -> None:
        self._lines = _lines(text)

    @property
    def text(self) -> str:
        return "".join(self._lines)

    @property
    def num_lines(self) -> int:
        """Counts the lines, the empty one after a last line end included."""
        return len(self._lines)

    def line(self, number: int) -> str:
        """Returns a line without its end; empty past the last one."""
        return self._lines[number].rstrip("\r\n") if 0 <= number < len(self._lines) else ""

    def place(self, position: Position, encoding: Encoding = "utf-16") -> tuple[int, int]:
        """Returns (line, code points before it) of a position.

        A position inside a character means where that character begins.
        """
        if position.line < 0:
            return 0, 0
        if position.line >= len(self._lines):
            return len(self._lines) - 1, len(self.line(len(self._lines) - 1))
        line = self.line(position.line)
        return position.line, _code_points(line, max(0, position.character), encoding)

    def units(self, line: int, code_points: int, encoding: Encoding = "utf-16") -> int:
        """Counts the units before a code point of a line."""
        name, width = _UNITS[encoding]
        return len(self.line(line)[:code_points].encode(name, "surrogatepass")) // width

    def copy(self) -> "TextDocument":
        """Returns an independent copy."""
        copy = TextDocument("")
        copy._lines = self._lines.copy()
        return copy

    def text_around(self, place: tuple[int, int], limit: int | None = None) -> tuple[str, str]:
        """Returns the text before and after a place: all of it, or about `limit` characters each.

        The text before then begins with a line that stays the first while somebody types there.
        """
        line, column = place
        text = self._lines[line]
        first, stop = 0, len(self._lines)
        if limit is not None:
            first = line - self._count(reversed(range(line)), limit)
            first -= first % _FIRST_LINES
            stop = line + 1 + self._count(range(line + 1, stop), limit)
        before = "".join(self._lines[first:line]) + text[:column]
        return before, text[column:] + "".join(self._lines[line + 1 : stop])

    def _count(self, lines: Iterable[int], characters: int) -> int:
        """Counts how many of `lines`, one after the other, have so many characters."""
        count = 0
        for line in lines:
            if characters <= 0:
                break
            characters -= len(self._lines[line])
            count += 1
        return count

    def lines(self, first: int = 0, stop: int | None = None) -> list[str]:
        """Returns lines with their ends."""
        return self._lines[first:stop]

    def replace(
        self, start: Position, end: Position, text: str, encoding: Encoding = "utf-16"
    ) -> LineChange:
        """Puts `text` in place of what stands between two positions; returns the change."""
        (first, column), (last, stop) = sorted(
            (self.place(start, encoding), self.place(end, encoding))
        )
        joined = self._lines[first][:column] + text + self._lines[last][stop:]
        # A line end may join two lines, or the text and its surroundings.
        if last + 1 < len(self._lines):
            joined += self._lines[last + 1]
            last += 1
        if first > 0:
            first -= 1
            joined = self._lines[first] + joined
        new = _lines(joined)
        if last + 1 < len(self._lines):
            new.pop()
        old = self._lines[first : last + 1]
        self._lines[first : last + 1] = new
        return LineChange.between(first, old, new)


def _lines(text: str) -> list[str]:
    """Returns the lines with their ends; the last has none, and may be empty."""
    lines = [match.group() for match in _LINE.finditer(text)]
    # The pattern matches once more at the end of a last line without one.
    if len(lines) > 1 and lines[-1] == "" and not lines[-2].endswith(("\r", "\n")):
        lines.pop()
    return lines


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Counts the lines that both begin with."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _code_points(line: str, units: int, encoding: Encoding) -> int:
    if line.isascii() or encoding == "utf-32":
        return min(units, len(line))
    name, width = _UNITS[encoding]
    sizes = (len(character.encode(name, "surrogatepass")) // width for character in line)
    return bisect_right(list(accumulate(sizes)), units)
