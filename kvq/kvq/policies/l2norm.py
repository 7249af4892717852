"""The policy `l2norm`: keys with a small norm attract attention."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.named import require
from kvq.policies import Evidence
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class L2Norm(Scorer):
    """Evicts the pages with the fewest short keys.

    After "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv
    2406.11430), which keeps the tokens with the lowest key norms of each head and leaves the first
    two layers alone, where norm and attention hardly correlate. Here whole pages go: the importance
    of a page is the number of its tokens among those with the lowest norms. Among pages with equal
    counts the one whose shortest key is longer goes first. Norms are of the keys as they are read.

    Args:
        demote: See `Scorer`; default 0.
        skip: Number of first layers whose pages go last. Default 2.
        low: Share, between 0 and 1, of the head's tokens that count as short. Default 0.25.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    skip: int = 2
    low: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.skip >= 0, "policy", f"l2norm: skip={self.skip}", "0 layers or more")
        require(0 < self.low < 1, "policy", f"l2norm: low={self.low}", "a share between 0 and 1")

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        return evidence.stack_layers(lambda layer: self._layer_importance(evidence, layer))

    def _layer_importance(self, evidence: Evidence, layer: int) -> NDArray[np.floating]:
        """Returns [Hk, C]: the number of short keys of a page, plus a fraction for the shortest."""
        present = evidence.widths[layer, :, :, 0] > 0
        squares = np.where(present[..., None], evidence.key_squares(layer), np.inf)
        tokens = squares.reshape(len(present), -1)
        ordered = np.sort(np.pad(tokens, ((0, 0), (0, 1)), constant_values=np.inf), axis=1)
        count = np.rint(self.low * squares.shape[-1] * present.sum(axis=1)).astype(int)
        threshold = np.take_along_axis(ordered, np.maximum(count - 1, 0)[:, None], axis=1)
        short = (squares <= threshold[..., None]).sum(axis=-1)
        return short + 1 / (2 + squares.min(axis=-1))

    def protected(self, evidence: Evidence) -> NDArray[np.bool_]:
        layers = np.arange(len(evidence.widths))[:, None, None]
        return np.broadcast_to(layers < self.skip, evidence.widths.shape[:3])
