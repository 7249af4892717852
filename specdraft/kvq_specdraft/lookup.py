"""Prompt look-up: what followed the last time the text ended like this."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq_runtime.drafter import NO_DRAFT, Draft, Round
from kvq_specdraft.repeats import Repeats, chance, check_lengths


@dataclass(kw_only=True, eq=False)
class Lookup:
    """Proposes the continuation of the longest earlier run that the text ends with.

    Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding, no
    paper; the n-gram speculation of LLMA, arXiv 2304.04487, is alike). Departures: it looks for the
    longest run from `max_ngram` tokens down to `min_ngram` and, of equally long ones, takes the
    newest instead of the first; the answer's own tokens are looked up as well; a run that reaches
    the end of the text repeats. `most` places are compared at most, the newest.
    """

    max_ngram: int = 16
    min_ngram: int = 2
    most: int = 16

    def __post_init__(self) -> None:
        check_lengths("lookup", max_ngram=self.max_ngram, min_ngram=self.min_ngram, most=self.most)
        self._repeats = Repeats(self.min_ngram)

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        self._repeats.follow(kept, new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        end = longest = 0
        for place, length in self._repeats.find(self.max_ngram, self.most):
            if length > longest:
                end, longest = place, length
                if length == self.max_ngram:
                    break
        if not longest:
            return NO_DRAFT
        return Draft(
            ids=tuple(self._repeats.after(end, place) for place in range(room)),
            chances=tuple(chance(longest + place) for place in range(room)),
        )

    def observe(self, outcome: Round) -> None:
        """Nothing to learn: the tokens are told by `follow`."""
