"""The drafter `auto`: drafts as far as its measurements say that this pays, else not at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft.costs import MARGIN, PassCosts, moving_average
from kvq_specdraft.lookup import Lookup
from kvq_specdraft.recycle import Recycle
from kvq_specdraft.rewrite import Rewrite

# Share of the passes' time that may be lost to looks and, for each drafter, to wrong guesses.
_LOSS_SHARE = 0.003
# Passes' time that may be lost to looks, and to wrong guesses, before any pass was made.
_FIRST_LOOKS, _FIRST_GUESSES = 0.1, 0.3
# A budget for losses holds no more than this many passes' time, so that gains pay for no long loss.
_MOST_PASSES = 4.0
# A rewritten text is drafted while the drafter thinks all of it right with at least this chance.
_LEAST_CHANCE = 0.02
# A best draft whose last token has at least this chance ends the search for others.
_SURE = 0.9
# The best length is final when this many more tokens do not improve it.
_MOST_FALLS = 4
# A look counts at most as this many average ones: other programs disturb some.
_MOST_LOOK_JUMP = 4.0
# The longest draft: a pass reads its weights once for this many guesses and one token before them.
_MOST_GUESSES = 15
# The most rounds without a look, and the most looks in which a drafter is left out.
_MOST_PAUSE = 64
# Assumed seconds to ask a drafter that makes a tree, until this is measured.
_TREE_S = 2e-4
# Guesses are counted in this many classes, by the chance that the drafter gives them.
_CLASSES = 16
# The first chance of a class counts as this many guesses.
_PRIOR_WEIGHT = 8
# The least weight of the newest guess in the chance of its class.
_NEWEST_GUESS = 0.02
# The first chances of `lookup` by class, counted in books, manuals, code, dialogues and sums.
_LOOKUP_CHANCES = (*(place / 24 for place in range(10)), 0.34, 0.5, 0.58, 0.6, 0.75, 0.87)
# The first chances of the other drafters by class: those that they give themselves.
_CLAIMED_CHANCES = tuple((place + 0.5) / _CLASSES for place in range(_CLASSES))
# Made once, since looks have to be fast.
_PAUSES = tuple(Draft(pause=rounds) for rounds in range(_MOST_PAUSE + 1))


@dataclass(kw_only=True, eq=False)
class Auto(Drafter):
    """Proposes the draft of a free drafter, and as much of it, as saves most time.

    It asks `rewrite`, `lookup` and `recycle`, which need no pass of a model. A draft of n tokens
    brings 1 + a(1) + .. + a(n) tokens, where a(i) is the chance that token i and all before it are
    right, and costs a pass with n more rows. n is chosen for the most tokens a second (arXiv
    2211.17192, section 3.3). Costs come from this session's passes. Chances come from how often
    guesses came true to which their drafter gave a similar chance, whether a draft was used or not.
    SpecDec++ (arXiv 2405.19715) and DISCO (arXiv 2405.04304) train a classifier for this. In a pass
    shared with other sequences all tokens of the pass count, so a draft must also pay for the time
    that it takes from the others.

    Losses are bounded. Two kinds of budgets get a small share of the passes' time and what drafts
    save. One pays for looking, but not for reading a prompt, which takes a millisecond for 8000
    tokens: where looks find nothing they are the rarer the shorter a pass is. Each drafter has a
    budget for its wrong guesses; `rewrite` and `lookup`, which guess from the same repeats, share
    one. Looking for repeats costs least and comes first. A drafter is not asked, nor told the text,
    if an earlier one is nearly certain or if it would find nothing either, as `lookup` after
    `rewrite`. A drafter that costs more is left out of twice as many looks each time that its draft
    was of no use.
    """

    branches = True

    def __post_init__(self) -> None:
        self._rewrite = Candidate(Rewrite(least=_LEAST_CHANCE), _CLAIMED_CHANCES)
        self._lookup = Candidate(Lookup(), _LOOKUP_CHANCES)
        recycle = Candidate(Recycle(), _CLAIMED_CHANCES, cost_s=_TREE_S)
        self._candidates = (self._rewrite, self._lookup, recycle)
        self._lookup.guess_budget = self._rewrite.guess_budget
        self._costs = PassCosts()
        self._plain_rows = 1  # rows of a pass without a draft of this drafter
        self._plain_s = 0.0  # seconds of such a pass
        self._total_s = 0.0  # seconds of all passes so far
        self._look_budget = LossBudget(_FIRST_LOOKS)
        self._follow_time, self._propose_time, self._observe_time = (
            RunningTime(), RunningTime(), RunningTime(),
        )  # fmt: skip
        self._chosen: Candidate | None = None

    def follow(self, kept: int, new: Sequence[int]) -> None:
        since = perf_counter()
        for candidate in self._candidates:
            candidate.follow(kept, new)
        self._rewrite.catch_up()
        if kept:
            self._look_budget.spend(self._follow_time.capped(perf_counter() - since))

    def propose(self, room: int) -> Draft:
        """Returns the best draft; one that is nearly certain as far as it pays ends the search."""
        best, self._chosen, plain_s = NO_DRAFT, None, self._plain_s
        if not plain_s:  # the first pass measures what drafts are compared with
            return NO_DRAFT
        room = min(room, _MOST_GUESSES)
        since, rate = perf_counter(), MARGIN * self._plain_rows / plain_s
        budget_s = self._look_budget.remaining_s(self._total_s, plain_s)
        repeats = False
        for candidate in self._candidates:
            if candidate is self._lookup and not repeats:
                continue  # it would find nothing either
            draft = candidate.propose(room, budget_s)
            if draft.ids:
                repeats = True
                length, rate, last_chance = self._best_length(candidate, draft, rate)
                if length:
                    best, self._chosen = draft.first(length), candidate
                    if last_chance > _SURE:
                        break
        took_s = self._propose_time.capped(perf_counter() - since)
        self._look_budget.spend(took_s)
        if best.ids or budget_s > took_s:
            return best
        pause = min(_MOST_PAUSE, int((took_s - budget_s) / (_LOSS_SHARE * plain_s)))
        self._total_s += pause * plain_s
        return _PAUSES[pause]

    def observe(self, outcome: Round) -> None:
        since, costs, rows, saved_s = perf_counter(), self._costs, outcome.rows, 0.0
        costs.record(rows, outcome.seconds)
        self._total_s += outcome.seconds
        self._plain_rows = rows - len(outcome.draft.ids)
        self._plain_s = plain_s = costs.seconds(self._plain_rows)
        if self._chosen is not None:
            # A token of a pass shared with others is worth its share of the pass.
            saved_s = outcome.accepted * plain_s / self._plain_rows + plain_s - costs.seconds(rows)
        for candidate in self._candidates:
            if candidate.awaits_outcome:
                candidate.observe(outcome, saved_s if candidate is self._chosen else 0.0)
        took_s = self._observe_time.capped(perf_counter() - since)
        self._look_budget.spend(took_s - max(0.0, saved_s))

    def _best_length(
        self, candidate: "Candidate", draft: Draft, best: float
    ) -> tuple[int, float, float]:
        """Returns how many tokens of `draft` to take, the tokens a second, the last one's chance.

        The length is 0 where none makes more tokens a second than `best`.
        """
        costs, rows, length, last_chance = self._costs, self._plain_rows, 0, 0.0
        limit = costs.seconds(rows, doubted=False)
        limit += candidate.guess_budget.remaining_s(self._total_s, self._plain_s)
        tokens = float(rows)
        for count, chance in enumerate(candidate.path_chances(draft), 1):
            more = rows + count
            if more > costs.most_rows or costs.seconds(more, doubted=False) > limit:
                break
            tokens += chance
            rate = tokens / costs.seconds(more)
            if rate > best:
                best, length, last_chance = rate, count, chance
            elif count > length + _MOST_FALLS:
                break
        return length, best, last_chance


class RunningTime:
    """Measures an operation that is repeated and takes about as long each time."""

    def __init__(self) -> None:
        self._average_s = 0.0

    def capped(self, seconds: float) -> float:
        """Returns what an operation of `seconds` counts as: at most a few average ones."""
        average_s = self._average_s or seconds
        self._average_s = moving_average(average_s, seconds, most_jump=_MOST_LOOK_JUMP)
        return min(seconds, _MOST_LOOK_JUMP * average_s)


class LossBudget:
    """Holds the seconds that may be lost: those of `first` passes, then a share of the passes'."""

    def __init__(self, first: float) -> None:
        self._remaining_s = 0.0
        self._first = first
        self._credited_s = 0.0  # passes' time whose share is in the budget already

    def remaining_s(self, total_s: float, plain_s: float) -> float:
        """Returns what may be lost after `total_s` of passes, if a plain pass takes `plain_s`."""
        self._remaining_s += _LOSS_SHARE * (total_s - self._credited_s) + self._first * plain_s
        self._credited_s, self._first = total_s, 0.0
        self._remaining_s = min(self._remaining_s, _MOST_PASSES * plain_s)
        return self._remaining_s

    def spend(self, seconds: float) -> None:
        """Takes a loss from the budget; a gain is negative."""
        self._remaining_s -= seconds


class Candidate:
    """Asks one drafter and counts how often its guesses came true, whether they were used or not.

    A drafter with a `cost_s` takes so many seconds to ask, which is then measured. It is asked only
    where so much may be spent, and it is left out of twice as many looks each time that none of its
    guesses was used. A drafter without one is asked at every look; it learns nothing from rounds
    without a guess of its own.
    """

    def __init__(self, drafter: Drafter, chances: Sequence[float], cost_s: float = 0.0) -> None:
        self.drafter = drafter
        self.guess_budget = LossBudget(_FIRST_GUESSES)
        self.awaits_outcome = False
        self._cost_s = cost_s
        # Asked at every `_interval`-th look, and left out of the next `_skips`.
        self._interval, self._skips = 1, 0
        self._chances = list(chances)
        self._counts = [_PRIOR_WEIGHT] * _CLASSES
        self._draft = NO_DRAFT
        self._propose_s = 0.0
        # The drafter knows a text of `_known_tokens`. Since then `_kept` of them stayed, and `_new`
        # came after these.
        self._known_tokens = self._kept = 0
        self._new = list[int]()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """Notes for the drafter what the text has become, until it is asked."""
        self._kept = min(self._kept, kept)
        del self._new[kept - self._kept :]
        self._new += new

    def catch_up(self) -> None:
        """Tells the drafter what the text has become."""
        if self._new or self._kept < self._known_tokens:
            self.drafter.follow(self._kept, self._new)
            self._kept = self._known_tokens = self._kept + len(self._new)
            self._new = []

    def propose(self, room: int, budget_s: float) -> Draft:
        """Returns a draft of at most `room` tokens; none if asking costs more than `budget_s`."""
        if not self._cost_s:
            self.catch_up()
            self._draft = self.drafter.propose(room)
            self.awaits_outcome = bool(self._draft.ids)
            return self._draft
        self.awaits_outcome = self._skips == 0 and budget_s > self._cost_s
        if not self.awaits_outcome:
            self._skips = max(0, self._skips - 1)
            return NO_DRAFT
        since = perf_counter()
        self.catch_up()
        self._draft = self.drafter.propose(room)
        self._propose_s = perf_counter() - since
        return self._draft

    def path_chances(self, draft: Draft) -> list[float]:
        """Returns for each token of `draft` the chance that it and all before it are right."""
        chances = list[float]()
        for place, claimed in enumerate(draft.chances):
            parent = place - 1 if draft.parents is None else draft.parents[place]
            before = chances[parent] if parent >= 0 else 1.0
            chances.append(before * self._chances[_class_of(claimed)])
        return chances

    def observe(self, outcome: Round, saved_s: float) -> None:
        """Compares the last proposal with what came, whether it was used or not."""
        self.awaits_outcome = False
        self.guess_budget.spend(-saved_s)
        self._compare(outcome.tokens)
        since = perf_counter()
        self.drafter.observe(outcome)
        if self._cost_s:
            seconds = self._propose_s + perf_counter() - since
            self._cost_s = moving_average(self._cost_s, seconds)
            self._interval = 1 if saved_s > 0 else min(2 * self._interval, _MOST_PAUSE)
            self._skips = self._interval - 1

    def _compare(self, tokens: Sequence[int]) -> None:
        draft, place = self._draft, -1
        for token in tokens if draft.ids else ():
            right = None
            for guess in draft.places_after(place):
                came = draft.ids[guess] == token
                right = guess if came else right
                chance_class = _class_of(draft.chances[guess])
                self._counts[chance_class] += 1
                weight = max(_NEWEST_GUESS, 1 / self._counts[chance_class])
                self._chances[chance_class] += weight * (came - self._chances[chance_class])
            if right is None:
                return
            place = right


def _class_of(chance: float) -> int:
    return min(_CLASSES - 1, int(chance * _CLASSES))
