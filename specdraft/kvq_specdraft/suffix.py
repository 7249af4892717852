"""Suffix decoding: what followed most often when the text ended like this."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import UsageError
from kvq_runtime.drafter import NO_DRAFT, Draft, Round
from kvq_specdraft.repeats import Repeats, check_lengths


@dataclass(kw_only=True, eq=False)
class Suffix:
    """Proposes, token by token, what most earlier places like the text's end went on with.

    SuffixDecoding (arXiv 2411.04975). For every length of match it walks down the suffix tree by
    the counts of the children, while the path's probability is at least `least`, and proposes the
    walk with the largest sum of probabilities. Departures: the tree is not kept but counted, at the
    moment of asking, over the newest `most` places that match (where the text has no more, the
    counts are the tree's), so memory is 8 bytes a token and going back is exact; a child seen n
    times of N after a match of m tokens has probability n / (N + 1 / m), as few short matches tell
    little; no tree over other answers, which would keep users' texts; chains only, as every row
    costs time on a CPU.
    """

    max_ngram: int = 16
    min_ngram: int = 2
    most: int = 16
    least: float = 0.1

    def __post_init__(self) -> None:
        check_lengths("suffix", max_ngram=self.max_ngram, min_ngram=self.min_ngram, most=self.most)
        if not 0 < self.least <= 1:
            raise UsageError(
                f"--draft suffix: least={self.least} is not possible: above 0, at most 1"
            )
        self._repeats = Repeats(self.min_ngram)

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        self._repeats.follow(kept, new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        found = list(self._repeats.find(self.max_ngram, self.most))
        best, best_score = NO_DRAFT, 0.0
        for length in sorted({length for _, length in found}, reverse=True):
            ends = [end for end, own in found if own >= length]
            draft, score = self._walk(ends, length, room)
            if score > best_score:
                best, best_score = draft, score
        return best

    def observe(self, outcome: Round) -> None:
        """Nothing to learn: the tokens are told by `follow`."""

    def _walk(self, ends: list[int], length: int, room: int) -> tuple[Draft, float]:
        """The likeliest path after `ends`, where `length` tokens match, and its score."""
        ids, likely, score, confidence = list[int](), 1.0, 0.0, 0.0
        after = self._repeats.after
        for place in range(room):
            seen = [after(end, place) for end in ends]
            token = max(seen, key=seen.count)  # of several the newest place's
            count = seen.count(token)
            likely *= count / (len(ends) + 1 / length)
            if likely < self.least:
                break
            confidence = confidence or likely
            score += likely
            ids.append(token)
            if count < len(ends):
                ends = [end for end, own in zip(ends, seen, strict=True) if own == token]
        return Draft(ids=tuple(ids), confidence=confidence), score
