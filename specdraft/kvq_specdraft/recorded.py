"""The method that measured best on this model, as its bundle records it; else `branches`."""

from dataclasses import dataclass
from functools import cache

from kvq_runtime.alternatives import AlternativesRequest, Line, Writer
from kvq_runtime.backends import C
from kvq_runtime.branch import Branch
from kvq_runtime.passes import Work

# What led on the embedded models and costs least to be wrong about; see the log of `kvq eval`.
UNRECORDED = "branches"


@dataclass(slots=True)
class Recorded:
    """`kvq_runtime.alternatives.Writer` that hands on to another."""

    def writing(self, branch: Branch[C], asked: AlternativesRequest) -> Work[C, list[Line]]:
        """What the recorded method writes."""
        return (yield from _named(asked.recorded or UNRECORDED).writing(branch, asked))


@cache
def _named(name: str) -> Writer:
    from kvq_specdraft import writer_named

    return writer_named(name)
