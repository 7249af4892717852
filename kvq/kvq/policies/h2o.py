"""H2O (2306.14048): heavy hitters and recent tokens stay; nothing is forgotten.

The paper splits each head's cache in half: the newest tokens, and those with the most attention
accumulated over all queries so far; each new token drops the least of the older ones. Here the unit
is the page, and the sum is estimated by a sample of the queries since the text began
(`total_mass`), who look at what is left: no query counts less for its age, and an early page, which
more queries could see, is favoured as in the paper. Option `recent`: the share of pages that counts
as recent and goes last; the tail is kept besides.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq.policies import Evidence
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """Evicts what was attended to least, the newest pages last."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "samples"})

    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent <= 1:
            raise UsageError(
                about="policy", value=f"recent={self.recent}", possible="a share from 0 to 1"
            )

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.attention is not None
        return evidence.attention.total_mass

    def spared(self, evidence: Evidence) -> NDArray[np.bool_]:
        held = evidence.widths[..., 0] > 0
        age = np.cumsum(held[..., ::-1], axis=-1)[..., ::-1]  # 1 for the newest held page
        return age <= np.rint(self.recent * held.sum(axis=-1, keepdims=True))
