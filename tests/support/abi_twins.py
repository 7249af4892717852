"""Caches of hybrids that are only told what makes sense: the C ABI's results are numpy's."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvq.class_cache import ClassCache
from kvq.config import Budget, ConvShape, DeltaShape, KvPlan
from kvq.reference.delta import DeltaWeights
from kvq.sizing import ClassSpec
from mixers import CHUNK, DRAFT, SHAPE, Twins
from pairs import Float, attention, frequencies, packed_rows
from tolerances import TRACE_ERROR

CONTEXT, LEAST_TOKENS, STEPS = 600, 64, 60
CONV = ConvShape(num_layers=2, width=300, taps=3)
DELTA = DeltaShape(num_layers=2, key_heads=2, value_heads=4, key_dim=16, value_dim=32, taps=4)
# Of outputs that are of the order of 1; pages are read with rounded queries.
MIXED, ATTENDED = 5e-4, 3 * TRACE_ERROR


class Row(NamedTuple):
    """Of a branch, and the row it follows."""

    parent: int


class Hybrid(Twins[Row]):
    """A native and a numpy cache whose every layer is compared, of attention too."""

    def __init__(self, spec: ClassSpec, seed: int) -> None:
        super().__init__(spec.resolved(), seed)
        self.weight = self.draw.normal(size=(CONV.num_layers, CONV.width, CONV.taps))
        self.delta = DeltaWeights(
            conv=self.normal(DELTA.conv_width, DELTA.taps),
            decay=self.draw.uniform(-6, 0, DELTA.value_heads).astype(np.float32),
            dt_bias=self.normal(DELTA.value_heads),
            scale=self.normal(DELTA.value_dim),
            key_heads=DELTA.key_heads,
            norm_eps=1e-6,
        )

    def normal(self, *shape: int) -> Float:
        return self.draw.normal(size=shape).astype(np.float32)

    def add(self, count: int, parents: Sequence[int] | None = None) -> None:
        first = len(self.branch)
        chain = range(first - 1, first + count - 1)
        self.branch += map(Row, chain if parents is None else parents)
        depths = [len(self.path_to(row)) - 1 for row in range(first, first + count)]
        where = self.tokens + np.array(depths, np.int64)
        for cache in self.caches:
            cache.begin(count, parents)
        self.attend(count, where)
        for layer in range(CONV.num_layers if self.arena.conv else 0):
            bcx, weight = self.normal(count, 3 * CONV.width), self.weight[layer].astype(np.float32)
            native, numpy = (cache.convolve(layer, bcx, weight) for cache in self.caches)
            np.testing.assert_array_equal(native, numpy)
        for layer in range(DELTA.num_layers if self.arena.delta else 0):
            rows = self.normal(count, DELTA.conv_width + DELTA.value_width)
            gates = self.normal(count, 2 * DELTA.value_heads)
            native, numpy = (cache.recur(layer, rows, gates, self.delta) for cache in self.caches)
            np.testing.assert_allclose(native, numpy, atol=MIXED)
        self.look(count)

    def attend(self, count: int, where: np.ndarray) -> None:
        for layer, rows in enumerate(packed_rows(SHAPE, self.draw, count)):
            params = attention(SHAPE, layer)
            native, numpy = (
                cache.attend(params, rows, where, frequencies(8)) for cache in self.caches
            )
            assert np.abs(native - numpy).max() <= ATTENDED

    def look(self, count: int) -> None:
        """Some rows of the pass ask the last layer once more."""
        rows = np.flatnonzero(self.draw.random(count) < 0.3)
        queries = self.normal(len(rows), SHAPE.num_heads * SHAPE.head_dim)
        params = attention(SHAPE, SHAPE.num_layers - 1)
        native, numpy = (
            cache.attend_shared(params, queries, rows, frequencies(8)) for cache in self.caches
        )
        assert np.abs(native - numpy).max(initial=0) <= ATTENDED


class Hybrids:
    """One after the other, each for `STEPS` steps."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.steps = STEPS
        self.hybrid: Hybrid | None = None

    def step(self) -> None:
        if self.hybrid is None or self.steps == STEPS:
            self.close()
            self.hybrid, self.steps = self.next_hybrid(), 0
        self.steps += 1
        choice = int(self.draw.integers(10))
        tokens = self.hybrid.tokens
        if choice == 0 and self.hybrid.caches[0].keeps_places:
            self.hybrid.mark(int(self.draw.integers(1, CONTEXT)))
        elif choice == 1:
            demote(self.hybrid.caches, self.draw)
        elif tokens < LEAST_TOKENS:
            self.hybrid.grow(CHUNK + 5)
        else:
            self.hybrid.random_step(self.draw, DRAFT, CONTEXT - CHUNK)

    def next_hybrid(self) -> Hybrid:
        """A cache with convolutions, with delta nets or with neither."""
        kind = int(self.draw.integers(5))
        bits = int(self.draw.choice([4, 8, 16]))
        spec = ClassSpec(
            shape=SHAPE,
            plan=KvPlan(k_bits=bits, v_bits=bits),
            context_tokens=CONTEXT,
            budget=Budget(tokens=CONTEXT),
            chunk_tokens=CHUNK,
            draft_tokens=DRAFT,
            conv=CONV if kind in (0, 1) else None,
            delta=DELTA if kind in (2, 3) else None,
        )
        return Hybrid(spec, int(self.draw.integers(1 << 30)))

    def close(self) -> None:
        if self.hybrid is not None:
            self.hybrid.close()


def demote(caches: Sequence[ClassCache], draw: np.random.Generator) -> None:
    """Of one page one head keeps fewer bits, or none."""
    _, widths = caches[0].columns()
    if not widths.shape[2]:
        return
    place = [int(draw.integers(count)) for count in widths.shape[:3]]
    bits = min(widths[tuple(place)].min(), int(draw.choice([0, 2, 4])))
    for cache in caches:
        cache.demote(np.array([[*place, bits, bits]], np.int32))
