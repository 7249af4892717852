"""The kernels for CUDA against the reference, on an emulated grid of threads and on a GPU.

`cuda_emulator.h` runs every thread of a block as a fiber, so barriers, shuffles and the products of
tensor cores mean what they mean on a device; speed alone is left out. `-m gpu` runs the same tests
on a real one, which needs no ONNX Runtime.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from emulated import DEVICES, SOURCE, ready
from kvq import devices
from kvq.formats import GRANULES, constant_bytes, grid_bytes
from kvq.reference import linear as reference_linear
from kvq.reference import stored as reference
from kvq.reference.linear import BlockFormat, Blocks, Grid, PanelFormat, View
from matrices import matrix
from pairs import some_feedback
from shelf import Shelf

ENTRY = np.dtype(
    [("granule", "<u4", 8), ("constants", "<u4"), ("k_bits", "u1"), ("v_bits", "u1"),
     ("peak", "u1"), ("mean", "u1")]
)  # fmt: skip
VIEW = np.dtype(
    [("column", "<i4"), ("pos0", "<i4"), ("delta", "<i4"), ("first_token", "<i4"), ("mask", "<u8")]
)
PAGE = np.dtype(
    [("granules", "<u8", 8), ("constants", "<u8"), ("k_bits", "<i4"), ("v_bits", "<i4")]
)
NONE, ALL = 0xFFFFFFFF, (1 << 64) - 1
NO_MEMORY = 5  # of kvq.h
ROTATED, CHANNELS = 1, 2
# Numbers that meet codes are rounded to float16, and so are a tail's queries and weights.
HALF = 2.0**-10

Array = np.ndarray[Any, Any]


class Library:
    """A device's library; arrays of the emulator's are where they are, a GPU's are copied."""

    def __init__(self, device: str) -> None:
        self.calls = ctypes.CDLL(str(devices.opened(device).library))
        self.is_emulated = device == "emulated"

    def call(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.calls, name)(*arguments))

    def _copy(self, to: int, source: int, num_bytes: int) -> None:
        count = c_int64(num_bytes)
        arguments = c_void_p(to), count, c_void_p(source), count, count, c_int64(1), None
        assert self.call("kvq_cuda_copy", *arguments) == 0
        assert self.call("kvq_cuda_wait", None) == 0

    def take(self, array: Array) -> int:
        if self.is_emulated:
            return array.ctypes.data
        there = c_void_p()
        assert self.call("kvq_cuda_allocate", c_int64(array.nbytes + 1), ctypes.byref(there)) == 0
        self._copy(there.value or 0, array.ctypes.data, array.nbytes)
        return there.value or 0

    def give_back(self, array: Array, place: int) -> None:
        if self.is_emulated:
            return
        if array.flags.writeable:
            self._copy(array.ctypes.data, place, array.nbytes)
        self.calls.kvq_cuda_free(c_void_p(place))


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """`fields`: a letter and names: i int32, l int64, f float, p pointer."""
    kinds = {"i": c_int32, "l": c_int64, "f": c_float, "p": c_void_p}
    rows = [
        (word, kinds[line.split()[0]]) for line in fields.split(";") for word in line.split()[1:]
    ]
    return type(name, (ctypes.Structure,), {"_fields_": rows})


Attention = structure(
    "Attention",
    "i heads kv_heads head_dim rotary_pairs; f scale softcap rope_factor norm_eps;"
    "i window_tokens splits",
)
Sequence = structure(
    "Sequence",
    "i tokens view_count most_columns tail_rows tail_stride turns row_turns tiles hi_view;"
    "l pool_bytes constant_bytes granule_bytes;"
    "p pool entries views turn_of_view deltas tile_rows tile_turns forms tail_keys tail_values "
    "tail_masks qkv positions inv_freq q_norm k_norm sink_logits queries partials out "
    "chosen bounds; f share; p counts away_end; l away_slot",
)
Closing = structure(
    "Closing",
    "i count kv_heads head_dim; p x; l stride; p rows pages forms feedback; l constant_bytes",
)
Linear = structure(
    "Linear",
    "i rows columns bits block grid; p panels x norm bias residual out; i tokens activation view;"
    "f norm_eps; p inputs tops levels steps; i exact_rows; p panel_tops deviations marks",
)
Rows = structure(
    "Rows", "p rows source; l stride source_stride; i streams head_dim first count; p from_"
)


def run(library: Library, name: str, *arguments: ctypes.Structure | Array | int) -> None:
    """Calls with arrays and those of structures where the device finds them; they come back."""
    named_arrays = [getattr(argument, "arrays", {"": argument}) for argument in arguments]
    arrays = [
        value for named in named_arrays for value in named.values() if isinstance(value, np.ndarray)
    ]
    places = {id(array): library.take(array) for array in arrays}
    passed = []
    for argument, named in zip(arguments, named_arrays, strict=True):
        if isinstance(argument, ctypes.Structure):
            there = type(argument).from_buffer_copy(argument)
            for field, value in named.items():
                if isinstance(value, np.ndarray):
                    setattr(there, field, places[id(value)])
            passed.append(ctypes.byref(there))
        else:
            passed.append(c_void_p(places[id(argument)]) if id(argument) in places else argument)
    status = library.call(name, *passed, None)
    for array in {id(array): array for array in arrays}.values():
        library.give_back(array, places[id(array)])
    assert status == 0


@contextmanager
def turns(library: Library, order: int) -> Iterator[None]:
    """A GPU's threads take turns as they like, the emulator's as `Emulator::take_turns` says."""
    if library.is_emulated:
        run(library, "kvq_cuda_take_turns", order)
    try:
        yield
    finally:
        if library.is_emulated:
            run(library, "kvq_cuda_take_turns", 0)


def filled(kind: type[ctypes.Structure], **values: Any) -> ctypes.Structure:
    """The structure; arrays as their addresses, which it keeps alive."""
    made = kind(
        **{
            name: value.ctypes.data if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
    )
    setattr(made, "arrays", values)  # noqa: B010
    return made


@pytest.fixture(scope="module", params=DEVICES)
def library(request: pytest.FixtureRequest, shelf: Shelf) -> Library:
    ready(request.param, shelf)
    return Library(request.param)


class Case(NamedTuple):
    """What a sequence is made of."""

    head_dim: int
    widths: list[tuple[int, int]]
    form: int = 0
    tokens: int = 1
    heads: int = 4
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    splits: int = 3
    tail: int = 21
    deltas: tuple[int, ...] = (0,)
    norms: bool = False
    hi_view: bool = False
    moved_rows: int = 0  # how far the first rows of the tail have moved
    sinks: tuple[float, ...] = ()
    share: float = 1.0  # of the pages that are read


class PageArrays(NamedTuple):
    """A sequence's keys and values of every KV head as attention must see them, and its parts."""

    keys: list[Array]
    values: list[Array]
    positions: Array
    seen: Array
    lines: Array  # of keys scales and mids, [kv_heads, columns, 2, head_dim]
    parts: dict[str, Any]


def page_arrays(case: Case, rng: np.random.Generator) -> PageArrays:
    """Pages of random numbers at the case's widths, each where it has moved, and a tail."""
    dim, columns = case.head_dim, len(case.widths)
    granule = 16 * dim
    entries = np.zeros((case.kv_heads, columns), ENTRY)
    entries["granule"] = NONE
    groups = max(64, dim) if case.form & CHANNELS else 64
    constants = constant_bytes(dim, groups)
    pool = np.zeros(case.kv_heads * columns * (constants + 8 * granule), np.uint8)
    views = np.zeros(columns, VIEW)
    turn = np.array([column % len(case.deltas) for column in range(columns)], np.int32)
    views["column"] = np.arange(columns)[::-1]  # in any order
    views["pos0"] = 64 * views["column"] + 4
    views["delta"] = np.array(case.deltas)[turn]
    views["mask"] = ALL
    views["mask"][:1] = 0x00FF_FFFF_FFFF_FF3F
    inv_freq = frequencies(dim)
    keys, values, free = [], [], 0
    lines = np.zeros((case.kv_heads, columns, 2, dim), np.float32)
    for head in range(case.kv_heads):
        one_keys, one_values = [], []
        for column, widths in enumerate(case.widths):
            entry = entries[head, column]
            entry["constants"], entry["k_bits"], entry["v_bits"] = head * columns + column, *widths
            for side, bits in enumerate(widths):
                x = rng.standard_normal((64, dim)).astype(np.float32) * rng.uniform(0.2, 3, dim)
                stored = x.astype(np.float16).astype(np.float32)
                if side == 0 and case.form & ROTATED:
                    stored = reference.hadamard(stored)
                axis = 0 if side == 0 or case.form & CHANNELS else 1
                codes, grid = reference.encode(stored, axis)
                planes = reference.planes(codes, bits, side) if bits else np.zeros(0, np.uint8)
                for place in range(GRANULES.get(bits, 0)):
                    entry["granule"][4 * side + place] = free
                    end = len(pool) - free * granule
                    pool[end - granule : end] = planes[place * granule :][:granule]
                    free += 1
                start = int(entry["constants"]) * constants + side * grid_bytes(dim)
                line = np.frombuffer(grid.stored(), np.uint8)
                pool[start : start + len(line)] = line
                seen_bits = min(bits, 4 if case.hi_view else 8)
                read = reference.decode(codes, grid, seen_bits, axis) if bits else stored
                if side == 0:
                    lines[head, column] = grid.scale, grid.mid
                    read = reference.hadamard(read) if case.form & ROTATED else read
                    delta = int(views["delta"][columns - 1 - column])
                    moved = np.full(64, delta, np.int64)
                    read = reference.rotate(read[:, None], moved, inv_freq)[:, 0]
                (one_keys if side == 0 else one_values).append(read)
        keys.append(np.concatenate([np.zeros((0, dim)), *one_keys]))
        values.append(np.concatenate([np.zeros((0, dim)), *one_values]))
    slots = np.arange(64)
    placed = [slots + view["pos0"] + view["delta"] for view in views[::-1]]
    positions = np.array(placed, np.int64).reshape(-1)
    bits = [int(view["mask"]) >> slots.astype(object) & 1 for view in views[::-1]]
    alive = [np.full(64, pair[0] > 0) for pair in case.widths]
    seen = np.array(bits, bool).reshape(-1) & np.array(alive, bool).reshape(-1)
    parts = {
        "pool": pool, "pool_bytes": len(pool), "constant_bytes": constants,
        "granule_bytes": granule, "entries": entries, "views": views, "view_count": columns,
        "most_columns": columns, "turn_of_view": turn, "hi_view": case.hi_view,
        "forms": np.full(case.kv_heads, case.form, np.uint8), "inv_freq": inv_freq,
    }  # fmt: skip
    return PageArrays(keys, values, positions, seen, lines, parts)


def frequencies(dim: int) -> Array:
    return (10_000.0 ** (-np.arange(dim // 2) / (dim // 2))).astype(np.float32)


def chosen(case: Case, pages: PageArrays, q: Array, head: int, seen: Array) -> Array:
    """Which pages each token reads of a KV head, [tokens, views]: of those of `seen`, as many."""
    group, forms = case.heads // case.kv_heads, case.form
    group_queries = q[:, head * group : (head + 1) * group].astype(np.float32)
    bounds = np.zeros((case.tokens, group, len(case.widths)), np.float32)
    for view, (column, delta) in enumerate(pages.parts["views"][["column", "delta"]].tolist()):
        back = np.full(case.tokens, -delta)
        met = reference.rotate(group_queries, back, pages.parts["inv_freq"])
        met = reference.hadamard(met) if forms & ROTATED else met
        scale, mid = pages.lines[head, column]
        scores = reference.page_bounds(met.reshape(-1, case.head_dim), scale[None], mid[None])
        bounds[:, :, view] = scores.reshape(case.tokens, group)
    per_row = zip(bounds, seen, strict=True)
    return np.array(
        [reference.chosen_pages(row_bounds, where, case.share) for row_bounds, where in per_row]
    )


def attended(case: Case, library: Library) -> tuple[Array, Array, float]:
    """(what the kernels give, what they must, the largest value) of one pass over it all."""
    rng = np.random.default_rng(case.head_dim + len(case.widths))
    pages, dim, group = page_arrays(case, rng), case.head_dim, case.heads // case.kv_heads
    rows = case.tail + case.tokens
    tail = rng.standard_normal((2, case.kv_heads, rows + 3, dim)).astype(np.float16)
    qkv = rng.standard_normal((case.tokens, (case.heads + 2 * case.kv_heads) * dim))
    qkv = qkv.astype(np.float32)
    end = 64 * len(case.widths) + 4 + max(case.deltas)
    positions = np.arange(end + case.tail, end + rows)
    norms = [rng.uniform(0.5, 2, dim).astype(np.float32) if case.norms else None for _ in range(2)]
    # A branch: the last token follows the first, and so does not see what lies between.
    sees = np.tril(np.ones((case.tokens, case.tokens), bool))
    if case.tokens > 2:
        sees[-1, 1:-1] = False
        positions[-1] = positions[1]
    tail_positions = np.concatenate([np.arange(end, end + case.tail), positions])
    visible = np.concatenate([np.ones((case.tokens, case.tail), bool), sees], axis=1)
    if case.window:
        visible &= tail_positions[None] > positions[:, None] - case.window
    moved = np.zeros(rows, np.int64)
    moved[: case.tail // 2] = case.moved_rows
    row_deltas = [case.moved_rows] if case.moved_rows else []
    visits = [
        (tile, delta)
        for tile in range(-(-rows // 64))
        for delta in sorted(set(moved[64 * tile : 64 * tile + 64].tolist()))
    ]
    masks = np.zeros((case.tokens, len(visits)), np.uint64)
    for token, row in np.argwhere(visible):
        visit = visits.index((row // 64, moved[row]))
        masks[token, visit] |= np.uint64(1 << int(row) % 64)
    turns = {
        "deltas": np.array([*row_deltas, *case.deltas], np.int32),
        "tile_rows": np.array([tile for tile, _ in visits], np.int32),
        "tile_turns": np.array([0 if delta else -1 for _, delta in visits], np.int32),
        "turn_of_view": pages.parts["turn_of_view"] + np.int32(len(row_deltas)),
    }
    shape = {"heads": case.heads, "kv_heads": case.kv_heads, "head_dim": dim}
    attention = filled(
        Attention, **shape, rotary_pairs=dim // 2, scale=dim**-0.5, softcap=case.softcap,
        rope_factor=1.0, norm_eps=1e-6, window_tokens=case.window, splits=case.splits,
    )  # fmt: skip
    out = np.zeros((case.tokens, case.heads, dim), np.float32)
    scratch = [
        np.zeros((1 + len(turns["deltas"])) * case.heads * case.tokens * dim, np.float32),
        np.zeros(case.heads * case.tokens * case.splits * (dim + 2), np.float32),
    ]
    kept = {**pages.parts, **turns, "tail_keys": tail[0].copy(), "tail_values": tail[1].copy()}
    kept |= {"tail_masks": masks, "qkv": qkv, "positions": positions, "out": out}
    kept |= dict(zip(("q_norm", "k_norm", "queries", "partials"), (*norms, *scratch), strict=True))
    kept |= {"sink_logits": np.array(case.sinks, np.float32)} if case.sinks else {}
    if case.share < 1:
        views = len(case.widths)
        marks = np.full((case.kv_heads, case.tokens, views), 7, np.uint8)
        kept |= {"chosen": marks, "counts": np.array([10, 20, 30])}
        kept |= {"bounds": np.zeros(case.heads * case.tokens * views, np.float32)}
        kept |= {"share": case.share}
    sequence = filled(
        Sequence, tokens=case.tokens, tail_rows=rows, tail_stride=rows + 3, tiles=len(visits),
        turns=len(turns["deltas"]), row_turns=len(row_deltas), **kept,
    )  # fmt: skip
    run(library, "kvq_cuda_attend", attention, sequence)

    heads = qkv.reshape(case.tokens, -1, dim)
    q, k, v = np.split(heads, [case.heads, case.heads + case.kv_heads], axis=1)
    if case.norms:
        q, k = (reference.normalize(x, norm, 1e-6) for x, norm in zip((q, k), norms, strict=True))
    inv_freq = kept["inv_freq"]
    q, k = (reference.rotate(x, positions, inv_freq) for x in (q, k))
    stands = reference.rotate(
        tail[0, :, :rows].astype(np.float32).transpose(1, 0, 2), moved, inv_freq
    )
    want, counts = np.zeros_like(out), np.zeros((2, case.kv_heads), np.int64)
    for head in range(case.heads):
        kv_head = head // group
        tail_keys = np.concatenate([stands[: case.tail, kv_head], k[:, kv_head].astype(np.float16)])
        tail_values = np.concatenate(
            [tail[1, kv_head, : case.tail], v[:, kv_head].astype(np.float16)]
        )
        keys = np.concatenate([pages.keys[kv_head], tail_keys]).astype(np.float64)
        values = np.concatenate([pages.values[kv_head], tail_values]).astype(np.float64)
        seen = np.repeat(pages.seen[None], case.tokens, axis=0)
        if case.window:
            seen &= pages.positions[None] > positions[:, None] - case.window
        if case.share < 1:
            # Views come in the other order than columns.
            by_page = seen.reshape(case.tokens, -1, 64)[:, ::-1]
            reads = chosen(case, pages, q, kv_head, by_page.any(axis=2))
            np.testing.assert_array_equal(kept["chosen"][kv_head], reads)
            seen = (by_page & reads[..., None])[:, ::-1].reshape(case.tokens, -1)
            counts[:, kv_head] = by_page.any(axis=2).sum(), reads.sum()
        seen = np.concatenate([seen, visible], axis=1)
        logits = q[:, head].astype(np.float64) @ keys.T * dim**-0.5
        if case.softcap:
            logits = case.softcap * np.tanh(logits / case.softcap)
        top = logits.max(axis=1, keepdims=True)
        weights = np.where(seen, np.exp(logits - top), 0)
        total = weights.sum(axis=1, keepdims=True)
        total += np.exp(case.sinks[head] - top) if case.sinks else 0
        want[:, head] = weights / total @ values
    if case.share < 1:
        assert kept["counts"].tolist() == [10 + counts[0].sum(), 20 + counts[1].sum(), 30]
    return out, want, float(max(np.abs(v).max() for v in pages.values) if case.widths else 3.0)


CASES = {
    "every width": Case(
        64, [(8, 8), (4, 2), (2, 4), (4, 4), (2, 2), (8, 2), (0, 0), (2, 8), (6, 6), (6, 2)]
    ),
    "rotated keys": Case(128, [(4, 4), (2, 2), (8, 8)], form=ROTATED, heads=8),
    "values per channel": Case(128, [(4, 4), (2, 2), (8, 8), (6, 6)], form=CHANNELS),
    "both, 80 channels": Case(80, [(4, 2), (2, 6), (6, 4), (8, 8)], form=ROTATED | CHANNELS),
    "96 channels": Case(96, [(4, 2), (2, 8), (8, 4)]),
    "256 channels": Case(256, [(4, 2), (8, 8)], form=ROTATED),
    "moved pages": Case(64, [(4, 4)] * 5, form=ROTATED, deltas=(0, 7, 31)),
    "a tree of tokens": Case(64, [(4, 2)] * 3, tokens=5, heads=6, tail=70),
    "a window": Case(64, [(8, 8)] * 4, tokens=2, window=150),
    "a softcap and norms": Case(64, [(4, 4)] * 2, softcap=20.0, norms=True),
    "sinks": Case(64, [(8, 8), (4, 4)] * 2, tokens=3, sinks=(-50, 0, 3, 40)),
    "sinks in a chunk": Case(64, [(8, 8)] * 3, tokens=40, splits=1, sinks=(-50, 0, 3, 40)),
    "no pages": Case(64, [], splits=1, tail=100),
    "more splits than work": Case(64, [(4, 4)], splits=8),
    "the hi view": Case(64, [(8, 6), (4, 2), (6, 8)], hi_view=True),
    "moved rows": Case(64, [(4, 4)] * 2, form=ROTATED, deltas=(0, 7), tail=70, moved_rows=5),
    "a chunk of every width": Case(
        64, [(8, 8), (4, 2), (2, 4), (0, 0), (2, 8), (6, 6), (8, 2)], tokens=40, splits=1
    ),
    "a chunk, rotated keys": Case(
        128, [(4, 2), (6, 8)], form=ROTATED | CHANNELS, tokens=11, heads=12, splits=2
    ),
    "a chunk, 80 channels": Case(80, [(4, 2), (2, 6), (8, 4)], form=CHANNELS, tokens=9),
    "a chunk, 96 channels": Case(96, [(4, 2), (2, 8), (6, 4)], tokens=9, softcap=20.0, norms=True),
    "a chunk, 256 channels": Case(256, [(4, 2), (8, 6)], form=CHANNELS, tokens=9, splits=1),
    "a chunk in a window, moved": Case(
        64, [(4, 4)] * 5, form=ROTATED, tokens=70, heads=2, window=100, deltas=(0, 7),
        moved_rows=5, tail=70, splits=1,
    ),
    "the best pages": Case(
        64, [(8, 8), (4, 2), (2, 4), (0, 0), (6, 6)] * 9, form=ROTATED, deltas=(0, 7, 31), tokens=3,
        heads=6, share=0.3, window=900,
    ),
    "the best pages for many rows": Case(
        80, [(4, 4)] * 9, tokens=5, heads=12, share=0.5, splits=2
    ),
    "as many as are seen": Case(96, [(4, 4)] * 3, share=0.99),
    "at least one": Case(64, [(4, 4)] * 3, tokens=2, share=1e-5),
    "a chunk in the hi view": Case(64, [(8, 6), (6, 8)], tokens=9, hi_view=True, splits=5),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_the_reference(name: str, library: Library) -> None:
    got, want, largest = attended(CASES[name], library)
    assert np.abs(got - want).max() < 2 * HALF * largest
    assert np.sqrt(np.square(got - want).mean()) < HALF / 8 * largest


@pytest.mark.parametrize(
    "name", ["both, 80 channels", "a tree of tokens", "the best pages", "a chunk, 96 channels"]
)
def test_attention_does_not_depend_on_the_order_of_threads(name: str, library: Library) -> None:
    if not library.is_emulated:
        pytest.skip("a GPU lets its threads take turns as it likes")
    in_order, *_ = attended(CASES[name], library)
    for order in (-1, 1, 2):
        with turns(library, order):
            np.testing.assert_array_equal(attended(CASES[name], library)[0], in_order)


CLOSED = [(8, 8), (6, 4), (2, 6), (4, 2)]


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(
    ("form", "order", "carried"), [(0, 0, True), (ROTATED, -1, False), (0, 1, False)]
)
def test_pages_are_closed_and_narrowed_to_the_byte(
    head_dim: int, form: int, order: int, carried: bool, library: Library
) -> None:
    rng = np.random.default_rng(head_dim + form)
    heads, forms = 2, np.array([form, (ROTATED | CHANNELS) - form], np.uint8)
    x = rng.standard_normal((heads, 2, 300, head_dim)) * rng.uniform(1e-3, 40, head_dim)
    x = x.astype(np.float16)
    rows = rng.permutation(300)[: 64 * len(CLOSED)].reshape(-1, 64).astype(np.int32)
    x[..., 3], x[:, :, rows[0, 5]] = 0, -1.5  # equal numbers: a scale of 0
    feedback = some_feedback(rng, heads, head_dim) if carried else None
    granule, constants = 16 * head_dim, constant_bytes(head_dim, max(64, head_dim))
    # Granules in any order, then constants, with a byte of nobody's behind each.
    pool = np.full(8 * heads * len(CLOSED) * (granule + 16 + constants + 16), 0xFF, np.uint8)
    want, free = pool.copy(), 0
    pages, encoded = np.zeros((heads, len(CLOSED)), PAGE), {}
    place = library.take(pool)
    for head, page, side in np.ndindex(heads, len(CLOSED), 2):
        kept = x[head, side, rows[page]].astype(np.float32)
        kept = reference.hadamard(kept) if forms[head] & ROTATED and not side else kept
        bits = CLOSED[page][side]
        codes, grid = reference.encode(
            kept,
            0 if not side or forms[head] & CHANNELS else 1,
            bits=bits,
            feedback=None if feedback is None or side else feedback[head],
        )
        planes = reference.planes(codes, bits, side)
        encoded[head, page, side] = codes
        to = pages[head, page]
        to["k_bits" if side == 0 else "v_bits"] = bits
        for g in range(GRANULES[bits]):
            to["granules"][4 * side + g] = place + free
            want[free : free + granule] = planes[g * granule :][:granule]
            free += granule + 16
        if side == 0:
            to["constants"] = place + free
            want[free : free + constants] = 0
            free += constants + 16
        start = int(to["constants"]) - place + side * grid_bytes(head_dim)
        line = np.frombuffer(grid.stored(), np.uint8)
        want[start : start + len(line)] = line
    call = filled(
        Closing, count=len(CLOSED), kv_heads=heads, head_dim=head_dim, x=x, stride=300, rows=rows,
        pages=pages, forms=forms, feedback=feedback, constant_bytes=constants,
    )  # fmt: skip
    # Of the page of 8 bits the keys' upper plane and the values' lower one are halved, at once.
    halved = pages["granules"][:, 0][:, [[0, 1], [6, 7]]].reshape(-1, 2)
    with turns(library, order):
        run(library, "kvq_cuda_close", call)
        run(library, "kvq_cuda_narrow", halved, len(halved), head_dim)
    for head in range(heads):
        first, second = (int(at) - place for at in halved[2 * head : 2 * head + 2, 0])
        want[first : first + granule] = reference.planes(encoded[head, 0, 0], 2, 0)
        want[second : second + granule] = reference.planes(encoded[head, 0, 1], 6, 1)[2 * granule :]
    library.give_back(pool, place)
    np.testing.assert_array_equal(pool, want)


def columns_of(grid: Grid) -> int:
    """Of matrices in tests: blocks and a part, or super-blocks and a part."""
    return 600 if grid.has_supers else 200


def shape_of(form: PanelFormat) -> dict[str, int]:
    """The matrix as both structures name it."""
    names = ("rows", "columns", "bits", "block", "grid")
    return {name: int(getattr(form, name)) for name in names}


@pytest.mark.parametrize(
    ("tokens", "bits", "block", "grid", "view"),
    [
        (1, 4, 64, Grid.SYMMETRIC, "full"), (16, 4, 32, Grid.SYMMETRIC, "hi"),
        (5, 4, 64, Grid.ZERO_POINT, "full"), (8, 4, 32, Grid.MINIMUM, "full"),
        (5, 5, 64, Grid.SYMMETRIC, "full"), (16, 5, 32, Grid.MINIMUM, "full"),
        (1, 5, 128, Grid.ZERO_POINT, "full"), (8, 5, 64, Grid.SYMMETRIC, "hi"),
        (8, 6, 64, Grid.SYMMETRIC, "full"), (16, 6, 64, Grid.ZERO_POINT, "full"),
        (1, 6, 32, Grid.MINIMUM, "full"), (5, 6, 32, Grid.ZERO_POINT, "hi"),
        (1, 8, 32, Grid.SYMMETRIC, "full"), (8, 8, 64, Grid.SYMMETRIC, "full"),
        (5, 8, 64, Grid.ZERO_POINT, "full"), (16, 8, 64, Grid.SYMMETRIC, "hi"),
        (5, 8, 32, Grid.MINIMUM, "hi"),
        (1, 4, 32, Grid.E2M1, "full"), (16, 4, 64, Grid.E2M1, "hi"),
        (1, 4, 32, Grid.SUPER_MINIMUM, "full"), (16, 5, 32, Grid.SUPER_MINIMUM, "full"),
        (1, 5, 32, Grid.SUPER_MINIMUM, "hi"), (5, 6, 32, Grid.SUPER_MINIMUM, "full"),
        (8, 6, 32, Grid.SUPER_MINIMUM, "hi"), (16, 4, 16, Grid.SUPER_MINIMUM, "full"),
        (1, 6, 16, Grid.SUPER_MINIMUM, "full"), (5, 6, 16, Grid.SUPER_MINIMUM, "hi"),
        (8, 4, 16, Grid.SUPER_SYMMETRIC, "full"), (16, 6, 16, Grid.SUPER_SYMMETRIC, "full"),
        (1, 6, 16, Grid.SUPER_SYMMETRIC, "hi"), (1, 8, 16, Grid.SUPER_SYMMETRIC, "full"),
        (16, 8, 16, Grid.SUPER_SYMMETRIC, "hi"),
        (1, 3, 32, Grid.SUPER_MINIMUM, "full"), (16, 3, 32, Grid.SUPER_MINIMUM, "hi"),
        (5, 2, 32, Grid.SUPER_MINIMUM, "full"), (16, 2, 32, Grid.SUPER_MINIMUM, "hi"),
        (5, 3, 16, Grid.SUPER_SYMMETRIC, "full"), (16, 3, 16, Grid.SUPER_SYMMETRIC, "hi"),
        (1, 2, 16, Grid.SUPER_MINIMUM, "full"), (16, 2, 16, Grid.SUPER_MINIMUM, "hi"),
    ],
)  # fmt: skip
def test_products_are_those_of_the_weights(
    tokens: int, bits: int, block: int, grid: Grid, view: View, library: Library
) -> None:
    rng = np.random.default_rng(tokens)
    form = PanelFormat(rows=35, columns=columns_of(grid), bits=bits, block=block, grid=grid)
    blocks, panels = matrix(form)
    x = rng.standard_normal((tokens, 2 * form.columns)).astype(np.float32) * 30
    norm = rng.uniform(0.5, 2, form.columns).astype(np.float32)
    bias = rng.standard_normal(form.rows).astype(np.float32)
    residual = rng.standard_normal((tokens, form.rows)).astype(np.float32)
    stored = reference_linear.in_weights(blocks)
    weights = reference_linear.dequantize(stored, bits, view)[:, : form.columns]
    out = np.zeros((tokens, form.rows), np.float32)
    inputs, tops = np.zeros((tokens, form.columns), np.uint16), np.zeros(tokens, np.float32)
    common = {
        **shape_of(form), "panels": panels, "out": out, "tokens": tokens,
        "view": ("full", "hi").index(view), "norm_eps": 1e-6, "inputs": inputs, "tops": tops,
        "steps": np.full((form.blocks, tokens), np.nan, np.float32),
    }  # fmt: skip
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    plain = np.ascontiguousarray(x[:, : form.columns])
    tanh = np.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3))
    cases: list[tuple[dict[str, Any], Array]] = [
        ({"x": plain}, gate),
        ({"x": plain, "norm": norm}, reference.normalize(plain, norm, 1e-6).astype(np.float64)),
        ({"x": x, "activation": 1}, gate / (1 + np.exp(-gate)) * up),
        ({"x": x, "activation": 2}, gate * (1 + tanh) / 2 * up),
    ]
    for options, entered in cases:
        run(
            library,
            "kvq_cuda_linear_run",
            filled(Linear, **common, **options, bias=bias, residual=residual),
        )
        product = entered @ weights.T.astype(np.float64)
        scale = np.abs(entered).max(axis=1, keepdims=True) * np.abs(weights).sum(axis=1)
        assert (np.abs(out - product - bias - residual) < HALF / 8 * scale + 1e-5).all()


@pytest.mark.parametrize(
    ("tokens", "rows", "bits", "block", "grid", "view"),
    [
        (70, 270, 4, 64, Grid.SYMMETRIC, "full"), (17, 35, 4, 128, Grid.ZERO_POINT, "full"),
        (17, 35, 4, 32, Grid.MINIMUM, "full"),
        (70, 270, 5, 32, Grid.ZERO_POINT, "full"), (17, 35, 5, 128, Grid.SYMMETRIC, "full"),
        (17, 35, 5, 64, Grid.MINIMUM, "hi"),
        (17, 35, 6, 64, Grid.MINIMUM, "full"), (17, 35, 6, 128, Grid.ZERO_POINT, "full"),
        (17, 35, 6, 32, Grid.SYMMETRIC, "hi"),
        (17, 35, 8, 32, Grid.SYMMETRIC, "full"), (17, 35, 8, 128, Grid.ZERO_POINT, "full"),
        (17, 35, 8, 32, Grid.MINIMUM, "full"), (17, 35, 8, 64, Grid.SYMMETRIC, "hi"),
        (17, 35, 8, 64, Grid.ZERO_POINT, "hi"),
        (17, 35, 4, 32, Grid.E2M1, "full"), (70, 270, 4, 64, Grid.E2M1, "hi"),
        (70, 270, 4, 32, Grid.SUPER_MINIMUM, "full"), (17, 35, 5, 32, Grid.SUPER_MINIMUM, "full"),
        (17, 35, 5, 32, Grid.SUPER_MINIMUM, "hi"), (17, 35, 6, 32, Grid.SUPER_MINIMUM, "full"),
        (17, 35, 6, 32, Grid.SUPER_MINIMUM, "hi"), (17, 35, 4, 16, Grid.SUPER_MINIMUM, "full"),
        (17, 35, 6, 16, Grid.SUPER_MINIMUM, "full"), (17, 35, 6, 16, Grid.SUPER_MINIMUM, "hi"),
        (17, 35, 4, 16, Grid.SUPER_SYMMETRIC, "full"),
        (70, 270, 6, 16, Grid.SUPER_SYMMETRIC, "full"), (17, 35, 6, 16, Grid.SUPER_SYMMETRIC, "hi"),
        (17, 35, 8, 16, Grid.SUPER_SYMMETRIC, "full"), (17, 35, 8, 16, Grid.SUPER_SYMMETRIC, "hi"),
        (70, 270, 3, 32, Grid.SUPER_MINIMUM, "full"), (17, 35, 3, 32, Grid.SUPER_MINIMUM, "hi"),
        (17, 35, 2, 32, Grid.SUPER_MINIMUM, "full"), (17, 35, 2, 32, Grid.SUPER_MINIMUM, "hi"),
        (17, 35, 3, 16, Grid.SUPER_SYMMETRIC, "full"), (17, 35, 3, 16, Grid.SUPER_SYMMETRIC, "hi"),
        (17, 35, 2, 16, Grid.SUPER_MINIMUM, "full"), (17, 35, 2, 16, Grid.SUPER_MINIMUM, "hi"),
    ],
)  # fmt: skip
def test_products_of_many_tokens_are_those_of_the_reference(
    tokens: int, rows: int, bits: int, block: int, grid: Grid, view: View, library: Library
) -> None:
    rng = np.random.default_rng(tokens)
    form = PanelFormat(rows=rows, columns=columns_of(grid), bits=bits, block=block, grid=grid)
    _, panels = matrix(form)
    x = rng.standard_normal((tokens, 2 * form.columns)).astype(np.float32) * 30
    plain = np.ascontiguousarray(x[:, : form.columns])
    plain[3], plain[5, 7] = 0, np.inf
    bias = rng.standard_normal(rows).astype(np.float32)
    residual = rng.standard_normal((tokens, rows)).astype(np.float32)
    norm = rng.uniform(0.5, 2, form.columns).astype(np.float32)
    out = np.zeros((tokens, rows), np.float32)
    call = {
        **shape_of(form), "panels": panels, "out": out, "tokens": tokens,
        "view": ("full", "hi").index(view), "norm_eps": 1e-6,
        "levels": np.zeros((tokens, form.blocks * block), np.int8),
        "steps": np.full((9 if grid.has_supers else 2, form.supers, tokens), np.nan, np.float32),
    }  # fmt: skip
    run(
        library,
        "kvq_cuda_linear_run",
        filled(Linear, **call, x=plain, bias=bias, residual=residual),
    )
    want = reference_linear.linear(form, panels, plain, view) + bias + residual
    np.testing.assert_array_equal(out, want)
    assert np.isnan(out[5]).all()
    assert np.isfinite(out[6]).all()
    gate, up = np.split(x / 8, 2, axis=1)
    x = np.concatenate([gate, up], axis=1)
    finite = np.ascontiguousarray(gate)
    for options, entered in (
        ({"x": finite, "norm": norm}, reference.normalize(finite, norm, 1e-6)),
        ({"x": x, "activation": 1}, (gate / (1 + np.exp(-gate)) * up).astype(np.float32)),
    ):
        run(library, "kvq_cuda_linear_run", filled(Linear, **call, **options))
        want = reference_linear.linear(form, panels, entered, view)
        # An input next to a half may be rounded the other way: a level or two of all of them.
        assert (np.abs(out - want) < 2e-3 * np.abs(want).max()).all()
        assert np.mean(np.abs(out - want) < 1e-6 * np.abs(want).max()) > 0.9


@pytest.mark.parametrize(
    "spelled",
    ["2/16/super_minimum", "3/16/super_symmetric", "6/16/super_minimum", "8/16/super_symmetric"],
)
def test_the_largest_whole_sums_are_those_of_the_reference(spelled: str, library: Library) -> None:
    kind = BlockFormat.parse(spelled)
    form = PanelFormat.of(kind, (16, 256))
    top = np.full((16, 256), (1 << form.bits) - 1, np.uint8)
    top[8:] = 0
    scales, numbers = np.ones((16, 1), np.float16), np.full((16, form.blocks), -128, np.int8)
    minimum = form.grid.has_minimum
    blocks = Blocks(top, scales, scales if minimum else None, *[numbers] * (2 if minimum else 1))
    panels, x = reference_linear.pack(form, blocks), np.ones((17, 256), np.float32)
    x[1:9] = -1
    for view in ("full", "hi"):
        out = np.zeros((17, 16), np.float32)
        call = filled(
            Linear, **shape_of(form), panels=panels, x=x, out=out, tokens=17,
            view=("full", "hi").index(view), levels=np.zeros((17, 256), np.int8),
            steps=np.full((9, 1, 17), np.nan, np.float32),
        )  # fmt: skip
        run(library, "kvq_cuda_linear_run", call)
        np.testing.assert_array_equal(out, reference_linear.linear(form, panels, x, view))


@pytest.mark.parametrize(
    ("exact_rows", "bits", "grid"),
    [
        (1, 8, Grid.SYMMETRIC), (40, 8, Grid.ZERO_POINT), (40, 6, Grid.MINIMUM),
        (40, 6, Grid.SUPER_MINIMUM), (1, 6, Grid.SUPER_SYMMETRIC),
    ],
)  # fmt: skip
def test_a_head_in_two_passes_is_exact_in_its_best(
    exact_rows: int, bits: int, grid: Grid, library: Library
) -> None:
    rng = np.random.default_rng(exact_rows)
    block = 16 if grid is Grid.SUPER_SYMMETRIC else 32
    form = PanelFormat(rows=3003, columns=64, bits=bits, block=block, grid=grid)
    # Most outputs are alike but for their low bits, so that the first pass alone would err.
    width = form.blocks * form.block
    codes = np.tile(rng.integers(0, 16, (1, width), np.uint8) << form.low_bits, (form.rows, 1))
    codes |= rng.integers(0, 1 << form.low_bits, codes.shape, np.uint8)
    scales = rng.choice(np.array([1, 1.01], np.float16), (form.rows, form.supers))
    kind = grid.offset_type
    offsets = None if kind is None else np.full(scales.shape, 100, kind)
    numbers = np.tile(rng.integers(30, 34, (1, form.blocks), np.int8), (form.rows, 1))
    sides = [numbers] * (grid.has_supers + (grid is Grid.SUPER_MINIMUM))
    panels = reference_linear.pack(form, Blocks(codes, scales, offsets, *sides))
    x = rng.standard_normal((3, form.columns)).astype(np.float32)
    marks = np.zeros((3, form.panels), np.uint8)
    results = []
    for view, exact in (("hi", 0), ("full", 0), ("full", exact_rows)):
        out = np.full((3, form.rows), np.nan, np.float32)
        call = filled(
            Linear, **shape_of(form), panels=panels, x=x, out=out, tokens=3,
            view=("full", "hi").index(view), exact_rows=exact,
            inputs=np.zeros((3, 64), np.uint16), tops=np.zeros(3, np.float32),
            panel_tops=np.zeros((3, form.panels), np.float32), marks=marks,
            steps=np.full((form.blocks, 3), np.nan, np.float32),
            deviations=np.zeros(3, np.float32),
        )  # fmt: skip
        run(library, "kvq_cuda_linear_run", call)
        results.append(out)
    scores, whole, in_two_passes = results
    # As linear_in_two_passes, of these products.
    chosen = reference_linear.best_panels(form, scores, reference_linear.FIRST_PANELS)
    rows = np.repeat(chosen, 16, axis=1)[:, : form.rows]
    deviation = np.where(rows, np.abs(whole - scores), 0).max(axis=1, keepdims=True)
    least = -np.sort(-np.where(rows, whole, -np.inf), axis=1)[:, exact_rows - 1, None]
    tops = reference_linear.panel_tops(form, scores)
    more = ~chosen & (tops + reference_linear.MARGIN * deviation >= least)
    np.testing.assert_array_equal(marks, more)
    assert 0 < more.sum() < more.size / 2
    rows = np.repeat(chosen | more, 16, axis=1)[:, : form.rows]
    np.testing.assert_array_equal(in_two_passes, np.where(rows, whole, scores))


@pytest.mark.parametrize("count", [1, 7, 256])
def test_the_best_of_a_row_come_in_order(count: int, library: Library) -> None:
    rng = np.random.default_rng(count)
    logits = rng.standard_normal((4, 3000)).astype(np.float32)
    logits[1] = np.round(logits[1] * 4)  # many equal ones
    logits[2, 5::600] = np.nan
    logits[3, ::7] = -np.inf
    logits[3, logits[3] > 0] = -0.0  # as large as the zeros after them, of which fewer are taken
    logits[3, 2900:] = 0
    places, values = np.zeros((4, count), np.int32), np.zeros((4, count), np.float32)
    run(library, "kvq_cuda_best", logits, 4, 3000, count, places, values)
    numbers = np.where(np.isnan(logits), np.inf, logits)
    want = np.argsort(-numbers, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(places, want)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, want, axis=1))


def test_what_is_refused_or_empty_is_no_failure_of_later_calls(library: Library) -> None:
    there = c_void_p()
    assert library.call("kvq_cuda_allocate", c_int64(1 << 50), ctypes.byref(there)) == NO_MEMORY
    nothing = (None, c_int64(64), None, c_int64(64), c_int64(0), c_int64(3), None)
    assert library.call("kvq_cuda_copy", *nothing) == 0
    values = np.zeros((1, 1), np.float32)
    run(library, "kvq_cuda_best", values + 2, 1, 1, 1, np.zeros((1, 1), np.int32), values)
    assert values == 2


@pytest.mark.parametrize(("in_place", "order"), [(True, 0), (True, -1), (True, 1), (False, 0)])
def test_rows_that_stay_move_together(in_place: bool, order: int, library: Library) -> None:
    rng = np.random.default_rng(0)
    rows, other = rng.standard_normal((2, 6, 300, 80)).astype(np.float16)
    source = rows if in_place else np.ascontiguousarray(other[:, :280])
    path = np.sort(rng.permutation(250)[:150]).astype(np.int32)
    path = path if in_place else rng.permutation(path)
    want = rows.copy()
    want[:, 9:159] = source[:, 9 + path]
    call = filled(
        Rows, rows=rows, source=source, stride=300 * 80, source_stride=source[0].size, streams=6,
        head_dim=80, first=9, count=150, from_=path,
    )  # fmt: skip
    with turns(library, order):
        run(library, "kvq_cuda_gather", call)
    np.testing.assert_array_equal(rows, want)


@pytest.mark.slow
@pytest.mark.cross
def test_nvcc_takes_the_kernels_without_a_warning(tmp_path: Path) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed")
    flags = ("-std=c++17", "-arch", "sm_90", "--expt-relaxed-constexpr", "-Werror")
    command = ["nvcc", *flags, "all-warnings", "--cubin", SOURCE, "-o", tmp_path / "kernels.cubin"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr
