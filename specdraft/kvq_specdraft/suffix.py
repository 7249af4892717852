"""The drafter `suffix`: the most frequent continuation of earlier places like the text's end."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.finished import FinishedAnswers, of_this_process
from kvq_specdraft.repeats import Repeats, chance, check_lengths
from kvq_specdraft.trees import Child, grow_tree

# The text in which an earlier match lies, and where it ends there.
_Place = tuple[Repeats | FinishedAnswers, int]


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
        store: Tokens of finished answers of this process that are searched too, the paper's second
            tree. 0, the default: none, since the store keeps what was written, and the speed of one
            text would tell something of another.
        tree: 1: proposes the best tree over all matching places (`trees.grow_tree`). 0, the
            default: proposes the best walk.
    """

    max_ngram: int = 16
    min_ngram: int = 2
    most: int = 16
    least: float = 0.1
    store: int = 0
    tree: int = 0

    def __post_init__(self) -> None:
        check_lengths("suffix", max_ngram=self.max_ngram, min_ngram=self.min_ngram, most=self.most)
        if not 0 < self.least <= 1:
            raise UsageError(
                about="draft", value=f"suffix: least={self.least}", possible="above 0, at most 1"
            )
        if self.store < 0:
            raise UsageError(
                about="draft", value=f"suffix: store={self.store}", possible="0 or more"
            )
        self.branches = self.tree > 0
        self._repeats = Repeats(self.min_ngram)
        self._finished = of_this_process(self.store, self.min_ngram) if self.store else None
        # The end of the answer that is being written, and its tokens.
        self._end, self._answer = 0, list[int]()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self._repeats.follow(kept, new)
        if self._finished is not None and len(self._repeats) != self._end:
            self._finished.add(self._answer)
            self._answer = []
        self._end = len(self._repeats)

    def propose(self, room: int) -> Draft:
        matches: list[tuple[_Place, int]] = [
            ((self._repeats, end), length)
            for end, length in self._repeats.find(self.max_ngram, self.most)
        ]
        if self._finished is not None:
            tail = self._repeats.tail(self.max_ngram)
            ends = self._finished.find(tail, self.max_ngram, self.most)
            matches += [((self._finished, end), length) for end, length in ends]
        if self.tree:
            return grow_tree(room, (matches, 0), _children) if matches else NO_DRAFT
        best, best_score = NO_DRAFT, 0.0
        for length in sorted({length for _, length in matches}, reverse=True):
            places = [place for place, match_length in matches if match_length >= length]
            draft, score = self._walk(places, length, room)
            if score > best_score:
                best, best_score = draft, score
        return best

    def observe(self, outcome: Round) -> None:
        """Notes the tokens as written by the model; `follow` tells them too."""
        if self._finished is not None:
            self._answer += outcome.tokens
            self._end += len(outcome.tokens)

    def _walk(self, places: list[_Place], length: int, room: int) -> tuple[Draft, float]:
        """Returns the likeliest path after `places`, where `length` tokens match, and its score."""
        ids, chances, path_chance, score = list[int](), list[float](), 1.0, 0.0
        for step in range(room):
            tokens = [text.after(end, step) for text, end in places]
            token = max(tokens, key=tokens.count)  # among equals that of the newest place
            token_chance = chance(length + step, len(places), tokens.count(token))
            path_chance *= token_chance
            if path_chance < self.least or token < 0:
                break
            score += path_chance
            ids.append(token)
            chances.append(token_chance)
            places = [place for place, other in zip(places, tokens, strict=True) if other == token]
        return Draft(ids=tuple(ids), chances=tuple(chances)), score


# The matches that agree with a path so far, each with its length, and the steps of the path.
_Path = tuple[list[tuple[_Place, int]], int]


def _children(path: _Path) -> list[Child[_Path]]:
    """Returns the next tokens of a path, likeliest first; a match counts by its squared length."""
    matches, step = path
    by_token: dict[int, list[tuple[_Place, int]]] = {}
    for match in matches:
        (text, end), _ = match
        by_token.setdefault(text.after(end, step), []).append(match)
    total = sum(length * length for _, length in matches)
    children: list[Child[_Path]] = []
    for token, agreeing in by_token.items():
        if token >= 0:
            share = sum(length * length for _, length in agreeing) / total
            token_chance = share * chance(max(length for _, length in agreeing) + step)
            children.append((token, token_chance, (agreeing, step + 1)))
    return sorted(children, key=lambda child: -child[1])
