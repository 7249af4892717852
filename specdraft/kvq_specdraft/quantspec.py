"""Self-speculation on half the bits: the same weights and pages, read by their upper nibbles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import BackendError
from kvq_runtime.backends import Backend, Mode
from kvq_runtime.config import SessionConfig
from kvq_runtime.drafter import Draft, DraftContext
from kvq_runtime.passes import Work
from kvq_specdraft.guessing import SelfGuessing

# Tokens that are frequent; of a text's newest so many, the share that may be others.
FREQUENT = 32768
_NEWEST = 512
_MOST_RARE = 0.02


@dataclass(kw_only=True, eq=False)
class QuantSpec(SelfGuessing):
    """Guesses with the upper nibbles of 8-bit weights and of 8-bit keys and values.

    QuantSpec (arXiv 2502.10424). Departures: there the draft has 4-bit weights of its own beside
    those of 16 bits, here 8-bit weights are two planes of nibbles and the draft reads one of them,
    so that it costs no memory; all matrices are read so, the head's too, embeddings excepted. A
    page of 4 or 2 bits has one plane only, which both read. Drafts are as long as pays, there of
    one length per data set. Draft rows are overwritten by those of the check, as there. `head` n:
    guesses are among the first n tokens of the vocabulary, the most frequent ones of one made by
    merges, so that less of the head is read (after FR-Spec, arXiv 2502.14856). 0: among the first
    32768 where nearly all of the text's newest tokens are and the vocabulary is twice as large at
    least, else among all. The head is what the upper plane alone does not make cheaper: the whole
    model's own head reads that plane first, and of the lower one what may be largest.
    """

    head: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text: list[int] = []

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """See `Drafter`."""
        self._mode = Mode(view="hi", head_tokens=self.head)
        backend.check_mode(self._mode)
        self._may_narrow = not self.head and can_narrow(backend)

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        self._text[kept:] = new

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """See `Drafter`."""
        if self._may_narrow:
            self._mode = Mode(view="hi", head_tokens=frequent_tokens(self._text))
        return (yield from super().drafting(draft_context))


def frequent_tokens(text: Sequence[int]) -> int:
    """The first so many tokens, where nearly all of the newest of `text` are; 0: all."""
    newest = text[-_NEWEST:]
    rare = sum(token >= FREQUENT for token in newest)
    return FREQUENT if rare <= _MOST_RARE * len(newest) else 0


def can_narrow(backend: Backend[Any]) -> bool:
    """Whether a head of the frequent tokens is possible, and much less than the whole."""
    if backend.model.vocab_size < 2 * FREQUENT:
        return False
    try:
        backend.check_mode(Mode(view="hi", head_tokens=FREQUENT))
    except BackendError:  # of an older export, whose head is one piece
        return False
    return True
