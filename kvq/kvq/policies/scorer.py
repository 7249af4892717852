"""What the eviction scorers share: a page's importance is all that differs between them.

Every (layer, KV head) gives up its least important page before any gives up its second least, so
all keep the same number, as keeping the top k of each head does. `demote=1` spends the same order
on bits first: all pages fall to 6 bits, to 4, to 2, and only then is the least important evicted.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq.policies import Evidence, Relief
from kvq.policies.ladder import EVICTED, LADDER, descend, rank_from_top
from kvq.policies.spend import held_pages


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """A policy that ranks pages by one number; subclasses say which."""

    needs: ClassVar[frozenset[str]] = frozenset()

    demote: int = 0

    def __post_init__(self) -> None:
        if self.demote not in (0, 1):
            raise UsageError(
                about="policy",
                value=f"demote={self.demote}",
                possible="0 evicts at once, 1 lowers widths first",
            )

    @abstractmethod
    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        """[L, Hk, C]; only the order within a (layer, KV head) counts, the least goes first."""

    def spared(self, evidence: Evidence) -> NDArray[np.bool_]:
        """[L, Hk, C]: pages that are touched only when no other page is left."""
        return np.zeros(evidence.widths.shape[:3], np.bool_)

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        """Actions int32 [n, 5] as `kvq.policies.Policy` asks for."""
        layers, heads, columns = held_pages(evidence)[:, :3].T
        importance = self.importance(evidence)[layers, heads, columns]
        spared = self.spared(evidence)[layers, heads, columns]
        ranks = rank_from_top(2 * (layers * evidence.widths.shape[1] + heads) + spared, importance)
        rungs = LADDER if self.demote else (EVICTED,)
        stages = np.arange(len(rungs)) + len(rungs) * spared[:, None]
        keys = stages * (len(ranks) + 1) - ranks[:, None]
        return descend(evidence, rungs, keys, bytes_short, columns_short)
