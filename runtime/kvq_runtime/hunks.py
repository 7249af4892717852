"""What has changed between two texts of tokens, as edits. Knows no cache."""

import collections.abc
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = collections.abc.Sequence[int]
Array = NDArray[np.int64]

# Texts are compared token by token in windows of so many; what begins alike goes on for nothing.
COMPARED_TOKENS = 256
# Fewer equal tokens than this between two changes are not worth a view of their own.
LEAST_KEPT_TOKENS = 8
# More places than this are not edits of one text but another text.
MOST_HUNKS = 16


class Hunk(NamedTuple):
    """Tokens `start` to `stop` of the old text give way to `new_ids`."""

    start: int
    stop: int
    new_ids: list[int]


def hunks(before: Ids, after: Ids, *, window: int = COMPARED_TOKENS) -> list[Hunk]:
    """The changes that make `after` of `before`, left to right in places of `before`.

    What the two begin and end with alike is found exactly. The middle is compared window by window
    from the left; where a window has nothing in common, what one text goes on with is looked for in
    all of the other, and the rest stays as a whole where that is not found either.
    """
    old, new = np.asarray(before, np.int64), np.asarray(after, np.int64)
    start = common_prefix(old, new)
    old, new = old[start:], new[start:]
    same_end = common_prefix(old[::-1], new[::-1])
    if same_end >= LEAST_KEPT_TOKENS:
        old, new = old[:-same_end], new[:-same_end]
    if not len(old) and not len(new):
        return []
    found = _compared(start, old, new, window)
    return found if len(found) <= MOST_HUNKS else [Hunk(start, start + len(old), new.tolist())]


def one_by_one(changes: Iterable[Hunk]) -> Iterator[Hunk]:
    """The same changes as edits of the text as it then is; what shrinks it first.

    So the text is never longer on the way than it is before or afterwards.
    """
    made: list[tuple[int, int]] = []
    for start, stop, new in sorted(
        changes, key=lambda one: len(one.new_ids) + one.start - one.stop
    ):
        shift = sum(growth for place, growth in made if place < start)
        yield Hunk(start + shift, stop + shift, new)
        made.append((start, len(new) + start - stop))


def _compared(start: int, old: Array, new: Array, window: int) -> list[Hunk]:
    """The changes that make `new` of `old`, which begins at token `start` and is not equal."""
    found: list[Hunk] = []
    done_old = done_new = 0
    for at_old, at_new, size in _alike(old, new, window):
        if at_old > done_old or at_new > done_new:
            found.append(Hunk(start + done_old, start + at_old, new[done_new:at_new].tolist()))
        done_old, done_new = at_old + size, at_new + size
    return found


def _alike(old: Array, new: Array, window: int) -> Iterator[tuple[int, int, int]]:
    """Runs (place in old, place in new, tokens) that both have, left to right, and the end."""
    at_old = at_new = 0
    while at_old < len(old) and at_new < len(new):
        a = old[at_old : at_old + window].tolist()
        b = new[at_new : at_new + window].tolist()
        blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
        runs = [
            (at_old + x, at_new + y, size) for x, y, size in blocks if size >= LEAST_KEPT_TOKENS
        ]
        if not runs:
            run = _farther(old, at_old, new, at_new)
            if run is None:
                break
            runs = [run]
        yield from runs[:-1]
        x, y, size = runs[-1]
        size += common_prefix(old[x + size :], new[y + size :])
        yield x, y, size
        at_old, at_new = x + size, y + size
    yield len(old), len(new), 0


def _farther(old: Array, at_old: int, new: Array, at_new: int) -> tuple[int, int, int] | None:
    """Where one text goes on as the other does here, beyond the window, as in `_alike`."""
    room = min(len(old) - at_old, len(new) - at_new)
    for size in (COMPARED_TOKENS, LEAST_KEPT_TOKENS):
        if size > room:
            continue
        place = _place(old[at_old:], new[at_new : at_new + size])
        if place is not None:
            return at_old + place, at_new, size
        place = _place(new[at_new:], old[at_old : at_old + size])
        if place is not None:
            return at_old, at_new + place, size
    return None


def _place(text: Array, part: Array) -> int | None:
    """Where `part` stands in `text` first."""
    whole, wanted, width = text.tobytes(), part.tobytes(), text.itemsize
    at = whole.find(wanted)
    while at > 0 and at % width:
        at = whole.find(wanted, at + 1)
    return at // width if at >= 0 else None


def common_prefix(before: Ids | NDArray[np.int64], after: Ids | NDArray[np.int64]) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(before), len(after))
    a, b = np.asarray(before[:length], np.int64), np.asarray(after[:length], np.int64)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else length
