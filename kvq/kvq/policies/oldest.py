"""Demotes the oldest pages 8 -> 4 -> 2, all layers and heads alike, then evicts the oldest.

Pages that a sliding-window layer can no longer see go first: they cost nothing.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS
from kvq.formats import FORMATS, constant_bytes, granule_bytes
from kvq.policies import Evidence

# A window's pages are kept this much longer, so that a rollback of a page or two loses nothing.
WINDOW_MARGIN_TOKENS = 4 * PAGE_TOKENS


class Oldest:
    """The plainest policy: age alone decides."""

    def relieve(
        self, evidence: Evidence, bytes_short: int, columns_short: int
    ) -> NDArray[np.int32]:
        widths = evidence.widths.astype(np.int32)
        actions: list[NDArray[np.int32]] = []
        for chosen, k_bits, v_bits in self._steps(evidence, widths, columns_short):
            if bytes_short <= 0 and columns_short <= 0:
                break
            before = widths[chosen]
            after = np.minimum(before, (k_bits, v_bits))
            bytes_short -= _bytes_of(before, evidence.head_dim) - _bytes_of(
                after, evidence.head_dim
            )
            widths[chosen] = after
            columns_short -= int(k_bits == 0 and not widths[:, :, chosen[2][0]].any())
            actions.append(np.column_stack([*chosen, after]).astype(np.int32))
        return np.concatenate(actions) if actions else np.zeros((0, 5), np.int32)

    def _steps(
        self, evidence: Evidence, widths: NDArray[np.int32], columns_short: int
    ) -> Iterator[tuple[tuple[NDArray[np.intp], ...], int, int]]:
        """(layer, head, column) triples and their new width ceilings, cheapest loss first."""
        columns = range(widths.shape[2])
        last = evidence.facts[:, 0] + evidence.facts[:, 1] + PAGE_TOKENS
        out_of_sight = last[None, :] + WINDOW_MARGIN_TOKENS < (
            evidence.tokens - evidence.windows[:, None]
        )
        unseen = (evidence.windows[:, None] > 0) & out_of_sight
        for column in columns:
            held = (widths[:, :, column, 0] > 0) & unseen[:, None, column]
            if held.any():
                yield _at(held, column), 0, 0
        if columns_short <= 0:
            for bits in (4, 2):
                for column in columns:
                    wide = widths[:, :, column].max(axis=-1) > bits
                    if wide.any():
                        yield _at(wide, column), bits, bits
        for column in columns:
            held = widths[:, :, column, 0] > 0
            if held.any():
                yield _at(held, column), 0, 0


def _at(chosen: NDArray[np.bool_], column: int) -> tuple[NDArray[np.intp], ...]:
    layers, heads = np.nonzero(chosen)
    return layers, heads, np.full_like(layers, column)


_GRANULES = np.array([FORMATS[bits].granules if bits in FORMATS else 0 for bits in range(9)])


def _bytes_of(widths: NDArray[np.int32], head_dim: int) -> int:
    """Bytes of pages with these widths [n, 2]."""
    held = int((widths[:, 0] > 0).sum()) * constant_bytes(head_dim)
    return held + int(_GRANULES[widths].sum()) * granule_bytes(head_dim)
