"""Suffix decoding: what followed most often when the text ended like this."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import UsageError
from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.finished import Finished, of_this_process
from kvq_specdraft.repeats import Repeats, chance, check_lengths
from kvq_specdraft.trees import Child, grown

# Where an earlier run ends, and in which text.
_Place = tuple[Repeats | Finished, int]


@dataclass(kw_only=True, eq=False)
class Suffix(Drafter):
    """Proposes, token by token, what most earlier places like the text's end went on with.

    SuffixDecoding (arXiv 2411.04975). For every length of match it walks down the suffix tree by
    the counts of the children, while the path's probability is at least `least`, and proposes the
    walk with the largest sum of probabilities. `store` is how many tokens of finished answers of
    this process are looked at besides the text, the paper's second tree; 0, unless asked for:
    it keeps what was written, and what one text makes faster tells of another. Departures: the
    trees are not kept but counted, at the moment of asking, over the newest `most` places of each
    text that match (where it has no more, the counts are the tree's), so memory is 8 bytes a token
    and going back is exact; a child seen n times of N after a match of m tokens has probability
    n / (N + 1 / m), as few short matches tell little. With `tree=1` the draft is the best tree over
    all these places in place of the best walk (`trees.grown`).
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
        # Of the answer that is being written: where it ends, and its tokens.
        self._end, self._answer = 0, list[int]()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        self._repeats.follow(kept, new)
        if self._finished is not None and len(self._repeats) != self._end:
            self._finished.add(self._answer)
            self._answer = []
        self._end = len(self._repeats)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        found: list[tuple[_Place, int]] = [
            ((self._repeats, end), length)
            for end, length in self._repeats.find(self.max_ngram, self.most)
        ]
        if self._finished is not None:
            tail = self._repeats.tail(self.max_ngram)
            ends = self._finished.find(tail, self.max_ngram, self.most)
            found += [((self._finished, end), length) for end, length in ends]
        if self.tree:
            return grown(room, (found, 0), _children) if found else NO_DRAFT
        best, best_score = NO_DRAFT, 0.0
        for length in sorted({length for _, length in found}, reverse=True):
            places = [place for place, own in found if own >= length]
            draft, score = self._walk(places, length, room)
            if score > best_score:
                best, best_score = draft, score
        return best

    def observe(self, outcome: Round) -> None:
        """The tokens are told by `follow`; here it learns that they were written, not given."""
        if self._finished is not None:
            self._answer += outcome.tokens
            self._end += len(outcome.tokens)

    def _walk(self, places: list[_Place], length: int, room: int) -> tuple[Draft, float]:
        """The likeliest path after `places`, where `length` tokens match, and its score."""
        ids, chances, likely, score = list[int](), list[float](), 1.0, 0.0
        for step in range(room):
            seen = [text.after(end, step) for text, end in places]
            token = max(seen, key=seen.count)  # of several the newest place's
            own = chance(length + step, len(places), seen.count(token))
            likely *= own
            if likely < self.least or token < 0:
                break
            score += likely
            ids.append(token)
            chances.append(own)
            places = [place for place, one in zip(places, seen, strict=True) if one == token]
        return Draft(ids=tuple(ids), chances=tuple(chances)), score


# Places that agree with a path so far, how much each had in common with the text, and the steps.
_Going = tuple[list[tuple[_Place, int]], int]


def _children(going: _Going) -> list[Child[_Going]]:
    """What the places of `going` go on with, likeliest first; each weighs as its match squared."""
    places, step = going
    found: dict[int, list[tuple[_Place, int]]] = {}
    for place in places:
        (text, end), _ = place
        found.setdefault(text.after(end, step), []).append(place)
    total = sum(length * length for _, length in places)
    children: list[Child[_Going]] = []
    for token, own in found.items():
        if token >= 0:
            share = sum(length * length for _, length in own) / total
            likely = share * chance(max(length for _, length in own) + step)
            children.append((token, likely, (own, step + 1)))
    return sorted(children, key=lambda child: -child[1])
