"""Demotes the oldest pages 8 -> 6 -> 4 -> 2, all layers and heads alike, then evicts the oldest."""

from dataclasses import dataclass
from typing import ClassVar

from kvq.policies import Evidence, Relief
from kvq.policies.ladder import LADDER, descend_by_age


@dataclass(frozen=True, kw_only=True)
class Oldest:
    """The plainest policy: age alone decides."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        return descend_by_age(evidence, LADDER, bytes_short, columns_short)
