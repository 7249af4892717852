"""The policy `uniform`: one pair of widths for the whole text."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from kvq.config import PAGE_WIDTHS, parse_kv
from kvq.errors import UsageError
from kvq.named import require
from kvq.policies import Evidence, Relief
from kvq.policies.ladder import EVICTED, descend_by_age


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Lowers all pages together, the oldest first inside a step, then evicts the oldest.

    This is what quantised caches usually do, made to fit a budget. It follows no paper.

    Args:
        order: The pairs of key and value bits that pages step through, such as 8:4/4:4/4:2/2:2, the
            default. No pair may raise a width.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    order: str = "8:4/4:4/4:2/2:2"

    def __post_init__(self) -> None:
        try:
            rungs = self._rungs()
        except UsageError:
            rungs = []
        falls = all(
            k <= above_k and v <= above_v and (k, v) != (above_k, above_v)
            for (above_k, above_v), (k, v) in pairwise(rungs)
        )
        known = bool(rungs) and falls and all(k in PAGE_WIDTHS for k, _ in rungs)
        pairs = "write K:V pairs of 8, 6, 4 and 2 bits that only fall, such as 8:4/4:4/4:2/2:2"
        require(known, "policy", f"uniform: order={self.order}", pairs)

    @property
    def fewest_bits(self) -> tuple[int, int]:
        return self._rungs()[-1]

    def _rungs(self) -> list[tuple[int, int]]:
        return [parse_kv(pair) for pair in self.order.split("/")]

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        return descend_by_age(evidence, [*self._rungs(), EVICTED], bytes_short, columns_short)
