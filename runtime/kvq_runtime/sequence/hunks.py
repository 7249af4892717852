"""The difference between two texts of tokens, as edits."""

import collections.abc
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = collections.abc.Sequence[int] | NDArray[np.int64]
Array = NDArray[np.int64]
# Place in the old text, place in the new text, number of tokens.
Run = tuple[int, int, int]

# Texts of up to so many tokens are compared token by token.
COMPARED_TOKENS = 256
# A run of fewer equal tokens between two changes is not worth keeping.
LEAST_KEPT_TOKENS = 8
# More changes than this make another text, not an edit of the same one.
MOST_HUNKS = 16
# Where the gap of an editor's prompt moves, at most so many tokens beside it are computed again.
MOST_GAP_TOKENS = 1024
# Odd, so that a hash depends on all of its tokens. Overflow is intended.
_FACTOR = 6364136223846793005


class Hunk(NamedTuple):
    """Replaces tokens `start` to `stop` of the old text by `new_ids`."""

    start: int
    stop: int
    new_ids: list[int]


def hunks(before: Ids, after: Ids, *, window: int = COMPARED_TOKENS) -> list[Hunk]:
    """Returns the edits that turn `before` into `after`, left to right in places of `before`.

    The common beginning and end are found exactly. In a long middle, runs that begin with tokens
    which either text has only once are kept, the longest first (as in patience diff). What lies
    between them is compared token by token, up to `window` tokens of each text.
    """
    old, new = np.asarray(before, np.int64), np.asarray(after, np.int64)
    start = common_prefix(old, new)
    old, new = old[start:], new[start:]
    same_end = common_prefix(old[::-1], new[::-1])
    if same_end >= LEAST_KEPT_TOKENS:
        old, new = old[:-same_end], new[:-same_end]
    if not len(old) and not len(new):
        return []
    changes: list[Hunk] = []
    done_old = done_new = 0
    for at_old, at_new, size in _common_runs(old, new, window):
        if at_old > done_old or at_new > done_new:
            changes.append(Hunk(start + done_old, start + at_old, new[done_new:at_new].tolist()))
        done_old, done_new = at_old + size, at_new + size
    return changes if len(changes) <= MOST_HUNKS else [Hunk(start, start + len(old), new.tolist())]


def with_moved_gap(before: Ids, changes: collections.abc.Sequence[Hunk], gap: int) -> list[Hunk]:
    """Returns the edits with what lies between the old and the new place of token `gap` as new.

    These tokens stood behind the gap and stand before it now, or the other way round. So their keys
    and values are of another role, and a text that is filled in comes out worse with them. Of more
    than `MOST_GAP_TOKENS` it is those next to the new place.
    """
    old = np.asarray(before, np.int64)
    leaves = next((hunk for hunk in changes if gap in old[hunk.start : hunk.stop]), None)
    comes = next((hunk for hunk in changes if gap in hunk.new_ids), None)
    if leaves is None or comes is None or leaves is comes:
        return list(changes)
    if comes.start > leaves.start:
        start, stop = max(leaves.stop, comes.start - MOST_GAP_TOKENS), comes.stop
    else:
        start, stop = comes.start, min(leaves.start, comes.stop + MOST_GAP_TOKENS)
    between = [
        hunk for hunk in changes
        if hunk is comes or (hunk is not leaves and hunk.start < stop and hunk.stop > start)
    ]  # fmt: skip
    start = min(start, between[0].start)
    stop = max(stop, between[-1].stop)
    new: list[int] = []
    at = start
    for hunk in between:
        new += [*old[at : hunk.start].tolist(), *hunk.new_ids]
        at = hunk.stop
    moved = Hunk(start, stop, new + old[at:stop].tolist())
    return sorted([*(hunk for hunk in changes if hunk not in between), moved])


def one_by_one(changes: Iterable[Hunk]) -> Iterator[Hunk]:
    """Yields the same edits in places of the text as it then is; those that shrink it come first.

    So the text is never longer on the way than before or afterwards.
    """
    made: list[tuple[int, int]] = []
    for start, stop, new in sorted(
        changes, key=lambda hunk: len(hunk.new_ids) + hunk.start - hunk.stop
    ):
        shift = sum(growth for place, growth in made if place < start)
        yield Hunk(start + shift, stop + shift, new)
        made.append((start, len(new) + start - stop))


def _common_runs(old: Array, new: Array, window: int) -> Iterator[Run]:
    """Yields runs that both texts have, left to right, and an empty one at the end."""
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
    """Returns long runs of both texts, left to right; the longest are taken first."""
    if max(len(old), len(new)) <= window or min(len(old), len(new)) < LEAST_KEPT_TOKENS:
        return []
    kept: list[Run] = []
    for x, y, size in sorted(_long_runs(old, new), key=lambda run: -run[2]):
        fits = all(
            (x + size <= i and y + size <= j) or (x >= i + count and y >= j + count)
            for i, j, count in kept
        )
        if fits and len(kept) < MOST_HUNKS:
            kept.append((x, y, size))
    return sorted(kept)


def _long_runs(old: Array, new: Array) -> Iterator[Run]:
    """Yields runs whose first tokens stand once in each text, each as long as both go on alike."""
    a, at_old = _unique_runs(old)
    b, at_new = _unique_runs(new)
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


def _unique_runs(text: Array) -> tuple[Array, Array]:
    """Returns hashes of the short runs that stand in `text` only once, and their places."""
    hashes = np.zeros(len(text) - LEAST_KEPT_TOKENS + 1, np.int64)
    for place in range(LEAST_KEPT_TOKENS):
        hashes = hashes * _FACTOR + text[place : place + len(hashes)]
    values, places, counts = np.unique(hashes, return_index=True, return_counts=True)
    return values[counts == 1], places[counts == 1]


def common_prefix(before: Ids, after: Ids) -> int:
    """Returns how many first tokens two texts share."""
    most = min(len(before), len(after))
    for length in (min(most, COMPARED_TOKENS), most):
        a, b = np.asarray(before[:length], np.int64), np.asarray(after[:length], np.int64)
        if len(differs := np.flatnonzero(a != b)):
            return int(differs[0])
    return most
