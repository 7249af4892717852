"""Turns an order of preference into the actions that free enough space.

A policy lists steps in the order it prefers, and `spend` takes as few from the front as free enough
bytes. In a list of steps the column after the last one stands for the pages that are about to close
(`Evidence.closing_pages`).
"""

import numpy as np
from numpy.typing import NDArray

from kvq.formats import GRANULES, constant_bytes, granule_bytes
from kvq.policies import Evidence, Relief

Steps = NDArray[np.int32]  # [n, 5]: layer, head, column, K bits, V bits

_GRANULES = np.array([GRANULES.get(bits, 0) for bits in range(9)])


def present_pages(evidence: Evidence) -> NDArray[np.int32]:
    """Returns int32 [n, 5]: layer, head, column and widths of every page that is not evicted.

    The rows are ordered by column, layer, head, as ties are.
    """
    columns, layers, heads = np.nonzero(evidence.widths[..., 0].transpose(2, 0, 1))
    widths = evidence.widths[layers, heads, columns]
    return np.column_stack([layers, heads, columns, widths]).astype(np.int32)


def all_widths(evidence: Evidence) -> NDArray[np.int32]:
    """Returns widths int32 [L, Hk, C + 1, 2]; the last column is that of new pages, 0 if none."""
    widths = evidence.widths.astype(np.int32)
    new = np.zeros((*widths.shape[:2], 1, 2), np.int32)
    if evidence.closing_pages and evidence.new_page_widths is not None:
        new = evidence.new_page_widths[:, :, None].astype(np.int32)
    return np.concatenate([widths, new], axis=2)


def page_bytes_at(bits: NDArray[np.integer], evidence: Evidence) -> NDArray[np.int64]:
    """Returns the bytes of pages with these widths [..., 2]; an evicted page (0, 0) has none."""
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
    groups: NDArray[np.intp] | None = None,
) -> Relief:
    """Returns actions that free `bytes_short` bytes and `columns_short` columns of the page table.

    A column is free only when its page is evicted in every layer and head, which no single step
    does. So whole columns are evicted first, as many as are short.

    Args:
        evidence: What the policy was given.
        steps: Steps in order of preference; those of one page must fall from step to step.
        bytes_short: Bytes to free.
        columns_short: Columns to free.
        column_order: The order in which columns are evicted; None: the oldest first.
        groups: [n], never falling: neighbouring steps with equal numbers are taken all or none;
            None: each step alone.
    """
    widths = all_widths(evidence)
    present = evidence.widths[..., 0] > 0
    columns = np.arange(present.shape[2], dtype=np.intp)
    order = columns if column_order is None else column_order
    pages: NDArray[np.int64] = present.sum(axis=(0, 1))
    rows = order[pages[order] > 0][: max(columns_short, 0)]
    plan = [evictions(present & (columns == row)) for row in rows]
    for actions in plan:
        apply(widths, actions)
    freed = _freed(evidence, widths)
    if freed < bytes_short:
        groups = np.arange(len(steps), dtype=np.intp) if groups is None else groups
        plan.append(_prefix(evidence, widths, steps, groups, bytes_short - freed))
    return _relief(evidence, np.concatenate([np.zeros((0, 5)), *plan]).astype(np.int32))


def _relief(evidence: Evidence, steps: Steps) -> Relief:
    """Returns `steps` as actions, and those of new pages as the widths that these close at."""
    is_new = steps[:, 2] == evidence.widths.shape[2]
    if not is_new.any():
        return Relief(actions=steps)
    widths = all_widths(evidence)
    apply(widths, steps[is_new])
    return Relief(actions=steps[~is_new], new_page_widths=widths[:, :, -1].astype(np.uint8))


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
    """Returns the last step of each page among the fewest first groups that free `short` bytes."""
    present = widths[steps[:, 0], steps[:, 1], steps[:, 2], 0] > 0
    steps, groups = steps[present], groups[present]
    heads, columns = widths.shape[1], widths.shape[2]
    page = (steps[:, 0] * heads + steps[:, 1]) * columns + steps[:, 2]
    order = np.argsort(page, kind="stable")
    after = page_bytes_at(steps[order, 3:], evidence)
    before = page_bytes_at(widths.reshape(-1, 2)[page[order]], evidence)
    later = np.flatnonzero(np.diff(page[order]) == 0) + 1
    before[later] = after[later - 1]
    freed = np.empty(len(steps), np.int64)
    copies = np.where(steps[order, 2] < columns - 1, 1, evidence.closing_pages)
    freed[order] = (before - after) * copies
    last_needed = np.searchsorted(np.cumsum(freed), short)
    stop = np.searchsorted(groups, groups[last_needed : last_needed + 1], side="right")
    page = page[: stop[0] if len(stop) else len(page)]
    last = len(page) - 1 - np.unique(page[::-1], return_index=True)[1]
    return steps[np.sort(last)]


def _freed(evidence: Evidence, widths: NDArray[np.int32]) -> int:
    before, after = all_widths(evidence), widths
    freed = page_bytes_at(before, evidence) - page_bytes_at(after, evidence)
    return int(freed.sum())


def evictions(chosen: NDArray[np.bool_]) -> Steps:
    """Returns evictions of the chosen pages, bool [L, Hk, C], ordered by column, layer, head."""
    columns, layers, heads = np.nonzero(chosen.transpose(2, 0, 1))
    zero = np.zeros_like(layers)
    return np.column_stack([layers, heads, columns, zero, zero]).astype(np.int32)
