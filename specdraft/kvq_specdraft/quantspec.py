"""Self-speculation on half the bits: the same weights and pages, read by their upper nibbles."""

from dataclasses import dataclass
from typing import Any

from kvq_runtime.backends import Backend, Mode
from kvq_runtime.config import SessionConfig
from kvq_specdraft.guessing import SelfGuessing


@dataclass(kw_only=True, eq=False)
class QuantSpec(SelfGuessing):
    """Guesses with the upper nibbles of 8-bit weights and of 8-bit keys and values.

    QuantSpec (arXiv 2502.10424). Departures: there the draft has 4-bit weights of its own beside
    those of 16 bits, here 8-bit weights are two planes of nibbles and the draft reads one of them,
    so that it costs no memory; all matrices are read so, the head's too, embeddings excepted. A
    page of 4 or 2 bits has one plane only, which both read. Drafts are as long as pays, there of
    one length per data set. Draft rows are overwritten by those of the check, as there. `head` n:
    guesses are among the first n tokens of the vocabulary, the most frequent ones of one made by
    merges, so that less of the head is read (after FR-Spec, arXiv 2502.14856); 0: all.
    """

    head: int = 0

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """See `ComputingDrafter`."""
        self._mode = Mode(view="hi", head_tokens=self.head)
        backend.check_mode(self._mode)
