"""Turns of pools that share the processor: by rank, in turn, and nobody waits for ever."""

from contextlib import suppress
from threading import Thread

from kvq_runtime.serving.scheduler import STEPS_PER_RANK, Turns

WAIT_S = 10.0


class Pool:
    """Takes turns of one rank in a thread and writes its name down at each."""

    def __init__(self, turns: Turns, name: str, rank: int, passes: int, log: list[str]) -> None:
        self.turns, self.name, self.log = turns, name, log
        self.passes = passes
        turns.wish(self, rank)
        self.thread = Thread(target=self.run, daemon=True)

    def run(self) -> None:
        for _ in range(self.passes):
            with self.turns.turn(self):
                self.log.append(self.name)
        self.turns.wish(self, None)


def order_of(*pools: tuple[str, int, int]) -> list[str]:
    """Returns who had a turn, of pools (name, rank, passes) that all wait before the first."""
    turns, log = Turns(), list[str]()
    gate = Pool(turns, "gate", 0, 0, log)
    with turns.turn(gate):
        made = [Pool(turns, *pool, log) for pool in pools]
        for pool in made:
            pool.thread.start()
    turns.wish(gate, None)
    for pool in made:
        pool.thread.join(WAIT_S)
        assert not pool.thread.is_alive(), log
    return log


def test_equal_ranks_take_turns() -> None:
    assert order_of(("a", 1, 3), ("b", 1, 3)) == ["a", "b"] * 3
    assert order_of(("a", 1, 1), ("b", 1, 3)) == ["a", "b", "b", "b"]


def test_a_better_rank_goes_first_and_keeps_its_place_between_passes() -> None:
    assert order_of(("chat", 1, 2), ("editor", 0, 5)) == ["editor"] * 5 + ["chat"] * 2


def test_a_pool_that_is_passed_over_rises() -> None:
    passes = 3 * STEPS_PER_RANK
    log = order_of(("batch", 2, 2), ("editor", 0, passes))
    assert len(log) == passes + 2
    places = [place for place, name in enumerate(log) if name == "batch"]
    assert places[0] == 2 * STEPS_PER_RANK
    assert places[1] == passes + 1


def test_one_pass_runs_at_a_time_and_an_error_gives_the_turn_back() -> None:
    turns, log = Turns(), list[str]()
    first, second = Pool(turns, "first", 1, 0, log), Pool(turns, "second", 0, 1, log)
    turns.wish(second, None)
    with suppress(OSError), turns.turn(first):
        turns.wish(second, 0)
        second.thread.start()
        second.thread.join(0.2)
        assert second.thread.is_alive()
        assert log == []
        raise OSError
    second.thread.join(WAIT_S)
    assert log == ["second"]
