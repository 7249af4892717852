"""What a user changed lately, in the hunks that a person would see, and what comes next.

Knows texts and their addresses, no editor and no model.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvq_apps.completion.document import LineChange

MOST_HUNKS = 32
MOST_BYTES = 64 << 10
# A change that touches the last hunk within this time belongs to it, while it stays this small.
SAME_EDIT_S = 10.0
SAME_EDIT_LINES = 12
# A likely edit: the log-probability of all that was written, and the lines that change.
LIKELY_EDIT = -3.0
LIKELY_LINES = 6
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class EditedLines:
    """Holds one hunk: what changed in the document `uri`, and when it last did."""

    uri: str
    change: LineChange
    time_s: float

    @property
    def old(self) -> str:
        return "".join(self.change.old)

    @property
    def new(self) -> str:
        return "".join(self.change.new)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes it takes in memory, about."""
        return 4 * (len(self.old) + len(self.new))

    def undone(self, lines: Sequence[str], first: int = 0) -> list[str]:
        """Returns `lines`, which begin at line `first`, as before it; unchanged where it is not."""
        begin, stop = self.change.first - first, self.change.first - first + len(self.change.new)
        if begin < 0 or tuple(lines[begin:stop]) != self.change.new:
            return list(lines)
        return [*lines[:begin], *self.change.old, *lines[stop:]]

    def removed_words(self) -> list[str]:
        """Returns the words that it removed and did not put back, in their order."""
        kept = set(_WORD.findall(self.new))
        return [word for word in dict.fromkeys(_WORD.findall(self.old)) if word not in kept]


@dataclass(frozen=True, kw_only=True, slots=True)
class NextEdit:
    """Holds the changes that come next, top to bottom, and their cost; `why_not`: why none do."""

    changes: tuple[LineChange, ...] = ()
    logprob: float = 0.0
    places: int = 0
    prompt_tokens: int = 0
    passes: int = 0
    ms: float = 0.0
    why_not: str | None = None
    # The model cannot do it at all, and a user should hear that once.
    impossible: bool = False

    @property
    def likely(self) -> bool:
        """Returns whether it is small, and the model sure of it."""
        lines = sum(max(len(change.old), len(change.new)) for change in self.changes)
        return self.logprob >= LIKELY_EDIT and lines <= LIKELY_LINES


class EditHistory:
    """Remembers the last hunks of a workspace's documents, the oldest first."""

    def __init__(self) -> None:
        self._hunks: deque[EditedLines] = deque()
        self._num_bytes = 0

    def __iter__(self) -> Iterator[EditedLines]:
        return iter(self._hunks)

    def __len__(self) -> int:
        return len(self._hunks)

    def add(self, uri: str, change: LineChange, time_s: float) -> None:
        """Adds a change; one that goes on with the last hunk becomes a part of it."""
        last = self._hunks[-1] if self._hunks else None
        if last is not None and last.uri == uri and time_s - last.time_s <= SAME_EDIT_S:
            whole = _joined(last.change, change)
            if whole is not None:
                self._num_bytes -= self._hunks.pop().num_bytes
                change = whole
        if change.old == change.new:
            return
        self._hunks.append(EditedLines(uri, change, time_s))
        self._num_bytes += self._hunks[-1].num_bytes
        while len(self._hunks) > MOST_HUNKS or self._num_bytes > MOST_BYTES:
            self._num_bytes -= self._hunks.popleft().num_bytes


def _joined(last: LineChange, change: LineChange) -> LineChange | None:
    """Returns both changes as one; None where they do not touch, or are large together."""
    begin, end = last.first, last.first + len(last.new)
    if change.first > end or change.first + len(change.old) < begin:
        return None
    above, below = max(0, begin - change.first), max(0, end - change.first)
    old = (*change.old[:above], *last.old, *change.old[below:])
    kept = last.new[: max(0, change.first - begin)]
    rest = last.new[max(0, change.first + len(change.old) - begin) :]
    new = (*kept, *change.new, *rest)
    if max(len(old), len(new)) > SAME_EDIT_LINES:
        return None
    return LineChange.between(min(begin, change.first), old, new)
