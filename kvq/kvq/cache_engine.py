"""The seam between a cache and what holds and computes it: one protocol, one table.

To add an engine: one file with a class that has `CacheEngine`'s members, one row in `ENGINES`.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq import native
from kvq.config import AttentionParams
from kvq.errors import UsageError
from kvq.geometry import Tiers
from kvq.reference_delta import DeltaWeights
from kvq.selectors import ReadRule
from kvq.sizing import Arena

ENGINES = {
    "native": "kvq.native:NativeCache",
    "cuda": "kvq.device_cache:CudaCache",
    "numpy": "kvq.reference_cache:ReferenceCache",
}
# Those whose pages lie in the processor's memory.
ON_HOST = ("native", "numpy")

Float = NDArray[np.float32]
Half = NDArray[np.float16]


class CacheEngine(Protocol):
    """One sequence in one arena. Decides nothing: which page loses bits is told from outside.

    `kvq.cache.Cache` says what its methods of the same names mean, and checks what they are given.
    """

    arena: Arena

    @property
    def handle(self) -> int | None:
        """What a graph's node names the cache by; None: no graph reaches it."""
        ...

    @property
    def tokens(self) -> int: ...

    @property
    def tail_rows(self) -> int:
        """Committed floating-point rows of a stream, sinks included."""
        ...

    @property
    def branch_rows(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...

    @property
    def pages_seen(self) -> int:
        """Pages of KV heads that steps could have read so far, and those they did."""
        ...

    @property
    def pages_read(self) -> int: ...

    @property
    def tiers(self) -> Tiers: ...

    def read_by(self, rule: ReadRule) -> None: ...

    def feed_back(self, feedback: Float) -> None:
        """Keys that close or lose bits are `kvq.reference.carried` by it, [L, Hk, D, D]."""
        ...

    def missing(self, tokens: int) -> tuple[int, int]:
        """(bytes, columns) still missing before `tokens` more rows can be kept."""
        ...

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        silent: Sequence[int] = (),
    ) -> None: ...

    def attend(
        self,
        params: AttentionParams,
        qkv: Float,
        positions: NDArray[np.int64],
        inv_freq: Float,
        q_norm: Float | None = None,
        k_norm: Float | None = None,
        sink_logits: Float | None = None,
    ) -> Float: ...
    def convolve(self, layer: int, bcx: Float, weight: Float) -> Float: ...

    def recur(self, layer: int, rows: Float, gates: Float, weights: DeltaWeights) -> Float: ...
    def look(
        self,
        params: AttentionParams,
        queries: Float,
        rows: NDArray[np.int64],
        inv_freq: Float,
        q_norm: Float | None = None,
    ) -> Float: ...
    def commit(self, rows: int | Sequence[int]) -> None: ...
    def rewind(self, rows: int = 0) -> None: ...
    def trim(self, tokens: int) -> None: ...
    def mark(self, tokens: int) -> None: ...
    def edit(self, start: int, stop: int, count: int) -> None: ...
    def demote(self, actions: NDArray[np.int32]) -> None: ...
    def demote_entering(self, widths: NDArray[np.uint8]) -> None: ...
    def shift(self, column: int, delta: int) -> None: ...
    def shift_sinks(self, delta: int) -> None: ...
    def mask(self, column: int, mask: int) -> None: ...
    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]: ...
    def views(self) -> NDArray[np.int64]: ...
    def places(self) -> NDArray[np.int64]: ...
    def entering(self) -> NDArray[np.uint8]: ...

    def evidence(self, tokens: int) -> tuple[Float, Float]:
        """What probes among the first `tokens` tokens see: [8, L, Hk, C] and [3, L, Hk, D]."""
        ...

    def constants(self, layer: int) -> tuple[Float, Float]:
        """Scales and mids of a layer: keys [Hk, C, 2, D], values [Hk, C, 2, 64]."""
        ...

    def key_squares(self, layer: int) -> Float:
        """Squared lengths of a layer's keys as read, [Hk, C, 64]; 0 where a page is evicted."""
        ...

    def page(self, layer: int, head: int, column: int) -> bytes: ...
    def tail(self, layer: int, head: int) -> tuple[Half, Half, NDArray[np.int32]]: ...
    def state(self) -> bytes: ...
    def load_state(self, state: bytes) -> None: ...
    def close(self) -> None: ...


def open_engine(name: str, arena: Arena) -> CacheEngine:
    """An empty cache in `arena`; numpy's, with a line in the log, where there is no native code.

    Raises `UsageError` for an unknown name, `BackendError` for a device that cannot be used.
    """
    if name not in ENGINES:
        raise UsageError(f"cache engine {name!r} is not known; choose {' or '.join(ENGINES)}")
    if name == "native" and not native.available():
        name = "numpy"
    module, _, attribute = ENGINES[name].partition(":")
    engine: Any = getattr(import_module(module), attribute)
    return engine(arena)
