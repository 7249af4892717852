"""The rungs pages step down, and the order they take them in.

A policy says of every held page which widths it falls to, rung by rung, and gives each rung a key:
the lowest keys go first, equal keys by column, layer, head. Knows no evidence but widths.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvq.policies import Evidence, Relief
from kvq.policies.spend import Steps, held_pages, spend

EVICTED = (0, 0)
# Both sides alike, where one number says who goes first.
LADDER = ((6, 6), (4, 4), (2, 2), EVICTED)


def descend(
    evidence: Evidence,
    rungs: ArrayLike,
    keys: NDArray[np.number],
    bytes_short: int,
    columns_short: int,
    *,
    alike: bool = False,
) -> Relief:
    """What frees what is short by taking as few of the lowest-keyed rungs as will do.

    `rungs` [n, R, 2] (or [R, 2] for all pages): the most K and V bits a page of `held_pages` has
    left after each rung, `EVICTED` at the last. `keys` [n, R] never fall from rung to rung. With
    `alike` the rungs of equal keys are taken together or not at all.
    """
    pages = held_pages(evidence)
    ceilings = np.broadcast_to(np.asarray(rungs, np.int32), (*keys.shape, 2))
    stages = np.concatenate([pages[:, None, 3:], ceilings], axis=1)
    stages = np.minimum.accumulate(stages, axis=1)
    page, rung = np.nonzero((stages[:, 1:] < stages[:, :-1]).any(axis=-1))
    order = np.argsort(keys[page, rung], kind="stable")
    page, rung = page[order], rung[order]
    steps = np.column_stack([pages[page, :3], stages[page, rung + 1]]).astype(np.int32)
    together = np.unique(keys[page, rung], return_inverse=True)[1] if alike else None
    columns = _columns_by_eviction(steps, evidence.widths.shape[2])
    return spend(evidence, steps, bytes_short, columns_short, columns, together)


def descend_by_age(
    evidence: Evidence, rungs: ArrayLike, bytes_short: int, columns_short: int
) -> Relief:
    """All layers and heads alike: rung after rung, the oldest column first, columns whole."""
    ages = held_pages(evidence)[:, 2:3]
    keys = ages + evidence.widths.shape[2] * np.arange(len(np.asarray(rungs)))
    return descend(evidence, rungs, keys, bytes_short, columns_short, alike=True)


def rank_from_top(group: NDArray[np.integer], importance: NDArray[np.floating]) -> NDArray[np.intp]:
    """Rank [n] of each page within its group, 0 for the most important.

    Keeping the k most important pages of every group means evicting the highest ranks first. Of
    equally important pages the one that comes first ranks last, so the oldest goes first.
    """
    order = np.lexsort((importance, group))
    ends = np.cumsum(np.bincount(group))
    ranks = np.empty(len(group), np.intp)
    ranks[order] = ends[group[order]] - 1 - np.arange(len(group))
    return ranks


def _columns_by_eviction(steps: Steps, columns: int) -> NDArray[np.intp]:
    """Columns in the order their pages are evicted in, by the mean place of these evictions."""
    places = np.flatnonzero(steps[:, 3] == 0)
    evicted = steps[places, 2]
    counts = np.bincount(evicted, minlength=columns)
    means = np.bincount(evicted, weights=places, minlength=columns) / np.maximum(counts, 1)
    return np.argsort(means, kind="stable")
