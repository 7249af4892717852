"""BLASST (2512.12087): the values of pages that weigh next to nothing are not read.

The paper multiplies a block of queries with all keys, and leaves out exponentials and values of the
blocks of keys whose best logit stands a threshold below the best that was met so far. Here every
query head leaves out pages by itself, and against the best of its floating-point keys, the text's
first and newest: the outcome depends on no order, and a draft's rows read what they would read
alone. The paper finds a threshold for each model and length; here one serves all.
"""

from dataclasses import dataclass

from kvq.errors import UsageError
from kvq.selectors import ReadRule


@dataclass(frozen=True, kw_only=True)
class Blasst:
    """Leaves out what stands so many `octaves`, binary orders, below. Raises `UsageError`."""

    octaves: float = 12.0

    def __post_init__(self) -> None:
        if not self.octaves > 0:
            raise UsageError(
                about="kv_read",
                value=f"blasst: octaves={self.octaves:g}",
                possible="above 0; all reads every page",
            )

    @property
    def rule(self) -> ReadRule:
        return ReadRule(octaves=self.octaves)
