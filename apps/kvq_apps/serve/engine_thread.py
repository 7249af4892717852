"""The one thread that touches the model: it loads it, then steps one job after another.

Everything else (sockets, JSON, tokenizing) happens in other threads, which talk to this one
through `submit`, `cancel` and each job's outbox.
"""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter

from kvq.errors import KvqError
from kvq_apps import output
from kvq_apps.serve.arenas import Arena, Arenas
from kvq_apps.serve.config import STEP_TARGET_S, ServeConfig
from kvq_apps.serve.counts import Counts
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.job import Decoding, Job
from kvq_apps.serve.outbox import Failed
from kvq_apps.serve.scheduler import Scheduler
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.session import Session

logger = logging.getLogger(__name__)

SMALLEST_CHUNK_TOKENS = 16
LARGEST_CHUNK_TOKENS = 256
_PROBE_TOKENS = 64
# A job that waits for its reader is looked at again this often.
_STALL_CHECK_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A loaded model and its arenas. `close` frees the weights."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    stop_ids: frozenset[int]
    k_bits: int
    v_bits: int
    loaded_at: int
    arenas: Arenas
    close: Callable[[], None]

    @property
    def kv(self) -> str:
        """The widths as `--kv` writes them."""
        return output.kv_text(self.k_bits, self.v_bits)

    @property
    def context_tokens(self) -> int:
        """Tokens a session holds at most."""
        return self.arenas.all[0].session.config.context_tokens

    @property
    def arena_bytes(self) -> int:
        """Bytes of one arena."""
        return self.arenas.all[0].session.config.budget_bytes


@dataclass(kw_only=True, slots=True, eq=False)
class _Run:
    """A job with its arena and the steps it has left."""

    arena: Arena
    steps: Generator[None]


class EngineThread:
    """Runs `load` once and then every submitted job, until `stop`."""

    def __init__(
        self,
        load: Callable[[], Served],
        config: ServeConfig,
        on_change: Callable[[], None],
    ) -> None:
        self.counts = Counts()
        self.served: Served | None = None
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
        self._thread = Thread(target=self._main, name="kvq-engine", daemon=True)

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
        """Whether a job runs, or is about to."""
        return bool(self._runs or self._arriving)

    @property
    def queue(self) -> tuple[int, int]:
        """How many jobs wait and how many run."""
        with self._wake:
            return len(self._scheduler.waiting), len(self._scheduler.running)

    def submit(self, job: Job) -> None:
        """Queues `job`. Raises `RequestError` when the queue is full or the server is leaving."""
        with self._wake:
            if self.draining or self._stopping:
                raise leaving()
            if not self._scheduler.submit(job):
                self.counts.refused += 1
                raise RequestError(
                    f"{self._config.queue} requests are waiting already; try again later, or "
                    "serve with a larger --queue",
                    status=429,
                    code="queue_full",
                    retry_s=self._retry_s(),
                )
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Ends `job` before its next step; nothing more is sent to its outbox."""
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
        try:
            self.served = self._load()
            self.served.arenas.saved.writer.on_room = self.poke
            session = self.served.arenas.all[0].session
            self._decoding = Decoding(
                tokenizer=self.served.tokenizer,
                stop_ids=self.served.stop_ids,
                chunk_tokens=self._config.chunk_tokens or measured_chunk(session),
            )
            logger.info("prompts are read %d tokens at a time", self._decoding.chunk_tokens)
            self._on_change()
            while self._turn(self.served):
                pass
        except BaseException as error:  # noqa: BLE001  shown by whoever runs the server
            self.error = error
        finally:
            self._close()
            self._ended = True
            self._on_change()

    def _turn(self, served: Served) -> bool:
        """Begins the jobs that got a slot, else one step of one job, else a rest."""
        with self._wake:
            if self._stopping:
                return False
            for job in self._scheduler.drop(lambda job: job.cancelled):
                self._cancelled(job)
            admitted = list(iter(self._scheduler.admit, None))
            if served.arenas.saved.writer.has_room:
                admitted, self._arriving = [*self._arriving, *admitted], []
            job = None if admitted else self._scheduler.next()
            if job is None and not admitted:
                self._rest(served)
        for newcomer in admitted:
            self._begin(newcomer, served)
        if job is not None:
            self._step(job, served)
        elif self._runs:
            self._end_stalled(served)
        else:
            served.arenas.save_idle(self._config.idle_save_s)
        return True

    def _rest(self, served: Served) -> None:
        """Waits for a job, a reader or the time to save; the lock is held."""
        wait_s = _STALL_CHECK_S
        if not self._runs:
            wait_s = served.arenas.next_save_s(self._config.idle_save_s)
        if wait_s != 0.0:
            self._wake.wait(wait_s)

    def _begin(self, job: Job, served: Served) -> None:
        assert self._decoding is not None
        try:
            ask = job.ask
            arena = served.arenas.lease(ask.prompts[0], reuse=ask.reuse, transient=ask.transient)
        except Exception as error:  # noqa: BLE001  one request's fault must not end the server
            self._log_fault(error)
            self._leave(job)
            job.fail(error)
            return
        job.waits = arena is None
        if arena is None:
            self._arriving.append(job)
        else:
            self._runs[id(job)] = _Run(arena=arena, steps=job.steps(arena, self._decoding))

    def _step(self, job: Job, served: Served) -> None:
        if job.waits:
            assert job.cancelled
            self._arriving.remove(job)
            self._cancelled(job)
            self._leave(job)
            return
        run = self._runs[id(job)]
        if job.cancelled:
            run.steps.close()
            self._cancelled(job)
            self._end(job, served)
            return
        started = perf_counter()
        try:
            next(run.steps)
        except StopIteration:
            self._end(job, served)
        except Exception as error:  # noqa: BLE001  one request's fault must not end the server
            self._log_fault(error)
            self._end(job, served, failed=True)
            job.fail(error)
        self.counts.steps += 1
        self.counts.busy_s += perf_counter() - started

    def _end(self, job: Job, served: Served, *, failed: bool = False) -> None:
        run = self._runs.pop(id(job))
        report = job.report()
        self.counts.add(report, failed=failed)
        logger.info(
            "a request ended: %d prompt tokens, %d of them cached, %d new, first after %.0f ms",
            report.prompt_tokens, report.cached_tokens, report.new_tokens, report.ttft_ms,
        )  # fmt: skip
        served.arenas.release(run.arena, failed=failed)
        self._leave(job)

    def _leave(self, job: Job) -> None:
        with self._wake:
            self._scheduler.finish(job)
        if self.draining:
            self._on_change()

    def _cancelled(self, job: Job) -> None:
        self.counts.cancelled += 1
        logger.info("a client left: its request ended after %d tokens", job.report().new_tokens)

    def _end_stalled(self, served: Served) -> None:
        for job in self._scheduler.running:
            if job.outbox.stalled_s() > self._config.stall_s:
                self._runs[id(job)].steps.close()
                self._cancelled(job)
                self._end(job, served)
                job.fail(RequestError("the answer was not read for too long", status=408))

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
        for job in jobs:
            run = self._runs.pop(id(job), None)
            if run is not None:
                run.steps.close()
                if self.served is not None:
                    self.served.arenas.release(run.arena, failed=self.error is not None)
            job.outbox.put(Failed(error=leaving()))
        if self.served is not None:
            self.served.arenas.save_all()
            self.served.arenas.close()
            self.served.close()


def leaving() -> RequestError:
    """What a request is answered with while the server shuts down."""
    return RequestError(
        "the server is shutting down; ask again when it is back",
        status=503,
        code="shutting_down",
        retry_s=5,
    )


def measured_chunk(session: Session) -> int:
    """Tokens of a prompt that one step may take here, a power of two, by trying it out."""
    probe = max(1, min(_PROBE_TOKENS, session.config.context_tokens // 2))
    seconds = 0.0
    for _ in range(2):  # the first pass also brings the weights into memory
        started = perf_counter()
        session.prefill([0] * probe)
        seconds = perf_counter() - started
        session.rollback(probe)
    chunk = LARGEST_CHUNK_TOKENS
    while chunk > SMALLEST_CHUNK_TOKENS and seconds / probe * chunk > STEP_TARGET_S:
        chunk //= 2
    return chunk
