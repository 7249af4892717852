"""Times engines side by side: every case in turn, over and over, then the medians.

A case is one engine with one cache setting at one depth. The depths are measured one after the
other. Knows the engines' interface only.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import ceil
from statistics import median
from typing import Any, TypeVar

import numpy as np

from kvq.config import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_READ,
    MOST_DRAFT_TOKENS,
    PAGE_TOKENS,
)
from kvq_apps.bench.bandwidth import read_bandwidth
from kvq_apps.bench.engines import (
    GGUF_READERS,
    BenchEngine,
    BenchSequence,
    Setting,
    default_engine,
    open_engine,
    shown_peers,
)
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal.output import ShowProgress
from kvq_runtime.backends import ModelFiles
from kvq_runtime.machine import gpu

T = TypeVar("T")
# A visit's first step, which is not timed, brings the engine's weights and threads back.
STEPS_PER_VISIT = 3
PREFILL_ROUNDS = 4
# A shorter first prefill pays for the first use of memory; a longer one hardly does.
WARM_UP_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedJob:
    """Holds what is measured: depths, cache settings of kvq, peers, and how often.

    Each depth is extended by `prefill_tokens` in one go; a prefill that is expected to take longer
    than `prefill_limit_s` is left out. A pass takes each of `rows` tokens of one sequence, a chain,
    with the logits of all. More rows than a draft holds go as a piece of a prompt, with the logits
    of the last. Attention alone is timed for these rows.

    kvq runs with each of `kv` as it is, with steps that read each of `kv_read` of it, and under the
    pressure of `kv_budget` with each of `kv_policy`. A timed decode is then the mean of
    `PAGE_TOKENS` steps, of which one closes a page. At most `weights_budget` bytes of a model's
    experts are in memory.
    """

    contexts: tuple[int, ...]
    kv: tuple[str, ...]
    kv_read: tuple[str, ...] = ()
    kv_policy: tuple[str, ...] = ()
    kv_budget: str | None = None
    peers: tuple[str, ...] = ()
    rows: tuple[int, ...] = (1, 5)
    repeat: int = 7
    prefill_tokens: int = 256
    prefill_limit_s: float = 60.0
    device: str = gpu.PROCESSOR
    weights_budget: int | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        check_range(1, context=min(self.contexts), repeat=self.repeat, prefill=self.prefill_tokens)
        for rows in self.rows:
            # A session takes no more of a prompt at once.
            check_range(1, DEFAULT_CHUNK_TOKENS, rows=rows)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Returns kvq's cache settings."""
        drafted = [rows for rows in self.rows if rows <= MOST_DRAFT_TOKENS]
        setting = partial(Setting, draft_tokens=max(DEFAULT_DRAFT_TOKENS, *drafted, 0))
        free = product(self.kv, (DEFAULT_READ, *self.kv_read))
        pressed = product(self.kv, self.kv_policy)
        return (
            *(setting(kv=kv, read=read) for kv, read in free),
            *(setting(kv=kv, policy=policy, budget=self.kv_budget) for kv, policy in pressed),
        )

    @property
    def visit(self) -> tuple[int, int]:
        """Returns the samples of a visit, and the decode steps that each is the mean of."""
        return (1, PAGE_TOKENS) if self.kv_policy else (STEPS_PER_VISIT, 1)

    @property
    def room(self) -> int:
        """Counts the tokens a sequence takes beyond its depth."""
        samples, steps = self.visit
        return max(self.prefill_tokens, samples * steps + 1, *self.rows)


@dataclass(slots=True)
class Case:
    """Holds one engine at one setting and one depth, and the seconds measured so far.

    `relief_s` is the part of each of `decode_s` in which room was made. `pass_s` and `attention_s`
    are by the number of rows.
    """

    engine: str
    setting: Setting
    context: int
    threads: int
    sequence: BenchSequence
    decode_s: list[float] = field(default_factory=list[float])
    relief_s: list[float] = field(default_factory=list[float])
    prefill_s: list[float] = field(default_factory=list[float])
    prefill_skipped: str | None = None
    pass_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    attention_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    @property
    def name(self) -> str:
        """Returns the engine and its setting."""
        return f"{self.engine} {self.setting.text}"

    def row(self, job: SpeedJob, bandwidth: float) -> dict[str, Any]:
        """Returns the medians in the units of `kvq bench --json`; `bandwidth` is in bytes/s."""
        decode, relief = median(self.decode_s), sum(self.relief_s) / sum(self.decode_s)
        prefill = median(self.prefill_s) if self.prefill_s else None
        weight_bytes, cache_bytes = self.sequence.step_bytes()
        passes = {"pass_ms": self.pass_s, "attention_ms": self.attention_s}
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
            "relief_share": relief,
            "relief_ms": relief * decode * PAGE_TOKENS * 1e3,
            "prefill_tok_s": prefill and job.prefill_tokens / prefill,
            "prefill_samples": len(self.prefill_s),
            "prefill_skipped": self.prefill_skipped,
            "ttft_ms": prefill and prefill * 1e3,
            "kv_bytes": self.sequence.kv_bytes,
            "weight_bytes_read": weight_bytes,
            "kv_bytes_read": cache_bytes,
            "memory_bytes_s": bandwidth,
            "bandwidth_share": (weight_bytes + cache_bytes) / decode / bandwidth,
            **{
                name: {str(rows): median(values) * 1e3 for rows, values in seconds.items()}
                for name, seconds in passes.items()
            },
        }


def measure(
    files: ModelFiles,
    job: SpeedJob,
    threads: int,
    progress: ShowProgress,
    gguf: ModelFiles | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Measures all engines at `threads` threads; yields the rows of each depth, kvq first.

    `gguf`: the file that `files` were made of, which peers run as it is if they can.
    """
    progress(0, 1, "reading memory")
    bandwidth = read_bandwidth(threads, job.device)
    labels = {default_engine(files): default_engine(files), **shown_peers(job.peers)}
    before: dict[str, Case] = {}
    with ExitStack() as stack:
        engines: list[BenchEngine] = []
        for name, label in labels.items():
            engine = open_engine(
                name,
                gguf if gguf and name.partition("=")[0] in GGUF_READERS else files,
                threads=threads,
                settings=() if name in job.peers else job.settings,
                device=job.device,
                weights_budget=job.weights_budget,
            )
            engines.append(stack.enter_context(closing(engine)))
            engine.name = label
        for context in sorted(set(job.contexts)):
            with ExitStack() as depth_stack:
                cases: list[Case] = []
                for engine in engines:
                    for setting in engine.settings:
                        progress(0, 1, f"filling {engine.name} {setting.text} to {context}")
                        sequence = engine.sequence(setting, context, job.room)
                        depth_stack.enter_context(closing(sequence))
                        cases.append(Case(engine.name, setting, context, threads, sequence))
                gc.collect()
                gc.disable()
                depth_stack.callback(gc.enable)
                _decode(cases, job, progress)
                _passes(cases, job, progress)
                _prefill(cases, job, before, progress)
                yield [case.row(job, bandwidth) for case in cases]


def _decode(cases: Sequence[Case], job: SpeedJob, progress: ShowProgress) -> None:
    token = np.zeros(1, np.int64)
    samples, steps = job.visit

    for turn, case in turns(cases, job.repeat):
        progress(turn, job.repeat * len(cases), f"decode at {case.context}: {case.name}")
        sequence = case.sequence
        sequence.forward(token)
        for _ in range(samples):
            since, relief_s = sequence.clock(), sequence.relief_s
            for _ in range(steps):
                sequence.forward(token)
            case.decode_s.append((sequence.clock() - since) / steps)
            case.relief_s.append((sequence.relief_s - relief_s) / steps)
        sequence.rollback()


def _passes(cases: Sequence[Case], job: SpeedJob, progress: ShowProgress) -> None:
    """Times whole passes and their attention alone, each number of rows right after the other."""
    for turn, case in turns(cases, job.repeat):
        progress(turn, job.repeat * len(cases), f"rows at {case.context}: {case.name}")
        sequence = case.sequence
        runs = ((sequence.verify, case.pass_s), (sequence.attend, case.attention_s))
        for (run, seconds), rows in product(runs, job.rows):
            # The first run brings weights and threads back; not every engine takes so many rows.
            possible = run(rows)
            sequence.rollback()
            for _ in range(possible * (STEPS_PER_VISIT if rows <= MOST_DRAFT_TOKENS else 1)):
                elapsed_s = _seconds(sequence, lambda run=run, rows=rows: run(rows))
                seconds.setdefault(rows, []).append(elapsed_s)
                sequence.rollback()


def _prefill(
    cases: Sequence[Case], job: SpeedJob, before: dict[str, Case], progress: ShowProgress
) -> None:
    """Times prefills, but those that `before`, of a smaller depth, predicts to take too long."""
    ids = np.arange(job.prefill_tokens, dtype=np.int64) % 64
    for case in cases:
        case.prefill_skipped = _too_long(case, before.get(case.name), job)
    chosen = [case for case in cases if case.prefill_skipped is None]
    for turn, case in turns(chosen, PREFILL_ROUNDS):
        if sum(case.prefill_s) > job.prefill_limit_s / 2:
            continue
        progress(turn, PREFILL_ROUNDS * len(chosen), f"prefill at {case.context}: {case.name}")
        seconds = _seconds(case.sequence, lambda case=case: case.sequence.forward(ids))
        case.sequence.rollback()
        if turn >= len(chosen) or seconds > WARM_UP_S:
            case.prefill_s.append(seconds)
    before |= {case.name: case for case in chosen}


def _too_long(case: Case, before: Case | None, job: SpeedJob) -> str | None:
    """Says why a prefill is left out, judged by the same setting's at a smaller depth.

    Two bounds: time grows at most in proportion to the tokens attended to, and a row of a prefill
    slows down at most as a decode step does.
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


def turns(cases: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yields A B C, B C A, ..., numbered: no case always follows the same other one."""
    turned = (cases[(first + i) % len(cases)] for first in range(rounds) for i in range(len(cases)))
    return enumerate(turned)


def _seconds(sequence: BenchSequence, work: Callable[[], object]) -> float:
    """Returns what `work` takes by the sequence's clock."""
    since = sequence.clock()
    work()
    return sequence.clock() - since


def p95(values: list[float]) -> float:
    """Returns the value that 95 of 100 do not exceed."""
    return sorted(values)[ceil(0.95 * len(values)) - 1]
