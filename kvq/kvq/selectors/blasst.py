"""The selector `blasst`: values of pages without weight are not read."""

from dataclasses import dataclass

from kvq.named import require
from kvq.selectors import ReadRule


@dataclass(frozen=True, kw_only=True)
class Blasst:
    """Skips the values of pages whose weights are far below the largest.

    BLASST (arXiv 2512.12087) multiplies a block of queries with all keys, and skips exponentials
    and values of the blocks whose best logit is a threshold below the best so far. Here every query
    head skips pages by itself, relative to the best of its floating-point keys, the text's first
    and newest. So the result depends on no order, and the rows of a draft read what they would read
    alone. The paper finds a threshold for each model and length; here one serves all.

    Args:
        octaves: How many powers of two below the largest weight a page is skipped; above 0. Default
            12.

    Raises:
        UsageError: `octaves` is not above 0.
    """

    octaves: float = 12.0

    def __post_init__(self) -> None:
        octaves = f"blasst: octaves={self.octaves:g}"
        require(self.octaves > 0, "kv_read", octaves, "above 0; all reads every page")

    @property
    def rule(self) -> ReadRule:
        return ReadRule(octaves=self.octaves)
