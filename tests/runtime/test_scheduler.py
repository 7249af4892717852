"""The scheduler: order asserted by counts, without clock and thread."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.serving.scheduler import OVERTAKES_PER_RANK, STEPS_PER_RANK, Scheduler

COMPLETION, CHAT, BATCH = 0, 1, 2


@dataclass(eq=False)
class Work:
    rank: int
    ready: bool = True
    brief: bool = False


def filled(ranks: list[int], *, slots: int = 4, queue: int = 100) -> tuple[Scheduler, list[Work]]:
    scheduler = Scheduler(slots=slots, queue=queue)
    jobs = [Work(rank) for rank in ranks]
    assert all(scheduler.submit(job) for job in jobs)
    return scheduler, jobs


def admitted(scheduler: Scheduler) -> list[Work]:
    return list(iter(scheduler.admit, None))


def test_better_ranks_are_admitted_first_and_each_in_order() -> None:
    scheduler, jobs = filled([BATCH, CHAT, COMPLETION, CHAT, COMPLETION], slots=5)
    assert admitted(scheduler) == [jobs[place] for place in (2, 4, 1, 3, 0)]
    assert scheduler.waiting == ()


@pytest.mark.parametrize(
    ("slots", "limits"),
    [
        (1, {COMPLETION: 1, CHAT: 1, BATCH: 1}),
        (2, {COMPLETION: 2, CHAT: 1, BATCH: 1}),
        (4, {COMPLETION: 4, CHAT: 3, BATCH: 2}),
    ],
)
def test_long_work_leaves_slots_to_better_ranks(slots: int, limits: dict[int, int]) -> None:
    for rank, count in limits.items():
        scheduler, _ = filled([rank] * 9, slots=slots)
        assert len(admitted(scheduler)) == count
    scheduler, jobs = filled([CHAT] * 9 + [BATCH] * 9 + [COMPLETION], slots=4)
    assert admitted(scheduler) == [jobs[-1], *jobs[:3]]


def test_a_completion_finds_a_slot_behind_a_queue_of_chats() -> None:
    scheduler, _ = filled([CHAT] * 20)
    assert len(admitted(scheduler)) == 3
    for _ in range(3 * OVERTAKES_PER_RANK):
        quick = Work(COMPLETION)
        assert scheduler.submit(quick)
        assert admitted(scheduler) == [quick]
        scheduler.finish(quick)
    assert len(scheduler.running) == 3


def test_what_is_overtaken_often_goes_first() -> None:
    scheduler, (running, batch) = filled([COMPLETION, BATCH], slots=1)
    assert scheduler.admit() is running
    overtakes = 0
    while True:
        newcomer = Work(COMPLETION)
        scheduler.submit(newcomer)
        scheduler.finish(running)
        running = scheduler.admit()
        if running is batch:
            break
        overtakes += 1
    assert overtakes == BATCH * OVERTAKES_PER_RANK


def test_steps_go_round_inside_a_rank() -> None:
    scheduler, jobs = filled([COMPLETION] * 3)
    admitted(scheduler)
    assert [scheduler.next() for _ in range(7)] == [[job] for job in (*jobs, *jobs, jobs[0])]


def test_better_ranks_get_the_steps_and_worse_ones_do_not_starve() -> None:
    scheduler, (quick, chat, batch) = filled([COMPLETION, CHAT, BATCH])
    admitted(scheduler)
    count = 40 * STEPS_PER_RANK
    steps = Counter(scheduler.next()[0] for _ in range(count))
    assert count // (STEPS_PER_RANK + 2) <= steps[chat] <= count // STEPS_PER_RANK
    assert count // (2 * STEPS_PER_RANK + 4) <= steps[batch] <= count // (2 * STEPS_PER_RANK)
    assert steps[quick] == count - steps[chat] - steps[batch]
    quick.ready = False
    assert scheduler.next() == [chat]
    chat.ready = batch.ready = False
    assert scheduler.next() == []


def test_brief_rows_join_every_pass_and_a_prompt_leads_its_own() -> None:
    scheduler, (first, second, reader, batch) = filled([CHAT, CHAT, CHAT, BATCH], slots=5)
    admitted(scheduler)
    first.brief = second.brief = True
    passes = [scheduler.next() for _ in range(6)]
    assert passes[0] == [first, second]
    assert passes[1] == [reader, first, second]
    assert all(served[0] is reader for served in passes[1:])
    assert all({first, second} <= set(served) for served in passes)
    assert not any(batch in served for served in passes)
    second.ready, batch.brief = False, True
    assert set(scheduler.next()) == {reader, first, batch}


def test_the_queue_is_bounded() -> None:
    scheduler, _ = filled([CHAT] * 3, slots=1, queue=3)
    assert not scheduler.submit(Work(COMPLETION))
    scheduler.admit()
    assert scheduler.submit(Work(COMPLETION))
    assert not scheduler.submit(Work(COMPLETION))


def test_unwanted_jobs_leave_the_queue_but_not_a_slot() -> None:
    scheduler, jobs = filled([CHAT] * 3, slots=1)
    scheduler.admit()
    assert list(scheduler.drop(lambda job: job is not jobs[1])) == [jobs[2]]
    assert (scheduler.running, scheduler.waiting) == ((jobs[0],), (jobs[1],))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.sampled_from("sfn"), st.integers(0, 2)), min_size=1, max_size=120),
)
def test_any_history_keeps_the_promises(slots: int, history: list[tuple[str, int]]) -> None:
    scheduler = Scheduler(slots=slots, queue=8)
    done: set[Work] = set()
    arrived: list[Work] = []
    started: list[Work] = []
    for action, rank in history:
        if action == "s":
            job = Work(rank)
            accepted = len(scheduler.waiting) < 8
            assert scheduler.submit(job) == accepted
            arrived += [job] if accepted else []
        elif action == "f" and scheduler.running:
            done.add(scheduler.running[0])
            scheduler.finish(scheduler.running[0])
        else:
            assert bool(scheduler.next()) == bool(scheduler.running)
        started += admitted(scheduler)
        assert len(scheduler.running) <= slots
        assert sum(job.rank >= CHAT for job in scheduler.running) <= max(1, slots - 1)
        # an idle server serves whatever comes
        assert scheduler.running or not scheduler.waiting
    for rank in (COMPLETION, CHAT, BATCH):
        of_rank = [job for job in arrived if job.rank == rank]
        assert [job for job in started if job.rank == rank] == of_rank[
            : len([job for job in started if job.rank == rank])
        ]
    while scheduler.running:
        scheduler.finish(scheduler.running[0])
        started += admitted(scheduler)
    assert set(started) == set(arrived)
