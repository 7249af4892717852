"""Wraps the C ABI of the native library; `kvq/csrc/kvq.h` defines every call made here.

Knows no policy and no model.
"""

import ctypes
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_uint8, c_uint64
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from kvq.abi import POINTERS, NativeLayout, NativeRead, NativeStats, Regions, as_attention
from kvq.config import PAGE_TOKENS, AttentionParams
from kvq.errors import BackendError, BudgetError, CacheError, SnapshotError, argument, closed
from kvq.files import room_on_disk
from kvq.formats import constant_bytes, format_bytes, grid_bytes
from kvq.geometry import Geometry, as_config
from kvq.native_library import library
from kvq.selectors import ReadRule
from kvq.settings import cache_folder
from kvq.sizing import ClassArena

if TYPE_CHECKING:
    from kvq.reference.delta import DeltaWeights

EVIDENCE_FACTS = 8
_MOST = 1 << 31
# Statuses of the C ABI: the call was done; the pool must give something up first.
_OK, _SHORT = 0, 1
_CLOSED: Any = closed(lambda: CacheError("this cache was closed: open another one"))
VIEWS = {"full": 0, "hi": 1}
# The device of caches that lie in the processor's memory.
HOST = "cpu"


def pack(
    x: NDArray[np.float32],
    side: int,
    bits: int = 8,
    *,
    axis: int | None = None,
    feedback: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Encodes one page's keys (side 0) or values (1), float32 [64, D]; returns planes and grid.

    `axis`: the one a group of the grid lies along; by default the tokens for keys. `feedback`
    float32 [D, D]: see `kvq.reference.stored.carried`.
    """
    x = np.ascontiguousarray(x, np.float32)
    dim = x.shape[1]
    planes = np.zeros(64 * dim, np.uint8)
    channels = (side if axis is None else axis) == 0
    grid = np.zeros(grid_bytes(dim if channels else 64), np.uint8)
    carried = None if feedback is None else np.ascontiguousarray(feedback, np.float32)
    pointers = carried if carried is None else pointer(carried), pointer(planes), pointer(grid)
    _check(library().kvq_pack(side, channels, pointer(x), dim, bits, *pointers))
    return planes[: 64 * dim * bits // 8], grid


def layout(geometry: Geometry, num_bytes: int, columns: int) -> dict[str, Any]:
    """Returns the library's count of an arena's bytes, to be compared with `kvq.geometry`'s."""
    config, out = as_config(geometry), NativeLayout()
    library().kvq_layout_of(ctypes.byref(config), num_bytes, columns, ctypes.byref(out))
    sizes = {field[0]: getattr(out, field[0]) for field in NativeLayout._fields_}
    return sizes | {"regions": Regions(*out.regions)}


def figure(path: str) -> int:
    """Declares a count that is read at the attribute `path` without a call of Python."""
    return cast(int, property(attrgetter(path)))


class NativeCache:
    """Holds a cache in native code; every method is one call of the C ABI.

    Calls may come from several threads: they take turns. `close` during a call lets it end. Counts
    and bytes are what the last call that changed them returned.
    """

    device = HOST
    tokens = figure("_open_stats.tokens")
    branch_rows = figure("_open_stats.branch_rows")
    used_bytes = figure("_open_stats.used_bytes")
    peak_bytes = figure("_open_stats.peak_bytes")
    tail_rows = figure("_open_stats.tail_rows")
    pages_seen = figure("_open_stats.pages_seen")
    pages_read = figure("_open_stats.pages_read")
    # Allocated on a device; of pages that lie in the host's memory instead; copied from there to
    # the device by the newest pass.
    device_bytes = figure("_open_stats.device_bytes")
    offloaded_bytes = figure("_open_stats.offloaded_bytes")
    streamed_bytes = figure("_open_stats.streamed_bytes")

    def __init__(self, arena: ClassArena) -> None:
        self.arena = arena
        self._library = library()
        self._stats = NativeStats()
        self._counted = ctypes.byref(self._stats)
        # The same while the cache is open; every use raises `CacheError` once it is closed.
        self._open_stats: NativeStats = self._stats
        handle, encodings = c_int64(), np.array(arena.spec.page_encodings, np.uint8)
        with _second_tier(arena.file_bytes) as file:
            _check(
                self._library.kvq_cache_open(
                    ctypes.byref(as_config(arena)),
                    arena.num_bytes,
                    arena.max_columns,
                    pointer(encodings) if len(encodings) else None,
                    self._device_number(),
                    arena.resident_columns,
                    file,
                    arena.file_bytes,
                    ctypes.byref(handle),
                )
            )
        self.handle = handle.value
        _check(self._library.kvq_cache_stats(self.handle, self._counted))

    def _device_number(self) -> int:
        return 0

    def close(self) -> None:
        if self.handle:
            self._library.kvq_cache_close(self.handle)
            self.handle, self._open_stats = 0, _CLOSED

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            self.close()

    def read_by(self, rule: ReadRule) -> None:
        numbers = NativeRead(share=rule.share, octaves=rule.octaves)
        self._call("read", ctypes.byref(numbers))

    def set_rounding_feedback(self, feedback: NDArray[np.float32]) -> None:
        # Native code keeps no copy, so the array must live as long as the cache.
        self._feedback = np.ascontiguousarray(feedback, np.float32)
        self._call("feed_back", pointer(self._feedback))

    def missing(self, tokens: int) -> tuple[int, int]:
        short, columns = c_int64(), c_int32()
        self._call("missing", tokens, ctypes.byref(short), ctypes.byref(columns))
        return short.value, columns.value

    def begin(
        self,
        tokens: int,
        parents: Sequence[int] | None = None,
        *,
        view: str = "full",
        at: int | None = None,
        kv_only_layers: Sequence[int] = (),
    ) -> bool:
        """Adds rows to the branch; returns False where room must be made for them first."""
        rows = None if parents is None else _int32_array(parents)
        first = -1 if at is None else at
        kv_only = None
        if kv_only_layers:
            layers = self.arena.shape.num_layers
            kv_only = (c_uint8 * layers)(*(layer in kv_only_layers for layer in range(layers)))
        if self._call("begin", tokens, rows, VIEWS[view], first, kv_only, allowed=_SHORT):
            return False
        self._stats.branch_rows += tokens
        return True

    def attend(
        self,
        params: AttentionParams,
        qkv: NDArray[np.float32],
        positions: NDArray[np.int64],
        inv_freq: NDArray[np.float32],
        q_norm: NDArray[np.float32] | None = None,
        k_norm: NDArray[np.float32] | None = None,
        sink_logits: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        qkv = np.ascontiguousarray(qkv, np.float32)
        positions = np.ascontiguousarray(positions, np.int64)
        inv_freq = np.ascontiguousarray(inv_freq, np.float32)
        attention = as_attention(params, len(inv_freq))
        out = np.empty((len(qkv), params.num_heads * params.head_dim), np.float32)
        weights = [
            None if w is None else pointer(np.ascontiguousarray(w, np.float32))
            for w in (q_norm, k_norm, sink_logits)
        ]
        arrays = (pointer(qkv), pointer(positions), pointer(inv_freq), *weights, pointer(out))
        self._call("attend", ctypes.byref(attention), len(qkv), *arrays)
        return out

    def convolve(
        self, layer: int, bcx: NDArray[np.float32], weight: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        bcx = np.ascontiguousarray(bcx, np.float32)
        weight = np.ascontiguousarray(weight, np.float32)
        out = np.empty((len(bcx), len(weight)), np.float32)
        arrays = pointer(bcx), pointer(weight), pointer(out)
        self._call("convolve", layer, len(bcx), *arrays)
        return out

    def recur(
        self,
        layer: int,
        rows: NDArray[np.float32],
        gates: NDArray[np.float32],
        weights: "DeltaWeights",
    ) -> NDArray[np.float32]:
        inputs = (rows, gates, weights.conv, weights.decay, weights.dt_bias, weights.scale)
        arrays_in = [np.ascontiguousarray(array, np.float32) for array in inputs]
        out = np.empty((len(rows), len(weights.decay) * len(weights.scale)), np.float32)
        arrays = (*map(pointer, arrays_in), weights.norm_eps, pointer(out))
        self._call("recur", layer, len(rows), *arrays)
        return out

    def attend_shared(
        self,
        params: AttentionParams,
        queries: NDArray[np.float32],
        rows: NDArray[np.int64],
        inv_freq: NDArray[np.float32],
        q_norm: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        queries = np.ascontiguousarray(queries, np.float32)
        rows = np.ascontiguousarray(rows, np.int64)
        inv_freq = np.ascontiguousarray(inv_freq, np.float32)
        norm = None if q_norm is None else pointer(np.ascontiguousarray(q_norm, np.float32))
        attention = as_attention(params, len(inv_freq))
        out = np.empty((len(rows), params.num_heads * params.head_dim), np.float32)
        arrays = (pointer(rows), pointer(queries), pointer(inv_freq), norm, pointer(out))
        self._call("look", ctypes.byref(attention), len(rows), *arrays)
        return out

    def commit(self, rows: int | Sequence[int]) -> None:
        path = None if isinstance(rows, int) else _int32_array(rows)
        count = rows if isinstance(rows, int) else len(rows)
        self._call("commit", path, count, self._counted)

    def rewind(self, rows: int = 0) -> None:
        self._call("rewind", rows, self._counted)

    def trim(self, tokens: int) -> None:
        self._call("trim", tokens, self._counted)

    def mark(self, tokens: int) -> None:
        self._call("mark", tokens)

    def edit(self, start: int, stop: int, count: int) -> None:
        self._call("edit", start, stop, count, self._counted)

    def demote(self, actions: NDArray[np.int32]) -> None:
        actions = np.ascontiguousarray(actions, np.int32)
        self._call("demote", pointer(actions), len(actions), self._counted)

    def _call(self, name: str, *arguments: Any, allowed: int = _OK) -> int:
        """Calls `kvq_cache_NAME` of this cache and returns its status, 0 or `allowed`.

        Raises `CacheError` for another status.
        """
        for number in arguments:
            if isinstance(number, int) and not -_MOST <= number < _MOST:
                raise _beyond(number)
        status = getattr(self._library, f"kvq_cache_{name}")(self.handle, *arguments)
        if status not in (_OK, allowed):
            raise _refusal(status)
        return status

    def lower_new_page_widths(self, widths: NDArray[np.uint8]) -> None:
        widths = np.ascontiguousarray(widths, np.uint8)
        self._call("demote_entering", pointer(widths))

    def shift(self, column: int, delta: int) -> None:
        self._call("shift", column, delta)

    def shift_sinks(self, delta: int) -> None:
        self._call("shift_sinks", delta)

    def mask(self, column: int, mask: int) -> None:
        self._call("mask", column, c_uint64(mask))

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        shape, count = self.arena.shape, self._open_stats.columns
        facts = np.zeros((count, 4), np.int64)
        widths = np.zeros((shape.num_layers, shape.num_kv_heads, count, 2), np.uint8)
        pointers = pointer(facts), pointer(widths)
        self._call("columns", count, *pointers)
        return facts, widths

    def views(self) -> NDArray[np.int64]:
        facts = np.zeros((self._open_stats.views, 5), np.int64)
        self._call("views", len(facts), pointer(facts))
        return facts

    def places(self) -> NDArray[np.int64]:
        places = np.zeros((self._open_stats.tail_rows, 3), np.int64)
        self._call("places", len(places), pointer(places))
        return places

    def new_page_widths(self) -> NDArray[np.uint8]:
        shape = self.arena.shape
        widths = np.zeros((shape.num_layers, shape.num_kv_heads, 2), np.uint8)
        self._call("entering", pointer(widths))
        return widths

    def evidence(self, tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        shape, count = self.arena.shape, self._open_stats.columns
        streams = (shape.num_layers, shape.num_kv_heads)
        facts = np.zeros((EVIDENCE_FACTS, *streams, count), np.float32)
        queries = np.zeros((3, *streams, shape.head_dim), np.float32)
        pointers = pointer(facts), pointer(queries)
        self._call("evidence", tokens, count, *pointers)
        return facts, queries

    def constants(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        shape, count = self.arena.shape, self._open_stats.columns
        keys = np.zeros((shape.num_kv_heads, count, 2, shape.head_dim), np.float32)
        values = np.zeros((shape.num_kv_heads, count, 2, PAGE_TOKENS), np.float32)
        pointers = pointer(keys), pointer(values)
        self._call("constants", layer, count, *pointers)
        return keys, values

    def key_squares(self, layer: int) -> NDArray[np.float32]:
        count = self._open_stats.columns
        squares = np.zeros((self.arena.shape.num_kv_heads, count, PAGE_TOKENS), np.float32)
        self._call("key_squares", layer, count, pointer(squares))
        return squares

    def page(self, layer: int, head: int, column: int) -> bytes:
        dim = self.arena.shape.head_dim
        out = np.zeros(constant_bytes(dim, self.arena.value_groups) + 128 * dim, np.uint8)
        place = _int32_array((layer, head, column))
        count = self._library.kvq_cache_page(self.handle, *place, pointer(out))
        if count < 0:
            raise CacheError(f"layer {layer}, head {head} has no page {column}")
        return out[:count].tobytes()

    def tail(
        self, layer: int, head: int
    ) -> tuple[NDArray[np.float16], NDArray[np.float16], NDArray[np.int32]]:
        rows, dim = self._open_stats.tail_rows, self.arena.shape.head_dim
        k, v = np.zeros((2, rows, dim), np.float16)
        positions = np.zeros(rows, np.int32)
        pointers = pointer(k), pointer(v), pointer(positions)
        self._call("tail", layer, head, rows, *pointers)
        return k, v, positions

    def state(self) -> bytes:
        out = np.zeros(max(0, self._library.kvq_cache_state_bytes(self.handle)), np.uint8)
        _check(self._library.kvq_cache_save(self.handle, pointer(out), len(out)))
        return out.tobytes()

    def load_state(self, state: bytes) -> None:
        if self._library.kvq_cache_load(self.handle, state, len(state), self._counted):
            raise SnapshotError(
                "the saved cache has another shape, plan or budget than this session, or is damaged"
            )


def pointer(x: NDArray[Any]) -> Any:
    """Returns C's pointer to a contiguous array, which it keeps alive; ctypes names no type."""
    return x.ctypes.data_as(POINTERS[x.dtype])


def _check(status: int) -> None:
    if status:
        raise _refusal(status)


def _refusal(status: int) -> CacheError:
    return CacheError(f"the cache refused: {library().kvq_status_text(status).decode()}")


@contextmanager
def _second_tier(num_bytes: int) -> Generator[int]:
    """Yields a file of so many bytes for pages, while a cache is opened over it."""
    folder = cache_folder()
    if num_bytes and sys.platform != "linux":
        raise BackendError(
            f"{argument('kv_offload')} on a processor keeps pages in a file, which this system "
            f"does not take out of memory again: use Linux, or leave it out and raise "
            f"{argument('kv_budget')}"
        )
    try:
        with room_on_disk(num_bytes, folder) as file:
            yield file
    except OSError as error:
        raise BudgetError(
            f"{argument('kv_offload')} needs {format_bytes(num_bytes)} in {folder}: "
            f"{error.strerror or error}; make room there, name another folder by XDG_CACHE_HOME, "
            f"or give a smaller {argument('context_tokens')} or a larger {argument('kv_budget')}"
        ) from error


def _int32_array(numbers: Sequence[int]) -> "ctypes.Array[c_int32]":
    """Returns `numbers` for C. Raises `CacheError` where ctypes would wrap one without a word."""
    for number in numbers:
        if not -_MOST <= number < _MOST:
            raise _beyond(number)
    return (c_int32 * len(numbers))(*numbers)


def _beyond(number: int) -> CacheError:
    return CacheError(f"{number} is beyond what a cache counts with, 32 bits")
