"""Key norms (2406.11430): keys of low norm draw attention, so those of high norm go.

The paper sorts each head's tokens by the norm of their keys, keeps the lowest and leaves the first
two layers alone, where norm and attention hardly correlate. Here a page's mean square norm is
estimated from the smallest and largest value of each channel. Rotation leaves a norm as it is but
spreads a channel, and evenly spread channels read up to a third too small, in all pages alike.
Option `skip`: first layers whose pages go last.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq.policies import Evidence
from kvq.policies.estimates import mean_square
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class L2Norm(Scorer):
    """Evicts the pages with the longest keys."""

    needs: ClassVar[frozenset[str]] = frozenset({"constants"})

    skip: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip < 0:
            raise UsageError(
                f"--kv-policy l2norm: skip={self.skip} is not possible: 0 layers or more"
            )

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.constants is not None
        keys = evidence.constants
        return -mean_square(keys.key_min, keys.key_range).sum(axis=-1)

    def spared(self, evidence: Evidence) -> NDArray[np.bool_]:
        layers = np.arange(len(evidence.widths))[:, None, None]
        return np.broadcast_to(layers < self.skip, evidence.widths.shape[:3])
