"""Writes calls of the C ABI with the numpy reference's answers, for `parity.cpp` to replay.

    python tests/support/parity.py FILE [FILE_OF_FEW]

Every width, side, view and block once, small enough for an emulator; the second file has fewer.
A record is its name, its number and how many parts follow, then the parts, each an int64 byte
count and bytes.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caches import budget_for_tokens, spec
from kvq import abi, native_linear
from kvq.config import PAGE_WIDTHS, AttentionParams, Budget, CacheShape, KvPlan, PageForm
from kvq.geometry import as_config
from kvq.reference import linear as reference_linear
from kvq.reference.linear import ACTIVATIONS, Bytes, Grid, PanelFormat, View
from kvq.reference.stored import encode, normalize, planes
from kvq.sizing import ClassArena
from kvq_models.reference import ACTIVATIONS as FUNCTIONS
from matrices import FORMATS, KINDS, activations, matrix
from numpy_cache.cache import NumpyCache
from pairs import (
    UNROTATED,
    Float,
    adversarial,
    attention,
    flat_heads,
    frequencies,
    pack_heads,
    random_heads,
    sharp_heads,
    some_feedback,
)
from tolerances import (
    EVIDENCE,
    EXACT,
    FLOAT_PAIR,
    HISTORY,
    PAIRS,
    PREPARED,
    PRODUCT,
    RANDOM,
    Tolerance,
)

CALLS = (
    "pack", "open", "begin", "attend", "commit", "rewind", "demote", "shift", "mask", "evidence",
    "page", "linear", "embed", "feed_back",
)  # fmt: skip
VIEWS: tuple[View, ...] = ("full", "hi")
NORM_EPS = 1e-5
ROWS, SINKS = 8, 4


class Cases:
    """The records of one file."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self.name = ""

    def add(self, call: str, *parts: Any) -> None:
        """One call: structures, arrays, tuples of int32, and limits."""
        head = np.array([CALLS.index(call), len(parts)], np.int32)
        for part in (self.name.encode(), head, *parts):
            raw = _raw(part)
            self._bytes += len(raw).to_bytes(8, "little") + raw

    def write(self, path: Path) -> None:
        path.write_bytes(self._bytes)


def _raw(part: Any) -> bytes:
    if isinstance(part, Tolerance):
        part = [part]
    if isinstance(part, list):
        return np.array([(limit.rms, limit.top) for limit in part], np.float32).tobytes()
    if isinstance(part, tuple):
        return np.array(part, np.int32).tobytes()
    return part.tobytes() if isinstance(part, np.ndarray) else bytes(part or b"")


class RecordedCache(NumpyCache):
    """The reference's cache; what it is asked and what it answers go to `cases`."""

    def __init__(self, arena: ClassArena, cases: Cases, limits: Tolerance, seen: float) -> None:
        super().__init__(arena)
        self._cases, self.limits = cases, limits
        self._seen = Tolerance(rms=1, top=seen)
        forms = np.array(arena.spec.page_encodings, np.uint8)
        cases.add(
            "open",
            as_config(arena),
            np.array([arena.num_bytes, arena.max_columns], np.int64).tobytes(),
            forms,
        )

    def begin(
        self, tokens: int, parents: Sequence[int] | None = None, *, view: str = "full"
    ) -> None:
        super().begin(tokens, parents, view=view)
        self._cases.add("begin", (tokens, VIEWS.index(view)))

    def attend(
        self,
        params: AttentionParams,
        qkv: Float,
        positions: NDArray[np.int64],
        inv_freq: Float,
        q_norm: Float | None = None,
        k_norm: Float | None = None,
        sink_logits: Float | None = None,
    ) -> Float:
        out = super().attend(params, qkv, positions, inv_freq, q_norm, k_norm, sink_logits)
        call = abi.as_attention(params, len(inv_freq))
        arguments = (call, qkv, positions, inv_freq, self.limits, out, sink_logits)
        self._cases.add("attend", *arguments)
        return out

    def set_rounding_feedback(self, feedback: Float) -> None:
        super().set_rounding_feedback(feedback)
        self._cases.add("feed_back", feedback)

    def commit(self, rows: int | Sequence[int]) -> None:
        super().commit(rows)
        self._cases.add("commit", (rows,))

    def rewind(self, rows: int = 0) -> None:
        super().rewind(rows)
        self._cases.add("rewind", (rows,))

    def demote(self, actions: NDArray[np.int32]) -> None:
        super().demote(actions)
        self._cases.add("demote", actions)

    def shift(self, column: int, delta: int) -> None:
        super().shift(column, delta)
        self._cases.add("shift", (column, delta))

    def mask(self, column: int, mask: int) -> None:
        super().mask(column, mask)
        self._cases.add("mask", (column,), np.array([mask], np.uint64))

    def evidence(self, tokens: int) -> tuple[Float, Float]:
        facts, queries = super().evidence(tokens)
        seen, history = self._seen, Tolerance(rms=1, top=HISTORY)
        limits = [seen, history, history, seen, seen, seen]
        self._cases.add("evidence", (tokens, len(self.table)), limits, facts, [seen] * 3, queries)
        return facts, queries

    def page(self, layer: int, head: int, column: int) -> bytes:
        stored = super().page(layer, head, column)
        self._cases.add("page", (layer, head, column), stored)
        return stored


# ---- what is asked ---------------------------------------------------------------------------


def packing(cases: Cases) -> None:
    sides = ((0, 0), (1, 1), (1, 0))
    for dim, (side, axis) in itertools.product((16, 48, 64, 80, 256), sides):
        for kind, x in adversarial(64, dim).items():
            cases.name = f"{kind}, side {side}, groups along {axis}, {dim} channels"
            codes, grid = encode(x, axis)
            for bits in PAGE_WIDTHS:
                expected = planes(codes, bits, side)
                cases.add("pack", (side, 1 - axis, dim, bits), x, expected, grid.stored(), b"")
    for dim, bits in itertools.product((16, 80), PAGE_WIDTHS):
        cases.name = f"carried keys of {dim} channels at {bits} bits"
        x, feedback = adversarial(64, dim)["noise"], some_feedback(np.random.default_rng(1), dim)
        codes, grid = encode(x, 0, bits=bits, feedback=feedback)
        expected = planes(codes, bits, 0)
        cases.add("pack", (0, 1, dim, bits), x, expected, grid.stored(), feedback)


def opened(
    cases: Cases, shape: CacheShape, widths: tuple[int, int], limits: Tolerance, tokens: int
) -> RecordedCache:
    """An empty cache with room for `tokens` tokens and a few more, keeping probes."""
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=SINKS)
    context = tokens + 4 * ROWS
    budget = Budget(num_bytes=budget_for_tokens(shape, plan, context) + (1 << 19))
    streams = shape.num_layers * shape.num_kv_heads
    forms = tuple(PageForm(3 * (s % 2)) for s in range(streams)) if limits is not EXACT else ()
    cache_spec = spec(shape, plan, context, budget=budget, observed=True, page_encodings=forms)
    seen = max(EVIDENCE.get(bits, 0) for bits in widths)
    return RecordedCache(cache_spec.resolved(), cases, limits, seen)


def fill(cache: RecordedCache, rows: Float, inv_freq: Float) -> None:
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        cache.begin(len(part))
        cache.attend(attention(cache.arena.shape), part, np.arange(len(part)) + start, inv_freq)
        cache.commit(len(part))


def ask(
    cache: RecordedCache, rows: Float, inv_freq: Float, view: str = "full", **changes: float
) -> None:
    """Attends rows at the next positions and forgets them."""
    cache.begin(len(rows), view=view)
    params = attention(cache.arena.shape, 0, **changes)
    cache.attend(params, rows, np.arange(len(rows)) + cache.tokens, inv_freq)
    cache.rewind()


def widths_and_views(cases: Cases) -> None:
    """Every pair of widths, of random heads: pages' bytes, attention, evidence."""
    for dim, widths in itertools.product((80, 256), (*PAIRS, FLOAT_PAIR)):
        cases.name = f"{widths}, head_dim {dim}"
        shape = CacheShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=dim)
        rng = np.random.default_rng(dim)
        cache = opened(cases, shape, widths, RANDOM[widths], 220)
        fill(cache, pack_heads(*random_heads(rng, shape, 220)), UNROTATED)
        for column in range(len(cache.table)):
            cache.page(0, 1, column)
        for count, view in itertools.product((1, 3, ROWS), VIEWS):
            rows = pack_heads(*random_heads(rng, shape, count))
            cache.limits = _of_view(widths, view)
            ask(cache, rows, frequencies(dim // 2), view)
        if widths != FLOAT_PAIR:
            cache.evidence(cache.tokens)


def _of_view(widths: tuple[int, int], view: str) -> Tolerance:
    """In the view `hi` 8 and 6 bits are read as 4."""
    k_bits, v_bits = (4 if bits in (8, 6) else bits for bits in widths)
    return RANDOM[(k_bits, v_bits) if view == "hi" else widths]


def masks_shifts_and_caps(cases: Cases) -> None:
    """Heads the kernels' rounding holds exactly, over pages of several widths."""
    heads: tuple[Callable[..., tuple[Float, Float, Float]], ...] = (sharp_heads, flat_heads)
    for dim, kind in itertools.product((64, 128), heads):
        shape = CacheShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=dim)
        rng = np.random.default_rng(dim)
        cache = opened(cases, shape, (8, 8), EXACT, 400)
        fill(cache, pack_heads(*kind(rng, shape, 400)), UNROTATED)
        steps = [(4, 6), (2, 4), (6, 2), (2, 8)]
        lower = [(0, head, c, *steps[(c + head) % 4]) for c in range(4) for head in (0, 1)]
        cache.demote(np.array(lower, np.int32))
        cache.mask(1, 0x9249249249249249)
        cache.shift(2, -3)
        q, k, v = kind(rng, shape, ROWS)
        for window, softcap in ((0, 0.0), (150, 0.0), (201, 3.0), (0, 0.5)):
            cases.name = f"{kind.__name__}, head_dim {dim}, window {window}, softcap {softcap}"
            options = {"window_tokens": window, "softcap": softcap}
            ask(cache, pack_heads(q, 0 * k, v), frequencies(32), **options)


def narrowed_keys(cases: Cases) -> None:
    """Pages whose keys were carried, and lose bits."""
    for dim in (48, 128):
        cases.name = f"keys of {dim} channels that lose bits"
        shape = CacheShape(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=dim)
        rng = np.random.default_rng(dim)
        cache = opened(cases, shape, (8, 8), RANDOM[(8, 8)], 400)
        cache.set_rounding_feedback(some_feedback(rng, 1, 2, dim))
        fill(cache, pack_heads(*random_heads(rng, shape, 400)), UNROTATED)
        for lower in ([(0, 6, 8), (1, 4, 4), (2, 2, 8)], [(0, 4, 8), (1, 2, 2)], [(0, 2, 6)]):
            actions = [(0, head, c, k, v) for c, k, v in lower for head in (0, 1)]
            cache.demote(np.array(actions, np.int32))
            for head, column in itertools.product((0, 1), range(3)):
                cache.page(0, head, column)


def add_product(
    cases: Cases,
    form: PanelFormat,
    panels: Bytes,
    x: Float,
    expected: Float,
    limits: Tolerance = PRODUCT,
    *,
    activation: str = "",
    view: str = "full",
    exact_rows: int = 0,
    norm: Float | None = None,
    bias: Float | None = None,
    residual: Float | None = None,
) -> None:
    """A product and what it is wanted to give, its limits row by row."""
    numbers = (len(x), ACTIVATIONS.index(activation), VIEWS.index(view), exact_rows, 0)
    shape, eps = bytes(native_linear.matrix(form)), np.array([NORM_EPS], np.float32)
    arguments = (panels, x, norm, bias, residual)
    cases.add("linear", shape, numbers, eps, *arguments, [limits] * len(x), expected)


def products(cases: Cases) -> None:
    """Every width, grid and view, of shapes that fill panels and blocks and that do not."""
    shapes = {16: (33, 449), 32: (5, 7), 64: (50, 200), 128: (33, 449)}
    for kind in FORMATS:
        form = PanelFormat.of(kind, shapes[kind.block])
        _, panels = matrix(form)
        for rows, view in itertools.product((1, 2, 5, 17), VIEWS):
            cases.name = f"{rows} rows of {form}, view {view}"
            x = activations(rows, form.columns)
            expected = reference_linear.linear(form, panels, x, view)
            add_product(cases, form, panels, x, expected, view=view)


def products_with_more(cases: Cases) -> None:
    """Two passes; norm, bias and residual; activations; embeddings of every width and grid."""
    for count, bits, grid in ((1, 8, Grid.SYMMETRIC), (20, 6, Grid.ZERO_POINT)):
        form = PanelFormat(rows=3000, columns=128, bits=bits, block=64, grid=grid)
        _, panels = matrix(form)
        x = activations(5, form.columns)
        cases.name = f"the best {count} rows of {form}"
        expected = reference_linear.linear_in_two_passes(form, panels, x, count)
        add_product(cases, form, panels, x, expected, exact_rows=count)
    form = PanelFormat(rows=50, columns=200, bits=8, block=32)
    _, panels = matrix(form)
    rng = np.random.default_rng(4)
    x = 3 * rng.standard_normal((9, 400), np.float32)
    x[0, 3], x[0, 7] = 90, -90
    first = np.ascontiguousarray(x[:, :200])
    bias, residual = (rng.standard_normal(n, np.float32) for n in (50, (9, 50)))
    norm = rng.uniform(0.5, 2, 200).astype(np.float32)
    normed = reference_linear.linear(form, panels, normalize(first, norm, NORM_EPS))
    cases.name = "norm, bias and residual"
    more = {"norm": norm, "bias": bias, "residual": residual}
    add_product(cases, form, panels, first, normed + bias + residual, PREPARED, **more)
    for activation, function in FUNCTIONS.items():
        cases.name = activation
        gated = reference_linear.linear(form, panels, function(first) * x[:, 200:])
        add_product(cases, form, panels, x, gated, PREPARED, activation=activation)
    ids = rng.integers(0, 50, (7, 3))
    weights = rng.uniform(0, 1, (7, 3)).astype(np.float32)
    for kind in KINDS:
        form = PanelFormat.of(kind, (50, 200))
        _, panels = matrix(form)
        table = reference_linear.restore(form, panels)
        expected = np.einsum("tk,tkh->th", weights, table[ids]).astype(np.float32)
        cases.name = f"embeddings of {form.format}"
        shape = bytes(native_linear.matrix(form))
        cases.add("embed", shape, panels, ids, weights, ids.shape, [PRODUCT] * 7, expected)


ALL = (
    packing, widths_and_views, masks_shifts_and_caps, narrowed_keys, products, products_with_more
)  # fmt: skip
FEW = (packing, masks_shifts_and_caps, narrowed_keys, products_with_more)


def write(path: Path, parts: Sequence[Callable[[Cases], None]] = ALL) -> None:
    """The cases of some parts, as one file."""
    cases = Cases()
    for part in parts:
        part(cases)
    cases.write(path)


if __name__ == "__main__":
    for name, parts in zip(sys.argv[1:], (ALL, FEW), strict=False):
        write(Path(name), parts)
