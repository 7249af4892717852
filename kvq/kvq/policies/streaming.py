"""The policy `streaming`: the sinks and a window of the newest tokens."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvq.policies import Evidence, Relief
from kvq.policies.ladder import EVICTED, descend_by_age


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Evicts the oldest pages of all layers and heads, and never lowers widths.

    StreamingLLM (arXiv 2309.17453) keeps a few first tokens and a sliding window, and counts
    positions inside the cache. Here the cache itself keeps the sinks and the tail. The window is
    what the budget holds at the widths that pages close at, and it slides by whole pages. Distances
    are those inside the cache: the tokens of the window keep their positions, and the sinks move up
    to them.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    fewest_bits: ClassVar[None] = None

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        relief = descend_by_age(evidence, [EVICTED], bytes_short, columns_short)
        return replace(relief, close_gap=True)
