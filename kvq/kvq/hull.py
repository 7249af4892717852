"""Frees bytes where they cost least: steps down lower convex hulls, over many items at once.

An item (a page of a cache, a matrix of a model) can be stored in several ways, its rungs, each with
a size and a cost. Only the rungs on the lower convex hull of (size, cost) are used, and the step
with the least cost per freed byte comes first, over all items. Where costs add up, this gives the
least total cost for the bytes, up to one step (Shoham and Gersho, 1988).
"""

import numpy as np
from numpy.typing import NDArray


def hull_descent(
    costs: NDArray[np.float64],
    sizes: NDArray[np.int64],
    start: NDArray[np.intp],
    reachable: NDArray[np.bool_],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns items and the rungs they step to, [steps] each, the cheapest per byte first.

    The rungs of n items have `costs` [n, R] and `sizes` [n, R] or [R] in bytes; `start` [n] are
    those they are on. `reachable` [R, R]: whether the second rung may follow the first. One that
    frees nothing is never used.
    """
    sizes = np.broadcast_to(sizes, costs.shape)
    rows = np.arange(len(costs), dtype=np.intp)
    slopes = np.full(len(rows), -np.inf)
    current = start
    steps: list[tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]] = []
    while True:
        place = np.arange(len(rows))
        freed = sizes[place, current][:, None] - sizes
        possible = reachable[current] & (freed > 0)
        moving = possible.any(axis=1)
        if not moving.any():
            break
        rows, current, slopes = rows[moving], current[moving], slopes[moving]
        costs, sizes, freed = costs[moving], sizes[moving], freed[moving]
        possible = possible[moving]
        place = np.arange(len(rows))
        added = costs - costs[place, current][:, None]
        slope = np.where(possible, added / np.where(possible, freed, 1), np.inf)
        current = np.argmin(slope, axis=1)
        # Rounding must not put a step before the item's earlier ones.
        slopes = np.maximum(slopes, slope[place, current])
        steps.append((slopes, rows, current))
    if not steps:
        return rows[:0], current[:0]
    price, item, rung = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    # The sort is stable: among equals the item's earlier step comes first, then the earlier item.
    order = np.argsort(price, kind="stable")
    return item[order], rung[order]
