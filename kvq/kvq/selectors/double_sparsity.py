"""Double Sparsity (2408.07092): few channels rank, few tokens are read.

The paper finds offline the channels of each head that carry its logits and ranks tokens by these
alone. Here pages are ranked, by their bound, and a query's own `channels` loudest channels do it:
they need no calibration and change with what is asked.
"""

from dataclasses import dataclass

from kvq.errors import UsageError
from kvq.selectors import ReadRule, Shared


@dataclass(frozen=True, kw_only=True)
class DoubleSparsity(Shared):
    """Reads the pages with the largest bounds over the loudest channels."""

    channels: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels < 1:
            raise UsageError(
                about="kv_read",
                value=f"double-sparsity: channels={self.channels}",
                possible="1 or more",
            )

    @property
    def rule(self) -> ReadRule:
        return ReadRule(share=self.share, channels=self.channels)
