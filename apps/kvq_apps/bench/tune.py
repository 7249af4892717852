"""Measures what is best on this machine: the number of threads, and how weights are fetched.

Multiplies stored weights that no cache holds, as a decode step does, on threads of its own. Needs
no model. `kvq_runtime.machine.tuning` keeps the result.
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
from kvq.reference.linear import Float, PanelFormat
from kvq_runtime.machine import device
from kvq_runtime.machine.tuning import (
    Tuning,
    built_in,
    load_tuning,
    save_tuning,
    set_prefetching,
    tuning_path,
)

# The size of a product in a small model's layer; the buffer has more of them than any cache holds.
FORM = PanelFormat(rows=4864, columns=896, bits=4, block=32)
BUFFER_BYTES = 128 << 20
AHEAD_BYTES = (0, 2 << 10, 4 << 10, 16 << 10, 32 << 10)
PROMPT_ROWS = 64
ROUNDS = 7
# A smaller gain is within the difference of two equal runs.
LEAST_GAIN = 1.03


def tune(progress: Callable[[str], None]) -> dict[str, Any]:
    """Finds the fastest `Tuning`; returns it with the seconds of each candidate, as plain data.

    The process goes on with the fastest.
    """
    weights, default = Weights(), built_in()
    progress("threads")
    by_count = by_threads(weights, default)
    default = replace(default, threads=fewest_threads(by_count))
    progress("how weights are fetched")
    fetching = product((False, True), AHEAD_BYTES)
    candidates = [
        replace(default, second_level=level, ahead_bytes=size) for level, size in fetching
    ]
    before, *medians = median_seconds([default, *candidates], weights.step_seconds)
    chosen = default
    if before > LEAST_GAIN * min(medians):
        # The best of many may be so by luck: it must win once more.
        fastest = candidates[medians.index(min(medians))]
        first, second = median_seconds([default, fastest], weights.step_seconds)
        chosen = fastest if first > LEAST_GAIN * second else default
    set_prefetching(chosen)
    return {
        "tuning": asdict(chosen),
        "step_bytes": weights.num_bytes,
        "prompt_rows": PROMPT_ROWS,
        "threads": [
            {"threads": count, "step_s": step, "prompt_s": prompt}
            for count, (step, prompt) in by_count.items()
        ],
        "fetching": [
            {
                "second_level": tuning.second_level,
                "ahead_bytes": tuning.ahead_bytes,
                "step_s": step_s,
            }
            for tuning, step_s in zip((default, *candidates), (before, *medians), strict=True)
        ],
    }


def threads_that_pay(note: Callable[[str], None]) -> int:
    """Returns as many threads as pay on this machine, as kept, or measured now and kept.

    `note` is told of a measurement. Raises `DataError` for a file that `tuning.save_tuning` has not
    written.
    """
    stored = load_tuning()
    if stored is not None and stored.threads is not None:
        return stored.threads
    note("measuring how many threads pay on this machine, once; let other programs rest")
    default = stored or built_in()
    threads = fewest_threads(by_threads(Weights(), default))
    try:
        save_tuning(replace(default, threads=threads))
    except DataError as error:
        note(f"{threads} threads pay; they are measured anew each time, since {error}")
    else:
        note(f"{threads} threads pay; kept in {tuning_path()}")
    return threads


def by_threads(weights: "Weights", default: Tuning) -> dict[int, tuple[float, float]]:
    """Measures a step and a piece of a prompt: median seconds by number of threads."""
    counts = thread_counts(device.physical_cores(), default.hardware_threads)
    tunings = [replace(default, threads=count) for count in counts]
    steps = median_seconds(tunings, weights.step_seconds)
    prompts = median_seconds(tunings, weights.prompt_seconds)
    return dict(zip(counts, zip(steps, prompts, strict=True), strict=True))


def thread_counts(cores: int, hardware_threads: int) -> tuple[int, ...]:
    """Returns the counts to try: all up to 8, then steps of about a quarter, and both numbers."""
    counts = {*range(1, min(8, hardware_threads) + 1), min(cores, hardware_threads)}
    count = 8
    while (count := count + count // 4) < hardware_threads:
        counts.add(count)
    return tuple(sorted(counts | {hardware_threads}))


def fewest_threads(by_count: Mapping[int, tuple[float, float]]) -> int:
    """Finds where one more thread stops paying, by seconds of a step and of a piece of a prompt.

    Of the counts with about the fastest step it takes those with about the fastest prompts, and of
    these the smallest. Differences as small as between two equal runs do not count.
    """
    quickest = min(step for step, _ in by_count.values())
    prompts = {
        count: prompt for count, (step, prompt) in by_count.items() if step <= LEAST_GAIN * quickest
    }
    least = min(prompts.values())
    return min(count for count, prompt in prompts.items() if prompt <= LEAST_GAIN * least)


def median_seconds(tunings: Sequence[Tuning], seconds: Callable[[Tuning], float]) -> list[float]:
    """Measures median seconds of each in turns, so that a slower machine affects all."""
    seen: list[list[float]] = [[] for _ in tunings]
    for _ in range(ROUNDS):
        for times, tuning in zip(seen, tunings, strict=True):
            set_prefetching(tuning)
            times.append(seconds(tuning))
    return [median(times) for times in seen]


class Weights:
    """Holds matrices that are multiplied one after the other, those of each thread side by side."""

    def __init__(self, num_bytes: int = BUFFER_BYTES) -> None:
        self._count = -(-num_bytes // (FORM.panels * FORM.panel_bytes))
        # Any bytes are weights. They are written because unwritten pages would all be the same one.
        self._panels = np.full((self._count, FORM.panels, FORM.panel_bytes), 0x2B, np.uint8)
        self.num_bytes = self._panels.nbytes
        random = np.random.default_rng(0)
        self._rows = random.standard_normal((PROMPT_ROWS, FORM.columns)).astype(np.float32)

    def step_seconds(self, tuning: Tuning) -> float:
        """Times one row times all matrices."""
        return self._seconds(self._rows[:1], self._count, tuning.threads or 1)

    def prompt_seconds(self, tuning: Tuning) -> float:
        """Times `PROMPT_ROWS` rows times an eighth of the matrices, or one for each thread."""
        threads = tuning.threads or 1
        return self._seconds(self._rows, min(self._count, max(self._count // 8, threads)), threads)

    def _seconds(self, rows: Float, count: int, threads: int) -> float:
        def multiply(part: Any) -> None:
            for panels in part:
                native_linear.linear(FORM, panels, rows)

        with ThreadPoolExecutor(threads) as pool:
            since = perf_counter()
            list(pool.map(multiply, np.array_split(self._panels[:count], threads)))
            return perf_counter() - since
