"""The one thread that touches the model: it loads it, then serves all running jobs pass by pass.

Everything else (sockets, JSON, tokenizing) happens in other threads, which talk to this one
through `submit`, `cancel` and each job's outbox. A pass holds the rows of many jobs: of everyone
who writes, and of one who reads a prompt, since the weights are read once for all of them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from typing import Any, Generic, TypeVar

from kvq.errors import KvqError, argument
from kvq_runtime.backends import Backend
from kvq_runtime.metrics import NO_ROUNDS, Rounds
from kvq_runtime.passes import Passed, SharedPassError, Work, forward_all
from kvq_runtime.serving.job import Decoding, Job
from kvq_runtime.serving.outbox import Done, Failed, Report
from kvq_runtime.serving.request import PoolError, leaving
from kvq_runtime.serving.scheduler import Scheduler
from kvq_runtime.serving.slots import Slot, Slots
from kvq_runtime.session import Session

logger = logging.getLogger(__name__)

SMALLEST_CHUNK_TOKENS = 16
LARGEST_CHUNK_TOKENS = 256
# A pass should not take longer than this while others wait.
PASS_TARGET_S = 0.05
_PROBE_TOKENS = 64
# An edited text is encoded again, a piece at a time, when nobody has asked for so long.
IDLE_REFRESH_S = 0.3
# A job that waits for its reader is looked at again this often.
_STALL_CHECK_S = 0.5
# Requests this far back tell how long one takes.
_RECENT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """How much a pool holds and how long it waits.

    `sessions` slots are opened at the start and no more later; `queue` requests may wait for
    one. `chunk_tokens` of a prompt go through the model at once, None: as many as take about
    50 ms, measured at the start. A session idle for `idle_save_s` is saved; what is written ahead
    of a reader may wait for `stall_s`.
    """

    sessions: int = 4
    queue: int = 64
    chunk_tokens: int | None = None
    idle_save_s: float = 2.0
    stall_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A loaded model and its slots; `close` frees the weights."""

    backend: Backend[Any]
    stop_ids: frozenset[int]
    slots: Slots
    close: Callable[[], None]

    @property
    def context_tokens(self) -> int:
        """Tokens a session holds at most."""
        return self.slots.all[0].session.config.context_tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's KV cache."""
        return self.slots.all[0].session.config.budget_bytes


@dataclass(kw_only=True, slots=True)
class Counts:
    """Totals since the start, changed by the pool's thread; `steps` counts passes."""

    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    finished: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    rounds: Rounds = NO_ROUNDS
    decode_s: float = 0.0
    busy_s: float = 0.0
    _recent_s: float = 1.0

    def add(self, report: Report, *, failed: bool) -> None:
        """A job ended."""
        self.finished += 1
        self.failed += failed
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.new_tokens += report.new_tokens
        self.rounds += report.rounds
        self.decode_s += report.decode_ms / 1e3
        seconds = (report.prompt_ms + report.decode_ms) / 1e3
        self._recent_s += _RECENT * (seconds - self._recent_s)

    def mean_s(self) -> float:
        """Engine seconds of a recent request, about."""
        return self._recent_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Run:
    """A job with its slot and the work it has left."""

    job: Job
    slot: Slot
    work: Work[Any, None]


S = TypeVar("S", bound=Served)


class SessionPool(Generic[S]):
    """Runs `load` once and then every submitted job, until `stop`."""

    def __init__(
        self, load: Callable[[], S], config: PoolConfig, on_change: Callable[[], None]
    ) -> None:
        self.counts = Counts()
        self.served: S | None = None
        self.error: BaseException | None = None
        self.draining = False
        self._load = load
        self._config = config
        self._on_change = on_change
        self._wake = Condition()
        self._stopping = False
        self._ended = False
        self._scheduler: Scheduler[Job] = Scheduler(slots=config.sessions, queue=config.queue)
        self._runs: dict[int, _Run] = {}
        self._arriving: list[Job] = []
        self._decoding: Decoding | None = None
        self._thread = Thread(target=self._main, name="kvq-pool", daemon=True)

    def start(self) -> None:
        """Begins to load."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._decoding is not None

    @property
    def ended(self) -> bool:
        """Whether the thread has nothing more to do, perhaps because of `error`."""
        return self._ended

    @property
    def busy(self) -> bool:
        """Whether a job has a slot, begun or not."""
        return bool(self.running)

    @property
    def queue(self) -> tuple[int, int]:
        """How many jobs wait and how many run."""
        with self._wake:
            return len(self._scheduler.waiting), len(self._scheduler.running)

    @property
    def waiting(self) -> tuple[Job, ...]:
        """Jobs that have not begun."""
        with self._wake:
            return self._scheduler.waiting

    @property
    def running(self) -> tuple[Job, ...]:
        """Jobs that have begun, or begin once the disk has what their slot held."""
        with self._wake:
            return self._scheduler.running

    @property
    def stopping(self) -> bool:
        """Whether no further pass is made."""
        return self._stopping

    def submit(self, job: Job) -> None:
        """Queues `job`. Raises `PoolError` when the queue is full or the pool is leaving."""
        with self._wake:
            if self.draining or self._stopping:
                raise leaving()
            if not self._scheduler.submit(job):
                self.counts.refused += 1
                raise PoolError(
                    f"{self._config.queue} requests are waiting already; try again later, or "
                    f"serve with a larger {argument('queue')}",
                    code="queue_full",
                    retry_s=self._retry_s(),
                )
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Ends `job` before its next pass; nothing more is sent to its outbox."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def poke(self) -> None:
        """Says that a reader took something, or that a session is on disk."""
        with self._wake:
            self._wake.notify()

    def drain(self) -> None:
        """Takes no more jobs and ends those that have not begun."""
        with self._wake:
            self.draining = True
            for job in self._scheduler.drop(lambda _: True):
                job.fail(leaving())
            self._wake.notify()

    def stop(self) -> None:
        """Ends every job with an error, saves the sessions, frees the model; returns after it.

        A model that is still being loaded is left to the end of the process.
        """
        self.drain()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self.ready:
            self._thread.join()

    def _main(self) -> None:
        for part in (self._serve, self._close):
            try:
                part()
            except BaseException as error:  # noqa: BLE001  shown by whoever runs the pool
                self.error = self.error or error
        self._ended = True
        self._on_change()

    def _serve(self) -> None:
        """Loads the model and takes turns until told to stop."""
        self.served = self._load()
        self.served.slots.saved.writer.on_room = self.poke
        session = self.served.slots.all[0].session
        self._decoding = Decoding(
            stop_ids=self.served.stop_ids,
            chunk_tokens=self._config.chunk_tokens or measured_chunk(session),
        )
        logger.info("prompts are read %d tokens at a time", self._decoding.chunk_tokens)
        self._on_change()
        while self._turn(self.served):
            pass

    def _turn(self, served: Served) -> bool:
        """Begins the jobs that got a slot, else one pass of those that can go on, else a rest."""
        with self._wake:
            if self._stopping:
                return False
            for job in self._scheduler.drop(lambda job: job.cancelled):
                self._cancelled(job)
            admitted = list(iter(self._scheduler.admit, None))
            if self._arriving and served.slots.saved.writer.has_room:
                admitted, self._arriving = [*self._arriving, *admitted], []
            jobs = [] if admitted else self._scheduler.next()
            if not jobs and not admitted:
                self._rest(served)
        for newcomer in admitted:
            self._begin(newcomer, served)
        going_on = [run for job in jobs if (run := self._going_on(job, served)) is not None]
        if going_on:
            self._pass(going_on, served)
        elif not self._runs and not self._arriving:
            assert self._decoding is not None
            if not served.slots.refresh_idle(IDLE_REFRESH_S, self._decoding.chunk_tokens):
                served.slots.save_idle(self._config.idle_save_s)
        self._end_stalled(served)
        return True

    def _rest(self, served: Served) -> None:
        """Waits for a job, a reader or the time to save; the lock is held."""
        wait_s = _STALL_CHECK_S
        if not self._runs:
            waits = (
                served.slots.next_save_s(self._config.idle_save_s),
                served.slots.next_refresh_s(IDLE_REFRESH_S),
            )
            wait_s = min((wait for wait in waits if wait is not None), default=None)
        if wait_s != 0.0:
            self._wake.wait(wait_s)

    def _begin(self, job: Job, served: Served) -> None:
        """Gives `job` a slot and works on it up to its first pass."""
        assert self._decoding is not None
        try:
            request = job.request
            slot = served.slots.lease(
                request.read[0][0],
                owner=request.owner,
                reuse=request.reuse,
                transient=request.transient,
                predict=request.predict,
            )
        except Exception as error:  # noqa: BLE001  one request's fault must not end the pool
            self._log_fault(error)
            self._leave(job)
            job.fail(error)
            return
        job.waits = slot is None
        if slot is None:
            self._arriving.append(job)
            return
        run = _Run(job=job, slot=slot, work=job.work(slot, self._decoding))
        self._runs[id(job)] = run
        self._resume(run, served, None)

    def _going_on(self, job: Job, served: Served) -> _Run | None:
        """The run of `job`, unless its client has left: then it ends."""
        if job.waits:
            assert job.cancelled
            self._arriving.remove(job)
            self._cancelled(job)
            self._leave(job)
            return None
        run = self._runs[id(job)]
        if not job.cancelled:
            return run
        run.work.close()
        self._cancelled(job)
        self._end(run, served)
        return None

    def _pass(self, runs: list[_Run], served: Served) -> None:
        """One pass for the rows of `runs`; one that fails is made again for each of them alone."""
        started = perf_counter()
        answers: list[Passed] | list[Exception]
        try:
            answers = forward_all([run.job.call for run in runs if run.job.call is not None])
        except Exception as error:  # noqa: BLE001  given to the work that asked for the pass
            answers = [error if len(runs) == 1 else SharedPassError()] * len(runs)
        for run, answer in zip(runs, answers, strict=True):
            self._resume(run, served, answer)
            if isinstance(answer, SharedPassError) and id(run.job) in self._runs:
                self._pass([run], served)
        self.counts.steps += 1
        self.counts.busy_s += perf_counter() - started

    def _resume(self, run: _Run, served: Served, answer: Passed | Exception | None) -> None:
        """Works on a job with the answer to its rows, up to its next pass or its end."""
        try:
            if isinstance(answer, Exception):
                run.job.call = run.work.throw(answer)
            else:
                run.job.call = next(run.work) if answer is None else run.work.send(answer)
        except StopIteration:
            self._end(run, served, done=True)
        except Exception as error:  # noqa: BLE001  one request's fault must not end the pool
            self._log_fault(error)
            self._end(run, served, failed=True)
            run.job.fail(error)

    def _end(self, run: _Run, served: Served, *, done: bool = False, failed: bool = False) -> None:
        """Counts `run` before its client hears that it is `done`, and frees its slot."""
        del self._runs[id(run.job)]
        report = run.job.report()
        self.counts.add(report, failed=failed)
        if done:
            run.job.outbox.put(Done(report=report))
        logger.info(
            "a request ended: %d prompt tokens, %d of them cached, %d new, first after %.0f ms",
            report.prompt_tokens, report.cached_tokens, report.new_tokens, report.ttft_ms,
        )  # fmt: skip
        served.slots.release(run.slot, failed=failed)
        self._leave(run.job)

    def _leave(self, job: Job) -> None:
        with self._wake:
            self._scheduler.finish(job)
        if self.draining:
            self._on_change()

    def _cancelled(self, job: Job) -> None:
        self.counts.cancelled += 1
        logger.info("a client left: its request ended after %d tokens", job.report().new_tokens)

    def _end_stalled(self, served: Served) -> None:
        for run in list(self._runs.values()):
            if run.job.outbox.stalled_s() > self._config.stall_s:
                run.work.close()
                self._cancelled(run.job)
                self._end(run, served)
                run.job.fail(PoolError("the answer was not read for too long", code="not_read"))

    def _log_fault(self, error: Exception) -> None:
        """A user's mistake is their answer alone; what may be ours is also in the log."""
        if not isinstance(error, KvqError):
            logger.error("a request failed", exc_info=error)
        else:
            logger.info("a request was refused: %s", type(error).__name__)

    def _retry_s(self) -> int:
        """Seconds after which a place in the queue is likely free."""
        waiting = len(self._scheduler.waiting)
        return max(1, min(60, round(waiting * self.counts.mean_s())))

    def _close(self) -> None:
        """Ends what runs, keeps what was read, frees the model."""
        with self._wake:
            self._stopping = True
            jobs = (*self._scheduler.running, *self._scheduler.drop(lambda _: True))
        # All are told before anything that can fail.
        for job in jobs:
            job.outbox.put(Failed(error=leaving()))
        for job in jobs:
            run = self._runs.pop(id(job), None)
            if run is not None:
                run.work.close()
                if self.served is not None:
                    self.served.slots.release(run.slot, failed=self.error is not None)
        if self.served is not None:
            self.served.slots.save_all()
            self.served.slots.close()
            self.served.close()


def measured_chunk(session: Session[Any]) -> int:
    """Tokens of a prompt that one pass may take here, a power of two, by trying it out."""
    probe = max(1, min(_PROBE_TOKENS, session.config.context_tokens // 2))
    seconds = 0.0
    for _ in range(2):  # the first pass also brings the weights into memory
        started = perf_counter()
        session.prefill([0] * probe)
        seconds = perf_counter() - started
        session.rollback(probe)
    chunk = LARGEST_CHUNK_TOKENS
    while chunk > SMALLEST_CHUNK_TOKENS and seconds / probe * chunk > PASS_TARGET_S:
        chunk //= 2
    return chunk
