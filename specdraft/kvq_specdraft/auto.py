"""The gate: drafts as far as what is measured here says that it pays, and else not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from kvq_runtime.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.costs import PassCosts
from kvq_specdraft.lookup import Lookup
from kvq_specdraft.recycle import Recycle
from kvq_specdraft.rewrite import Rewrite

# A draft must promise this much more than plain decoding: estimates are noisy.
MARGIN = 1.02
# Of the passes' time this share may go into looking and, for each drafter, this one into wrong
# guesses; at first what so many passes take. What is gained is put by for no more than so many
# passes, so that good times do not pay for long bad ones.
_LOOK_SHARE, _GUESS_SHARE = 0.003, 0.003
_FIRST_LOOKS, _FIRST_GUESSES = 0.1, 0.3
_MOST_PASSES = 4.0
# Of a rewritten text no more is made out than is right with this chance in the drafter's own eyes.
_LEAST = 0.02
# A draft is nearly certain when its last token is; guesses that add nothing before the search ends.
_SURE = 0.9
_MOST_FALLS = 4
# What other programs disturbed counts as so many usual ones; weight of the newest of these.
_MOST_JUMP = 4.0
_NEWEST_TIME = 0.2
# A pass reads its weights once for so many guesses and the token before them.
_MOST_GUESSES = 15
# Rounds without a look at most; a patient drafter misses up to 2 to the power of so many looks.
_MOST_PAUSE = 64
_MOST_MISSES = 6
# What asking a drafter that makes a tree takes at first, and the weight of the newest such look.
_TREE_S = 2e-4
_NEWEST_LOOK = 0.2
_PAUSES = tuple(Draft(pause=rounds) for rounds in range(_MOST_PAUSE + 1))
# Classes of a drafter's own chances, how many guesses what is thought of a class at first counts
# for, and the least weight of its newest guess.
_CLASSES = 16
_PRIOR_WEIGHT = 8
_NEWEST = 0.02
# How often what `lookup` thinks as likely came true in books, manuals, code, dialogues and sums,
# none of which the bench has.
_LOOKUP = (*(own / 24 for own in range(10)), 0.34, 0.5, 0.58, 0.6, 0.75, 0.87)
_AS_THOUGHT = tuple((own + 0.5) / _CLASSES for own in range(_CLASSES))


@dataclass(kw_only=True, eq=False)
class Auto(Drafter):
    """Asks the drafters that cost no pass and takes the one, and as much of it, as pays best.

    A draft of n tokens brings 1 + a(1) + .. + a(n) tokens, where a(i) is the chance that token i
    and all before it are right, and costs a pass of so many more rows: n is where the tokens of a
    second are most (arXiv 2211.17192, section 3.3, with measured chances and costs). Both are
    learned from this session: seconds from its passes; chances from how often guesses came true
    that their drafter thought as likely, whether they went through the model or not, which needs no
    training where SpecDec++ (2405.19715) and DISCO (2405.04304) train a classifier. In a pass
    shared with other sequences all tokens of the pass count, so that a draft must also pay for the
    time it takes from the others.

    What is lost is bounded: two kinds of accounts are given a small share of the passes' time and
    what drafts save. One pays for looking, though not for reading a prompt, a millisecond for 8000
    tokens: where nothing is found a look is the rarer the shorter a pass is. Each drafter has one
    that pays for its wrong guesses. Looking for repeats costs least and comes first: a drafter is
    not asked, nor told how the text goes on, where an earlier one is nearly certain or, as `lookup`
    after `rewrite`, would find nothing either; and those that cost more are left out of twice as
    many looks each time that they were of no use.
    """

    branches = True

    def __post_init__(self) -> None:
        self._rewrite = Candidate(Rewrite(least=_LEAST), _AS_THOUGHT)
        self._lookup = Candidate(Lookup(), _LOOKUP)
        recycle = Candidate(Recycle(), _AS_THOUGHT, takes_s=_TREE_S)
        self._candidates = (self._rewrite, self._lookup, recycle)
        # Both guess from the same repeats, and pay from one account.
        self._lookup.guesses = self._rewrite.guesses
        self._costs = PassCosts()
        self._rows = 1  # of a pass without a draft of ours
        self._plain_s = self._passed_s = 0.0  # of such a pass, of all passes so far
        self._looks = Account(_FIRST_LOOKS, _LOOK_SHARE)
        self._followed, self._asked, self._noted = Usual(), Usual(), Usual()
        self._chosen: Candidate | None = None

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        since = perf_counter()
        for candidate in self._candidates:
            candidate.follow(kept, new)
        self._rewrite.tell()
        if kept:
            self._looks.pay(self._followed.of(perf_counter() - since))

    def propose(self, room: int) -> Draft:
        """See `Drafter`. A draft that is nearly certain as far as it pays ends the search."""
        best, self._chosen, plain_s = NO_DRAFT, None, self._plain_s
        if not plain_s:  # the first round tells
            return NO_DRAFT
        room = min(room, _MOST_GUESSES)
        since, rate = perf_counter(), MARGIN * self._rows / plain_s
        left_s = self._looks.left_s(self._passed_s, plain_s)
        repeats = False
        for candidate in self._candidates:
            if candidate is self._lookup and not repeats:
                continue  # it would find nothing either
            draft = candidate.propose(room, left_s)
            if draft.ids:
                repeats = True
                length, rate, likely = self._worth(candidate, draft, rate)
                if length:
                    best, self._chosen = draft.first(length), candidate
                    if likely > _SURE:
                        break
        took_s = self._asked.of(perf_counter() - since)
        self._looks.pay(took_s)
        if best.ids or left_s > took_s:
            return best
        pause = min(_MOST_PAUSE, int((took_s - left_s) / (_LOOK_SHARE * plain_s)))
        self._passed_s += pause * plain_s
        return _PAUSES[pause]

    def observe(self, outcome: Round) -> None:
        """See `Drafter`."""
        since, costs, rows, saved_s = perf_counter(), self._costs, outcome.rows, 0.0
        costs.record(rows, outcome.seconds)
        self._passed_s += outcome.seconds
        self._rows = rows - len(outcome.draft.ids)
        self._plain_s = plain_s = costs.seconds(self._rows)
        if self._chosen is not None:
            # A token of a pass shared with others is worth its share of the pass.
            saved_s = outcome.accepted * plain_s / self._rows + plain_s - costs.seconds(rows)
        for candidate in self._candidates:
            if candidate.waits:
                candidate.observe(outcome, saved_s if candidate is self._chosen else 0.0)
        self._looks.pay(self._noted.of(perf_counter() - since) - max(0.0, saved_s))

    def _worth(self, candidate: "Candidate", draft: Draft, best: float) -> tuple[int, float, float]:
        """How many tokens of `draft` make more of a second than `best`, and how many that is.

        And how likely the last of these tokens is.
        """
        costs, rows, length, chance = self._costs, self._rows, 0, 0.0
        limit = costs.seconds(rows, doubted=False)
        limit += candidate.guesses.left_s(self._passed_s, self._plain_s)
        tokens = float(rows)
        for count, likely in enumerate(candidate.likely(draft), 1):
            more = rows + count
            if more > costs.most_rows or costs.seconds(more, doubted=False) > limit:
                break
            tokens += likely
            rate = tokens / costs.seconds(more)
            if rate > best:
                best, length, chance = rate, count, likely
            elif count > length + _MOST_FALLS:
                break
        return length, best, chance


class Usual:
    """What something takes that is done again and again, each time about as long."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    def of(self, seconds: float) -> float:
        """What to count for one that took so long: not more than a few usual ones."""
        usual_s = self._usual_s or seconds
        counted_s = min(seconds, _MOST_JUMP * usual_s)
        self._usual_s = usual_s + _NEWEST_TIME * (counted_s - usual_s)
        return counted_s


class Account:
    """Seconds that may be lost: at first those of `first` passes, then a share of the passes'."""

    def __init__(self, first: float, share: float) -> None:
        self._left_s = 0.0
        self._first = first
        self._share = share
        self._paid_until_s = 0.0

    def left_s(self, passed_s: float, plain_s: float) -> float:
        """What may still be lost when so much has passed and a pass takes `plain_s`."""
        self._left_s += self._share * (passed_s - self._paid_until_s) + self._first * plain_s
        self._paid_until_s, self._first = passed_s, 0.0
        self._left_s = min(self._left_s, _MOST_PASSES * plain_s)
        return self._left_s

    def pay(self, seconds: float) -> None:
        """So much was lost; a gain is less than nothing."""
        self._left_s -= seconds


class Candidate:
    """A drafter, and how often guesses that it thought as likely came true, used or not.

    One that `takes_s` seconds to ask, learned from when it is, is asked where so much may be spent,
    and left out of twice as many looks each time that none of its guesses was used. One of 0, which
    learns nothing from rounds without a guess of its own, is asked at every look.
    """

    def __init__(self, drafter: Drafter, chances: Sequence[float], takes_s: float = 0.0) -> None:
        self.drafter = drafter
        self.guesses = Account(_FIRST_GUESSES, _GUESS_SHARE)
        self.waits = False  # to be told what became of its guesses
        self._takes_s = takes_s
        self._rest, self._misses = 0, 0
        self._chances = list(chances)
        self._seen = [_PRIOR_WEIGHT] * _CLASSES
        self._draft = NO_DRAFT
        self._asking_s = 0.0
        # How the text has changed since the drafter was told: so much of it stayed, this is new.
        self._kept = self._told = 0
        self._new = list[int]()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """Notes for the drafter what the text has become, until it is asked."""
        self._kept = min(self._kept, kept)
        del self._new[kept - self._kept :]
        self._new += new

    def tell(self) -> None:
        """Tells the drafter."""
        if self._new or self._kept < self._told:
            self.drafter.follow(self._kept, self._new)
            self._kept = self._told = self._kept + len(self._new)
            self._new = []

    def propose(self, room: int, left_s: float) -> Draft:
        """See `Drafter`; none where what is left for looking does not allow it."""
        if not self._takes_s:
            self.tell()
            self._draft = self.drafter.propose(room)
            self.waits = bool(self._draft.ids)
            return self._draft
        self.waits = self._rest == 0 and left_s > self._takes_s
        if not self.waits:
            self._rest = max(0, self._rest - 1)
            return NO_DRAFT
        since = perf_counter()
        self.tell()
        self._draft = self.drafter.propose(room)
        self._asking_s = perf_counter() - since
        return self._draft

    def likely(self, draft: Draft) -> list[float]:
        """Of each token of `draft`, the chance that it and all before it are right."""
        likely = list[float]()
        for own, thought in enumerate(draft.chances):
            parent = own - 1 if draft.parents is None else draft.parents[own]
            before = likely[parent] if parent >= 0 else 1.0
            likely.append(before * self._chances[_class_of(thought)])
        return likely

    def observe(self, outcome: Round, saved_s: float) -> None:
        """Compares the last proposal with what came, whether it was used or not."""
        self.waits = False
        self.guesses.pay(-saved_s)
        self._compare(outcome.tokens)
        since = perf_counter()
        self.drafter.observe(outcome)
        if self._takes_s:
            taken_s = self._asking_s + perf_counter() - since
            self._takes_s += _NEWEST_LOOK * (min(taken_s, 2 * self._takes_s) - self._takes_s)
            self._misses = 0 if saved_s > 0 else min(self._misses + 1, _MOST_MISSES)
            self._rest = (1 << self._misses) - 1

    def _compare(self, tokens: Sequence[int]) -> None:
        draft, place = self._draft, -1
        for token in tokens if draft.ids else ():
            right = None
            for guess in draft.places_after(place):
                came = draft.ids[guess] == token
                right = guess if came else right
                own = _class_of(draft.chances[guess])
                self._seen[own] += 1
                weight = max(_NEWEST, 1 / self._seen[own])
                self._chances[own] += weight * (came - self._chances[own])
            if right is None:
                return
            place = right


def _class_of(thought: float) -> int:
    return min(_CLASSES - 1, int(thought * _CLASSES))
