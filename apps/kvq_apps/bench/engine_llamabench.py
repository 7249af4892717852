"""Any build of llama.cpp's `llama-bench`, forks too: the user's own program, one run a visit.

Each run loads the weights and fills its cache anew, and what it says its steps took is what counts.
Knows no other engine.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle, pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvq.config import KvPlan
from kvq.errors import BackendError
from kvq_apps.bench.engines import Setting
from kvq_apps.bench.gguf_file import same_weights
from kvq_runtime import gpu
from kvq_runtime.backends import ModelFiles
from kvq_runtime.backends.llama_layout import CACHE_TYPES, CacheLayout, LayerGroup
from kvq_runtime.bundle import Bundle
from kvq_runtime.gguf_file import GgufFile

# Of one run, and the steps that each of them is the mean of.
SAMPLES, STEPS = 3, 8
# How a program takes a depth: for itself, or, older ones and forks, as a prompt to generate behind.
_DEPTH, _BEHIND = "--n-depth", "-gp "
_KEY_FLAGS = ("-ctk", "--cache-type-k")
_ALL_LAYERS = 99


class LlamaBench:
    """The peer `llama-bench=COMMAND`: a path, and flags of the program's own behind it."""

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)

    def missing(self, device: str) -> str | None:
        """Why it cannot run here, or None."""
        del device
        program = self._command[0]
        if shutil.which(program) is None:
            return f"{program} is no program; give the path of a llama-bench"
        if _depth_flag(program) is None:
            return f"{program} --help knows no {_DEPTH} and no {_BEHIND}as llama-bench's does"
        return None

    def __call__(
        self, files: ModelFiles, *, threads: int, settings: Sequence[Setting], device: str
    ) -> "LlamaBenchEngine":
        """See `open_engine`."""
        del settings
        # Only a bundle has a graph.
        bundle = cast(Bundle, files) if files.has_onnx else None
        file = same_weights(bundle, "llama-bench") if bundle else files.gguf()
        layers = 0 if device == gpu.PROCESSOR else _ALL_LAYERS
        return LlamaBenchEngine(self._command, file, threads=threads, layers_on_gpu=layers)


class LlamaBenchEngine:
    """A file, and the flags it is measured with at any depth.

    Keys and values have each of `CACHE_TYPES`, or what the command says of keys.
    """

    name = "llama-bench"

    def __init__(
        self, command: Sequence[str], file: GgufFile, *, threads: int, layers_on_gpu: int
    ) -> None:
        given = {"-m": file.path, "-t": threads, "-ngl": layers_on_gpu, "-fa": 1, "-o": "json"}
        flags = [str(word) for pair in given.items() for word in pair]
        self._command = [command[0], *flags, *command[1:]]
        self._file = file
        self._depth_flag = _depth_flag(command[0])
        own = [kind for flag, kind in pairwise(command) if flag in _KEY_FLAGS]
        self._types_are_given = bool(own)
        kinds = own[-1:] or [kind.name for kind in CACHE_TYPES.values()]
        self.settings = tuple(Setting(kv=kind) for kind in kinds)

    def sequence(self, setting: Setting, depth: int, room: int) -> "LlamaBenchSequence":
        del room
        types = [] if self._types_are_given else ["-ctk", setting.kv, "-ctv", setting.kv]
        return LlamaBenchSequence(
            [*self._command, *types],
            depth,
            depth_flag=self._depth_flag,
            weight_bytes=self._file.weight_bytes_per_step,
            kv_bytes=self.cache_bytes(setting, depth),
        )

    def batch(self, setting: Setting, depth: int, room: int, count: int) -> None:
        """See `BenchEngine.batch`; its attention is inside the program."""

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        """As of float16 for a type that is only known to the program."""
        bits = {kind.name: bits for bits, kind in CACHE_TYPES.items()}.get(setting.kv, 16)
        layout = CacheLayout(groups=(LayerGroup(widths=self._file.kv_widths),))
        return tokens * layout.bytes_per_token(KvPlan(k_bits=bits, v_bits=bits))

    def close(self) -> None:
        """See `BenchEngine.close`; nothing is held between runs."""


class LlamaBenchSequence:
    """Runs at one depth. Its clock goes on by what they say; logits stay in them.

    One run gives the steps up to the next `rollback`, the same few again and again.
    """

    relief_s = 0.0

    def __init__(
        self,
        command: Sequence[str],
        depth: int,
        *,
        depth_flag: str | None,
        weight_bytes: int,
        kv_bytes: int,
    ) -> None:
        self._command = command
        self._depth = depth
        self._depth_flag = depth_flag
        self._bytes = weight_bytes, kv_bytes
        self._steps_s: Iterator[float] | None = None
        self._clock_s = 0.0
        self.kv_bytes = kv_bytes

    @property
    def why_no_prefill(self) -> str | None:
        """See `BenchSequence.why_no_prefill`."""
        return None if self._depth_flag == _DEPTH else f"this llama-bench knows no {_DEPTH}"

    def clock(self) -> float:
        return self._clock_s

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `BenchSequence.forward`; of no logits."""
        if len(ids) > 1:
            self._clock_s += self._run(["-p", len(ids), "-n", 0, "-d", self._depth, "-r", 1])[0]
        else:
            self._steps_s = self._steps_s or cycle(self._steps())
            self._clock_s += next(self._steps_s)
        return np.zeros(0, np.float32)

    def verify(self, rows: int) -> bool:
        """See `BenchSequence.verify`; it has logits of a pass's last token only."""
        return False

    def rollback(self) -> None:
        self._steps_s = None

    def attend(self, rows: int) -> bool:
        """See `BenchSequence.attend`; its attention is inside the program."""
        return False

    def step_bytes(self) -> tuple[int, int]:
        return self._bytes

    def close(self) -> None:
        """See `BenchSequence.close`; nothing is held between runs."""

    def _steps(self) -> list[float]:
        """Seconds of a step, a few times."""
        if self._depth_flag == _DEPTH:
            words = ["-p", 0, "-n", STEPS, "-d", self._depth]
        else:
            words = ["-p", 0, "-n", 0, "-gp", f"{self._depth},{STEPS}"]
        return [seconds / STEPS for seconds in self._run([*words, "-r", SAMPLES])]

    def _run(self, words: Sequence[object]) -> list[float]:
        """Seconds of each repetition."""
        told = _output([*self._command, *map(str, words)])
        try:
            (test,) = json.loads(told[told.index("[") :])
            found = [nanoseconds / 1e9 for nanoseconds in test["samples_ns"]]
        except (ValueError, TypeError, KeyError) as error:
            raise BackendError(
                f"the peer llama-bench answers what is not understood: {told[:200]!r}"
            ) from error
        if not found or min(found) <= 0:
            raise BackendError(f"the peer llama-bench measured nothing: {found}")
        return found


@cache
def _depth_flag(program: str) -> str | None:
    """By what the program is told a depth, or None: then it is no llama-bench."""
    known = _output([program, "--help"], may_fail=True)
    return next((flag for flag in (_DEPTH, _BEHIND) if flag in known), None)


def _output(command: Sequence[str], *, may_fail: bool = False) -> str:
    try:
        run = subprocess.run(  # noqa: S603  the user's own program
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise BackendError(f"{command[0]} cannot be run: {error.strerror}") from error
    output = run.stdout.decode(errors="replace")
    if run.returncode and not may_fail:
        said = run.stderr.decode(errors="replace").strip() or output.strip()
        raise BackendError(
            f"the peer llama-bench ended with status {run.returncode}: "
            f"{said.splitlines()[-1] if said else 'without a word'} (it ran {shlex.join(command)})"
        )
    return output
