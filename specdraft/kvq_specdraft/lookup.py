"""Prompt look-up: what followed the last time the text ended like this."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.repeats import chance, check_lengths


@dataclass(kw_only=True, eq=False)
class Lookup(Drafter):
    """Proposes the continuation of the longest earlier run that the text ends with.

    Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding, no
    paper; the n-gram speculation of LLMA, arXiv 2304.04487, is alike). Departures: it looks for the
    longest run from `min_ngram` to `max_ngram` tokens and, of equally long ones, takes the newest
    instead of the first; the answer's own tokens are looked up as well; a run that reaches the end
    of the text repeats. No index is kept: a string search skips most of the text, and takes 2
    microseconds for 8000 tokens; 4 bytes a token.
    """

    max_ngram: int = 16
    min_ngram: int = 2

    def __post_init__(self) -> None:
        check_lengths(self.name, max_ngram=self.max_ngram, min_ngram=self.min_ngram)
        # A token is a character here: no vocabulary has more than the million there are.
        self._text = ""

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        self._text = self._text[:kept] + "".join(map(chr, new))

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        end, length = self._longest()
        if not length:
            return NO_DRAFT
        again = self._text[end : end + room]
        again = (again * (room // len(again) + 1))[:room]
        return Draft(
            ids=tuple(map(ord, again)),
            chances=tuple(chance(length + place) for place in range(room)),
        )

    def observe(self, outcome: Round) -> None:
        """Nothing to learn: the tokens are told by `follow`."""

    def _longest(self) -> tuple[int, int]:
        """Where the longest run like the text's end has ended before, and how long it is."""
        text, end, length = self._text, 0, 0
        longest = min(self.max_ngram, len(text) - 1)
        wanted = self.min_ngram
        while wanted <= longest:
            place = text.rfind(text[-wanted:], 0, len(text) - 1)
            if place < 0:
                break
            end, length = place + wanted, wanted
            while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
                length += 1
            wanted = length + 1
        return end, length
