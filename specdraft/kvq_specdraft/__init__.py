"""Drafters guess how a text goes on, for the runtime to check in one pass; one file, one row each.

A drafter is told how its text changes and proposes tokens; it never sees a model. What it gets
wrong costs time and changes nothing.
"""

from kvq.errors import argument
from kvq.named import named
from kvq_runtime.alternatives import Writer
from kvq_runtime.drafter import Drafter

# What they guess from costs no pass.
FREE_DRAFTERS = {
    "auto": "kvq_specdraft.auto:Auto",
    "lookup": "kvq_specdraft.lookup:Lookup",
    "recycle": "kvq_specdraft.recycle:Recycle",
    "rewrite": "kvq_specdraft.rewrite:Rewrite",
    "suffix": "kvq_specdraft.suffix:Suffix",
}

# Each guess is a pass of the model on fewer bits or layers, of a smaller one, or of a draft head.
COMPUTING_DRAFTERS = {
    "early": "kvq_specdraft.early:Early",
    "model": "kvq_specdraft.model:Model",
    "mtp": "kvq_specdraft.mtp:Mtp",
    "quantspec": "kvq_specdraft.quantspec:QuantSpec",
    "skip": "kvq_specdraft.skip:Skip",
}

DRAFTERS = FREE_DRAFTERS | COMPUTING_DRAFTERS

# Who writes several alternatives side by side.
WRITERS = {
    "auto": "kvq_specdraft.recorded:Recorded",
    "branches": "kvq_specdraft.branches:Branches",
    "superposed": "kvq_specdraft.superposed:Superposed",
    "spliced": "kvq_specdraft.superposed:Spliced",
}


def drafter_named(text: str) -> Drafter:
    """The drafter `NAME` or `NAME:option=value,...` of the table. Raises `UsageError`.

    `FREE+NAME`: the free drafter first, and where it has nothing the other, which guesses with
    passes and whose options these are.
    """
    name, colon, options = text.partition(":")
    free, plus, computing = name.partition("+")
    if not plus:
        return named(argument("draft"), text, DRAFTERS)
    from kvq_specdraft.relay import Relay

    second = named(f"{argument('draft')} {free}+", computing + colon + options, COMPUTING_DRAFTERS)
    return Relay(named(argument("draft"), free, FREE_DRAFTERS), second)


def writer_named(text: str) -> Writer:
    """The writer `NAME` or `NAME:option=value,...` of the table. Raises `UsageError`."""
    return named(argument("method"), text, WRITERS)
