"""The drafter `suffix`: the most frequent continuation of earlier places like the text's end."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.repeats import Repeats, chance, check_lengths


@dataclass(kw_only=True, eq=False)
class Suffix(Drafter):
    """Proposes, token by token, what most earlier places like the text's end went on with.

    SuffixDecoding (arXiv 2411.04975) walks down a suffix tree for every length of match, by the
    counts of the children, while the path's probability is at least `least`. It proposes the walk
    with the largest sum of probabilities. Here no tree is stored. Counts are made when asked for,
    over the newest `most` places of each text that match; where there are no more, they are those
    of the tree. So memory is 8 bytes a token, and going back is exact. A child seen n times of N
    after a match of m tokens has the probability n / (N + 1 / m), as few short matches tell little.

    Args:
        max_ngram: The longest match in tokens. Default 16.
        min_ngram: The shortest match in tokens. Default 2.
        most: The most matching places of a text that are counted. Default 16.
        least: The least probability of a path, above 0 and up to 1. Default 0.1.
    """

    max_ngram: int = 16
    min_ngram: int = 2
    most: int = 16
    least: float = 0.1

    def __post_init__(self) -> None:
        check_lengths("suffix", max_ngram=self.max_ngram, min_ngram=self.min_ngram, most=self.most)
        if not 0 < self.least <= 1:
            raise UsageError(
                about="draft", value=f"suffix: least={self.least}", possible="above 0, at most 1"
            )
        self._repeats = Repeats(self.min_ngram)

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self._repeats.follow(kept, new)

    def propose(self, room: int) -> Draft:
        matches = list(self._repeats.find(self.max_ngram, self.most))
        best, best_score = NO_DRAFT, 0.0
        for length in sorted({length for _, length in matches}, reverse=True):
            ends = [end for end, match_length in matches if match_length >= length]
            draft, score = self._walk(ends, length, room)
            if score > best_score:
                best, best_score = draft, score
        return best

    def observe(self, outcome: Round) -> None:
        """Learns nothing, since `follow` tells the tokens."""

    def _walk(self, ends: list[int], length: int, room: int) -> tuple[Draft, float]:
        """Returns the likeliest path after `ends`, where `length` tokens match, and its score."""
        ids, chances, path_chance, score = list[int](), list[float](), 1.0, 0.0
        for step in range(room):
            tokens = [self._repeats.after(end, step) for end in ends]
            token = max(tokens, key=tokens.count)  # among equals that of the newest place
            token_chance = chance(length + step, len(ends), tokens.count(token))
            path_chance *= token_chance
            if path_chance < self.least:
                break
            score += path_chance
            ids.append(token)
            chances.append(token_chance)
            ends = [end for end, other in zip(ends, tokens, strict=True) if other == token]
        return Draft(ids=tuple(ids), chances=tuple(chances)), score
