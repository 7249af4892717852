"""The gate: drafts as far as what is measured here says that it pays, and else not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.costs import PassCosts
from kvq_specdraft.lookup import Lookup
from kvq_specdraft.recycle import Recycle
from kvq_specdraft.suffix import Suffix

# A draft must promise this much more than plain decoding: estimates are noisy.
MARGIN = 1.02
# Of the passes' time this share may be lost, and at first what so many passes take; gains are put
# by for no more than so many passes, so that good times do not pay for long bad ones.
_SHARE = 0.008
_FIRST_PASSES = 2.0
_MOST_PASSES = 4.0
# Classes of a drafter's own chances, and the least weight of the newest guess of a class.
_CLASSES = 16
_NEWEST = 0.02


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

    What is lost is bounded: an account is given a small share of the passes' time and what drafts
    save, and pays for asking and for guesses that are wrong. While it is empty nobody is asked.
    """

    branches = True

    def __post_init__(self) -> None:
        self._candidates = (Candidate(Lookup()), Candidate(Suffix()), Candidate(Recycle()))
        self._costs = PassCosts()
        self._account: Account | None = None
        self._rows = 1  # of a pass without a draft of ours
        # What the candidates were told of the text, and the tokens after it.
        self._told, self._untold = 0, list[int]()
        self._asked, self._spent_s = False, 0.0

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`. The candidates are told when they are asked."""
        if kept < self._told:
            self._told, self._untold = kept, list(new)
        else:
            self._untold[kept - self._told :] = new

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        if self._account is None or self._account.seconds <= 0:
            return NO_DRAFT
        since = perf_counter()
        self._asked = True
        kept, new = self._told, self._untold
        self._told, self._untold = kept + len(new), []
        for candidate in self._candidates:
            candidate.follow(kept, new)
        best = self._best(room)
        self._spent_s = perf_counter() - since
        return best

    def observe(self, outcome: Round) -> None:
        """See `Drafter`."""
        since = perf_counter()
        self._costs.record(outcome.rows, outcome.seconds)
        self._rows = outcome.rows - outcome.drafted
        plain = self._costs.seconds(self._rows)
        if self._account is None:
            self._account = Account(plain)
        # A token of a pass shared with others is worth its share of the pass.
        saved = outcome.accepted * plain / self._rows
        if outcome.drafted:
            saved += plain - self._costs.seconds(outcome.rows)
        if self._asked:
            for candidate in self._candidates:
                candidate.observe(outcome)
        spent = self._spent_s + perf_counter() - since
        self._asked, self._spent_s = False, 0.0
        self._account.enter(outcome.seconds, plain, saved - spent)

    def _best(self, room: int) -> Draft:
        """What promises the most tokens a second; a draft that fills the room ends the search."""
        seconds = self._affordable(room)
        room = len(seconds) - 1
        best, best_rate = NO_DRAFT, MARGIN * self._rows / seconds[0]
        for candidate in self._candidates if room else ():
            draft, tokens, length = candidate.propose(room), float(self._rows), 0
            for count, likely in enumerate(candidate.likely(draft), 1):
                tokens += likely
                if tokens > best_rate * seconds[count]:
                    best_rate, length = tokens / seconds[count], count
            if length:
                best = draft.first(length)
            if length == room:
                break
        return best

    def _affordable(self, room: int) -> list[float]:
        """Seconds of a pass of 0, 1, .. `room` more rows, as far as they may be lost."""
        costs, rows = self._costs, self._rows
        assert self._account is not None
        limit = costs.seconds(rows, doubted=False) + self._account.seconds
        seconds = [costs.seconds(rows)]
        for more in range(rows + 1, min(rows + room, costs.most_rows) + 1):
            if costs.seconds(more, doubted=False) > limit:
                break
            seconds.append(costs.seconds(more))
        return seconds


class Account:
    """Seconds that drafting may lose, and has not."""

    def __init__(self, pass_s: float) -> None:
        self.seconds = _FIRST_PASSES * pass_s

    def enter(self, spent_s: float, plain_s: float, saved_s: float) -> None:
        """A pass took `spent_s`, without a draft `plain_s`; drafting has saved so much."""
        self.seconds += _SHARE * spent_s + saved_s
        self.seconds = min(self.seconds, _MOST_PASSES * plain_s)


class Candidate:
    """A drafter, and how often guesses that it thought as likely came true, used or not."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._chances = [(own + 0.5) / _CLASSES for own in range(_CLASSES)]
        self._draft = NO_DRAFT

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        self._drafter.follow(kept, new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`."""
        self._draft = self._drafter.propose(room)
        return self._draft

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
        self._draft = NO_DRAFT
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
