"""Measures what the kernels leave open on this machine: threads, and how weights are fetched.

Multiplies stored weights that no cache holds, as a decode step does, on threads of its own; needs
no model. What it finds is kept by `kvq_runtime.tuning`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvq import native_linear
from kvq.errors import DataError
from kvq.reference_linear import Float, PanelFormat
from kvq_runtime import device
from kvq_runtime.tuning import Tuning, built_in, keep, kept, set_prefetching, tuning_path

# A product of a small model's layer; so many of them that no cache holds them.
FORM = PanelFormat(rows=4864, columns=896, bits=4, block=32)
BUFFER_BYTES = 128 << 20
AHEAD_BYTES = (0, 2 << 10, 4 << 10, 16 << 10, 32 << 10)
PROMPT_ROWS = 64
ROUNDS = 7
# Less is within what two runs of the same differ by.
LEAST_GAIN = 1.03

Seconds = Callable[[Tuning, int], float]


def tune(progress: Callable[[str], None]) -> dict[str, Any]:
    """The fastest `Tuning` and what was seen, as plain data: seconds of each candidate.

    The process goes on with the fastest.
    """
    weights = Weights()
    here = built_in()
    progress("threads")
    seen = by_threads(weights, here)
    threads = fewest_threads(seen)
    progress("how weights are fetched")
    candidates = [
        replace(here, past_caches=past, ahead_bytes=ahead)
        for past, ahead in product((False, True), AHEAD_BYTES)
    ]
    found = compared([(one, threads) for one in (here, *candidates)], weights.step_seconds)
    seconds, fastest = min(zip(found[1:], candidates, strict=True), key=lambda pair: pair[0])
    if found[0] > LEAST_GAIN * seconds:
        # The best of many is so by luck, too: it must win once more.
        again = compared([(here, threads), (fastest, threads)], weights.step_seconds)
        fastest = fastest if again[0] > LEAST_GAIN * again[1] else here
    else:
        fastest = here
    chosen = replace(fastest, threads=threads)
    set_prefetching(chosen)
    return {
        "tuning": asdict(chosen),
        "step_bytes": weights.num_bytes,
        "prompt_rows": PROMPT_ROWS,
        "threads": [
            {"threads": count, "step_s": step, "prompt_s": prompt}
            for count, (step, prompt) in seen.items()
        ],
        "fetching": [
            {"past_caches": one.past_caches, "ahead_bytes": one.ahead_bytes, "step_s": taken}
            for one, taken in zip((here, *candidates), found, strict=True)
        ],
    }


def threads_that_pay(note: Callable[[str], None]) -> int:
    """As many threads as pay on this machine: as was kept, else as is measured now and kept.

    `note` is told of a measurement. Raises `DataError` for a file that `tuning.keep` has not
    written.
    """
    found = kept()
    if found is not None and found.threads is not None:
        return found.threads
    note("measuring how many threads pay on this machine, once; let other programs rest")
    here = found or built_in()
    threads = fewest_threads(by_threads(Weights(), here))
    try:
        keep(replace(here, threads=threads))
    except DataError as error:
        note(f"{threads} threads pay; they are measured anew each time, since {error}")
    else:
        note(f"{threads} threads pay; kept in {tuning_path()}")
    return threads


def by_threads(weights: "Weights", here: Tuning) -> dict[int, tuple[float, float]]:
    """Median seconds of a step and of a piece of a prompt, by number of threads."""
    counts = thread_counts(device.physical_cores(), here.hardware_threads)
    steps = compared([(here, count) for count in counts], weights.step_seconds)
    prompts = compared([(here, count) for count in counts], weights.prompt_seconds)
    return dict(zip(counts, zip(steps, prompts, strict=True), strict=True))


def thread_counts(cores: int, hardware_threads: int) -> tuple[int, ...]:
    """Those worth trying: all up to 8, then steps of about a quarter, both numbers included."""
    counts = {*range(1, min(8, hardware_threads) + 1), min(cores, hardware_threads)}
    count = 8
    while (count := count + count // 4) < hardware_threads:
        counts.add(count)
    return tuple(sorted(counts | {hardware_threads}))


def fewest_threads(seen: Mapping[int, tuple[float, float]]) -> int:
    """Where one more thread stops paying, by seconds of a step and of a piece of a prompt.

    Of the numbers whose step is as fast as any, the fewest whose prompts are as fast as any of
    theirs: a difference that two runs of the same have is none.
    """
    quickest = min(step for step, _ in seen.values())
    prompts = {
        count: prompt for count, (step, prompt) in seen.items() if step <= LEAST_GAIN * quickest
    }
    least = min(prompts.values())
    return min(count for count, prompt in prompts.items() if prompt <= LEAST_GAIN * least)


def compared(candidates: Sequence[tuple[Tuning, int]], seconds: Seconds) -> list[float]:
    """Median seconds of each, in turns, so that a machine that slows down does so for all."""
    seen: list[list[float]] = [[] for _ in candidates]
    for _ in range(ROUNDS):
        for times, (tuning, threads) in zip(seen, candidates, strict=True):
            set_prefetching(tuning)
            times.append(seconds(tuning, threads))
    return [median(times) for times in seen]


class Weights:
    """Matrices that are multiplied one after the other, those of each thread side by side."""

    def __init__(self, num_bytes: int = BUFFER_BYTES) -> None:
        self._count = -(-num_bytes // (FORM.panels * FORM.panel_bytes))
        # Any bytes are weights; these are written, or all of them would be one page of zeros.
        self._panels = np.full((self._count, FORM.panels, FORM.panel_bytes), 0x2B, np.uint8)
        random = np.random.default_rng(0)
        self._rows = random.standard_normal((PROMPT_ROWS, FORM.columns)).astype(np.float32)

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes

    def step_seconds(self, tuning: Tuning, threads: int) -> float:
        """Of one row times all matrices."""
        return self._seconds(self._rows[:1], self._count, threads)

    def prompt_seconds(self, tuning: Tuning, threads: int) -> float:
        """Of `PROMPT_ROWS` rows times an eighth of them, or one for each thread."""
        return self._seconds(self._rows, min(self._count, max(self._count // 8, threads)), threads)

    def _seconds(self, rows: Float, count: int, threads: int) -> float:
        def multiply(part: Any) -> None:
            for panels in part:
                native_linear.linear(FORM, panels, rows)

        with ThreadPoolExecutor(threads) as pool:
            since = perf_counter()
            list(pool.map(multiply, np.array_split(self._panels[:count], threads)))
            return perf_counter() - since
