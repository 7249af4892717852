"""The gate against made-up passes: it drafts where that pays and costs little where not."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvq_runtime.answer.drafter import NO_DRAFT, Draft, Drafter, Round
from kvq_specdraft import auto
from kvq_specdraft.auto import Auto, Candidate
from kvq_specdraft.costs import PassCosts
from kvq_specdraft.rewrite import Rewrite

# Of a model that has no opinion, so that only repeats are found.
NO_LOGITS = np.full((20, 6000 + 3000), -np.inf, np.float32)


def outcome(
    tokens: tuple[int, ...], rows: int, seconds: float, draft: Draft = NO_DRAFT, right: int = 0
) -> Round:
    return Round(
        draft=draft,
        path=tuple(range(right)),
        tokens=tokens,
        logits=NO_LOGITS[: 1 + len(draft.ids)],
        rows=rows,
        seconds=seconds,
    )


def decode(
    drafter: Auto,
    prompt: list[int],
    answer: list[int],
    seconds: Callable[[int], float],
    other_rows: int = 0,
) -> tuple[float, list[int]]:
    """Seconds to write `answer` when a pass of n rows takes `seconds(n)`, and what was drafted."""
    drafter.follow(0, prompt)
    at, total, drafted, pause = 0, 0.0, list[int](), 0
    while at < len(answer):
        if pause:
            drafter.follow(len(prompt) + at, answer[at : at + 1])
            at, total, pause = at + 1, total + seconds(1 + other_rows), pause - 1
            drafted.append(0)
            continue
        draft = drafter.propose(min(7, len(answer) - at - 1)) if at < len(answer) - 1 else Draft()
        right, pause = 0, draft.pause
        while right < len(draft.ids) and draft.ids[right] == answer[at + right]:
            right += 1
        rows = 1 + other_rows + len(draft.ids)
        tokens = tuple(answer[at : at + right + 1])
        drafter.observe(outcome(tokens, rows, seconds(rows), draft, right))
        drafter.follow(len(prompt) + at, tokens)
        at += len(tokens)
        total += seconds(rows)
        drafted.append(len(draft.ids))
    return total, drafted


def noise(count: int, kinds: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, kinds, count).tolist()


def test_a_repeated_text_is_drafted_whole() -> None:
    text = noise(400, 1000)
    seconds, drafted = decode(Auto(), text, text, lambda rows: 1 + 0.02 * rows)
    assert 400 * 1.02 / seconds > 5
    assert np.mean(drafted) > 6


def test_a_text_without_repeats_is_never_drafted() -> None:
    _, drafted = decode(Auto(), list(range(500)), list(range(500, 1000)), lambda rows: 1.0)
    assert set(drafted) == {0}


def test_rows_that_cost_as_much_as_passes_are_not_paid_for() -> None:
    """Loses only the trials: most guesses are right, but n rows take as long as n passes."""
    text = noise(3000, 1000)
    answer = [token if place % 4 else 5000 + place for place, token in enumerate(text)]
    seconds, drafted = decode(Auto(), text, answer, float)
    assert seconds <= 1.04 * len(answer)
    assert np.mean(np.array(drafted) > 0) < 0.05


@pytest.mark.parametrize("seed", range(4))
def test_guesses_that_are_rarely_right_cost_two_percent_at_most(seed: int) -> None:
    """Uses eight kinds of tokens in no order, where drafters always find something by accident."""
    answer = noise(3000, 8, seed)
    seconds, _ = decode(
        Auto(), noise(500, 8, seed + 100), answer, lambda rows: 1 + 0.12 * (rows - 1)
    )
    assert seconds <= 1.02 * len(answer)


def test_the_length_is_the_one_that_pays() -> None:
    """Uses passes of up to four rows at one cost, and larger ones at three times that."""
    text = noise(1000, 1000)
    answer = [token if place % 6 else 5000 + place for place, token in enumerate(text)]
    _, drafted = decode(Auto(), text, answer, lambda rows: 1.0 if rows <= 4 else 3.0)
    settled = [count for count in drafted[100:] if count]
    assert np.mean(np.array(settled) == 3) > 0.6
    assert np.mean(np.array(settled) > 3) < 0.1


def test_where_rows_touch_more_experts_less_is_drafted() -> None:
    """Needs no rule for experts, since costs are measured."""
    text = noise(2000, 1000)
    answer = [token if place % 3 else 5000 + place for place, token in enumerate(text)]

    def experts(rows: int) -> float:
        """Shares a tenth of a pass; n rows read 1 - (1 - 1/16)^n of the experts."""
        return 0.1 + 0.9 * (1 - (1 - 1 / 16) ** rows) * 16

    def dense(rows: int) -> float:
        return 1 + 0.02 * (rows - 1)

    few, many = (decode(Auto(), text, answer, costs)[1] for costs in (experts, dense))
    assert np.mean(many) > 1.5
    assert np.mean(few) < 0.2 * np.mean(many)


def test_the_time_of_other_sequences_is_paid_for_too() -> None:
    """Uses a guess that is right every other time: it saves passes, and may cost others as much."""
    text = noise(600, 1000)
    answer = [token if place % 4 else 5000 + place for place, token in enumerate(text)]

    def seconds(rows: int) -> float:
        return 1 + 0.1 * rows

    alone, drafted = decode(Auto(), text, answer, seconds)
    assert np.mean(np.array(drafted) > 0) > 0.2
    assert alone < 0.95 * 600 * seconds(1)
    _, beside = decode(Auto(), text, answer, seconds, other_rows=20)
    assert np.mean(np.array(beside) > 0) < 0.05


def test_a_changed_machine_is_noticed() -> None:
    """Checks that rows that cost too much once are tried again, and used when they are cheap."""
    drafter, text = Auto(), noise(1500, 1000)
    _, dear = decode(drafter, text, text, float)
    _, cheap = decode(drafter, text, text, lambda rows: 1.0)
    assert np.mean(np.array(dear) > 0) < 0.1  # right guesses, which cost what they bring
    assert np.mean(np.array(cheap[-100:]) > 0) > 0.9


class Fixed(Drafter):
    """Proposes the same draft always."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def follow(self, kept: int, new: Sequence[int]) -> None:
        pass

    def propose(self, room: int) -> Draft:
        return self.draft

    def observe(self, outcome: Round) -> None:
        pass


def test_chances_are_counted_whether_a_draft_was_used_or_not() -> None:
    """Counts by the chance that the drafter claims, here a higher one for tokens that fail."""
    draft = Draft(ids=(1, 2, 3), chances=(0.2, 0.5, 0.9))
    candidate = Candidate(Fixed(draft), [0.5] * 16)
    for _ in range(300):
        assert candidate.propose(3, 1.0) == draft
        candidate.observe(outcome((1, 2, 9), 1, 1.0), 0.0)
    first, second, third = candidate.path_chances(draft)
    assert first > second > 0.99
    assert third < 0.01


def test_chances_of_a_tree_are_those_of_its_paths() -> None:
    draft = Draft(ids=(1, 2, 3, 4), parents=(-1, -1, 1, 2), chances=(0.2, 0.5, 0.9, 0.5))
    candidate = Candidate(Fixed(draft), [0.5] * 16)
    for _ in range(300):
        candidate.propose(4, 1.0)
        candidate.observe(outcome((2, 3, 9), 1, 1.0), 0.0)
    first, second, third, fourth = candidate.path_chances(draft)
    assert first < 0.01
    assert third == pytest.approx(second, abs=0.01)
    # Half of the guesses as likely came true: the token 2, and never the token 4.
    assert second == pytest.approx(0.5, abs=0.02)
    assert fourth == pytest.approx(0.25, abs=0.02)


def test_what_is_lost_is_bounded() -> None:
    """Uses guesses that promise much and never come true, of rows that cost a pass each."""
    drafter, text = Auto(), noise(4000, 6)
    seconds, _ = decode(drafter, text[:500], text[500:], float)
    assert seconds <= 1.012 * 3500
    seconds, _ = decode(Auto(), text[:500], text[500:756], float)
    assert seconds <= 1.02 * 256


def test_a_dear_drafter_is_asked_the_rarer_the_less_it_helps() -> None:
    """Checks too that it is never asked where too little is left to spend on it."""
    candidate = Candidate(Fixed(Draft(ids=(1,), chances=(0.5,))), [0.5] * 16, cost_s=1e-3)

    def rounds_asked(rounds: int, left_s: float, saved_s: float) -> list[int]:
        places = []
        for place in range(rounds):
            candidate.propose(1, left_s)
            if candidate.awaits_outcome:
                places.append(place)
                candidate.observe(outcome((1,), 1, 1.0), saved_s)
        return places

    assert rounds_asked(100, left_s=1e-3, saved_s=0.0) == []
    assert rounds_asked(130, left_s=1.0, saved_s=0.0) == [0, 2, 6, 14, 30, 62, 126]
    rounds_asked(100, left_s=1.0, saved_s=0.1)
    assert rounds_asked(5, left_s=1.0, saved_s=0.1) == [0, 1, 2, 3, 4]


def test_a_look_is_the_rarer_the_shorter_a_pass_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks in one of 64 rounds if a look takes a fifth of a pass, in all if a thousandth."""
    clock = [0.0]
    monkeypatch.setattr(auto, "perf_counter", lambda: clock[0])
    follow = Rewrite.follow

    def slow(self: Rewrite, kept: int, new: Sequence[int]) -> None:
        clock[0] += 1e-3
        follow(self, kept, new)

    monkeypatch.setattr(Rewrite, "follow", slow)
    looks = []
    for pass_s in (5e-3, 1.0):
        pauses, drafter = list[int](), Auto()
        drafter.follow(0, range(10))
        for place in range(10):
            drafter.follow(10 + place, [10 + place])
            pauses.append(drafter.propose(3).pause)
            drafter.observe(outcome((11 + place,), 1, pass_s))
        looks.append(pauses)
    assert looks[0][3:] == [64] * 7
    assert looks[1] == [0] * 10


def test_costs_lie_between_what_was_measured() -> None:
    costs = PassCosts()
    assert (costs.seconds(3), costs.most_rows) == (0, 0)
    costs.record(1, 1.0)
    assert costs.seconds(1) == 1
    assert costs.most_rows == 2
    assert 1 < costs.seconds(5) < 1.2
    costs.record(5, 2.0)
    assert costs.seconds(3) == pytest.approx(1.5)
    assert costs.most_rows == 10
    costs.record(5, 1000.0)
    assert costs.seconds(5) == pytest.approx(3.0)
    costs.record(400, 1e9)
    assert costs.seconds(8) < 4
    for _ in range(2000):
        costs.record(1, 1.0)
    assert costs.seconds(5) == pytest.approx(1.0)
    costs.record(5, 3.0)
    assert costs.seconds(5) == pytest.approx(3.0)
    costs.record(6, 1000.0)
    assert costs.seconds(6) == pytest.approx(2 * 3.0 * 1.02)


def test_a_look_that_was_disturbed_counts_as_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets another program take 50 ms in a look: the next repeat is noticed all the same."""
    clock, disturbed = [0.0], [False]
    monkeypatch.setattr(auto, "perf_counter", lambda: clock[0])
    follow = Rewrite.follow

    def sometimes(self: Rewrite, kept: int, new: Sequence[int]) -> None:
        clock[0] += 5e-2 if disturbed[0] else 1e-6
        follow(self, kept, new)

    monkeypatch.setattr(Rewrite, "follow", sometimes)
    drafter, pauses = Auto(), list[int]()
    drafter.follow(0, range(10))
    for place in range(40):
        disturbed[0] = place == 20
        drafter.follow(10 + place, [10 + place])
        pauses.append(drafter.propose(3).pause)
        drafter.observe(outcome((11 + place,), 1, 5e-3))
    assert pauses == [0] * 40


def test_a_candidate_that_is_told_late_is_told_the_same() -> None:
    """Makes edits of a text that come together between two looks."""
    known_text = list[int]()

    class Listening(Fixed):
        def follow(self, kept: int, new: Sequence[int]) -> None:
            assert kept <= len(known_text)
            known_text[kept:] = new

    random, text = np.random.default_rng(1), list[int]()
    candidate = Candidate(Listening(NO_DRAFT), [0.5] * 16)
    for count in range(500):
        kept = len(text) - int(random.integers(0, len(text) + 1)) * (random.random() < 0.3)
        new = random.integers(0, 99, random.integers(0, 5)).tolist()
        candidate.follow(kept, new)
        text[kept:] = new
        if count % 3 == 0:
            candidate.propose(1, 0.0)
            assert known_text == text
