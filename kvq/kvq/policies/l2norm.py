"""Key norms (2406.11430): keys of low norm draw attention, so those of high norm go.

The paper sorts each head's tokens by the norm of their keys, keeps the lowest and leaves the first
two layers alone, where norm and attention hardly correlate. Here pages go, so a page is worth as
many of its tokens as are among the `low` share of the head's held tokens with the lowest norms; of
pages with equally many the one whose shortest key is longer goes first. Norms are of the keys as
they are read. Option `skip`: first layers whose pages go last.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq.policies import Evidence
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class L2Norm(Scorer):
    """Evicts the pages with the fewest short keys."""

    needs: ClassVar[frozenset[str]] = frozenset()

    skip: int = 2
    low: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip < 0:
            raise UsageError(
                about="policy", value=f"l2norm: skip={self.skip}", possible="0 layers or more"
            )
        if not 0 < self.low < 1:
            raise UsageError(
                about="policy", value=f"l2norm: low={self.low}", possible="a share between 0 and 1"
            )

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        return evidence.of_layers(lambda layer: self._layer(evidence, layer))

    def _layer(self, evidence: Evidence, layer: int) -> NDArray[np.floating]:
        """[Hk, C]: short keys of each page, and a fraction that says how short the shortest is."""
        held = evidence.widths[layer, :, :, 0] > 0
        squares = np.where(held[..., None], evidence.key_squares(layer), np.inf)
        every = squares.reshape(len(held), -1)
        ordered = np.sort(np.pad(every, ((0, 0), (0, 1)), constant_values=np.inf), axis=1)
        count = np.rint(self.low * squares.shape[-1] * held.sum(axis=1)).astype(int)
        threshold = np.take_along_axis(ordered, np.maximum(count - 1, 0)[:, None], axis=1)
        short = (squares <= threshold[..., None]).sum(axis=-1)
        return short + 1 / (2 + squares.min(axis=-1))

    def spared(self, evidence: Evidence) -> NDArray[np.bool_]:
        layers = np.arange(len(evidence.widths))[:, None, None]
        return np.broadcast_to(layers < self.skip, evidence.widths.shape[:3])
