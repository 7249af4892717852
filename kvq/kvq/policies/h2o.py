"""The policy `h2o`: heavy hitters and recent tokens stay."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.named import require
from kvq.policies import Evidence
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class H2O(Scorer):
    """Evicts the pages with the least accumulated attention, the newest pages last.

    H2O (arXiv 2306.14048) gives half of each head's cache to the newest tokens, and half to those
    with the most attention accumulated over all queries so far. Here the unit is the page, and a
    sample of the queries since the text began estimates the sum (`total_mass`). As in the paper,
    old queries count fully, and early pages, which more queries could see, have an advantage.

    Args:
        demote: See `Scorer`; default 0.
        recent: Share, 0 to 1, of the pages that count as recent and go last; the tail, which has no
            pages yet, is kept in any case. Default 0.5.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "samples"})

    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.recent <= 1, "policy", f"recent={self.recent}", "a share from 0 to 1")

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        assert evidence.attention is not None
        return evidence.attention.total_mass

    def protected(self, evidence: Evidence) -> NDArray[np.bool_]:
        present = evidence.widths[..., 0] > 0
        age = np.cumsum(present[..., ::-1], axis=-1)[..., ::-1]  # 1 for the newest page
        return age <= np.rint(self.recent * present.sum(axis=-1, keepdims=True))
