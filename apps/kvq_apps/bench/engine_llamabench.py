"""Any build of llama.cpp's `llama-bench`, also forks: the user's program, one run per visit.

Each run loads the weights and fills its cache anew; only the times that it reports count. Knows no
other engine.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, pairwise

import numpy as np
from numpy.typing import NDArray

from kvq.config import KvPlan
from kvq.errors import BackendError
from kvq_apps.bench.engines import BenchSequence, Setting
from kvq_apps.bench.gguf_file import gguf_of
from kvq_runtime.backends import ModelFiles
from kvq_runtime.backends.llama_cache import CACHE_TYPES, CacheLayout
from kvq_runtime.machine import gpu

# Samples of one run, and the steps that each is the mean of.
SAMPLES, STEPS = 3, 8
# How a program takes a depth: by a flag, or, older ones and forks, as a prompt to generate after.
_DEPTH, _DEPTH_PROMPT = "--n-depth", "-gp "
_KEY_FLAGS = ("-ctk", "--cache-type-k")
_ALL_LAYERS = 99


class LlamaBenchEngine:
    """Holds a file, and the flags it is measured with at any depth; `command`: a path and flags.

    Keys and values have each of `CACHE_TYPES`, or the type of keys in the command.
    """

    name = "llama-bench"

    def __init__(
        self, files: ModelFiles, *, threads: int, device: str, command: str, **_: object
    ) -> None:
        program, *words = shlex.split(command)
        self._file = gguf_of(files, self.name)
        layers = 0 if device == gpu.PROCESSOR else _ALL_LAYERS
        flags = f"-t {threads} -ngl {layers} -fa 1 -o json".split()
        self._command = [program, "-m", str(self._file.path), *flags, *words]
        key_types = [kind for flag, kind in pairwise(words) if flag in _KEY_FLAGS]
        self._types_are_fixed = bool(key_types)
        kinds = key_types[-1:] or [kind.name.lower() for kind in CACHE_TYPES.values()]
        self.settings = tuple(Setting(kv=kind) for kind in kinds)

    @staticmethod
    def missing(device: str, command: str) -> str | None:
        """Says why it cannot run here, or None."""
        del device
        program = shlex.split(command)[0]
        if shutil.which(program) is None:
            return f"{program} is no program; give the path of a llama-bench"
        if _depth_flag(program) is None:
            return f"{program} --help knows no {_DEPTH} and no {_DEPTH_PROMPT}as llama-bench's does"
        return None

    def sequence(self, setting: Setting, depth: int, room: int) -> "LlamaBenchSequence":
        del room
        types = [] if self._types_are_fixed else ["-ctk", setting.kv, "-ctv", setting.kv]
        # A type that only the program knows counts as float16.
        bits = {kind.name.lower(): bits for bits, kind in CACHE_TYPES.items()}.get(setting.kv, 16)
        plan = KvPlan(k_bits=bits, v_bits=bits)
        kv_bytes = depth * CacheLayout.of(self._file).bytes_per_token(plan)
        weight_bytes = self._file.weight_bytes_per_step
        return LlamaBenchSequence([*self._command, *types], depth, weight_bytes, kv_bytes)

    def close(self) -> None:
        """Does nothing: nothing is held between runs."""


class LlamaBenchSequence(BenchSequence):
    """Runs the program at one depth. Its clock adds what the runs report; there are no logits.

    One run gives the steps up to the next `rollback`; they are repeated if there are too few.
    """

    def __init__(
        self, command: Sequence[str], depth: int, weight_bytes: int, kv_bytes: int
    ) -> None:
        self._command = command
        self._depth = depth
        self._weight_bytes = weight_bytes
        self._steps_s: Iterator[float] | None = None
        self._clock_s = 0.0
        self._takes_depth = _depth_flag(command[0]) == _DEPTH
        self.kv_bytes = kv_bytes
        self.why_no_prefill = None if self._takes_depth else f"this llama-bench knows no {_DEPTH}"

    def clock(self) -> float:
        return self._clock_s

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Runs the program or takes the next step; returns no logits."""
        if len(ids) > 1:
            self._clock_s += self._run(f"-p {len(ids)} -n 0 -d {self._depth} -r 1")[0]
        else:
            self._steps_s = self._steps_s or cycle(self._steps())
            self._clock_s += next(self._steps_s)
        return np.zeros(0, np.float32)

    def rollback(self) -> None:
        self._steps_s = None

    def step_bytes(self) -> tuple[int, int]:
        return self._weight_bytes, self.kv_bytes

    def close(self) -> None:
        """Does nothing: nothing is held between runs."""

    def _steps(self) -> list[float]:
        """Returns the seconds of a step, several times."""
        depth = f"-n {STEPS} -d {self._depth}"
        flags = depth if self._takes_depth else f"-n 0 -gp {self._depth},{STEPS}"
        return [seconds / STEPS for seconds in self._run(f"-p 0 {flags} -r {SAMPLES}")]

    def _run(self, flags: str) -> list[float]:
        """Returns the seconds of each repetition."""
        output = _output([*self._command, *flags.split()])
        try:
            (test,) = json.loads(output[output.index("[") :])
            seconds = [nanoseconds / 1e9 for nanoseconds in test["samples_ns"]]
        except (ValueError, TypeError, KeyError) as error:
            raise BackendError(
                f"the peer llama-bench answers what is not understood: {output[:200]!r}"
            ) from error
        if not seconds or min(seconds) <= 0:
            raise BackendError(f"the peer llama-bench measured nothing: {seconds}")
        return seconds


@cache
def _depth_flag(program: str) -> str | None:
    """Returns the flag that gives the program a depth, or None: then it is no llama-bench."""
    help_text = _output([program, "--help"], may_fail=True)
    return next((flag for flag in (_DEPTH, _DEPTH_PROMPT) if flag in help_text), None)


def _output(command: Sequence[str], *, may_fail: bool = False) -> str:
    try:
        run = subprocess.run(  # noqa: S603  the user's own program
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be run: {error.strerror}") from error
    output = run.stdout.decode(errors="replace")
    if run.returncode and not may_fail:
        message = run.stderr.decode(errors="replace").strip() or output.strip()
        raise BackendError(
            f"the peer llama-bench ended with status {run.returncode}: "
            f"{message.splitlines()[-1] if message else 'without a word'} "
            f"(it ran {shlex.join(command)})"
        )
    return output
