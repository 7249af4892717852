"""From an order of preference to actions: how every policy's wish becomes bytes freed.

A policy lists steps in the order it would take them; `spend` takes as few from the front as free
what is short. Within a list of steps the column after the last stands for the pages about to
enter, as `Evidence.entering` counts them.
"""

import numpy as np
from numpy.typing import NDArray

from kvq.formats import GRANULES, constant_bytes, granule_bytes
from kvq.policies import Evidence, Relief

Steps = NDArray[np.int32]  # [n, 5]: layer, head, column, K bits, V bits

_GRANULES = np.array([GRANULES.get(bits, 0) for bits in range(9)])


def held_pages(evidence: Evidence) -> NDArray[np.int32]:
    """int32 [n, 5]: layer, head, column and present widths of every page not evicted.

    Ordered by column, layer, head: the order ties are decided in.
    """
    columns, layers, heads = np.nonzero(evidence.widths[..., 0].transpose(2, 0, 1))
    widths = evidence.widths[layers, heads, columns]
    return np.column_stack([layers, heads, columns, widths]).astype(np.int32)


def all_widths(evidence: Evidence) -> NDArray[np.int32]:
    """Widths int32 [L, Hk, C + 1, 2], those of entering pages last; 0 if none enter."""
    held = evidence.widths.astype(np.int32)
    entry = np.zeros((*held.shape[:2], 1, 2), np.int32)
    if evidence.entering and evidence.entry_widths is not None:
        entry = evidence.entry_widths[:, :, None].astype(np.int32)
    return np.concatenate([held, entry], axis=2)


def page_bytes_at(bits: NDArray[np.integer], evidence: Evidence) -> NDArray[np.int64]:
    """Bytes of pages with these widths [..., 2]; 0 and 0 takes none."""
    granules = _GRANULES[bits].sum(axis=-1)
    constants = constant_bytes(evidence.head_dim, evidence.value_groups)
    planes = granules * granule_bytes(evidence.head_dim)
    return (planes + (granules > 0) * constants).astype(np.int64)


def spend(
    evidence: Evidence,
    steps: Steps,
    bytes_short: int,
    columns_short: int,
    column_order: NDArray[np.intp] | None = None,
    together: NDArray[np.intp] | None = None,
) -> Relief:
    """What frees `bytes_short` bytes and `columns_short` rows of the page table.

    `steps` are in order of preference; those of one page must fall from step to step. Neighbours
    with equal numbers in `together` [n], which never falls, are taken all or none. A row is free
    when its page is evicted in every layer and head, which no single step does, so whole columns go
    by `column_order` (default: oldest first) as far as rows are short.
    """
    widths = all_widths(evidence)
    held = evidence.widths[..., 0] > 0
    columns = np.arange(held.shape[2], dtype=np.intp)
    order = columns if column_order is None else column_order
    pages: NDArray[np.int64] = held.sum(axis=(0, 1))
    rows = order[pages[order] > 0][: max(columns_short, 0)]
    plan = [evictions(held & (columns == row)) for row in rows]
    for actions in plan:
        apply(widths, actions)
    freed = _freed(evidence, widths)
    if freed < bytes_short:
        groups = np.arange(len(steps), dtype=np.intp) if together is None else together
        plan.append(_prefix(evidence, widths, steps, groups, bytes_short - freed))
    return _relief(evidence, np.concatenate([np.zeros((0, 5)), *plan]).astype(np.int32))


def _relief(evidence: Evidence, steps: Steps) -> Relief:
    """Steps of held pages as actions, those of pages about to enter as the widths they enter at."""
    enters = steps[:, 2] == evidence.widths.shape[2]
    if not enters.any():
        return Relief(actions=steps)
    widths = all_widths(evidence)
    apply(widths, steps[enters])
    return Relief(actions=steps[~enters], entering=widths[:, :, -1].astype(np.uint8))


def apply(widths: NDArray[np.int32], actions: Steps) -> None:
    """Lowers `widths` [L, Hk, C, 2] in place."""
    layers, heads, columns = actions[:, 0], actions[:, 1], actions[:, 2]
    widths[layers, heads, columns] = np.minimum(widths[layers, heads, columns], actions[:, 3:])


def _prefix(
    evidence: Evidence,
    widths: NDArray[np.int32],
    steps: Steps,
    groups: NDArray[np.integer],
    short: int,
) -> Steps:
    """The last action of each page among as few first groups of steps as free `short` bytes."""
    held = widths[steps[:, 0], steps[:, 1], steps[:, 2], 0] > 0
    steps, groups = steps[held], groups[held]
    heads, columns = widths.shape[1], widths.shape[2]
    page = (steps[:, 0] * heads + steps[:, 1]) * columns + steps[:, 2]
    order = np.argsort(page, kind="stable")
    after = page_bytes_at(steps[order, 3:], evidence)
    before = page_bytes_at(widths.reshape(-1, 2)[page[order]], evidence)
    later = np.flatnonzero(np.diff(page[order]) == 0) + 1
    before[later] = after[later - 1]
    gained = np.empty(len(steps), np.int64)
    gained[order] = (before - after) * np.where(steps[order, 2] < columns - 1, 1, evidence.entering)
    enough = np.searchsorted(np.cumsum(gained), short)
    taken = np.searchsorted(groups, groups[enough : enough + 1], side="right")
    page = page[: taken[0] if len(taken) else len(page)]
    last = len(page) - 1 - np.unique(page[::-1], return_index=True)[1]
    return steps[np.sort(last)]


def _freed(evidence: Evidence, widths: NDArray[np.int32]) -> int:
    held, left = all_widths(evidence), widths
    bytes_of = page_bytes_at(held, evidence) - page_bytes_at(left, evidence)
    return int(bytes_of.sum())


def evictions(chosen: NDArray[np.bool_]) -> Steps:
    """Evictions of the chosen pages [L, Hk, C], ordered by column, layer, head."""
    columns, layers, heads = np.nonzero(chosen.transpose(2, 0, 1))
    zero = np.zeros_like(layers)
    return np.column_stack([layers, heads, columns, zero, zero]).astype(np.int32)
