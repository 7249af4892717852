"""The one thread that touches the model: it loads it, then serves all running jobs pass by pass.

Everything else (sockets, JSON, tokenizing) happens in other threads. They talk to this one through
`submit`, `cancel` and each job's outbox. A pass holds the rows of many jobs, since the weights are
read once for all of them: the rows of every job that writes, and of one that reads a prompt.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from threading import Condition, Thread
from time import perf_counter
from typing import Any, Generic, TypeVar

from kvq.errors import KvqError, argument
from kvq_runtime.backends import Backend
from kvq_runtime.sequence.passes import PassResult, SharedPassError, Work, forward_all
from kvq_runtime.serving.job import Decoding, Job
from kvq_runtime.serving.outbox import Done, Failed, Report
from kvq_runtime.serving.request import PoolError, shutdown_error
from kvq_runtime.serving.scheduler import Scheduler, Turns
from kvq_runtime.serving.slots import Slot, Slots
from kvq_runtime.session.metrics import NO_ROUNDS, Rounds
from kvq_runtime.session.session import Session

logger = logging.getLogger(__name__)

SMALLEST_CHUNK_TOKENS = 16
LARGEST_CHUNK_TOKENS = 256
# A pass should not take longer than this while others wait.
PASS_TARGET_S = 0.05
_PROBE_TOKENS = 64
# An edited text is encoded again, a piece at a time, after so many idle seconds.
IDLE_REFRESH_S = 0.3
# A job that waits for its reader is checked this often.
_STALL_CHECK_S = 0.5
# Weight of the newest request in the mean time of one.
_RECENT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Says how much a pool holds and how long it waits.

    Attributes:
        sessions: Slots, which are all opened at the start.
        queue: Requests that may wait for a slot.
        chunk_tokens: Tokens of a prompt in one pass. None: as many as take about 50 ms, measured at
            the start.
        idle_save_s: A session that is idle for so many seconds is saved.
        stall_s: Seconds that text may wait for its reader.
        contended_stall_s: The same while other requests wait for a slot.
        turns: Of several pools whose passes run one at a time. None: this one is alone.
    """

    sessions: int = 4
    queue: int = 64
    chunk_tokens: int | None = None
    idle_save_s: float = 2.0
    stall_s: float = 120.0
    contended_stall_s: float = 3.0
    turns: Turns | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Holds a loaded model and its slots; `close` frees the weights."""

    backend: Backend[Any]
    stop_ids: frozenset[int]
    slots: Slots
    close: Callable[[], None]

    @property
    def context_tokens(self) -> int:
        """Returns how many tokens a session holds at most."""
        return self.slots.all[0].session.config.context_tokens

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes of one slot's KV cache."""
        return self.slots.all[0].session.config.budget_bytes


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts totals since the start; only the pool's thread changes them. `steps` are passes."""

    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    finished: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moved_tokens: int = 0
    new_tokens: int = 0
    rounds: Rounds = NO_ROUNDS
    decode_s: float = 0.0
    queued_s: float = 0.0
    busy_s: float = 0.0
    # The engine's seconds for a recent request, about.
    recent_s: float = 1.0

    def add(self, report: Report, *, failed: bool) -> None:
        """Adds a job that ended."""
        self.finished += 1
        self.failed += failed
        self.prompt_tokens += report.prompt_tokens
        self.cached_tokens += report.cached_tokens
        self.moved_tokens += report.moved_tokens
        self.new_tokens += report.new_tokens
        self.rounds += report.rounds
        self.decode_s += report.decode_ms / 1e3
        self.queued_s += report.queued_ms / 1e3
        seconds = (report.prompt_ms + report.decode_ms) / 1e3
        self.recent_s += _RECENT * (seconds - self.recent_s)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _RunningJob:
    """Holds a job with its slot and the work that is left."""

    job: Job
    slot: Slot
    work: Work[Any, None]


S = TypeVar("S", bound=Served)


class SessionPool(Generic[S]):
    """Calls `load` once and then runs every submitted job, until `stop`."""

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
        self._scheduler = Scheduler(slots=config.sessions, queue=config.queue)
        self._runs: dict[int, _RunningJob] = {}
        self._decoding: Decoding | None = None
        self._thread = Thread(target=self._main, name="kvq-pool", daemon=True)

    def start(self) -> None:
        """Begins to load the model."""
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Returns whether the model is loaded."""
        return self._decoding is not None

    @property
    def ended(self) -> bool:
        """Returns whether the thread has nothing more to do, perhaps because of `error`."""
        return self._ended

    @property
    def busy(self) -> bool:
        """Returns whether a job has a slot, begun or not."""
        return bool(self.running)

    @property
    def queue(self) -> tuple[int, int]:
        """Returns how many jobs wait and how many run."""
        with self._wake:
            return len(self._scheduler.waiting), len(self._scheduler.running)

    @property
    def waiting(self) -> tuple[Job, ...]:
        """Returns the jobs that have not begun."""
        with self._wake:
            return self._scheduler.waiting

    @property
    def running(self) -> tuple[Job, ...]:
        """Returns the jobs that have begun."""
        with self._wake:
            return self._scheduler.running

    def submit(self, job: Job) -> None:
        """Queues `job`. Raises `PoolError` when the queue is full or the pool shuts down."""
        with self._wake:
            if self.draining or self._stopping:
                raise shutdown_error()
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
        """Wakes the pool: a reader took something."""
        with self._wake:
            self._wake.notify()

    def drain(self) -> None:
        """Takes no more jobs and ends those that have not begun."""
        with self._wake:
            self.draining = True
            for job in self._scheduler.drop(lambda _: True):
                job.fail(shutdown_error())
            self._wake.notify()

    def stop(self) -> None:
        """Ends every job with an error, saves the sessions and frees the model, then returns.

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
        if self._config.turns is not None:
            self._config.turns.wish(self, None)
        self._ended = True
        self._on_change()

    def _serve(self) -> None:
        """Loads the model and takes turns until `stop`."""
        self.served = self._load()
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
        """Begins the jobs that got a slot, else makes one pass, else rests.

        Returns False at the end.
        """
        with self._wake:
            if self._stopping:
                return False
            for job in self._scheduler.drop(lambda job: job.cancelled):
                self._cancelled(job)
            admitted = list(iter(self._scheduler.admit, None))
            num_waiting = len(self._scheduler.waiting)
            jobs = [] if admitted else self._scheduler.next()
            if not jobs and self._config.turns is not None:
                self._config.turns.wish(self, None)
            if not jobs and not admitted:
                self._rest(served)
        for newcomer in admitted:
            self._begin(newcomer, served)
        runs = [run for job in jobs if (run := self._continuing_run(job, served)) is not None]
        if runs:
            self._pass_in_turn(runs, served)
        elif not self._runs:
            assert self._decoding is not None
            if not served.slots.refresh_idle(IDLE_REFRESH_S, self._decoding.chunk_tokens):
                served.slots.save_idle(self._config.idle_save_s)
        self._end_stalled(served, num_waiting)
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
            slot = served.slots.lease(job.request)
        except Exception as error:  # noqa: BLE001  one request's fault must not end the pool
            self._log_fault(error)
            self._leave(job)
            job.fail(error)
            return
        run = _RunningJob(job=job, slot=slot, work=job.work(slot, self._decoding))
        self._runs[id(job)] = run
        self._resume(run, served, None)

    def _continuing_run(self, job: Job, served: Served) -> _RunningJob | None:
        """Returns the run of `job`, or ends it if its client has left."""
        run = self._runs[id(job)]
        if not job.cancelled:
            return run
        run.work.close()
        self._cancelled(job)
        self._end(run, served)
        return None

    def _pass_in_turn(self, runs: list[_RunningJob], served: Served) -> None:
        """Makes one pass, when the pools that share the processor leave it to this one."""
        turns = self._config.turns
        if turns is None:
            self._pass(runs, served)
            return
        turns.wish(self, min(run.job.rank for run in runs))
        with turns.turn(self):
            self._pass(runs, served)

    def _pass(self, runs: list[_RunningJob], served: Served) -> None:
        """Makes one pass for the rows of `runs`; if it fails, each of them gets a pass alone."""
        started = perf_counter()
        answers: list[PassResult] | list[Exception]
        try:
            answers = forward_all(
                [run.job.pass_request for run in runs if run.job.pass_request is not None]
            )
        except Exception as error:  # noqa: BLE001  given to the work that asked for the pass
            answers = [error if len(runs) == 1 else SharedPassError()] * len(runs)
        for run, answer in zip(runs, answers, strict=True):
            self._resume(run, served, answer)
            if isinstance(answer, SharedPassError) and id(run.job) in self._runs:
                self._pass([run], served)
        self.counts.steps += 1
        self.counts.busy_s += perf_counter() - started

    def _resume(
        self, run: _RunningJob, served: Served, answer: PassResult | Exception | None
    ) -> None:
        """Works on a job with the answer to its rows, up to its next pass or its end."""
        try:
            if isinstance(answer, Exception):
                run.job.pass_request = run.work.throw(answer)
            else:
                run.job.pass_request = next(run.work) if answer is None else run.work.send(answer)
        except StopIteration:
            self._end(run, served, done=True)
        except Exception as error:  # noqa: BLE001  one request's fault must not end the pool
            self._log_fault(error)
            self._end(run, served, failed=True)
            run.job.fail(error)

    def _end(
        self, run: _RunningJob, served: Served, *, done: bool = False, failed: bool = False
    ) -> None:
        """Counts `run` before its client learns that it is `done`, and frees its slot."""
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

    def _end_stalled(self, served: Served, num_waiting: int) -> None:
        """Ends the jobs whose readers have not read for too long; their slots keep the text.

        For each job that waits for a slot one ends after a shorter time, the longest stalled first.
        """
        stalls = [(run.job.outbox.stalled_s(), run) for run in self._runs.values()]
        for place, (stalled_s, run) in enumerate(sorted(stalls, key=itemgetter(0), reverse=True)):
            contended = place < num_waiting
            patience_s = self._config.contended_stall_s if contended else self._config.stall_s
            if stalled_s > min(patience_s, self._config.stall_s):
                run.work.close()
                self._cancelled(run.job)
                self._end(run, served)
                run.job.fail(_unread_error(contended=contended))

    def _log_fault(self, error: Exception) -> None:
        """Logs an error that may be a fault of kvq; a user's mistake is only answered."""
        if not isinstance(error, KvqError):
            logger.error("a request failed", exc_info=error)
        else:
            logger.info("a request was refused: %s", type(error).__name__)

    def _retry_s(self) -> int:
        """Returns the seconds after which a place in the queue is likely free."""
        waiting = len(self._scheduler.waiting)
        return max(1, min(60, round(waiting * self.counts.recent_s)))

    def _close(self) -> None:
        """Ends what runs, saves what was read, frees the model."""
        with self._wake:
            self._stopping = True
            jobs = (*self._scheduler.running, *self._scheduler.drop(lambda _: True))
        # All clients are told before anything that can fail.
        for job in jobs:
            job.outbox.put(Failed(error=shutdown_error()))
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


def _unread_error(*, contended: bool) -> PoolError:
    """Returns the error for a reader that did not read."""
    reason = "others were waiting and the answer was not read for some seconds"
    return PoolError(
        f"{reason if contended else 'the answer was not read for too long'}; ask again, and read "
        "the stream as it comes: what was computed is kept",
        code="not_read",
    )


def measured_chunk(session: Session[Any]) -> int:
    """Measures how many prompt tokens one pass may take here, a power of two."""
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
