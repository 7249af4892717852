"""Drafters guess how a text goes on, and the model checks their guesses in one pass.

A drafter is told how its text changes and proposes tokens; it never sees a model. A wrong guess
costs time and changes nothing else.

To add one: write a dataclass that derives from `Drafter` in a file of its own, and add one row to a
table below.
"""

from typing import TYPE_CHECKING

from kvq.errors import argument
from kvq.named import named
from kvq_runtime.answer.drafter import Drafter

if TYPE_CHECKING:
    from kvq_runtime.answer.alternatives import Writer

# What they guess from costs no pass.
FREE_DRAFTERS = {
    "auto": "kvq_specdraft.auto:Auto",
    "lookup": "kvq_specdraft.lookup:Lookup",
    "recycle": "kvq_specdraft.recycle:Recycle",
    "rewrite": "kvq_specdraft.rewrite:Rewrite",
    "suffix": "kvq_specdraft.suffix:Suffix",
}

# Each guess is a pass of the model on fewer bits, of a smaller one, or of a draft head.
COMPUTING_DRAFTERS = {
    "model": "kvq_specdraft.model:Model",
    "mtp": "kvq_specdraft.mtp:Mtp",
    "quantspec": "kvq_specdraft.quantspec:QuantSpec",
}

DRAFTERS = FREE_DRAFTERS | COMPUTING_DRAFTERS

# Who writes several alternatives side by side.
WRITERS = {
    "branches": "kvq_specdraft.branches:Branches",
    "superposed": "kvq_specdraft.superposed:Superposed",
}


def drafter_named(text: str) -> Drafter:
    """Returns the drafter that `NAME` or `NAME:option=value,...` names. Raises `UsageError`.

    For `FREE+NAME` the free drafter comes first, and where it has no draft the other one, which
    guesses with passes; the options are those of the other one.
    """
    name, colon, options = text.partition(":")
    free, plus, computing = name.partition("+")
    if not plus:
        return named(argument("draft"), text, DRAFTERS)
    from kvq_specdraft.relay import Relay

    second = named(f"{argument('draft')} {free}+", computing + colon + options, COMPUTING_DRAFTERS)
    return Relay(named(argument("draft"), free, FREE_DRAFTERS), second)


def writer_named(text: str) -> "Writer":
    """Returns the writer that `NAME` or `NAME:option=value,...` names. Raises `UsageError`."""
    return named(argument("method"), text, WRITERS)
