"""ZipCache (2405.14256): salient tokens in high precision, the others in low.

The paper ranks tokens by the attention they received from probe rows, the newest and a random
sample of all, divided by the number of rows that could see them, and stores the top fraction at 4
bits and the rest at 2, keys and values alike. Its probe rows are ours, and `mass` is that saliency,
of a page instead of a token. Its channel-separable value scales are left out: values have a scale
per token, and gain nothing from them (0.2 dB at most either way). Widths only fall, so the
unsalient pages fall to the low width first and the salient ones to the high width; where that is
too much still, the fraction is lowered, and when all pages are low the least salient go. Ranked per
layer, the heads of a layer together. Options: `salient`, the fraction; `high`, `low`, the widths.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvq.config import PAGE_WIDTHS
from kvq.errors import UsageError, argument
from kvq.policies import Evidence, Relief
from kvq.policies.ladder import descend, rank_from_top
from kvq.policies.spend import held_pages


@dataclass(frozen=True, kw_only=True)
class ZipCache:
    """Two widths, and saliency to say which page has which."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "samples"})

    salient: float = 0.6
    high: int = 4
    low: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.salient <= 1:
            raise UsageError(
                about="policy",
                value=f"zipcache: salient={self.salient}",
                possible="a share from 0 to 1",
            )
        if not {self.high, self.low} <= set(PAGE_WIDTHS) or self.high <= self.low:
            raise UsageError(
                f"{argument('policy')} zipcache: high={self.high} and low={self.low} are not "
                "possible: 8, 6, 4 and 2 are, the first above the second"
            )

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        assert evidence.attention is not None
        layers, heads, columns = held_pages(evidence)[:, :3].T
        ranks = rank_from_top(layers, evidence.attention.mass[layers, heads, columns])
        salient = ranks < np.rint(self.salient * np.bincount(layers))[layers]
        first = np.where(salient, self.high, self.low)
        bits = np.stack([first, np.full_like(first, self.low), np.zeros_like(first)], axis=1)
        stages = np.stack([salient, np.full_like(ranks, 2), np.full_like(ranks, 3)], axis=1)
        keys = stages * (len(ranks) + 1) - ranks[:, None]
        rungs = np.stack([bits, bits], axis=2)
        return descend(evidence, rungs, keys, bytes_short, columns_short)
