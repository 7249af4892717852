"""The bases of drafters that make each guess with a pass, and how many guesses pay."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import NO_DRAFT, Draft, DraftContext, Drafter, Round
from kvq_runtime.sequence.passes import PassResult, Work
from kvq_runtime.sequence.sequence import TokenSequence
from kvq_specdraft.costs import MARGIN, PassCosts, moving_average

# Once in this many rounds the way that does not pay is tried, so that both stay measured.
TRIAL_ROUNDS = 32
# The most guesses of a trial in a place where guesses do not pay.
_TRIAL_GUESSES = 2
# Upper ends of the classes of likelihoods in which guesses are counted together.
_CLASS_ENDS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.01)
# The first chance of a class, its middle, counts as this many guesses.
_PRIOR_WEIGHT = 4.0
# The least weight of the newest guess in the chance of its class.
_NEWEST_GUESS = 0.01
# Assumed chance of a guess before any was checked.
_FIRST_CHANCE = 0.7
# Assumed cost of a guess before any was made, as a share of a pass of the model.
_FIRST_COST = 0.6
# Weight of the newest guess in the average seconds of a guess.
_NEWEST_SECONDS = 0.1


@dataclass(kw_only=True, eq=False)
class Guessing(Drafter):
    """Guesses a chain of tokens, each with a pass, as long as that pays.

    Args:
        most: The most guesses of a draft. Default 7.
        least: Above 0 and below 1, guesses go on while the chance that all of them are right is at
            least this, a threshold on calibrated chances as in SpecDec++ (arXiv 2405.19715). 0, the
            default: while they pay, as measured (`Pace`).
    """

    most: int = 7
    least: float = 0.0

    def __post_init__(self) -> None:
        name = self.name
        if self.most < 1:
            raise UsageError(about="draft", value=f"{name}: most={self.most}", possible="1 or more")
        if not 0 <= self.least < 1:
            raise UsageError(
                about="draft",
                value=f"{name}: least={self.least}",
                possible="0 (by what is measured) up to, not including, 1",
            )
        self._pace = Pace(most=self.most, least=self.least)

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        room, goes_on = self._pace.begin(draft_context.room), True
        if not room:
            return NO_DRAFT
        foresight, ids, distributions = (
            draft_context.foresight(),
            list[int](),
            list[NDArray[np.float64]](),
        )
        new = draft_context.due
        while goes_on and len(ids) < room:
            passed = yield from self._guess(draft_context, new)
            logits = passed.logits[-1]
            chosen = foresight.choose(logits)
            if chosen is None:
                break
            token, probabilities = chosen
            new = [token]
            ids += new
            distributions += [] if probabilities is None else [probabilities]
            goes_on = self._pace.goes_on(likelihood(logits), passed.seconds)
        return Draft(
            ids=tuple(ids),
            probabilities=np.array(distributions) if distributions else None,
        )

    def observe(self, outcome: Round) -> None:
        self._pace.observe(outcome)

    @abstractmethod
    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, PassResult]:
        """Runs a pass over `new`, what follows the text or the last guess; its last row counts."""


@dataclass(kw_only=True, eq=False)
class GuessingWithCache(Guessing):
    """Guesses with passes over a cache for the text that is the drafter's, and not the session's.

    `open` sets the `_sequence` of this cache.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sequence: TokenSequence[Any] | None = None

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of its cache."""
        return 0 if self._sequence is None else self._sequence.config.budget_bytes

    def close(self) -> None:
        if self._sequence is not None:
            self._sequence.close()
            self._sequence = None

    @property
    def _opened(self) -> TokenSequence[Any]:
        assert self._sequence is not None, "a session opens its drafter"
        return self._sequence


def likelihood(logits: NDArray[np.float32]) -> float:
    """Returns the probability of the likeliest token by logits [V], before any filter."""
    return float(1 / np.exp(logits - logits.max()).sum(dtype=np.float64))


class Chances:
    """Counts how often guesses were right, by the likelihood that the drafter gave them.

    SpecDec++ (arXiv 2405.19715) and DISCO (arXiv 2405.04304) train a classifier for this.
    """

    def __init__(self) -> None:
        starts = (0.0, *_CLASS_ENDS)
        self._right = [
            (low + min(1.0, high)) / 2 for low, high in zip(starts, _CLASS_ENDS, strict=False)
        ]
        self._counts = [0] * len(_CLASS_ENDS)
        self.mean = _FIRST_CHANCE
        self._total = 0

    def of(self, likelihood: float) -> float:
        """Returns the chance that a guess of this likelihood is right."""
        return self._right[_class_of(likelihood)]

    def count(self, likelihood: float, right: bool) -> None:
        """Counts a guess whose predecessors were right."""
        place = _class_of(likelihood)
        self._counts[place] += 1
        self._right[place] += _newest_weight(self._counts[place]) * (right - self._right[place])
        self._total += 1
        self.mean += _newest_weight(self._total) * (right - self.mean)


class Pace:
    """Decides before every guess whether to make it, and learns from the results.

    A round of n guesses brings E(n) = 1 + a(1) + a(1) a(2) + .. tokens, where a(i) is the chance
    that guess i is right if those before it are. It takes n passes of the drafter and one pass of
    the model with n + 1 rows (arXiv 2211.17192, section 3.3). Costs are measured and chances are
    counted; no tokens are seen.

    Args:
        most: The most guesses of a round.
        least: Above 0, guesses go on while the chance that all are right is at least this; 0: while
            they pay.
    """

    def __init__(self, *, most: int, least: float) -> None:
        self._most = most
        self._least = least
        self._right = Chances()
        self._costs = PassCosts()
        self._guess_s = 0.0
        self._plain_rows = 1  # rows of a pass without a guess of this drafter
        self._rounds = 0
        self._likelihoods: list[float] = []
        self._expected, self._all_right = 1.0, 1.0

    def begin(self, room: int) -> int:
        """Returns how many guesses the next round may have; 0: none pays."""
        self._likelihoods = []
        self._expected, self._all_right = float(self._plain_rows), 1.0
        room = min(room, self._most)
        if self._least:
            return room
        self._rounds += 1
        pays = self._best_count(room) > 0
        if self._rounds % TRIAL_ROUNDS != 1:
            return room if pays else 0
        # The very first round is plain, to measure what drafts are compared with.
        return 0 if pays or not self._costs.seconds(1) else min(room, _TRIAL_GUESSES)

    def goes_on(self, likelihood: float, seconds: float) -> bool:
        """Returns whether one more guess is worth its pass, after one that took `seconds`."""
        self._likelihoods.append(likelihood)
        before = self._guess_s
        self._guess_s = (
            moving_average(before, seconds, weight=_NEWEST_SECONDS) if before else seconds
        )
        chance = self._right.of(likelihood)
        self._all_right *= chance
        self._expected += self._all_right
        if self._least:
            return self._all_right >= self._least
        count = len(self._likelihoods)
        gained = self._all_right * self._right.mean
        more = self._seconds(count + 1) - self._seconds(count)
        return gained * self._seconds(count) > self._expected * more

    def observe(self, outcome: Round) -> None:
        """Learns what the round's pass took and which of its guesses were right."""
        self._plain_rows = outcome.rows - outcome.drafted
        self._costs.record(outcome.rows, outcome.seconds)
        pairs = zip(self._likelihoods, outcome.draft.ids, outcome.tokens, strict=False)
        for likelihood, guess, token in pairs:
            self._right.count(likelihood, guess == token)
            if guess != token:
                break

    def _best_count(self, most: int) -> int:
        """Returns the number of guesses that promises most tokens a second; 0: none does."""
        expected, all_right = float(self._plain_rows), 1.0
        best, best_rate = 0, MARGIN * expected * self._rounds_a_second(0)
        for count in range(1, most + 1):
            all_right *= self._right.mean
            expected += all_right
            rate = expected * self._rounds_a_second(count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _rounds_a_second(self, count: int) -> float:
        """Returns rounds of `count` guesses a second; 0 until a pass was measured."""
        seconds = self._seconds(count)
        return 1 / seconds if seconds else 0.0

    def _seconds(self, count: int) -> float:
        """Returns what a round of `count` guesses takes."""
        each = self._guess_s or _FIRST_COST * self._costs.seconds(self._plain_rows)
        return count * each + self._costs.seconds(self._plain_rows + count)


def _class_of(likelihood: float) -> int:
    return next(place for place, end in enumerate(_CLASS_ENDS) if likelihood < end)


def _newest_weight(count: int) -> float:
    """Returns the weight of the newest of `count` guesses."""
    return max(_NEWEST_GUESS, 1 / (count + _PRIOR_WEIGHT))
