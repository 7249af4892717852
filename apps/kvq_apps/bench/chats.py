"""Tokens per second of many chats at once, through the pool that `kvq serve` runs.

Prompts are read before the clock starts, so a round times answers alone: passes with a row of each
chat. Knows no HTTP and no text; token ids are enough.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event, Semaphore
from time import perf_counter
from typing import Any

from kvq_apps.bench.measure import turns
from kvq_apps.bench.suite import Setup
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal import output
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
    """Holds what is measured: each number of `chats` at once in turn, in `repeat` rounds.

    Every chat writes `new_tokens` after a prompt of its own of `context` tokens and the next token,
    which costs no pass.
    """

    chats: tuple[int, ...]
    context: int = 512
    repeat: int = 7
    new_tokens: int = 64

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        # The pool takes no slot that would lose more than it shares: prompts would be read again.
        check_range(self.new_tokens + 1, context=self.context)
        check_range(1, repeat=self.repeat)
        for count in self.chats:
            check_range(1, MOST_CHATS, chats=count)


def measure(setup: Setup, job: ChatsJob) -> dict[str, Any]:
    """Measures the rows of all numbers of chats. Raises `KvqError`."""
    counts = sorted(set(job.chats))
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    options = setup.session_options | {"context_tokens": job.context + job.new_tokens + 1}
    with (
        Engine(setup.files, threads=setup.threads) as engine,
        # Chats leave one slot to completions.
        _running(engine, options, counts[-1] + 1) as pool,
    ):
        for turn, count in turns(counts, job.repeat):
            setup.progress(turn, job.repeat * len(counts), f"{count} chats")
            seconds[count].append(_seconds(pool, job, count))
        session = pool.served and pool.served.slots.all[0].session
        assert session is not None
        config = session.config
    speeds = {count: count * job.new_tokens / median(seconds[count]) for count in counts}
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
def _running(engine: Engine, options: dict[str, Any], slots: int) -> Generator[SessionPool[Served]]:
    """Runs a pool of so many slots over `engine`, which keeps nothing on disk."""
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
    """Times `count` answers from the request to the end of the last."""
    _answer(pool, [_request(job, chat, 0) for chat in range(count)])
    since = perf_counter()
    _answer(pool, [_request(job, chat, job.new_tokens + 1) for chat in range(count)])
    return perf_counter() - since


def _answer(pool: SessionPool[Served], requests: list[GenerationRequest]) -> None:
    """Sends all requests at once and waits for their end. Raises the error of a failed one."""
    wake = Semaphore(0)
    waiting = [Job(request, Outbox(_OUTBOX_BYTES, wake.release)) for request in requests]
    for job in waiting:
        pool.submit(job)
    while waiting:
        wake.acquire()
        for job in tuple(waiting):
            event = job.outbox.take()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                waiting.remove(job)


def _request(job: ChatsJob, chat: int, max_tokens: int) -> GenerationRequest:
    """Makes the request of chat number `chat`, which only its length ends."""
    return GenerationRequest(
        prompts=(tuple((place * 7 + chat) % MOST_CHATS for place in range(job.context)),),
        sampling=Sampling(temperature=0.0),
        seed=0,
        rank=PRIORITIES["chat"],
        max_tokens=max_tokens,
        stop_ids=frozenset(),
    )


def print_report(data: dict[str, Any]) -> None:
    """Prints the same as a table."""
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
