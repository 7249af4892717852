"""The drafter `quantspec`: the model guesses with the upper halves of its own 8-bit numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import BackendError
from kvq_runtime.answer.drafter import Draft, DraftContext
from kvq_runtime.backends import Backend, Mode
from kvq_runtime.config import SessionConfig
from kvq_runtime.sequence.passes import PassResult, Work
from kvq_specdraft.guessing import Guessing

# The first tokens of a vocabulary made by merges, which are the frequent ones.
FREQUENT = 32768
# The newest tokens of a text in which rare ones are counted.
_NEWEST = 512
# The share of these that may be rare where the head is narrowed to the frequent ones.
_MOST_RARE = 0.02


@dataclass(kw_only=True, eq=False)
class QuantSpec(Guessing):
    """Guesses with the upper nibbles of 8-bit weights and of 8-bit keys and values.

    QuantSpec (arXiv 2502.10424) has 4-bit draft weights beside those of 16 bits. Here 8-bit weights
    are two planes of nibbles and the draft reads one of them, so it needs no memory. All matrices
    are read so, the head too, but not the embeddings. A page of 4 or 2 bits has one plane, which
    both read. A draft is as long as pays; in the paper it has one length per data set. As there,
    the check overwrites the rows of the draft.

    Args:
        most: The most guesses of a draft. Default 7.
        least: See `Guessing`; default 0.
        head: Guesses are among the first so many tokens of the vocabulary, which are the most
            frequent in one made by merges, so that less of the head is read (after FR-Spec, arXiv
            2502.14856). 0, the default: among the first 32768 if nearly all of the text's newest
            tokens are and the vocabulary has at least twice as many, else among all.
    """

    head: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text: list[int] = []

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        self._mode = Mode(view="hi", head_tokens=self.head)
        backend.check_mode(self._mode)
        self._may_narrow = not self.head and can_narrow(backend)

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self._text[kept:] = new

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        if self._may_narrow:
            self._mode = Mode(view="hi", head_tokens=frequent_tokens(self._text))
        return (yield from super().drafting(draft_context))

    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, PassResult]:
        return (yield from draft_context.branch.extend(list(new), mode=self._mode))


def frequent_tokens(text: Sequence[int]) -> int:
    """Returns `FREQUENT` if nearly all of the newest tokens of `text` are below it, else 0: all."""
    newest = text[-_NEWEST:]
    rare = sum(token >= FREQUENT for token in newest)
    return FREQUENT if rare <= _MOST_RARE * len(newest) else 0


def can_narrow(backend: Backend[Any]) -> bool:
    """Returns whether a head of the frequent tokens is possible and much smaller."""
    if backend.model.vocab_size < 2 * FREQUENT:
        return False
    try:
        backend.check_mode(Mode(view="hi", head_tokens=FREQUENT))
    except BackendError:  # an older export, whose head is one piece
        return False
    return True
