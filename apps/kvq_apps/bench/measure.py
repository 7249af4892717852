"""Times engines beside each other: every case in turn, over and over, then the medians.

A case is one engine with one cache setting at one depth. Knows the engines' protocol only.
"""

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any

import numpy as np

from kvq import devices
from kvq.config import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_READ,
    MOST_DRAFT_TOKENS,
    PAGE_TOKENS,
)
from kvq.errors import UsageError, argument
from kvq_apps.bench.bandwidth import read_bandwidth
from kvq_apps.bench.engines import (
    OURS,
    BenchBatch,
    BenchEngine,
    BenchSequence,
    Setting,
    open_engine,
    own_engines,
    own_width,
    reads_gguf,
    shown_peers,
)
from kvq_apps.output import Shown
from kvq_runtime import device, gpu
from kvq_runtime.backends import ModelFiles

# A visit takes one step to bring the engine's weights and threads back, then times these.
STEPS_PER_VISIT = 3
PREFILL_ROUNDS = 4
# Of a pass: what a session takes at once of a prompt.
MOST_ROWS = DEFAULT_CHUNK_TOKENS
# A first prefill this short pays for first use of memory; a longer one hardly does.
WARM_UP_S = 5.0
# Caches, their snapshots and the engines' scratch must fit this share of the free memory.
MEMORY_SHARE = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedJob:
    """What is measured: depths, cache settings of ours, peers, and how often.

    Each depth is extended by `prefill_tokens` in one go; a prefill expected to take longer than
    `prefill_limit_s` is left out. A pass takes each of `rows` tokens of one sequence, a chain, with
    the logits of all; more than a draft holds go as a piece of a prompt, with those of the last.
    Attention alone is timed for these rows, and for one row of each of `batch` sequences.

    `linear` are the operators that ours multiplies with, one engine each; none: the model's own.

    Ours runs with each of `kv` as it is, with steps that read of it each of `kv_read`, and under
    the pressure of `kv_budget` with each of `kv_policy`; a timed decode is then the mean of
    `PAGE_TOKENS` steps, of which one closes a page. Of a model's experts ours has
    `weights_budget` bytes in memory at most.
    """

    contexts: tuple[int, ...]
    kv: tuple[str, ...]
    kv_read: tuple[str, ...] = ()
    kv_policy: tuple[str, ...] = ()
    kv_budget: str | None = None
    peers: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 5)
    batch: tuple[int, ...] = (1,)
    linear: tuple[str, ...] = ()
    repeat: int = 7
    prefill_tokens: int = 256
    prefill_limit_s: float = 60.0
    device: str = gpu.PROCESSOR
    weights_budget: int | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        least = {
            "context": min(self.contexts),
            "repeat": self.repeat,
            "prefill": self.prefill_tokens,
            "batch": min(self.batch),
        }
        for flag, value in least.items():
            if value < 1:
                raise UsageError(about=f"--{flag}", value=value, possible="give 1 or more")
        for rows in self.rows:
            if not 1 <= rows <= MOST_ROWS:
                raise UsageError(
                    f"{argument('--rows')} {rows} is not possible: give 1 to {MOST_ROWS}"
                )

    @property
    def settings(self) -> tuple[Setting, ...]:
        """How ours keeps its caches."""
        drafted = [rows for rows in self.rows if rows <= MOST_DRAFT_TOKENS]
        room = max(DEFAULT_DRAFT_TOKENS, *drafted, 0)
        pressed = [
            Setting(kv=kv, policy=policy, budget=self.kv_budget, draft_tokens=room)
            for kv in self.kv
            for policy in self.kv_policy
        ]
        reads = (DEFAULT_READ, *self.kv_read)
        free = [Setting(kv=kv, read=read, draft_tokens=room) for kv in self.kv for read in reads]
        return (*free, *pressed)

    @property
    def visit(self) -> tuple[int, int]:
        """Samples of a visit, and decode steps that each is the mean of."""
        return (1, PAGE_TOKENS) if self.kv_policy else (STEPS_PER_VISIT, 1)

    @property
    def room(self) -> int:
        """Tokens a sequence takes beyond its depth."""
        samples, steps = self.visit
        return max(self.prefill_tokens, samples * steps + 1, *self.rows)


@dataclass(kw_only=True, slots=True)
class Case:
    """One engine at one setting and one depth, and the seconds it took so far.

    `relief_s` is the part of each of `decode_s` in which room was made; `pass_s` and `attention_s`
    are by the number of rows, `batches` and `batch_s` by that of sequences.
    """

    engine: str
    setting: Setting
    context: int
    threads: int
    sequence: BenchSequence
    batches: dict[int, BenchBatch] = field(default_factory=dict[int, BenchBatch])
    decode_s: list[float] = field(default_factory=list[float])
    relief_s: list[float] = field(default_factory=list[float])
    prefill_s: list[float] = field(default_factory=list[float])
    prefill_skipped: str | None = None
    pass_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    attention_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    batch_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    @property
    def name(self) -> str:
        """The engine and its setting."""
        return f"{self.engine} {self.setting.text}"

    def row(self, job: SpeedJob, bandwidth: float) -> dict[str, Any]:
        """The medians, in the units of `kvq bench --json`; `bandwidth` in bytes a second."""
        decode, prefill = median(self.decode_s), _median(self.prefill_s)
        weight_bytes, cache_bytes = self.sequence.step_bytes()
        return {
            "engine": self.engine,
            "kv": self.setting.name,
            "kv_read": self.setting.read,
            "kv_policy": self.setting.policy,
            "context": self.context,
            "threads": self.threads,
            "decode_ms": decode * 1e3,
            "decode_min_ms": min(self.decode_s) * 1e3,
            "decode_p95_ms": p95(self.decode_s) * 1e3,
            "decode_samples": len(self.decode_s),
            "relief_share": sum(self.relief_s) / sum(self.decode_s),
            "prefill_tok_s": prefill and job.prefill_tokens / prefill,
            "prefill_samples": len(self.prefill_s),
            "prefill_skipped": self.prefill_skipped,
            "ttft_ms": prefill and prefill * 1e3,
            "kv_bytes": self.sequence.kv_bytes,
            "weight_bytes_read": weight_bytes,
            "kv_bytes_read": cache_bytes,
            "memory_bytes_s": bandwidth,
            "bandwidth_share": (weight_bytes + cache_bytes) / decode / bandwidth,
            "pass_ms": _medians_ms(self.pass_s),
            "attention_ms": _medians_ms(self.attention_s),
            "batch_attention_ms": _medians_ms(self.batch_s),
        }


def measure(
    files: ModelFiles,
    job: SpeedJob,
    threads: int,
    progress: Shown,
    *,
    beside: Sequence[ModelFiles] = (),
    gguf: ModelFiles | None = None,
) -> list[dict[str, Any]]:
    """The rows of all engines at `threads` threads, by depth, ours first.

    `beside`: the same model with weights of other widths, one more engine of ours each. `gguf`: the
    file that `files` were made of, which peers run as it is if they can.
    """
    progress(0, 1, "reading memory")
    bandwidth = read_bandwidth(threads, job.device)
    with ExitStack() as stack:
        asked, peers = job.settings, shown_peers(job.peers).items()
        named = [
            *((name, name, files, asked) for name in own_engines(files, job.linear, job.device)),
            *((own_width(other), OURS, other, asked) for other in beside),
            *((one, name, gguf if gguf and reads_gguf(name) else files, ()) for name, one in peers),
        ]
        engines = list[BenchEngine]()
        for shown, name, weights, settings in named:
            engine = open_engine(
                name,
                weights,
                threads=threads,
                settings=settings,
                device=job.device,
                weights_budget=job.weights_budget,
            )
            engines.append(stack.enter_context(closing(engine)))
            engine.name = shown
        rows: list[dict[str, Any]] = []
        for contexts in _groups(engines, job):
            rows += _measure_group(engines, job, contexts, threads, bandwidth, progress)
        return rows


def _groups(engines: Sequence[BenchEngine], job: SpeedJob) -> list[tuple[int, ...]]:
    """Depths measured together: all of them, or one by one where memory is short."""
    contexts = tuple(sorted(set(job.contexts)))
    sequences = 1 + sum(count for count in job.batch if count > 1)
    needed = sequences * sum(
        engine.cache_bytes(setting, context + job.room)
        for engine in engines
        for setting in engine.settings
        for context in contexts
    )
    if needed <= MEMORY_SHARE * _free_bytes(job.device):
        return [contexts]
    return [(context,) for context in contexts]


def _free_bytes(name: str) -> int:
    """Of the memory that caches lie in."""
    if name == gpu.PROCESSOR:
        return device.probe().memory_free_bytes
    return devices.opened(name).free_bytes


def _measure_group(
    engines: Sequence[BenchEngine],
    job: SpeedJob,
    contexts: Sequence[int],
    threads: int,
    bandwidth: float,
    progress: Shown,
) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        cases: list[Case] = []
        for context in contexts:
            for engine in engines:
                for setting in engine.settings:
                    progress(0, 1, f"filling {engine.name} {setting.text} to {context}")
                    sequence = engine.sequence(setting, context, job.room)
                    stack.enter_context(closing(sequence))
                    case = Case(
                        engine=engine.name,
                        setting=setting,
                        context=context,
                        threads=threads,
                        sequence=sequence,
                    )
                    cases.append(case)
                    for count, batch in _batches(engine, setting, context, job):
                        case.batches[count] = stack.enter_context(closing(batch))
        with _collector_off():
            _decode(cases, job, progress)
            _passes(cases, job, progress)
            _prefill(cases, job, progress)
        return [case.row(job, bandwidth) for case in cases]


def _batches(
    engine: BenchEngine, setting: Setting, context: int, job: SpeedJob
) -> Iterator[tuple[int, BenchBatch]]:
    """Several sequences each, of a cache that holds everything: `Case.sequence` is a batch of 1."""
    for count in job.batch if setting.policy is None else ():
        batch = engine.batch(setting, context, job.room, count) if count > 1 else None
        if batch is not None:
            yield count, batch


def _decode(cases: Sequence[Case], job: SpeedJob, progress: Shown) -> None:
    token = np.zeros(1, np.int64)
    samples, steps = job.visit

    def decode(sequence: BenchSequence) -> None:
        for _ in range(steps):
            sequence.forward(token)

    for turn, case in _turns(cases, job.repeat):
        progress(turn, job.repeat * len(cases), f"decode at {case.context}: {case.name}")
        sequence = case.sequence
        sequence.forward(token)
        for _ in range(samples):
            before = sequence.relief_s
            case.decode_s.append(_seconds(sequence, lambda one=sequence: decode(one)) / steps)
            case.relief_s.append((sequence.relief_s - before) / steps)
        sequence.rollback()


def _passes(cases: Sequence[Case], job: SpeedJob, progress: Shown) -> None:
    """Whole passes and their attention alone, each number of rows right after the other."""
    for turn, case in _turns(cases, job.repeat):
        progress(turn, job.repeat * len(cases), f"rows at {case.context}: {case.name}")
        sequence = case.sequence
        parts = ((sequence.verify, case.pass_s), (sequence.attend, case.attention_s))
        for run, seconds in parts:
            for rows in job.rows:
                # The first brings weights and threads back; not every engine takes so many.
                willing = run(rows)
                sequence.rollback()
                for _ in range(willing * (STEPS_PER_VISIT if rows <= MOST_DRAFT_TOKENS else 1)):
                    taken = _seconds(sequence, lambda run=run, rows=rows: run(rows))
                    seconds.setdefault(rows, []).append(taken)
                    sequence.rollback()
        for count, batch in case.batches.items():
            batch.attend(1)
            for _ in range(STEPS_PER_VISIT):
                taken = _seconds(sequence, lambda batch=batch: batch.attend(1))
                case.batch_s.setdefault(count, []).append(taken)


def _prefill(cases: Sequence[Case], job: SpeedJob, progress: Shown) -> None:
    """From shallow to deep, so that a prefill too long is foreseen by the one before."""
    ids = np.arange(job.prefill_tokens, dtype=np.int64) % 64
    before: dict[str, Case] = {}
    contexts = sorted({case.context for case in cases})
    for place, context in enumerate(contexts):
        here = [case for case in cases if case.context == context]
        for case in here:
            case.prefill_skipped = _too_long(case, before.get(case.name), job)
        willing = [case for case in here if case.prefill_skipped is None]
        for turn, case in _turns(willing, PREFILL_ROUNDS):
            if sum(case.prefill_s) > job.prefill_limit_s / 2:
                continue
            share = place + turn / (PREFILL_ROUNDS * len(willing))
            progress(share, len(contexts), f"prefill at {context}: {case.name}")
            seconds = _seconds(case.sequence, lambda case=case: case.sequence.forward(ids))
            case.sequence.rollback()
            if turn >= len(willing) or seconds > WARM_UP_S:
                case.prefill_s.append(seconds)
        before |= {case.name: case for case in willing}


def _too_long(case: Case, before: Case | None, job: SpeedJob) -> str | None:
    """Why a prefill is left out, judged by the same setting's at a smaller depth.

    Two bounds: time grows at most in proportion to the tokens attended to, and a row of a prefill
    takes on at most what a decode step does.
    """
    if before is None or case.sequence.why_no_prefill:
        return case.sequence.why_no_prefill
    seconds = median(before.prefill_s)
    proportion = (case.context + job.prefill_tokens) / (before.context + job.prefill_tokens)
    slower = max(0.0, min(case.decode_s) - min(before.decode_s))
    expected = min(seconds * proportion, seconds + slower * job.prefill_tokens)
    if expected <= job.prefill_limit_s:
        return None
    return f"up to {expected:.0f} s expected, --prefill-limit is {job.prefill_limit_s:g}"


def _turns(cases: Sequence[Case], rounds: int) -> Iterator[tuple[int, Case]]:
    """A B C, B C A, ..., numbered: none always follows the same other one."""
    turned = (cases[(first + i) % len(cases)] for first in range(rounds) for i in range(len(cases)))
    return enumerate(turned)


def _seconds(sequence: BenchSequence, work: Callable[[], object]) -> float:
    """What `work` takes by the sequence's clock."""
    since = sequence.clock()
    work()
    return sequence.clock() - since


def p95(values: list[float]) -> float:
    """The value that 95 of 100 do not exceed."""
    return sorted(values)[ceil(0.95 * len(values)) - 1]


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _medians_ms(seconds: dict[int, list[float]]) -> dict[str, float]:
    return {str(rows): median(taken) * 1e3 for rows, taken in seconds.items()}


@contextmanager
def _collector_off() -> Generator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
