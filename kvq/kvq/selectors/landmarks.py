"""ShadowKV's landmarks (2410.21465): a page is ranked by one key that stands for it.

The paper keeps the mean key of every chunk on the device and fetches the chunks whose means fit the
query best. Here that key is the middle of the page's span in each channel, which the constants
tell; its low-rank keys and its outlier chunks are left out.
"""

from dataclasses import dataclass

from kvq.selectors import ReadRule, Shared


@dataclass(frozen=True, kw_only=True)
class Landmarks(Shared):
    """Reads the pages whose middle fits best."""

    @property
    def rule(self) -> ReadRule:
        return ReadRule(share=self.share, spread=0.0)
