"""The seam between the loop and an engine: its protocols, one table. Knows no engine itself.

To add a backend: one file with a class that has `Backend`'s members, and of its own `missing`,
`reads` and `estimate`, asked before anything is loaded; one row in `BACKENDS`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Holdings
from kvq.config import KvPlan
from kvq.errors import BackendError, UsageError
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import SessionConfig, SessionRequest
from kvq_runtime.gguf_file import GgufFile

logger = logging.getLogger(__name__)

BACKENDS = {
    "onnx": "kvq_runtime.backends.onnx:OnnxBackend",
    "llama.cpp": "kvq_runtime.backends.llama_cpp:LlamaCppBackend",
    "reference": "kvq_runtime.backends.reference:ReferenceBackend",
}

# `auto` takes the first of these that reads the model's files and can run here.
PREFERENCE = ("onnx", "llama.cpp", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInput:
    """What one forward pass computes over T new tokens.

    `ids` int64 [T, K] and `weights` float32 [T, K]: the embedding of row t is
    sum_k weights[t, k] * E[ids[t, k]]; plain text has K = 1 and weight 1. `positions` int64 [T].
    `rows` int64 [R]: the rows whose logits are wanted. `rope_long`: use the long-context rotary
    frequencies of a model that has two sets; the same for every pass of a session.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    rope_long: bool = False


def plain_input(
    ids: NDArray[np.int64], first: int, rows: NDArray[np.int64], *, rope_long: bool
) -> ForwardInput:
    """Tokens `ids` [T] at positions `first`, `first` + 1, ..."""
    return ForwardInput(
        ids=ids[:, None],
        weights=np.ones((len(ids), 1), np.float32),
        positions=np.arange(first, first + len(ids), dtype=np.int64),
        rows=rows,
        rope_long=rope_long,
    )


class ModelFiles(Protocol):
    """What a model is read from: a bundle folder or a GGUF file."""

    @property
    def path(self) -> Path:
        """The folder or the file."""
        ...

    @property
    def name(self) -> str:
        """What the model is called."""
        ...

    @property
    def kv(self) -> KvPlan:
        """The default plan."""
        ...

    @property
    def has_onnx(self) -> bool:
        """Whether there is a graph with a bundle's weights."""
        ...

    @property
    def has_gguf(self) -> bool:
        """Whether there is a GGUF file."""
        ...

    def weights_json(self) -> dict[str, Any]:
        """Bytes and types of the weights, for reports."""
        ...

    def gguf(self) -> GgufFile:
        """The GGUF file, checked. Raises `ModelError` for a damaged one."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the loop and the apps may know of a model, whatever its files are.

    `kv` is the default plan, `stop_ids` end a generation, `fingerprint` identifies the weights. A
    session of more than `short_rope_tokens` uses the second rotary table of a model that has two.
    """

    name: str
    context_length: int
    vocab_size: int
    stop_ids: frozenset[int]
    fingerprint: str
    kv: KvPlan
    short_rope_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a session would hold; `bytes_per_token` of a plan is None where it is not possible."""

    plan: KvPlan
    context_tokens: int
    kv_bytes: int
    bytes_per_token: Callable[[KvPlan], float | None]


class SequenceCache(Protocol):
    """One sequence's keys and values. A forward pass is `begin(n)`, the pass, `commit(m <= n)`.

    `trim` keeps at most the first `tokens` tokens: fewer, where a cache cannot go back exactly;
    the loop computes what is missing again.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def chunk_tokens(self) -> int: ...

    @property
    def budget_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def bytes_per_token(self) -> float: ...

    def holdings(self) -> Holdings: ...

    def begin(self, tokens: int, /) -> None: ...

    def commit(self, tokens: int, /) -> None: ...

    def rewind(self, rows: int = 0, /) -> None: ...

    def trim(self, tokens: int, /) -> None: ...

    def state(self) -> bytes: ...

    def load_state(self, state: bytes, /) -> None: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Computes forward passes of one model over any number of caches, which it opens itself.

    `cache_kind` names the form of a saved cache: only a cache of the same kind can load it.
    """

    name: str
    cache_kind: str
    model: ModelFacts
    weight_bytes_per_step: int

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None for a model that takes ids only."""
        ...

    def session_config(self, request: SessionRequest) -> SessionConfig:
        """What a session gets for what was asked.

        Raises `UsageError`, `BudgetError` naming the smallest budget that works, and
        `BackendError` for what this backend cannot do.
        """
        ...

    def open_cache(self, config: SessionConfig) -> SequenceCache:
        """An empty cache as `config` says."""
        ...

    def forward(self, cache: Any, inputs: ForwardInput) -> NDArray[np.float32]:
        """Logits float32 [R, V] of `inputs.rows`; writes the new tokens' K and V into `cache`.

        `cache` is one that this backend opened. The caller has called `cache.begin(T)` and will
        call `commit` or `rewind`.
        """
        ...

    def close(self) -> None:
        """Gives the weights' memory back; the backend cannot be used afterwards."""
        ...


def open_backend(name: str, files: ModelFiles, *, threads: int) -> Backend:
    """The backend called `name` (or the best one for `auto`) with the weights of `files` loaded.

    Raises `UsageError` for an unknown name and `BackendError` for one that cannot run here or
    does not read these files.
    """
    if name == "auto":
        name, reason = choose(files)
        if reason is not None:
            logger.warning("using the slow %s backend: %s", name, reason)
    elif name not in BACKENDS:
        raise UsageError(
            f"backend {name!r} is not known; choose auto, {', '.join(sorted(BACKENDS))}"
        )
    elif not _load(name).reads(files):
        possible = ", ".join(other for other in PREFERENCE if _load(other).reads(files))
        raise BackendError(f"the {name} backend does not read {files.path}; {possible} can")
    return _load(name)(files, threads=threads)


def estimate(files: ModelFiles, request: SessionRequest, *, threads: int) -> Estimate:
    """What a session on the best backend that reads `files` would hold, told from them alone.

    Without a budget it gives up none of its tokens, by default the model's context. Loads no
    weights, and asks not whether the backend can run here. Raises what `session_config` would.
    """
    name = next(name for name in PREFERENCE if _load(name).reads(files))
    return _load(name).estimate(files, request, threads=threads)


def missing(name: str) -> str | None:
    """Why backend `name` cannot run here, or None when it can."""
    return _load(name).missing()


def choose(files: ModelFiles) -> tuple[str, str | None]:
    """The backend `auto` takes for these files, and why it is not the fastest, or None if it is.

    Raises `BackendError` when none can run here.
    """
    readers = [name for name in PREFERENCE if _load(name).reads(files)]
    name = next((name for name in readers if missing(name) is None), None)
    reason = missing(readers[0])
    if name is None:
        raise BackendError(f"{files.path} cannot run here: {reason}")
    return name, reason


def _load(name: str) -> Any:
    module_name, _, class_name = BACKENDS[name].partition(":")
    return getattr(import_module(module_name), class_name)
