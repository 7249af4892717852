"""The selector `quest`: the pages with the largest possible logits are read."""

from dataclasses import dataclass

from kvq.named import require
from kvq.selectors import ReadRule


@dataclass(frozen=True, kw_only=True)
class Quest:
    """Reads the pages whose keys may have the largest products with the query.

    Quest (arXiv 2406.10774) keeps the smallest and largest key of every page, channel by channel.
    For each channel it takes the one with the larger product, and it reads the pages with the
    largest sums. Here these two follow from the page's stored middle and scale, so no byte is
    added. The heads that share keys read the same pages: the best of their scores counts, each
    relative to the best page of its head. The paper reads all pages in the first two layers; here
    all layers read their share.

    Args:
        share: Share of the pages that a step reads, above 0 and up to 1. Default 0.25.

    Raises:
        UsageError: `share` is not possible.
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        shares = "give above 0 and up to 1, or 0% to 100%"
        require(0 < self.share <= 1, "kv_read", f"share={self.share:g}", shares)

    @property
    def rule(self) -> ReadRule:
        return ReadRule(share=self.share)
