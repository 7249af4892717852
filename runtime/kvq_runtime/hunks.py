"""What has changed between two texts of tokens, as edits. Knows no cache."""

import collections.abc
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = collections.abc.Sequence[int]

# Texts that differ over more tokens than this are compared at their two ends only.
MOST_COMPARED_TOKENS = 1024
# Fewer equal tokens than this between two changes are not worth a view of their own.
LEAST_KEPT_TOKENS = 8
# More places than this are not edits of one text but another text.
MOST_HUNKS = 8


class Hunk(NamedTuple):
    """Tokens `start` to `stop` of the old text give way to `new_ids`."""

    start: int
    stop: int
    new_ids: list[int]


def hunks(before: Ids, after: Ids) -> list[Hunk]:
    """The changes that make `after` of `before`, left to right in places of `before`.

    What the two begin and end with alike is found exactly; the middle is compared token by token
    where it is short enough, and stays as a whole else.
    """
    start = common_prefix(before, after)
    same_end = common_prefix(before[start:][::-1], after[start:][::-1])
    if same_end < LEAST_KEPT_TOKENS:
        same_end = 0
    old, new = before[start : len(before) - same_end], after[start : len(after) - same_end]
    if not old and not new:
        return []
    found = [Hunk(start, start + len(old), list(new))]
    if max(len(old), len(new)) <= MOST_COMPARED_TOKENS:
        inner = _compared(start, old, new)
        found = inner if len(inner) <= MOST_HUNKS else found
    return found


def _compared(start: int, old: Ids, new: Ids) -> list[Hunk]:
    matcher: SequenceMatcher[int] = SequenceMatcher(None, old, new, autojunk=False)
    found: list[Hunk] = []
    done_old = done_new = 0
    for block in matcher.get_matching_blocks():
        if 0 < block.size < LEAST_KEPT_TOKENS:
            continue
        if block.a > done_old or block.b > done_new:
            found.append(Hunk(start + done_old, start + block.a, list(new[done_new : block.b])))
        done_old, done_new = block.a + block.size, block.b + block.size
    return found


def common_prefix(before: Ids | NDArray[np.int64], after: Ids | NDArray[np.int64]) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(before), len(after))
    a, b = np.asarray(before[:length], np.int64), np.asarray(after[:length], np.int64)
    differs = np.flatnonzero(a != b)
    return int(differs[0]) if len(differs) else length
