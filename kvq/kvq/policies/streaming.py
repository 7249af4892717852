"""StreamingLLM (2309.17453): the sinks and a window of the newest tokens, nothing else.

The paper keeps a few first tokens and a sliding window, and counts positions inside the cache. Here
the cache itself keeps the sinks and the tail; the window is what the budget holds at the widths
pages close at, and it slides by whole pages. Distances are those inside the cache: the window's
tokens keep their positions, and the sinks move up to them.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvq.policies import Evidence, Relief
from kvq.policies.ladder import EVICTED, descend_by_age


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Evicts the oldest pages of all layers and heads; never demotes."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        relief = descend_by_age(evidence, [EVICTED], bytes_short, columns_short)
        return replace(relief, close_gap=True)
