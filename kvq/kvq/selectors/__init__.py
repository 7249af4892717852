"""Selectors decide what a pass reads of the pages; one file, one row each.

The cache keeps every page. Either a step, a pass of few rows, reads a share of them: of each KV
head those that may matter most to its queries, judged by the pages' constants alone. Or all keys
are read, and of the values those of pages that weigh something. Sinks and tail are always read. A
selector is a rule that native code follows for every page, so it is numbers and no code that runs
between them: `ReadRule` says what they mean.

To add one: a frozen dataclass with a `rule` in a file of its own, one row in `SELECTORS`.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from kvq.errors import UsageError, argument
from kvq.named import named

SELECTORS = {
    "all": "kvq.selectors.everything:All",
    "blasst": "kvq.selectors.blasst:Blasst",
    "double-sparsity": "kvq.selectors.double_sparsity:DoubleSparsity",
    "landmarks": "kvq.selectors.landmarks:Landmarks",
    "quest": "kvq.selectors.quest:Quest",
}
# What a bare share is a share of.
USUAL = "quest"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRule:
    """How a pass reads; `kvq.reference` has `page_bounds`, the score, and `weighing`.

    Of the pages of a KV head that a token can see a step reads the best `share`, at least one. A
    page's score is its middle key's product with the query plus `spread` times the most that any of
    its keys can add to it, over the `channels` loudest channels of the query (0: all); of several
    query heads the largest score counts, each against that head's best page. `octaves` above 0 is
    for prompts too: pages whose keys all stand so many binary orders below the best floating-point
    key weigh nothing, and their values need not be read.
    """

    share: float = 1.0
    spread: float = 1.0
    channels: int = 0
    octaves: float = 0.0


READ_ALL = ReadRule()


class Selector(Protocol):
    """What a row of the table names: options, and the rule they come to."""

    @property
    def rule(self) -> ReadRule: ...


def rule_named(text: str) -> ReadRule:
    """The rule of `25%`, `NAME` or `NAME:option=value,...` of the table. Raises `UsageError`."""
    share = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)%", text.strip())
    if share:
        text = f"{USUAL}:share={float(share[1]) / 100}"
    elif text.partition(":")[0] not in SELECTORS:
        raise UsageError(
            about="kv_read",
            value=f"{text!r}",
            possible="give a share of the pages such as 25%, or one of "
            f"{', '.join(SELECTORS)}, such as {USUAL}:share=0.25",
        )
    selector: Selector = named(argument("kv_read"), text, SELECTORS)
    return selector.rule


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What most selectors take: the share of the pages that is read. Raises `UsageError`."""

    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(
                about="kv_read",
                value=f"share={self.share:g}",
                possible="give above 0 and up to 1, or 0% to 100%",
            )
