"""The gate: drafts as far as what is measured here says that it pays, and else not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.costs import PassCosts
from kvq_specdraft.lookup import Lookup
from kvq_specdraft.recycle import Recycle

# A draft must promise this much more than plain decoding: estimates are noisy.
MARGIN = 1.02
# Of the passes' time each drafter may lose this share, and at first what so many passes take; its
# gains are put by for no more than so many passes, so that good times do not pay for long bad ones.
_SHARE = 0.0015
_FIRST_PASSES = 0.25
_MOST_PASSES = 4.0
# A draft that promises a gain may cost this much of a pass more than is in the account.
_OVERDRAFT = 0.5
# Rounds that nobody is asked for at most.
_MOST_PAUSE = 32
# Classes of a drafter's own chances, and the least weight of the newest guess of a class.
_CLASSES = 16
_NEWEST = 0.02
# How often what `lookup` thinks as likely came true in books, manuals, code, dialogues and sums,
# none of which the bench has.
_LOOKUP = (*(own / 24 for own in range(10)), 0.34, 0.5, 0.58, 0.6, 0.75, 0.87)
_AS_THOUGHT = tuple((own + 0.5) / _CLASSES for own in range(_CLASSES))


@dataclass(kw_only=True, eq=False)
class Auto:
    """Asks the drafters that cost no pass and takes the one, and as much of it, as pays best.

    A draft of n tokens brings 1 + a(1) + .. + a(n) tokens, where a(i) is the chance that token i
    and all before it are right, and costs a pass of so many more rows: n is where the tokens of a
    second are most (arXiv 2211.17192, section 3.3, with measured chances and costs). Both are
    learned from this session: seconds from its passes; chances from how often guesses came true
    that their drafter thought as likely, whether they went through the model or not, which needs no
    training where SpecDec++ (2405.19715) and DISCO (2405.04304) train a classifier. In a pass
    shared with other sequences all tokens of the pass count, so that a draft must also pay for the
    time it takes from the others.

    What is lost is bounded: every drafter has an account that is given a small share of the passes'
    time and what its drafts save, and that pays for asking it and for its guesses that are wrong,
    though not for reading a prompt, a millisecond for 8000 tokens. Whose account is empty is not
    asked.
    """

    branches = True

    def __post_init__(self) -> None:
        self._candidates = (Candidate(Lookup(), _LOOKUP), Candidate(Recycle(), _AS_THOUGHT))
        self._costs = PassCosts()
        self._rows = 1  # of a pass without a draft of ours
        self._chosen: Candidate | None = None
        self._pause = 0

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        for candidate in self._candidates:
            candidate.follow(kept, new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`. A draft that fills the room ends the search."""
        best, self._chosen, rate = NO_DRAFT, None, 0.0
        for candidate in self._candidates:
            if candidate.account_s <= 0:
                continue
            candidate.tell()
            since = perf_counter()
            draft = candidate.propose(room)
            if draft.ids:
                rate = rate or MARGIN * self._rows / self._costs.seconds(self._rows)
                length, rate = self._worth(candidate, draft, rate)
                if length:
                    best, self._chosen = draft.first(length), candidate
            candidate.account_s -= perf_counter() - since
            if len(best.ids) == room:
                break
        self._pause = 0 if best.ids else self._rounds_until_one_is_asked()
        return best if best.ids else Draft(pause=self._pause)

    def _rounds_until_one_is_asked(self) -> int:
        earned = _SHARE * self._costs.seconds(self._rows)
        owed = -max(candidate.account_s for candidate in self._candidates)
        return min(_MOST_PAUSE, int(owed / earned)) if owed > 0 and earned else 0

    def observe(self, outcome: Round) -> None:
        """See `Drafter`."""
        costs, drafted = self._costs, len(outcome.draft.ids)
        costs.record(outcome.rows, outcome.seconds)
        self._rows = outcome.rows - drafted
        plain = costs.seconds(self._rows)
        if self._chosen is not None:
            # A token of a pass shared with others is worth its share of the pass.
            saved = len(outcome.path) * plain / self._rows + plain - costs.seconds(outcome.rows)
            self._chosen.account_s += saved
        passed_s = outcome.seconds + self._pause * plain
        for candidate in self._candidates:
            if candidate.asked:
                since = perf_counter()
                candidate.observe(outcome)
                candidate.account_s -= perf_counter() - since
            candidate.earn(passed_s, plain)

    def _worth(self, candidate: "Candidate", draft: Draft, best: float) -> tuple[int, float]:
        """How many tokens of `draft` make more of a second than `best`, and how many that is."""
        costs, rows, length = self._costs, self._rows, 0
        limit = (1 + _OVERDRAFT) * costs.seconds(rows, doubted=False) + candidate.account_s
        tokens = float(rows)
        for count, likely in enumerate(candidate.likely(draft), 1):
            more = rows + count
            if more > costs.most_rows or costs.seconds(more, doubted=False) > limit:
                break
            tokens += likely
            rate = tokens / costs.seconds(more)
            if rate > best:
                best, length = rate, count
        return length, best


class Candidate:
    """A drafter, and how often guesses that it thought as likely came true, used or not.

    `account_s` are the seconds that it may still lose.
    """

    def __init__(self, drafter: Drafter, chances: Sequence[float]) -> None:
        self.account_s = 0.0
        self.asked = False
        self._drafter = drafter
        self._chances = list(chances)
        self._draft = NO_DRAFT
        self._new = True
        # How much of the text the drafter was told, and the tokens after that.
        self._told, self._untold = 0, list[int]()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`. The drafter is told when it is asked."""
        if kept < self._told:
            self._told, self._untold = kept, list(new)
        else:
            self._untold[kept - self._told :] = new

    def tell(self) -> None:
        """Tells the drafter what has become of the text."""
        self._drafter.follow(self._told, self._untold)
        self._told, self._untold = self._told + len(self._untold), []

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        self.asked = True
        self._draft = self._drafter.propose(room)
        return self._draft

    def earn(self, pass_s: float, plain_s: float) -> None:
        """A pass took so long, and takes `plain_s` without a draft."""
        if self._new:
            self._new, self.account_s = False, _FIRST_PASSES * plain_s
        self.account_s = min(self.account_s + _SHARE * pass_s, _MOST_PASSES * plain_s)

    def likely(self, draft: Draft) -> list[float]:
        """Of each token of `draft`, the chance that it and all before it are right."""
        likely = list[float]()
        for own, thought in enumerate(draft.chances):
            parent = own - 1 if draft.parents is None else draft.parents[own]
            before = likely[parent] if parent >= 0 else 1.0
            likely.append(before * self._chances[_class_of(thought)])
        return likely

    def observe(self, outcome: Round) -> None:
        """Compares the last proposal with what came, whether it was used or not."""
        draft, place = self._draft, -1
        self._draft, self.asked = NO_DRAFT, False
        for token in outcome.tokens:
            right = None
            for guess in draft.places_after(place):
                came = draft.ids[guess] == token
                right = guess if came else right
                own = _class_of(draft.chances[guess])
                self._chances[own] += _NEWEST * (came - self._chances[own])
            if right is None:
                break
            place = right
        self._drafter.observe(outcome)


def _class_of(thought: float) -> int:
    return min(_CLASSES - 1, int(thought * _CLASSES))
