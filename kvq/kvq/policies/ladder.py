"""The rungs that pages step down, and the order of these steps.

A policy lists for every page the widths it falls to, rung by rung, and gives each rung a key: the
lowest keys go first, equal keys by column, layer, head.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvq.policies import Evidence, Relief
from kvq.policies.spend import Steps, present_pages, spend

EVICTED = (0, 0)
# The usual rungs: keys and values lose bits together.
LADDER = ((6, 6), (4, 4), (2, 2), EVICTED)


def descend(
    evidence: Evidence,
    rungs: ArrayLike,
    keys: NDArray[np.number],
    bytes_short: int,
    columns_short: int,
    *,
    all_or_none: bool = False,
) -> Relief:
    """Returns the actions that free enough by taking as few of the lowest-keyed rungs as possible.

    Args:
        evidence: What the policy was given.
        rungs: [n, R, 2], or [R, 2] for all pages: the most key and value bits that a page of
            `present_pages` has after each rung; the last rung is `EVICTED`.
        keys: [n, R]: keys that never fall from rung to rung.
        bytes_short: Bytes to free.
        columns_short: Columns to free.
        all_or_none: Whether rungs with equal keys are taken together or not at all.
    """
    pages = present_pages(evidence)
    ceilings = np.broadcast_to(np.asarray(rungs, np.int32), (*keys.shape, 2))
    stages = np.concatenate([pages[:, None, 3:], ceilings], axis=1)
    stages = np.minimum.accumulate(stages, axis=1)
    page, rung = np.nonzero((stages[:, 1:] < stages[:, :-1]).any(axis=-1))
    order = np.argsort(keys[page, rung], kind="stable")
    page, rung = page[order], rung[order]
    steps = np.column_stack([pages[page, :3], stages[page, rung + 1]]).astype(np.int32)
    groups = np.unique(keys[page, rung], return_inverse=True)[1] if all_or_none else None
    columns = _columns_by_eviction(steps, evidence.widths.shape[2])
    return spend(evidence, steps, bytes_short, columns_short, columns, groups)


def descend_by_age(
    evidence: Evidence, rungs: ArrayLike, bytes_short: int, columns_short: int
) -> Relief:
    """Returns actions that lower all layers and heads, rung by rung, the oldest column first."""
    ages = present_pages(evidence)[:, 2:3]
    keys = ages + evidence.widths.shape[2] * np.arange(len(np.asarray(rungs)))
    return descend(evidence, rungs, keys, bytes_short, columns_short, all_or_none=True)


def rank_from_top(group: NDArray[np.integer], importance: NDArray[np.floating]) -> NDArray[np.intp]:
    """Returns the rank [n] of each page within its group, 0 for the most important.

    Evicting the highest ranks first keeps the k most important pages of every group. Among equally
    important pages the first, the oldest, has the highest rank.
    """
    order = np.lexsort((importance, group))
    ends = np.cumsum(np.bincount(group))
    ranks = np.empty(len(group), np.intp)
    ranks[order] = ends[group[order]] - 1 - np.arange(len(group))
    return ranks


def _columns_by_eviction(steps: Steps, columns: int) -> NDArray[np.intp]:
    """Returns the columns ordered by the mean place of their evictions in `steps`."""
    places = np.flatnonzero(steps[:, 3] == 0)
    evicted = steps[places, 2]
    counts = np.bincount(evicted, minlength=columns)
    means = np.bincount(evicted, weights=places, minlength=columns) / np.maximum(counts, 1)
    return np.argsort(means, kind="stable")
