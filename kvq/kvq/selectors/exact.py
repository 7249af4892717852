"""All pages, or all but those that no float32 sum would notice.

`exact` is ours: a page whose largest possible logit stands 32 binary orders below what a query has
already seen is not read; its weight would vanish in rounding.
"""

from dataclasses import dataclass

from kvq.selectors import READ_ALL, ReadRule


@dataclass(frozen=True, kw_only=True)
class All:
    """Reads every page."""

    @property
    def rule(self) -> ReadRule:
        return READ_ALL


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Leaves out what cannot matter."""

    @property
    def rule(self) -> ReadRule:
        return ReadRule(exact=True)
