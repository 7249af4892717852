"""The policy `zipcache`: salient pages have more bits than the others."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvq.config import PAGE_WIDTHS
from kvq.named import require
from kvq.policies import Evidence, Relief
from kvq.policies.ladder import descend, rank_from_top
from kvq.policies.spend import present_pages


@dataclass(frozen=True, kw_only=True)
class ZipCache:
    """Keeps salient pages at one width and the others at a lower one.

    ZipCache (arXiv 2405.14256) ranks tokens by the attention that they received from probe rows
    (the newest, and a random sample of all), divided by the number of rows that could see them. It
    stores the top share at 4 bits and the rest at 2, keys and values alike. Here the same probe
    rows give the saliency of a page (`mass`), and the heads of a layer are ranked together. Widths
    only fall: first the other pages fall to the low width, then the salient ones to the high width.
    Where that is not enough, the share falls, and when all pages are at the low width the least
    salient are evicted. The paper's channel-separable value scales are left out, since values have
    a scale per token here.

    Args:
        salient: Share, 0 to 1, of the pages that are salient. Default 0.6.
        high: Bits of salient pages: 8, 6 or 4. Default 4.
        low: Bits of the other pages, below `high`. Default 2.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "samples"})

    salient: float = 0.6
    high: int = 4
    low: int = 2

    def __post_init__(self) -> None:
        salient = f"zipcache: salient={self.salient}"
        require(0 <= self.salient <= 1, "policy", salient, "a share from 0 to 1")
        falls = {self.high, self.low} <= set(PAGE_WIDTHS) and self.high > self.low
        widths = f"zipcache: high={self.high}, low={self.low}"
        require(falls, "policy", widths, "8, 6, 4 and 2 are, the first above the second")

    @property
    def fewest_bits(self) -> tuple[int, int]:
        return self.low, self.low

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        assert evidence.attention is not None
        layers, heads, columns = present_pages(evidence)[:, :3].T
        ranks = rank_from_top(layers, evidence.attention.mass[layers, heads, columns])
        salient = ranks < np.rint(self.salient * np.bincount(layers))[layers]
        first = np.where(salient, self.high, self.low)
        bits = np.stack([first, np.full_like(first, self.low), np.zeros_like(first)], axis=1)
        stages = np.stack([salient, np.full_like(ranks, 2), np.full_like(ranks, 3)], axis=1)
        keys = stages * (len(ranks) + 1) - ranks[:, None]
        rungs = np.stack([bits, bits], axis=2)
        return descend(evidence, rungs, keys, bytes_short, columns_short)
