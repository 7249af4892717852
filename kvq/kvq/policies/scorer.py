"""The base of policies that rank pages by one number, their importance."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.named import require
from kvq.policies import FEWEST_BITS, Evidence, Relief
from kvq.policies.ladder import EVICTED, LADDER, descend, rank_from_top
from kvq.policies.spend import present_pages


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Evicts the least important pages of every head; a subclass defines the importance.

    Every (layer, KV head) gives up its least important page before any gives up its second least
    important one. So all heads keep the same number of pages, as in the papers, which keep the top
    k tokens of each head.

    Args:
        demote: 1 lowers widths first: all pages fall to 6, 4 and 2 bits, and only then the least
            important one is evicted. 0, the default, evicts at once.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    demote: int = 0

    def __post_init__(self) -> None:
        known = "0 evicts at once, 1 lowers widths first"
        require(self.demote in (0, 1), "policy", f"demote={self.demote}", known)

    @property
    def fewest_bits(self) -> tuple[int, int] | None:
        return FEWEST_BITS if self.demote else None

    @abstractmethod
    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        """Returns [L, Hk, C]; the page with the lowest value of a (layer, KV head) goes first."""

    def protected(self, evidence: Evidence) -> NDArray[np.bool_]:
        """Returns bool [L, Hk, C]: pages that go only when no other page is left."""
        return np.zeros(evidence.widths.shape[:3], np.bool_)

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        layers, heads, columns = present_pages(evidence)[:, :3].T
        importance = self.importance(evidence)[layers, heads, columns]
        protected = self.protected(evidence)[layers, heads, columns]
        ranks = rank_from_top(
            2 * (layers * evidence.widths.shape[1] + heads) + protected, importance
        )
        rungs = LADDER if self.demote else (EVICTED,)
        stages = np.arange(len(rungs)) + len(rungs) * protected[:, None]
        keys = stages * (len(ranks) + 1) - ranks[:, None]
        return descend(evidence, rungs, keys, bytes_short, columns_short)
