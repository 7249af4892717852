"""SnapKV (2404.14469): the last queries vote on what each head will need.

The paper compresses a prompt once: the attention of an observation window at its end is summed per
head, smoothed over some seven neighbouring tokens so that details keep their surroundings, and the
top k stay beside the window. Here the window is the probes of the newest rows alone
(`recent_mass`), it happens whenever bytes are short, and the unit is a page, which is wider than
the paper's neighbourhood; `pool` averages over so many pages that are still held.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq.policies import Evidence
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class SnapKV(Scorer):
    """Evicts what the newest queries look at least, neighbours included."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    pool: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool not in range(1, 64, 2):
            raise UsageError(
                about="policy",
                value=f"snapkv: pool={self.pool}",
                possible="an odd number of pages from 1 (none but the page itself) to 63",
            )

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.attention is not None
        mass = self._pooled(evidence.attention.recent_mass)
        held = self._pooled(evidence.widths[..., 0] > 0)
        return mass / np.maximum(held, 1)

    def _pooled(self, x: NDArray[np.generic]) -> NDArray[np.float64]:
        """Sums over `pool` neighbouring columns, fewer at the ends."""
        reach = self.pool // 2
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (reach, reach)))
        shifted = [padded[..., i : i + x.shape[-1]] for i in range(self.pool)]
        return np.sum(shifted, axis=0)
