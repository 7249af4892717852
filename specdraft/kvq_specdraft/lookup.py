"""The drafter `lookup`: what followed the last time that the text ended like this."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.repeats import chance, check_lengths


@dataclass(kw_only=True, eq=False)
class Lookup(Drafter):
    """Proposes the continuation of the longest earlier run that the text ends with.

    This is prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding,
    no paper); the n-gram speculation of LLMA (arXiv 2304.04487) is similar. Here the longest run
    counts, and among equally long ones the newest instead of the first. The answer's own tokens are
    searched too, and a run that reaches the end of the text repeats. There is no index: a string
    search skips most of the text. It stores 4 bytes a token.

    Args:
        max_ngram: The longest run in tokens. Default 16.
        min_ngram: The shortest run in tokens. Default 2.
    """

    max_ngram: int = 16
    min_ngram: int = 2

    def __post_init__(self) -> None:
        check_lengths(self.name, max_ngram=self.max_ngram, min_ngram=self.min_ngram)
        # Each token is a character, of which there are a million: more than any vocabulary has.
        self._text = ""

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self._text = self._text[:kept] + "".join(map(chr, new))

    def propose(self, room: int) -> Draft:
        end, length = self._longest()
        if not length:
            return NO_DRAFT
        copied = self._text[end : end + room]
        copied = (copied * (room // len(copied) + 1))[:room]
        return Draft(
            ids=tuple(map(ord, copied)),
            chances=tuple(chance(length + place) for place in range(room)),
        )

    def observe(self, outcome: Round) -> None:
        """Learns nothing, since `follow` tells the tokens."""

    def _longest(self) -> tuple[int, int]:
        """Returns where the longest earlier run like the text's end ended, and its length."""
        text, end, length = self._text, 0, 0
        longest = min(self.max_ngram, len(text) - 1)
        sought = self.min_ngram
        while sought <= longest:
            place = text.rfind(text[-sought:], 0, len(text) - 1)
            if place < 0:
                break
            end, length = place + sought, sought
            while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
                length += 1
            sought = length + 1
        return end, length
