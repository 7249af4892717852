"""The policy `snapkv`: the newest queries choose what each head keeps."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.named import require
from kvq.policies import Evidence
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class SnapKV(Scorer):
    """Evicts the pages that the newest queries attend to least, averaged over neighbouring pages.

    SnapKV (arXiv 2404.14469) compresses a prompt once: it sums the attention of an observation
    window at its end per head, smooths it over some seven neighbouring tokens so that details keep
    their surroundings, and keeps the top k tokens beside the window. Here the window is the newest
    probe rows (`recent_mass`), pages go whenever bytes are short, and the unit is a page, which is
    wider than the paper's neighbourhood.

    Args:
        demote: See `Scorer`; default 0.
        pool: Odd number of neighbouring pages, 1 to 63, over which attention is averaged; evicted
            ones do not count. Default 1, the page alone.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    pool: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        pages = "an odd number of pages from 1 (none but the page itself) to 63"
        require(self.pool in range(1, 64, 2), "policy", f"snapkv: pool={self.pool}", pages)

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.attention is not None
        mass = self._pool(evidence.attention.recent_mass)
        pages = self._pool(evidence.widths[..., 0] > 0)
        return mass / np.maximum(pages, 1)

    def _pool(self, x: NDArray[np.generic]) -> NDArray[np.float64]:
        """Returns the sums over `pool` neighbouring columns, fewer at the ends."""
        reach = self.pool // 2
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (reach, reach)))
        shifted = [padded[..., i : i + x.shape[-1]] for i in range(self.pool)]
        return np.sum(shifted, axis=0)
