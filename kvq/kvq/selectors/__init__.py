"""Selectors decide which pages a pass reads; the cache keeps every page.

There are two ways. A step, a pass of few rows, reads a share of the pages of each KV head: those
that may matter most to its queries, judged by the pages' constants alone. Or a pass reads all keys,
and the values only of pages that have some weight. Sinks and tail are always read. A selector is a
rule of numbers (`ReadRule`), which native code follows for every page.

To add one: write a frozen dataclass with a `rule` in a file of its own, and add one row to
`SELECTORS`.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from kvq.errors import UsageError, argument
from kvq.named import named

SELECTORS = {
    "all": "kvq.selectors.everything:All",
    "blasst": "kvq.selectors.blasst:Blasst",
    "quest": "kvq.selectors.quest:Quest",
}
# The selector that a bare share such as 25% means.
DEFAULT_SELECTOR = "quest"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRule:
    """Holds the numbers that say what a pass reads.

    `kvq.reference.stored` computes the scores (`page_bounds`) and the weights (`weighing`).

    Args:
        share: Of the pages of a KV head that a token can see, a step reads this share, those with
            the best scores, at least one. A page's score is the largest product that any of its
            keys can have with the query. With several query heads the largest score counts, each
            relative to the best page of its head. Default 1, all pages.
        octaves: Above 0, for prompts too: the values of a page are not read if all its keys are so
            many powers of two below the best floating-point key. Default 0, off.
    """

    share: float = 1.0
    octaves: float = 0.0


READ_ALL = ReadRule()


class Selector(Protocol):
    """Decides what a pass reads, by a rule that follows from its options."""

    @property
    def rule(self) -> ReadRule:
        """Returns the rule for native code."""
        ...


def rule_named(text: str) -> ReadRule:
    """Returns the rule that `25%`, `NAME` or `NAME:option=value,...` names. Raises `UsageError`."""
    share = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", text.strip())
    if share:
        text = f"{DEFAULT_SELECTOR}:share={float(share[1]) / 100}"
    elif text.partition(":")[0] not in SELECTORS:
        raise UsageError(
            about="kv_read",
            value=f"{text!r}",
            possible="give a share of the pages such as 25%, or one of "
            f"{', '.join(SELECTORS)}, such as {DEFAULT_SELECTOR}:share=0.25",
        )
    selector: Selector = named(argument("kv_read"), text, SELECTORS)
    return selector.rule
