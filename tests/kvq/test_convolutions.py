"""What convolutions remember: native equals numpy, and a path through a tree equals the path alone.

The oracle keeps every row of the text for good, and computes each path by itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from caches import geometry, open_cache
from kvq import native, native_library
from kvq.class_cache import ClassCache
from kvq.config import CONV_CHECKPOINTS, Budget, ConvShape, KvPlan
from kvq.errors import BackendError, CacheError, SnapshotError, UsageError
from kvq.reference.conv import products, seen_rows, short_conv
from kvq.sizing import ClassArena, ClassSpec
from mixers import (
    CHUNK,
    DRAFT,
    SHAPE,
    Twins,
    attend,
    forget_drafts_in_part,
    keep_a_chunk_as_a_draft,
    refuse_edits_and_silence,
    refuse_rows_in_a_gap,
)
from numpy_cache import storage_named
from numpy_cache.mixed_rows import least_missed
from regions import CONV_BACK_ROWS, CONV_STEP_TOKENS, MOST_WANTED
from snapshot_bytes import HEADER, damaged

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

# More channels than native code takes at once, and no multiple of them.
CONV = ConvShape(num_layers=3, width=300, taps=3)
PLAN = KvPlan(k_bits=4, v_bits=4)
CONTEXT = 4000


def spec(conv: ConvShape = CONV, plan: KvPlan = PLAN, context_tokens: int = CONTEXT) -> ClassSpec:
    return ClassSpec(
        shape=SHAPE,
        plan=plan,
        context_tokens=context_tokens,
        budget=Budget(tokens=context_tokens),
        chunk_tokens=CHUNK,
        draft_tokens=DRAFT,
        conv=conv,
    )


class Row(NamedTuple):
    """What enters each convolution, float32 [layers, 3 width]."""

    parent: int
    entered: np.ndarray


class Both(Twins[Row]):
    """The oracle is each row's own path alone."""

    def __init__(self, arena: ClassArena, seed: int = 0) -> None:
        super().__init__(arena, seed)
        assert arena.conv is not None
        self.conv = arena.conv
        shape = (self.conv.num_layers, self.conv.width, self.conv.taps)
        self.weight = self.draw.normal(size=shape).astype(np.float32)

    def rows(self, count: int) -> np.ndarray:
        shape = (count, self.conv.num_layers, 3 * self.conv.width)
        return self.draw.normal(size=shape).astype(np.float32)

    def add(self, count: int, parents: Sequence[int] | None = None) -> None:
        """A pass, whose every number is compared."""
        first = len(self.branch)
        chain = range(first - 1, first + count - 1)
        rows = self.rows(count)
        self.branch += map(Row, chain if parents is None else parents, rows)
        expected = np.stack([self.alone(row) for row in range(first, first + count)], axis=1)
        for cache in self.caches:
            cache.begin(count, parents)
            attend(cache, count)
            for layer in range(self.conv.num_layers):
                actual = cache.convolve(layer, rows[:, layer], self.weight[layer])
                np.testing.assert_array_equal(actual, expected[layer])
            assert cache.used_bytes <= cache.peak_bytes <= cache.budget_bytes

    def alone(self, row: int) -> np.ndarray:
        """What a row of the branch gives when its path is the whole text: [layers, width]."""
        path = [self.branch[place] for place in self.path_to(row)]
        seen = np.stack([node.entered for node in (*self.text, *path)])[-self.conv.taps :]
        outputs = []
        for layer in range(self.conv.num_layers):
            last = seen_rows(products(seen[:, layer]), self.conv.taps)[-1:]
            entered = path[-1].entered[None, layer]
            outputs.append(short_conv(entered, self.weight[layer], last)[0])
        return np.stack(outputs)


@pytest.fixture
def both() -> Iterator[Both]:
    with closing(Both(spec().resolved())) as twins:
        yield twins


@pytest.mark.parametrize("taps", [2, 3, 7])
def test_steps_equal_chunks_and_the_text_alone(taps: int) -> None:
    shape = ConvShape(num_layers=2, width=24, taps=taps)
    with closing(Both(spec(shape).resolved())) as both:
        for count in (1, 1, 5, CHUNK, DRAFT, 1, DRAFT + 1, 64, 2):
            both.step(count)


def test_a_path_of_a_tree_is_kept_and_goes_on(both: Both) -> None:
    both.grow(3)
    both.add(4, [-1, 0, 0, -1])
    both.add(3, [2, 3, 4])
    both.commit([0, 2, 4, 6])
    both.step()


def test_drafts_are_forgotten_in_part(both: Both) -> None:
    forget_drafts_in_part(both)


def test_a_chunk_is_kept_whole_or_as_a_draft(both: Both) -> None:
    keep_a_chunk_as_a_draft(both)


def test_the_newest_tokens_can_be_gone_back_to(both: Both) -> None:
    both.grow(150)
    for back in (1, 3, CONV_BACK_ROWS - 4):
        assert both.trim(both.tokens - back) == 0
        both.add(1)
        both.commit(0)
    both.step()
    assert both.trim(2) == 2  # the beginning has no rows before it
    both.grow(7)
    assert both.trim(2) == 0


def test_further_back_what_is_missing_was_not_long_ago(both: Both) -> None:
    both.grow(6 * CHUNK)
    assert both.trim(both.tokens - 100) == 2 * CHUNK - 100 + 1
    both.grow(CHUNK)
    assert both.trim(4 * CHUNK) == 1
    assert both.trim(4 * CHUNK - 1) == 0
    both.grow(3)
    assert both.trim(CHUNK + 40) == 41
    both.grow(20)


def test_a_place_that_was_gone_back_to_is_remembered() -> None:
    """The system prompt's end, where every new conversation begins: also one within a chunk."""
    system = CHUNK + 41
    with closing(Both(spec(replace(CONV, width=8)).resolved())) as both:
        both.grow(3 * CHUNK)
        assert both.trim(system) == 42
        both.grow(CHUNK - 29)
        both.grow(2 * CHUNK)
        assert both.trim(system) == 0
        both.grow((CONV_CHECKPOINTS + 12) * CHUNK)
        assert both.trim(system) == 0


def test_the_places_that_were_wanted_last_are_remembered() -> None:
    places = [CHUNK * turn + 13 for turn in range(1, MOST_WANTED + 2)]
    with closing(Both(spec(replace(CONV, width=8)).resolved())) as both:
        for place in places[:-1]:
            both.mark(place)
        # Used again, so that the second is now what was used longest ago.
        both.mark(places[0])
        both.mark(places[-1])
        both.grow((CONV_CHECKPOINTS + 14) * CHUNK)
        both.reload()
        for place in reversed(places[2:]):
            assert both.trim(place) == 0
        assert both.trim(places[1]) > 0
        assert both.trim(places[0]) == 0


def test_a_place_at_the_edge_of_passes_is_remembered() -> None:
    for before in (1, 2, 3, DRAFT - 1, DRAFT, DRAFT + 1, DRAFT + 3):
        with closing(Both(spec(replace(CONV, width=8)).resolved(), seed=before)) as both:
            both.grow(3 * CHUNK)
            place = 2 * CHUNK - 1
            both.trim(place)
            both.grow(CHUNK - before)
            both.grow(before + 40)
            both.grow(CHUNK)
            assert both.trim(place) == 0
            both.grow(2)


def test_decoding_leaves_places_too(both: Both) -> None:
    both.grow(10)
    for _ in range(CONV_STEP_TOKENS // 3 + 20):
        both.step(3)
    place = CONV_STEP_TOKENS + 20
    assert both.trim(place) in (20, 21, 22)


def test_places_thin_out_with_their_distance() -> None:
    places: list[int] = []
    for place in range(64, 64 * 400, 64):
        if len(places) == CONV_CHECKPOINTS:
            del places[least_missed(places, place, (640,))]
        places.append(place)
    assert 640 in places
    assert places[-2:] == [64 * 398, 64 * 399]
    for place_back in range(64, places[-1], 7):
        missing = place_back - max((place for place in places if place <= place_back), default=0)
        assert missing <= 0.8 * (places[-1] - place_back + CONV_STEP_TOKENS)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(20))
def test_random_traces(seed: int) -> None:
    shape = ConvShape(num_layers=2, width=12, taps=2 + seed % 3)
    plan = PLAN if seed % 2 else KvPlan(k_bits=16, v_bits=16)
    with closing(Both(spec(shape, plan, 1500).resolved(), seed)) as both:
        draw = np.random.default_rng(seed + 100)
        for _ in range(80):
            both.random_step(draw, DRAFT, limit=1300)


def test_what_is_not_finite_is_refused(both: Both) -> None:
    both.grow(4)
    for cache in both.caches:
        cache.begin(1)
        attend(cache, 1)
        with pytest.raises(CacheError, match="finite"):
            cache.convolve(0, np.full((1, 900), 1e30, np.float32), both.weight[0])
        cache.rewind()


def test_a_pass_ends_when_every_convolution_has_seen_it(both: Both) -> None:
    rows = both.rows(2)
    for cache in both.caches:
        with pytest.raises(CacheError, match="begin"):
            cache.convolve(0, rows[:, 0], both.weight[0])
        cache.begin(2)
        attend(cache, 2)
        for layer in range(2):
            cache.convolve(layer, rows[:, layer], both.weight[layer])
        with pytest.raises(CacheError):
            cache.commit(2)
        with pytest.raises(CacheError):
            cache.convolve(2, rows[:1, 2], both.weight[2])
        cache.convolve(2, rows[:, 2], both.weight[2])
        cache.commit(2)


def test_what_is_no_convolution_of_the_cache_is_refused(both: Both) -> None:
    rows = both.rows(1)[:, 0]
    plain = open_cache(SHAPE, PLAN, 1 << 20, 1000)
    for cache, layer, bcx, weight in (
        (plain, 0, rows, both.weight[0]),
        *((cache, 3, rows, both.weight[0]) for cache in both.caches),
        *((cache, 0, rows[:, 1:], both.weight[0]) for cache in both.caches),
        *((cache, 0, rows, both.weight[0][:, 1:]) for cache in both.caches),
    ):
        with pytest.raises(CacheError, match=r"convolution|weights"):
            cache.convolve(layer, bcx, weight)
    plain.close()
    for shape in ((0, 8, 3), (1, 0, 3), (1, 8, 1), (1, 8, 17)):
        with pytest.raises(UsageError, match="not possible"):
            ConvShape(**dict(zip(("num_layers", "width", "taps"), shape, strict=True)))


def test_nothing_in_the_middle_is_replaced_and_no_layer_left_out(both: Both) -> None:
    refuse_edits_and_silence(both, "convolutions")


def test_no_rows_are_put_where_pages_were_evicted(both: Both) -> None:
    refuse_rows_in_a_gap(both, "convolutions")


def test_no_device_has_them() -> None:
    with pytest.raises(BackendError, match="convolutions have no kernel on the device"):
        ClassCache(spec().resolved(), storage=storage_named("cuda"))


# Snapshots


KEPT_ROWS, CHECKPOINTS, MARKS, OLDEST, PLACES = (HEADER + 4 * i for i in (0, 1, 2, 9, 10))


@pytest.mark.parametrize(
    ("at", "number"),
    [
        (KEPT_ROWS, -1),
        (KEPT_ROWS, 1),
        (KEPT_ROWS, CONV.before + CONV_BACK_ROWS + 1),
        (KEPT_ROWS, 1 << 30),
        (MARKS, -1),
        (MARKS, CONTEXT + 1),
        (CHECKPOINTS, -1),
        (CHECKPOINTS, 2),
        (CHECKPOINTS, CONV_CHECKPOINTS + 1),
        (CHECKPOINTS, 1 << 28),
        (OLDEST, -1),
        (OLDEST, CONTEXT + 1),
        (PLACES, 0),
        (PLACES, -5),
        (PLACES, 2 * CHUNK - 1),
        (PLACES, 1 << 30),
        (PLACES + 4, CHUNK - 1),
        (PLACES + 8, 3 * CHUNK + 20),
        (PLACES + 12, 1),
        (-4, float("nan")),
        (-4, float("inf")),
    ],
)
def test_a_damaged_snapshot_is_refused_and_nothing_changes(
    both: Both, at: int, number: int | float
) -> None:
    both.grow(3 * CHUNK + 5)
    cache = both.caches[0]
    state = cache.state()
    fields = np.frombuffer(state, np.int32, 14, HEADER).tolist()
    assert fields == [10, 3, *[0] * MOST_WANTED, CHUNK - 1, 2 * CHUNK - 1, 3 * CHUNK - 1, 0]
    with pytest.raises(SnapshotError):
        cache.load_state(damaged(state, at % len(state), number))
    assert cache.state() == state


def test_a_snapshot_needs_the_rows_before_its_end(both: Both) -> None:
    both.grow(3 * CHUNK)
    cache = both.caches[0]
    state = cache.state()
    shape = (CONV.num_layers, 10 + 3 * CONV.before, CONV.width)
    first = len(state) - 4 * int(np.prod(shape))
    rows = np.frombuffer(state, np.float32, offset=first).reshape(shape)
    for kept_rows in (2, 1):
        cut = damaged(state[:first], KEPT_ROWS, kept_rows) + rows[:, 10 - kept_rows :].tobytes()
        if kept_rows == CONV.before:
            cache.load_state(cut)
            continue
        with pytest.raises(SnapshotError):
            cache.load_state(cut)


def test_changed_bytes_harm_no_memory(both: Both) -> None:
    """Any byte may be wrong: it is refused, or loads as other numbers that can be worked with."""
    both.grow(4 * CHUNK + 7)
    cache, draw = both.caches[0], np.random.default_rng(0)
    state, outcomes = cache.state(), set[str]()
    first = len(state) - 3 * (10 + 2 * 4) * CONV.width * 4
    for place in [*range(HEADER, PLACES + 20), *draw.integers(first, len(state), 60).tolist()]:
        wrong = bytearray(state)
        wrong[place] ^= int(draw.integers(1, 256))
        try:
            cache.load_state(bytes(wrong))
        except SnapshotError:
            outcomes.add("refused")
            continue
        outcomes.add("loaded")
        for tokens in (cache.tokens - 2, CHUNK + 3):
            cache.trim(tokens)
            cache.begin(CHUNK)
            attend(cache, CHUNK)
            for layer in range(CONV.num_layers):
                cache.convolve(layer, both.rows(CHUNK)[:, layer], both.weight[layer])
            cache.commit(CHUNK)
    assert outcomes == {"refused", "loaded"}
    cache.load_state(state)


def test_numpys_damaged_snapshots_are_refused(both: Both) -> None:
    both.grow(3 * CHUNK)
    cache = both.caches[1]
    state = cache.state()
    conv = cache.storage._conv
    for name, value in (
        ("_newest", conv._newest[:, :1]),
        ("_newest", conv._newest[:, :, :5]),
        ("_newest", conv._newest * np.float32(np.nan)),
        ("_marked", (-1, 0)),
        ("_marked", (0, -1)),
        ("_checkpoints", {0: conv._checkpoints[CHUNK - 1]}),
        ("_checkpoints", {CONTEXT: conv._checkpoints[CHUNK - 1]}),
        ("_checkpoints", {CHUNK: conv._checkpoints[CHUNK - 1][:, :1]}),
    ):
        before = getattr(conv, name)
        setattr(conv, name, value)
        bad = cache.state()
        setattr(conv, name, before)
        with pytest.raises(SnapshotError):
            cache.load_state(bad)
        assert cache.state() == state


def test_equal_contents_have_equal_bytes() -> None:
    """What was held and is gone leaves nothing in a file."""
    states: list[bytes] = []
    for detour in (False, True):
        with closing(Both(spec().resolved())) as both:
            both.grow(5)
            draw, both.draw = both.draw, np.random.default_rng(99)
            if detour:
                both.grow(4)
                both.trim(5)
                both.add(3)
                both.rewind(0)
            both.draw = np.random.default_rng(7)
            both.grow(30)
            del draw
            states.append(both.caches[0].state())
    assert len(states[0]) == len(states[1])
    peak = slice(HEADER - 8, HEADER)
    assert states[0][: peak.start] == states[1][: peak.start]
    assert states[0][peak.stop :] == states[1][peak.stop :]


# Bytes


@pytest.mark.parametrize("conv", [CONV, ConvShape(num_layers=10, width=2048, taps=3)])
@pytest.mark.parametrize("draft_tokens", [1, 8, 96])
def test_the_library_counts_the_same_bytes(conv: ConvShape, draft_tokens: int) -> None:
    arena = geometry(SHAPE, PLAN, context_tokens=900, conv=conv, draft_tokens=draft_tokens)
    for columns in (2, 9):
        num_bytes = arena.bytes_for_columns(columns)
        fit, regions = arena.divide(num_bytes)
        layout = native.layout(arena, num_bytes, fit)
        assert layout["regions"] == regions
        assert layout["minimum_bytes"] == arena.minimum_bytes
    rows = 2 * (2 + CONV_BACK_ROWS) + draft_tokens + 2 * (CONV_CHECKPOINTS + 1)
    assert regions.conv_rows == conv.num_layers * rows * conv.width * 4
