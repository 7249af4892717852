"""Tokens per second of many chats at once, all together, through the pool that `kvq serve` runs.

Their prompts are read before the clock starts, so that a round times answers alone: passes that
hold a row of each chat. Knows no HTTP and no text; token ids are enough.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event, Semaphore
from time import perf_counter
from typing import Any

from kvq.errors import UsageError, argument
from kvq_apps import output
from kvq_apps.bench.suite import Setup
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.serving.job import Job
from kvq_runtime.serving.outbox import Done, Failed, Outbox
from kvq_runtime.serving.pool import PoolConfig, Served, SessionPool
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.saving import SavedSessions
from kvq_runtime.serving.scheduler import PRIORITIES
from kvq_runtime.serving.slots import Slots

MOST_CHATS = 64
# Nobody reads while the clock runs.
_OUTBOX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatsJob:
    """What is measured: each number of `chats` at once in turn, in `repeat` rounds.

    Every chat writes `new_tokens` after a prompt of `context` tokens of its own and the token that
    follows it, which costs no pass.
    """

    chats: tuple[int, ...]
    context: int = 512
    repeat: int = 7
    new_tokens: int = 64

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        # The pool takes no slot that would lose more than it shares: prompts would be read again.
        least = {"context": self.new_tokens + 1, "repeat": 1}
        for flag, value in (("context", self.context), ("repeat", self.repeat)):
            if value < least[flag]:
                raise UsageError(
                    about=f"--{flag}", value=value, possible=f"give {least[flag]} or more"
                )
        for count in self.chats:
            if not 1 <= count <= MOST_CHATS:
                raise UsageError(
                    f"{argument('--chats')} {count} is not possible: give 1 to {MOST_CHATS}"
                )


def measure(setup: Setup, job: ChatsJob) -> dict[str, Any]:
    """The rows of all numbers of chats. Raises `KvqError`."""
    counts = sorted(set(job.chats))
    taken: dict[int, list[float]] = {count: [] for count in counts}
    options = setup.session_options | {"context_tokens": job.context + job.new_tokens + 1}
    with (
        Engine(setup.files, threads=setup.threads) as engine,
        _running(engine, options, counts[-1]) as pool,
    ):
        for turn in range(job.repeat):
            # 1 4 8, 4 8 1, ...: none always follows the same other one.
            for place in range(len(counts)):
                count = counts[(turn + place) % len(counts)]
                done, whole = turn * len(counts) + place, job.repeat * len(counts)
                setup.progress(done, whole, f"{count} chats")
                taken[count].append(_seconds(pool, job, count))
        session = pool.served and pool.served.slots.all[0].session
        assert session is not None
        config = session.config
    speeds = {count: count * job.new_tokens / median(taken[count]) for count in counts}
    return {
        "model": setup.files.name,
        "kv": output.kv_text(config.plan.k_bits, config.plan.v_bits),
        "kv_budget": config.budget_bytes,
        "context": job.context,
        "repeat": job.repeat,
        "new_tokens": job.new_tokens,
        "rows": [
            {"chats": count, "tok_s": speed, "ratio": (1 in speeds and speed / speeds[1]) or None}
            for count, speed in speeds.items()
        ],
    }


@contextmanager
def _running(engine: Engine, options: dict[str, Any], chats: int) -> Generator[SessionPool[Served]]:
    """A pool over `engine` for so many chats, that keeps nothing on disk."""
    # Chats leave one slot to completions.
    slots = chats + 1
    ready = Event()

    def load() -> Served:
        return Served(
            backend=engine.backend,
            stop_ids=engine.model.stop_ids,
            slots=Slots(lambda: engine.session(**options), slots, SavedSessions(Path(), "", 0)),
            close=lambda: None,
        )

    pool = SessionPool(load, PoolConfig(sessions=slots), ready.set)
    pool.start()
    ready.wait()
    if pool.error is not None:
        raise pool.error
    try:
        yield pool
    finally:
        pool.stop()


def _seconds(pool: SessionPool[Served], job: ChatsJob, count: int) -> float:
    """From asking until the last of `count` answers has ended."""
    _answer(pool, [_request(job, chat, 0) for chat in range(count)])
    since = perf_counter()
    _answer(pool, [_request(job, chat, job.new_tokens + 1) for chat in range(count)])
    return perf_counter() - since


def _answer(pool: SessionPool[Served], requests: list[GenerationRequest]) -> None:
    """All of them at once; returns when all have ended. Raises what ended one early."""
    news = Semaphore(0)
    jobs = [Job(request, Outbox(_OUTBOX_BYTES, news.release)) for request in requests]
    for one in jobs:
        pool.submit(one)
    left = len(jobs)
    while left:
        news.acquire()
        for one in jobs:
            event = one.outbox.take()
            if isinstance(event, Failed):
                raise event.error
            left -= isinstance(event, Done)


def _request(job: ChatsJob, chat: int, max_tokens: int) -> GenerationRequest:
    """The answer of chat number `chat`, which nothing but its length ends."""
    return GenerationRequest(
        prompts=(tuple((place * 7 + chat) % MOST_CHATS for place in range(job.context)),),
        sampling=Sampling(temperature=0.0),
        seed=0,
        rank=PRIORITIES["chat"],
        max_tokens=max_tokens,
        stop_ids=frozenset(),
    )


def print_report(data: dict[str, Any]) -> None:
    """The same as a table."""
    rows = [
        (str(row["chats"]), f"{row['tok_s']:.1f}", f"{row['tok_s'] / row['chats']:.1f}",
         f"{row['ratio']:.2f} x" if row["ratio"] else "-")
        for row in data["rows"]
    ]  # fmt: skip
    output.print_table(rows, header=("chats at once", "tok/s together", "each", "of one chat"))
    output.print_data(
        f"\n{data['model']} {data['kv']}, {data['threads']} threads: answers of "
        f"{data['new_tokens']} tokens after {data['context']}"
    )
