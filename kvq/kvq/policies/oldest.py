"""The policy `oldest`: age alone decides."""

from dataclasses import dataclass
from typing import ClassVar

from kvq.policies import FEWEST_BITS, Evidence, Relief
from kvq.policies.ladder import LADDER, descend_by_age


@dataclass(frozen=True, kw_only=True)
class Oldest:
    """Lowers the oldest pages to 6, 4 and 2 bits in all layers and heads, then evicts the oldest.

    It is the simplest policy, a baseline for the others, and follows no paper.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    fewest_bits: ClassVar[tuple[int, int]] = FEWEST_BITS

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        return descend_by_age(evidence, LADDER, bytes_short, columns_short)
