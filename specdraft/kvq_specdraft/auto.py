"""The gate: drafts as far as what is measured here says that it pays, and else not at all."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.costs import PassCosts
from kvq_specdraft.lookup import Lookup
from kvq_specdraft.suffix import Suffix

# A draft must promise this much more than plain decoding: estimates are noisy.
MARGIN = 1.05
# Chance that a token of a draft is right, until some have been seen.
_PRIOR = 0.4
# Classes of confidence that are told apart, and the least weight of the newest draft of a class.
_CLASSES = 4
_NEWEST = 0.03


@dataclass(kw_only=True, eq=False)
class Auto:
    """Asks `lookup` and `suffix` and takes the one, and as much of it, as pays best; often none.

    A draft of n tokens brings 1 + a(1) + .. + a(n) tokens, where a(i) is how often its first i were
    all right, and costs a pass of so many more rows (arXiv 2211.17192, section 3.3, with measured
    chances in place of one). Both are learned from this session: seconds from its passes, chances
    from what each drafter would have proposed at every place, whether it went through the model or
    not, so that one that is not used costs no pass and is still known. Chances are kept by the
    drafter's confidence, which needs no training where SpecDec++ (2405.19715) and DISCO
    (2405.04304) train a classifier. In a pass shared with other sequences all tokens of the pass
    count, so that a draft must also pay for the time it takes from the others.
    """

    def __post_init__(self) -> None:
        self._candidates = (Candidate(Lookup()), Candidate(Suffix()))
        self._costs = PassCosts()
        self._rows = 1  # of a pass without a draft of ours

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        for candidate in self._candidates:
            candidate.follow(kept, new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        best, best_rate = NO_DRAFT, MARGIN * self._rate(self._rows, 0)
        for candidate in self._candidates:
            draft = candidate.propose(room)
            tokens = float(self._rows)
            for count, chance in enumerate(candidate.chances(draft), 1):
                tokens += chance
                rate = self._rate(tokens, count)
                if rate > best_rate:
                    best, best_rate = draft.first(count), rate
        return best

    def observe(self, outcome: Round) -> None:
        """See `Drafter`."""
        self._rows = outcome.rows - outcome.drafted
        self._costs.record(outcome.rows, outcome.seconds)
        for candidate in self._candidates:
            candidate.observe(outcome)

    def _rate(self, tokens: float, drafted: int) -> float:
        """Tokens a second of a pass with so many more rows; 0 until a pass was measured."""
        seconds = self._costs.seconds(self._rows + drafted)
        return tokens / seconds if seconds else 0.0


class Candidate:
    """A drafter of chains, and how often its proposals were right so far, used or not."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._chances: list[list[float]] = [[] for _ in range(_CLASSES)]
        self._scored = [0] * _CLASSES
        self._length = 0
        # Proposals that the text has agreed with so far, and with how many of their tokens.
        self._open: list[tuple[Draft, int]] = []

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`. Proposals are not scored by a text that was not written but given."""
        self._drafter.follow(kept, new)
        if kept + len(new) != self._length:
            self._open.clear()
        self._length = kept + len(new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        draft = self._drafter.propose(room)
        if draft.ids:
            self._open.append((draft, 0))
        return draft

    def chances(self, draft: Draft) -> list[float]:
        """Of each token of `draft`, the chance that it and all before it are right."""
        chances = self._chances[_class_of(draft)]
        while len(chances) < len(draft.ids):
            chances.append(_PRIOR * (chances[-1] if chances else 1.0))
        return chances[: len(draft.ids)]

    def observe(self, outcome: Round) -> None:
        """See `Drafter`."""
        self._length += len(outcome.tokens)
        self._drafter.observe(outcome)
        for token in outcome.tokens:
            self._open = [one for one in self._open if self._goes_on(one[0], one[1], token)]
            self._open = [(draft, right + 1) for draft, right in self._open]

    def _goes_on(self, draft: Draft, right: int, token: int) -> bool:
        """Whether `token` agrees with `draft` and leaves something of it; else it is scored."""
        agrees = draft.ids[right] == token
        if agrees and right + 1 < len(draft.ids):
            return True
        self._score(draft, right + agrees)
        return False

    def _score(self, draft: Draft, right: int) -> None:
        """The first `right` tokens of `draft` were right, and no more."""
        own, chances = _class_of(draft), self.chances(draft)
        self._scored[own] += 1
        newest = max(_NEWEST, 1 / (self._scored[own] + 2))
        for place, chance in enumerate(chances):
            chances[place] = chance + newest * ((place < right) - chance)
        self._chances[own][: len(chances)] = chances


def _class_of(draft: Draft) -> int:
    return min(_CLASSES - 1, int(draft.confidence * _CLASSES))
