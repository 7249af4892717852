"""Bytes given back where they cost least: steps down lower convex hulls, over many items at once.

An item (a page of a cache, a matrix of a model) can be stored in several ways, its rungs, each with
a size and a cost. Of each item the lower convex hull of (size, cost) remains, and the step with the
least cost per byte freed is taken first, over all items: where costs add up, that is the least
total for the bytes, up to one step (Shoham and Gersho, 1988).
"""

import numpy as np
from numpy.typing import NDArray


def hull_descent(
    costs: NDArray[np.float64],
    sizes: NDArray[np.int64],
    at: NDArray[np.intp],
    lower: NDArray[np.bool_],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Items and the rungs they step to, [steps] each, the cheapest per byte first.

    `costs` [n, R] and `sizes` [n, R] or [R] are of each item's rungs, `at` [n] says where it is,
    `lower` [R, R] which rungs may follow which. A rung that frees nothing is never stepped to.
    """
    sizes = np.broadcast_to(sizes, costs.shape)
    rows = np.arange(len(costs), dtype=np.intp)
    slopes = np.full(len(rows), -np.inf)
    taken: list[tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]] = []
    while True:
        place = np.arange(len(rows))
        freed = sizes[place, at][:, None] - sizes
        possible = lower[at] & (freed > 0)
        moving = possible.any(axis=1)
        if not moving.any():
            break
        rows, at, slopes = rows[moving], at[moving], slopes[moving]
        costs, sizes, freed = costs[moving], sizes[moving], freed[moving]
        possible = possible[moving]
        place = np.arange(len(rows))
        risen = costs - costs[place, at][:, None]
        slope = np.where(possible, risen / np.where(possible, freed, 1), np.inf)
        at = np.argmin(slope, axis=1)
        # A step is never taken before the item's earlier ones, whatever rounding says.
        slopes = np.maximum(slopes, slope[place, at])
        taken.append((slopes, rows, at))
    if not taken:
        return rows[:0], at[:0]
    price, item, rung = (np.concatenate(parts) for parts in zip(*taken, strict=True))
    # Stable: among equals the item's earlier step, then the earlier item.
    order = np.argsort(price, kind="stable")
    return item[order], rung[order]
