"""The seam between the measuring and an engine: two protocols and one table. Measures nothing.

To add an engine: one file with a class that has `BenchEngine`'s members, one row in `ENGINES`, or
in `kvq_lab.peers` where nobody but us asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.config import DEFAULT_DRAFT_TOKENS, DEFAULT_READ, MOST_DRAFT_TOKENS
from kvq.errors import BackendError, UsageError, argument
from kvq.reference_linear import BlockFormat
from kvq_apps import laboratory
from kvq_runtime import gpu
from kvq_runtime.backends import ModelFiles

OURS = "kvq"
# Ours over the same weights, multiplied by ONNX Runtime's operator.
OURS_ON_ORT = "kvq (MatMulNBits)"
# Ours, of 8-bit weights the upper nibbles alone.
OURS_ON_HALVES = "kvq (upper nibbles)"
# By what `--linear` calls them.
OWN = {"kvq": OURS, "ort": OURS_ON_ORT, "hi": OURS_ON_HALVES}
ENGINES = {
    OURS: "kvq_apps.bench.engine_kvq:KvqEngine",
    OURS_ON_ORT: "kvq_apps.bench.engine_kvq:KvqOnOrtEngine",
    OURS_ON_HALVES: "kvq_apps.bench.engine_kvq:KvqOnHalvesEngine",
    "llama.cpp": "kvq_apps.bench.engine_llamacpp:LlamaCppEngine",
    "llama-bench": "kvq_apps.bench.engine_llamabench:LlamaBench",
    **laboratory.peers(),
}
PEERS = tuple(name for name in ENGINES if name not in OWN.values())
LABORATORY_PEERS = ("onnxruntime", "transformers")
# Of the peers those that are a program of the user's, `NAME=COMMAND`, and those that read GGUF.
PROGRAMS = ("llama-bench",)
GGUF_READERS = ("llama.cpp", "llama-bench")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How an engine keeps its cache: `kv` is the engine's own name for the widths.

    With a `policy` the cache has `budget`, as `--kv-budget` writes it, and the policy decides what
    gives way; otherwise it holds everything. It reads of its pages what `--kv-read` writes so.
    Ours keeps room for drafts of `draft_tokens`.
    """

    kv: str
    policy: str | None = None
    budget: str | None = None
    read: str = DEFAULT_READ
    draft_tokens: int = DEFAULT_DRAFT_TOKENS

    @property
    def name(self) -> str:
        """`4:2`, or where it reads otherwise `4:2 read 25%`."""
        return self.kv if self.read == DEFAULT_READ else f"{self.kv} read {self.read}"

    @property
    def text(self) -> str:
        """`8:8`, or under pressure `8:8 h2o`."""
        return self.name if self.policy is None else f"{self.name} {self.policy}"


class BenchSequence(Protocol):
    """One sequence in an engine, begun with a cache that holds some tokens already."""

    @property
    def kv_bytes(self) -> int:
        """Bytes the tokens it began with take in the cache."""
        ...

    @property
    def relief_s(self) -> float:
        """Seconds that making room for new tokens has taken so far."""
        ...

    @property
    def why_no_prefill(self) -> str | None:
        """Why it cannot be extended by many tokens at once, or None."""
        ...

    def clock(self) -> float:
        """Seconds, by the clock that what it does is timed with."""
        ...

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends tokens `ids` [T] and returns the logits float32 [V] of the last."""
        ...

    def verify(self, rows: int) -> bool:
        """One pass over `rows` new tokens, a chain, whose logits are those of `wanted_rows`.

        `rollback` forgets them. False where the engine takes fewer tokens at once.
        """
        ...

    def rollback(self) -> None:
        """Forgets what `forward`, `verify` and `attend` appended."""
        ...

    def attend(self, rows: int) -> bool:
        """The attention of all layers alone, for `rows` new tokens.

        False where the engine does not let its attention run alone, or takes fewer at once.
        """
        ...

    def step_bytes(self) -> tuple[int, int]:
        """Bytes of weights and of the cache that one decode step reads."""
        ...

    def close(self) -> None:
        """Gives the cache's memory back."""
        ...


class InProcess:
    """What is the same of all sequences that compute in this process."""

    relief_s = 0.0
    why_no_prefill: str | None = None
    clock = staticmethod(perf_counter)


class BenchBatch(Protocol):
    """Several sequences of one depth, for their attention alone."""

    def attend(self, rows: int) -> bool:
        """The attention of all layers alone, for `rows` new tokens of each sequence, together.

        It has been computed when this returns. False where the engine takes fewer at once.
        """
        ...

    def close(self) -> None:
        """Gives the caches' memory back."""
        ...


class BenchEngine(Protocol):
    """A model's weights in memory, ready for sequences at any of its cache settings."""

    name: str
    settings: tuple[Setting, ...]

    def sequence(self, setting: Setting, depth: int, room: int) -> BenchSequence:
        """A sequence of `depth` random tokens with room for `room` more, its cache as `setting`.

        The cache is filled without running the model. Raises `UsageError` for a budget in which
        nothing has to give way, `BudgetError` for one that is too small.
        """
        ...

    def batch(self, setting: Setting, depth: int, room: int, count: int) -> BenchBatch | None:
        """`count` sequences like those of `sequence`, which take one row each at once.

        None where the engine does not let its attention run alone.
        """
        ...

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        """About how much memory a sequence of `tokens` tokens takes."""
        ...

    def close(self) -> None:
        """Gives the weights' memory back."""
        ...


def draft_ids(rows: int) -> NDArray[np.int64]:
    """Tokens int64 [rows] that every vocabulary has."""
    return np.arange(rows, dtype=np.int64) % 64


def wanted_rows(rows: int) -> NDArray[np.int64]:
    """The rows whose logits a pass of `rows` is for: all of a draft's, the last of a prompt's."""
    return np.arange(0 if rows <= MOST_DRAFT_TOKENS else rows - 1, rows, dtype=np.int64)


def check_peers(names: Sequence[str], device: str = gpu.PROCESSOR) -> None:
    """Raises `UsageError` for an unknown peer, `BackendError` naming what must be installed."""
    for name in names:
        kind, _, command = name.partition("=")
        if kind in LABORATORY_PEERS and kind not in ENGINES:
            raise laboratory.only_there(f"{argument('--peer')} {kind}")
        if kind not in PEERS or bool(command) != (kind in PROGRAMS):
            shown = (f"{one}=COMMAND" if one in PROGRAMS else one for one in PEERS)
            raise UsageError(
                f"{argument('--peer')} {name!r} is not known; choose {', '.join(shown)}"
            )
        reason = _load(name).missing(device)
        if reason is not None:
            raise BackendError(f"the peer {name} cannot run here: {reason}")


def check_computable(peer: str, reason: str | None) -> None:
    """Raises `BackendError` where there is a `reason` why a peer cannot compute a model."""
    if reason is not None:
        raise BackendError(f"the peer {peer} cannot compute this model: {reason}")


def own_engine(files: ModelFiles) -> str:
    """The engine that is ours with these files: the paged cache over a graph, else llama.cpp."""
    return OURS if files.has_onnx else "llama.cpp"


def own_engines(files: ModelFiles, linear: Sequence[str], device: str) -> tuple[str, ...]:
    """Ours with each of the operators `linear`; none given: with the one of these files.

    Raises `UsageError` for what these files cannot give, on this device.
    """
    if device != gpu.PROCESSOR and (linear or not files.has_onnx):
        raise UsageError(
            f"{argument('--device')} {device} measures bundles, and takes no {argument('--linear')}"
        )
    for name in linear:
        if name not in OWN:
            raise UsageError(
                f"{argument('--linear')} {name} is not possible: choose kvq, ort or hi"
            )
    if linear and files.weights_json().get("linear") != "kvq":
        raise UsageError(
            f"{argument('--linear')} {','.join(linear)} is not possible: the weights of "
            f"{files.path} are not "
            "stored for kvq::Linear; leave the flag out, or give a bundle that is"
        )
    return tuple(dict.fromkeys(OWN[name] for name in linear)) or (own_engine(files),)


def shown_peers(names: Sequence[str]) -> dict[str, str]:
    """What a peer is called in tables, by its name: two programs of one kind by their paths."""
    kinds = [name.partition("=")[0] for name in names]
    return {
        name: kind if kinds.count(kind) == 1 else name
        for name, kind in zip(names, kinds, strict=True)
    }


def reads_gguf(name: str) -> bool:
    """Whether a peer can be given a GGUF file as it is."""
    return name.partition("=")[0] in GGUF_READERS


def is_own(name: str) -> bool:
    """Whether an engine is ours, with whatever weights."""
    return name.partition(" ")[0] == OURS


def own_width(files: ModelFiles) -> str:
    """What to call ours beside itself with weights of another width."""
    bits = min(BlockFormat.parse(form).bits for form in files.weights_json()["formats"])
    return f"{OURS} ({bits} bits)"


def open_engine(
    name: str,
    files: ModelFiles,
    *,
    threads: int,
    settings: Sequence[Setting],
    device: str = gpu.PROCESSOR,
    weights_budget: int | None = None,
) -> BenchEngine:
    """BenchEngine `name` with the weights of `files`, on `device` as `gpu.chosen` gives it.

    `settings` and `weights_budget` are those asked of ours; a peer is asked for none, and has all
    it can. Raises `BackendError` for a model the engine cannot compute.
    """
    own = {"weights_budget": weights_budget} if name in OWN.values() else {}
    return _load(name)(files, threads=threads, settings=settings, device=device, **own)


def _load(name: str) -> Any:
    kind, _, command = name.partition("=")
    module_name, _, class_name = ENGINES[kind].partition(":")
    found = getattr(import_module(module_name), class_name)
    return found(command) if command else found
