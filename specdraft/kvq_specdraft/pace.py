"""How many guesses to make where each costs a pass. Knows seconds and chances, no tokens' meaning.

A round of n guesses brings E(n) = 1 + a(1) + a(1) a(2) + .. tokens, where a(i) is the chance that
guess i is right when those before it are, and takes n passes of the drafter and one of n + 1 rows
of the model (arXiv 2211.17192, section 3.3). Both costs are measured, chances are counted.
"""

from kvq_runtime.drafter import Round
from kvq_specdraft.costs import PassCosts

# A first guess must promise this much more than plain decoding: estimates are noisy.
MARGIN = 1.02
# Every so many rounds the other way is tried, so that both stay measured.
TRIAL_ROUNDS = 32
# Likelihoods up to which guesses are counted together, and how many right ones in a row it takes
# to believe in more than the likelihood itself.
_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99, 1.01)
_PRIOR_WEIGHT = 4.0
_NEWEST = 0.01
# Chance of a guess that nothing is known of yet; cost of its pass as a share of the model's.
_PRIOR = 0.7
_PRIOR_COST = 0.6


class Chances:
    """How often guesses were right, by their likelihood in the drafter's own eyes.

    Calibrates the drafter's likeliest probability from the rounds themselves, where SpecDec++
    (arXiv 2405.19715) and DISCO (2405.04304) train a classifier.
    """

    def __init__(self) -> None:
        starts = (0.0, *_EDGES)
        self._right = [
            (low + min(1.0, high)) / 2 for low, high in zip(starts, _EDGES, strict=False)
        ]
        self._seen = [0] * len(_EDGES)
        self.mean = _PRIOR
        self._all = 0

    def of(self, likelihood: float) -> float:
        """The chance that a guess of this likelihood is right."""
        return self._right[_class_of(likelihood)]

    def count(self, likelihood: float, right: bool) -> None:
        """A guess whose predecessors were right was right, or was not."""
        own = _class_of(likelihood)
        self._seen[own] += 1
        self._right[own] += _share(self._seen[own]) * (right - self._right[own])
        self._all += 1
        self.mean += _share(self._all) * (right - self.mean)


class Pace:
    """Decides before every guess whether to make it, and learns from what became of them."""

    def __init__(self, *, most: int, least: float) -> None:
        self._most = most
        self._least = least
        self._right = Chances()
        self._costs = PassCosts()
        self._guess_s = 0.0
        self._rows = 1  # of a pass without a guess of ours
        self._rounds = 0
        self._likelihoods: list[float] = []
        self._expected, self._all_right = 1.0, 1.0

    @property
    def chances(self) -> tuple[float, ...]:
        """Of each guess of this round, that it is right if those before it are."""
        return tuple(map(self._right.of, self._likelihoods))

    def begin(self, room: int) -> int:
        """How many guesses the coming round may have; 0: none pays."""
        self._likelihoods = []
        self._expected, self._all_right = float(self._rows), 1.0
        room = min(room, self._most)
        if self._least:
            return room
        self._rounds += 1
        pays = self._planned(room) > 0
        if self._rounds % TRIAL_ROUNDS != 1:
            return room if pays else 0
        # The first round of all is plain: what it takes is what drafts are compared with.
        return 0 if pays or not self._costs.seconds(1) else min(room, 2)

    def goes_on(self, likelihood: float, seconds: float) -> bool:
        """Whether one more guess is worth its pass, after one of so many seconds."""
        self._likelihoods.append(likelihood)
        before = self._guess_s
        self._guess_s += 0.1 * (min(seconds, 2 * before) - before) if before else seconds
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
        self._rows = outcome.rows - outcome.drafted
        self._costs.record(outcome.rows, outcome.seconds)
        pairs = zip(self._likelihoods, outcome.draft.ids, outcome.tokens, strict=False)
        for likelihood, guess, token in pairs:
            self._right.count(likelihood, guess == token)
            if guess != token:
                break

    def _planned(self, most: int) -> int:
        """The number of guesses that promises most tokens a second; 0: none does."""
        expected, all_right = float(self._rows), 1.0
        best, best_rate = 0, MARGIN * expected * self._speed(0)
        for count in range(1, most + 1):
            all_right *= self._right.mean
            expected += all_right
            rate = expected * self._speed(count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _speed(self, count: int) -> float:
        """Rounds of so many guesses a second; 0 until a pass was measured."""
        seconds = self._seconds(count)
        return 1 / seconds if seconds else 0.0

    def _seconds(self, count: int) -> float:
        """What a round of so many guesses takes."""
        each = self._guess_s or _PRIOR_COST * self._costs.seconds(self._rows)
        return count * each + self._costs.seconds(self._rows + count)


def _class_of(likelihood: float) -> int:
    return next(place for place, edge in enumerate(_EDGES) if likelihood < edge)


def _share(count: int) -> float:
    """Weight of the newest of so many."""
    return max(_NEWEST, 1 / (count + _PRIOR_WEIGHT))
