"""Quest (2406.10774): a page's largest possible logit says whether it is read.

The paper keeps the smallest and largest key of every page, channel by channel, takes for each
channel whichever gives the larger product with the query, and reads the pages with the largest
sums. Here the page's stored mid and scale stand for these two, no byte is added, and the heads that
share keys share the choice: the best of their scores counts, each against its head's best page.
The paper leaves the first two layers dense; here all layers read their share.
"""

from dataclasses import dataclass

from kvq.selectors import ReadRule, Shared


@dataclass(frozen=True, kw_only=True)
class Quest(Shared):
    """Reads the pages with the largest bounds."""

    @property
    def rule(self) -> ReadRule:
        return ReadRule(share=self.share)
