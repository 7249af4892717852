"""What measuring asks of an engine: two classes and one table. Measures nothing.

To add an engine, write a file with a class that has `BenchEngine`'s members, and add a row to
`ENGINES`, or to `kvq_lab.peers` for an engine that only the laboratory needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.config import DEFAULT_DRAFT_TOKENS, DEFAULT_READ, MOST_DRAFT_TOKENS
from kvq.errors import BackendError, UsageError, argument
from kvq_apps import laboratory
from kvq_runtime.backends import ModelFiles
from kvq_runtime.machine import gpu

KVQ = "kvq"
ENGINES = {
    KVQ: "kvq_apps.bench.engine_kvq:KvqEngine",
    "llama.cpp": "kvq_apps.bench.engine_llamacpp:LlamaCppEngine",
    "llama-bench": "kvq_apps.bench.engine_llamabench:LlamaBenchEngine",
    **laboratory.peers(),
}
PEERS = tuple(name for name in ENGINES if name != KVQ)
LABORATORY_PEERS = ("transformers",)
# Peers that are a program of the user's, `NAME=COMMAND`, and peers that read GGUF.
PROGRAMS = ("llama-bench",)
GGUF_READERS = ("llama.cpp", "llama-bench")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Describes how an engine keeps its cache: `kv` is the engine's own name for the widths.

    With a `policy` the cache has `budget`, written as for `--kv-budget`, and the policy decides
    what is given up; otherwise it holds everything. `read` is the part of its pages it reads,
    written as for `--kv-read`. kvq keeps room for drafts of `draft_tokens`.
    """

    kv: str
    policy: str | None = None
    budget: str | None = None
    read: str = DEFAULT_READ
    draft_tokens: int = DEFAULT_DRAFT_TOKENS

    @property
    def name(self) -> str:
        """Returns `4:2`, or where it reads less `4:2 read 25%`."""
        return self.kv if self.read == DEFAULT_READ else f"{self.kv} read {self.read}"

    @property
    def text(self) -> str:
        """Returns `8:8`, or under pressure `8:8 h2o`."""
        return self.name if self.policy is None else f"{self.name} {self.policy}"


class BenchSequence(ABC):
    """Holds one sequence in an engine, begun with a cache that holds some tokens already.

    `kv_bytes` are the cache's bytes of these tokens, `relief_s` the seconds spent on making room
    so far. `why_no_prefill` says why it cannot be extended by many tokens at once, or is None.
    """

    kv_bytes: int
    relief_s = 0.0
    why_no_prefill: str | None = None

    def clock(self) -> float:
        """Returns seconds by the clock that times its work."""
        return perf_counter()

    @abstractmethod
    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Appends tokens `ids` [T] and returns the logits float32 [V] of the last."""

    def verify(self, rows: int) -> bool:
        """Runs one pass over `rows` new tokens, a chain, with the logits of `logit_rows`.

        `rollback` forgets the tokens. Returns False where the engine takes fewer tokens at once.
        """
        return False

    @abstractmethod
    def rollback(self) -> None:
        """Forgets what `forward`, `verify` and `attend` appended."""

    def attend(self, rows: int) -> bool:
        """Runs the attention of all layers alone, for `rows` new tokens.

        Returns False where the engine's attention cannot run alone, or takes fewer tokens at once.
        """
        return False

    @abstractmethod
    def step_bytes(self) -> tuple[int, int]:
        """Counts the bytes of weights and of the cache that one decode step reads."""

    @abstractmethod
    def close(self) -> None:
        """Frees the cache."""


class BenchEngine(Protocol):
    """Describes a model's weights in memory, ready for sequences at any of its cache settings."""

    name: str
    settings: tuple[Setting, ...]

    def sequence(self, setting: Setting, depth: int, room: int) -> BenchSequence:
        """Makes a sequence of `depth` tokens with room for `room` more.

        Raises `UsageError` for a budget in which nothing has to be given up, `BudgetError` for one
        that is too small.
        """
        ...

    def close(self) -> None:
        """Frees the weights."""
        ...


def draft_ids(rows: int) -> NDArray[np.int64]:
    """Returns tokens int64 [rows] that every vocabulary has."""
    return np.arange(rows, dtype=np.int64) % 64


def logit_rows(rows: int) -> NDArray[np.int64]:
    """Returns the rows that a pass needs logits of: all of a draft's, the last of a prompt's."""
    return np.arange(0 if rows <= MOST_DRAFT_TOKENS else rows - 1, rows, dtype=np.int64)


def check_peers(names: Sequence[str], device: str = gpu.PROCESSOR) -> None:
    """Raises `UsageError` for an unknown peer, `BackendError` naming what must be installed."""
    for name in names:
        kind, _, command = name.partition("=")
        if kind in LABORATORY_PEERS and kind not in ENGINES:
            raise laboratory.laboratory_missing(f"{argument('--peer')} {kind}")
        if kind not in PEERS or bool(command) != (kind in PROGRAMS):
            shown = (f"{peer}=COMMAND" if peer in PROGRAMS else peer for peer in PEERS)
            raise UsageError(
                f"{argument('--peer')} {name!r} is not known; choose {', '.join(shown)}"
            )
        engine_class, options = _load(name)
        reason = engine_class.missing(device, **options)
        if reason is not None:
            raise BackendError(f"the peer {name} cannot run here: {reason}")


def default_engine(files: ModelFiles) -> str:
    """Returns the engine that kvq uses for these files: its own for a graph, else llama.cpp."""
    return KVQ if files.has_onnx else "llama.cpp"


def shown_peers(names: Sequence[str]) -> dict[str, str]:
    """Returns the name of each peer in tables: two programs of one kind go by their paths."""
    kinds = [name.partition("=")[0] for name in names]
    return {
        name: kind if kinds.count(kind) == 1 else name
        for name, kind in zip(names, kinds, strict=True)
    }


def open_engine(
    name: str,
    files: ModelFiles,
    *,
    threads: int,
    settings: Sequence[Setting],
    device: str = gpu.PROCESSOR,
    weights_budget: int | None = None,
) -> BenchEngine:
    """Opens engine `name` with the weights of `files`, on `device` as `gpu.usable_device` gives it.

    `settings` and `weights_budget` are for kvq; a peer measures all the settings it has. Raises
    `BackendError` for a model the engine cannot compute.
    """
    engine_class, options = _load(name)
    if name == KVQ:
        options["weights_budget"] = weights_budget
    return engine_class(files, threads=threads, settings=settings, device=device, **options)


def _load(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns an engine's class, and the command of a program as an argument for it."""
    kind, _, command = name.partition("=")
    module_name, _, class_name = ENGINES[kind].partition(":")
    engine_class = getattr(import_module(module_name), class_name)
    return engine_class, {"command": command} if command else {}
