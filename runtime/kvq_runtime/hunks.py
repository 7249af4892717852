"""What has changed between two texts of tokens, as edits. Knows no cache."""

import collections.abc
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = collections.abc.Sequence[int] | NDArray[np.int64]
Array = NDArray[np.int64]
# (place in the old text, place in the new one, tokens).
Run = tuple[int, int, int]

# Texts of so many tokens are compared token by token.
COMPARED_TOKENS = 256
# Fewer equal tokens than this between two changes are not worth a view of their own.
LEAST_KEPT_TOKENS = 8
# More places than this are not edits of one text but another text.
MOST_HUNKS = 16
# Odd, so that a hash depends on all of its tokens; overflow is wanted.
_FACTOR = 6364136223846793005


class Hunk(NamedTuple):
    """Tokens `start` to `stop` of the old text give way to `new_ids`."""

    start: int
    stop: int
    new_ids: list[int]


def hunks(before: Ids, after: Ids, *, window: int = COMPARED_TOKENS) -> list[Hunk]:
    """The changes that make `after` of `before`, left to right in places of `before`.

    What the two begin and end with alike is found exactly. Of a long middle the longest runs are
    kept that begin with tokens which either text has once (as in patience diff, the longest first);
    what stands between them is compared token by token, up to `window` tokens of each.
    """
    old, new = np.asarray(before, np.int64), np.asarray(after, np.int64)
    start = common_prefix(old, new)
    old, new = old[start:], new[start:]
    same_end = common_prefix(old[::-1], new[::-1])
    if same_end >= LEAST_KEPT_TOKENS:
        old, new = old[:-same_end], new[:-same_end]
    if not len(old) and not len(new):
        return []
    found: list[Hunk] = []
    done_old = done_new = 0
    for at_old, at_new, size in _alike(old, new, window):
        if at_old > done_old or at_new > done_new:
            found.append(Hunk(start + done_old, start + at_old, new[done_new:at_new].tolist()))
        done_old, done_new = at_old + size, at_new + size
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


def _alike(old: Array, new: Array, window: int) -> Iterator[Run]:
    """Runs that both have, left to right, and an empty one at the end."""
    at_old = at_new = 0
    for x, y, size in [*_anchors(old, new, window), (len(old), len(new), 0)]:
        if max(x - at_old, y - at_new) <= window:
            a, b = old[at_old:x].tolist(), new[at_new:y].tolist()
            for i, j, count in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
                if count >= LEAST_KEPT_TOKENS:
                    yield at_old + i, at_new + j, count
        yield x, y, size
        at_old, at_new = x + size, y + size


def _anchors(old: Array, new: Array, window: int) -> list[Run]:
    """Long runs of both texts, the longest first as far as one order allows; left to right."""
    if max(len(old), len(new)) <= window or min(len(old), len(new)) < LEAST_KEPT_TOKENS:
        return []
    kept: list[Run] = []
    for x, y, size in sorted(_runs(old, new), key=lambda run: -run[2]):
        fits = all(
            (x + size <= i and y + size <= j) or (x >= i + count and y >= j + count)
            for i, j, count in kept
        )
        if fits and len(kept) < MOST_HUNKS:
            kept.append((x, y, size))
    return sorted(kept)


def _runs(old: Array, new: Array) -> Iterator[Run]:
    """Runs whose first tokens stand once in each text, as long as both go on alike."""
    a, at_old = _once(old)
    b, at_new = _once(new)
    _, i, j = np.intersect1d(a, b, assume_unique=True, return_indices=True)
    order = np.argsort(at_old[i])
    done: dict[int, int] = {}
    for x, y in zip(at_old[i][order].tolist(), at_new[j][order].tolist(), strict=True):
        if x < done.get(y - x, 0):
            continue
        size = common_prefix(old[x:], new[y:])
        done[y - x] = x + size
        if size >= LEAST_KEPT_TOKENS:  # hashes may be equal by chance
            yield x, y, size


def _once(text: Array) -> tuple[Array, Array]:
    """Hashes of the runs of a few tokens that stand in `text` once, and where."""
    hashes = np.zeros(len(text) - LEAST_KEPT_TOKENS + 1, np.int64)
    for place in range(LEAST_KEPT_TOKENS):
        hashes = hashes * _FACTOR + text[place : place + len(hashes)]
    found, places, counts = np.unique(hashes, return_index=True, return_counts=True)
    return found[counts == 1], places[counts == 1]


def common_prefix(before: Ids, after: Ids) -> int:
    """How many tokens two texts begin with alike."""
    most = min(len(before), len(after))
    for length in (min(most, COMPARED_TOKENS), most):
        a, b = np.asarray(before[:length], np.int64), np.asarray(after[:length], np.int64)
        if len(differs := np.flatnonzero(a != b)):
            return int(differs[0])
    return most
