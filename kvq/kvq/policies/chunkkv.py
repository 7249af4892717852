"""The policy `chunkkv`: whole chunks stay or go, and neighbouring layers choose alike."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.named import require
from kvq.policies import Evidence
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class ChunkKV(Scorer):
    """Evicts the pages that all heads of a layer together attend to least.

    ChunkKV (arXiv 2502.00299) sums the attention of an observation window over the tokens of a
    chunk (about ten) and over the heads, keeps the best chunks of each layer, and lets several
    layers in a row use the choice of the first. Here the chunk is the page, and the window is the
    newest probes. A layer uses the choice of the first layer of its group only if both have the
    same sliding window, since otherwise they see different pages.

    Args:
        demote: See `Scorer`; default 0.
        reuse: Number of layers in a row that share one choice, 1 or more. Default 2.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})

    reuse: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.reuse >= 1, "policy", f"chunkkv: reuse={self.reuse}", "1 layer or more")

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.attention is not None
        mass = evidence.attention.recent_mass
        layers = np.arange(len(mass))
        first = layers - layers % self.reuse
        leader = np.where(evidence.windows[first] == evidence.windows, first, layers)
        return np.broadcast_to(mass.sum(axis=1, keepdims=True)[leader], mass.shape)
