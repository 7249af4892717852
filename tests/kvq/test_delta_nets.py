"""What delta nets remember: a path through a tree, however it came, is bit for bit the path alone.

Native code is compared with numpy and both with a recurrence over the whole text, to the rounding
of sums; what they gave of the text that was kept, with the same engine decoding it token by token,
to the last bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest

from caches import geometry, open_cache
from kvq import native, native_library
from kvq.class_cache import ClassCache
from kvq.config import FOLD_TOKENS, Budget, DeltaShape, KvPlan
from kvq.errors import BackendError, CacheError, SnapshotError, UsageError
from kvq.geometry import DELTA_PLACES, LEAST_DELTA_STATES
from kvq.reference.delta import DeltaWeights, Recurrence, base_of
from kvq.sizing import PLACES_SHARE, ClassArena, ClassSpec
from mixers import (
    CHUNK,
    DRAFT,
    ENGINES,
    SHAPE,
    Twins,
    attend,
    forget_drafts_in_part,
    keep_a_chunk_as_a_draft,
    refuse_edits_and_silence,
    refuse_rows_in_a_gap,
)
from native_calls import select_isa
from numpy_cache import storage_named
from regions import MOST_WANTED, delta_newest, delta_row_width, delta_state_bytes
from snapshot_bytes import HEADER, damaged

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

SHARED = DeltaShape(num_layers=2, key_heads=2, value_heads=4, key_dim=16, value_dim=48, taps=4)
ALONE = DeltaShape(num_layers=1, key_heads=3, value_heads=3, key_dim=32, value_dim=16, taps=2)
PLAN = KvPlan(k_bits=4, v_bits=4)
CONTEXT = 1500
STATES = LEAST_DELTA_STATES + DELTA_PLACES
# Outputs are of the order of 1.
TOLERANCE = 2e-4


def spec(delta: DeltaShape = SHARED, draft_tokens: int = DRAFT) -> ClassSpec:
    return ClassSpec(
        shape=SHAPE,
        plan=PLAN,
        context_tokens=CONTEXT,
        budget=Budget(tokens=CONTEXT),
        chunk_tokens=CHUNK,
        draft_tokens=draft_tokens,
        delta=delta,
    )


def weights_of(delta: DeltaShape, draw: np.random.Generator) -> DeltaWeights:
    """Some heads forget within a few tokens, some within hundreds."""
    return DeltaWeights(
        conv=draw.normal(0, 0.7, (delta.conv_width, delta.taps)).astype(np.float32),
        decay=draw.uniform(-6, 0, delta.value_heads).astype(np.float32),
        dt_bias=draw.normal(size=delta.value_heads).astype(np.float32),
        scale=draw.normal(1, 0.1, delta.value_dim).astype(np.float32),
        key_heads=delta.key_heads,
        norm_eps=1e-6,
    )


@dataclass
class Row:
    """A row of a branch: the one it follows, what enters every net, what each engine gave."""

    parent: int
    entered: tuple[np.ndarray, np.ndarray]
    outputs: tuple[np.ndarray, ...] = ()


class Both(Twins[Row]):
    """What both gave of the text is compared, in the end, with decoding it alone."""

    def __init__(self, arena: ClassArena, seed: int = 0) -> None:
        super().__init__(arena, seed)
        assert arena.delta is not None
        self.delta = arena.delta
        self.weights = [weights_of(self.delta, self.draw) for _ in range(self.delta.num_layers)]

    def entering(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and gates of so many tokens, [T, layers, ...]."""
        delta, layers = self.delta, self.delta.num_layers
        rows = self.draw.normal(size=(count, layers, delta.conv_width + delta.value_width))
        gates = self.draw.normal(size=(count, layers, 2 * delta.value_heads))
        return rows.astype(np.float32), gates.astype(np.float32)

    def passed(self, cache: ClassCache, rows: np.ndarray, gates: np.ndarray) -> np.ndarray:
        """What every net gives of a pass that has begun: [layers, T, value_width]."""
        attend(cache, len(rows))
        layers = range(self.delta.num_layers)
        return np.stack([cache.recur(i, rows[:, i], gates[:, i], self.weights[i]) for i in layers])

    def add(self, count: int, parents: Sequence[int] | None = None) -> None:
        """A pass; engines are compared."""
        first = len(self.branch)
        rows, gates = self.entering(count)
        outputs = []
        for cache in self.caches:
            cache.begin(count, parents)
            outputs.append(self.passed(cache, rows, gates))
            assert cache.used_bytes <= cache.peak_bytes <= cache.budget_bytes
        np.testing.assert_allclose(outputs[0], outputs[1], atol=TOLERANCE)
        chain = range(first - 1, first + count - 1)
        self.branch += [
            Row(parent, (rows[t], gates[t]), tuple(output[:, t] for output in outputs))
            for t, parent in enumerate(chain if parents is None else parents)
        ]

    def check(self) -> None:
        """All that was kept is what decoding the text gives, and what a recurrence does."""
        rows, gates = (np.stack([row.entered[side] for row in self.text]) for side in (0, 1))
        for index, engine in enumerate(ENGINES):
            outputs = np.stack([row.outputs[index] for row in self.text], axis=1)
            for layer, weights in enumerate(self.weights):
                whole = Recurrence(weights).run(rows[:, layer], gates[:, layer], weights)
                np.testing.assert_allclose(outputs[layer], whole, atol=TOLERANCE)
            with closing(ClassCache(self.arena, storage=storage_named(engine))) as alone:
                for t in range(len(self.text)):
                    alone.begin(1)
                    actual = self.passed(alone, rows[t : t + 1], gates[t : t + 1])
                    np.testing.assert_array_equal(actual[:, 0], outputs[:, t])
                    alone.commit(1)


@pytest.fixture
def both() -> Iterator[Both]:
    with closing(Both(spec().resolved())) as twins:
        yield twins


@pytest.mark.parametrize("delta", [SHARED, ALONE])
def test_steps_equal_chunks_and_the_text_alone(delta: DeltaShape) -> None:
    with closing(Both(spec(delta).resolved())) as both:
        for count in (1, 1, 5, CHUNK, DRAFT, 1, DRAFT + 1, 64, 2, 7, 33):
            both.step(count)
        both.check()


@pytest.mark.parametrize("isa", native_library.isas() if native_library.available() else [])
def test_every_set_of_kernels_agrees_with_numpy(isa: str) -> None:
    select_isa(isa)
    try:
        with closing(Both(spec().resolved(), 3)) as both:
            both.grow(CHUNK + 5)
            both.add(5, [-1, 0, 0, 2, 1])
            both.commit([0, 2, 3])
            both.check()
    finally:
        select_isa(native_library.isas()[0])


def test_a_path_of_a_tree_is_kept_and_goes_on() -> None:
    """Also where paths pass the places that rows are folded at, once or often."""
    with closing(Both(spec(draft_tokens=40).resolved())) as both:
        both.grow(FOLD_TOKENS - 3)
        # Two long paths, which part before the first fold.
        both.add(20, [-1, 0, 0, *range(1, 18)])
        both.add(10, [18, 19, 2, 3, *range(20, 26)])
        path = both.path_to(29)
        assert len(path) > 2 * FOLD_TOKENS - 5
        both.commit(path)
        both.step()
        both.add(40)
        both.commit(37)
        both.step(2)
        both.check()


def test_drafts_are_forgotten_in_part(both: Both) -> None:
    forget_drafts_in_part(both)


def test_a_chunk_is_kept_whole_or_as_a_draft(both: Both) -> None:
    keep_a_chunk_as_a_draft(both)


@pytest.mark.sampled
@pytest.mark.parametrize("tokens", range(150, 150 + FOLD_TOKENS))
def test_as_many_tokens_as_are_folded_can_be_gone_back(tokens: int) -> None:
    """Behind a chunk and behind steps, wherever the end stands."""
    with closing(Both(spec().resolved())) as both:
        both.grow(tokens)
        assert both.trim(tokens - FOLD_TOKENS) == 0
        for _ in range(2 * FOLD_TOKENS):
            both.step()
        assert both.trim(both.tokens - FOLD_TOKENS) == 0
        both.step(3)
        both.check()


def test_further_back_a_chunks_beginning_is_there(both: Both) -> None:
    both.grow(6 * CHUNK)
    assert both.trim(5 * CHUNK - 1) == CHUNK - 1
    both.grow(CHUNK)
    assert both.trim(0) == 0
    both.grow(20)
    both.check()


def test_a_place_that_was_gone_back_to_is_remembered(both: Both) -> None:
    """The system prompt's end, where every new conversation begins: also one within a chunk."""
    system = CHUNK + 41
    both.grow(3 * CHUNK)
    assert both.trim(system) > FOLD_TOKENS
    for _ in range(2):
        both.grow(4 * CHUNK)
        for _ in range(3 * FOLD_TOKENS):
            both.step()
        assert both.trim(system) == system % FOLD_TOKENS
    both.check()


def test_the_places_that_were_wanted_last_are_remembered(both: Both) -> None:
    """Marked before they are passed, within chunks; who is gone back to is wanted anew."""
    system, first, second, third, fourth = (CHUNK * turn + 13 for turn in range(1, 6))
    for place in (third, second, first, system):
        both.mark(place)
    both.grow(7 * CHUNK)
    for _ in range(3 * FOLD_TOKENS):
        both.step()
    both.reload()
    # All four of them, the third place included, which two would not have had room for.
    for place in (third, second, first):
        assert both.trim(place) == place % FOLD_TOKENS
    both.grow(6 * CHUNK)
    assert both.trim(first) == first % FOLD_TOKENS
    # Used last are now the first turn and the system prompt, then the second: the third leaves.
    for place in (second, system, first, fourth):
        both.mark(place)
    both.grow(6 * CHUNK)
    assert both.trim(fourth) == fourth % FOLD_TOKENS
    both.grow(CHUNK)
    assert both.trim(third) == third - base_of(second)
    for place in (first, system):
        assert both.trim(place) == place % FOLD_TOKENS
    both.check()


def test_a_budget_decides_of_how_many_places_states_are_kept() -> None:
    """A share of it; the least opens with none, and what holds so many tokens still does."""
    cache_spec, state_bytes = spec(), delta_state_bytes(SHARED, 1)
    places = list[int]()
    for num_bytes in range(cache_spec.minimum_bytes, cache_spec.whole_bytes, state_bytes // 2):
        arena = replace(cache_spec, budget=Budget(num_bytes=num_bytes)).resolved()
        places.append(arena.delta_states - LEAST_DELTA_STATES)
        assert places[-1] * state_bytes <= (num_bytes - cache_spec.minimum_bytes) * PLACES_SHARE
        assert arena.pool_bytes >= 0
        assert arena.regions.num_bytes + arena.pool_bytes == num_bytes
    assert places == sorted(places)
    assert {0, 1} <= set(places)
    for tokens in range(200, CONTEXT, 100):
        arena = replace(cache_spec, budget=Budget(tokens=tokens)).resolved()
        assert arena.whole_tokens >= tokens


def least(delta: DeltaShape = SHARED) -> ClassArena:
    """An arena that keeps no place to go back to, and rows of one fold."""
    cache_spec = spec(delta)
    arena = replace(cache_spec, budget=Budget(num_bytes=cache_spec.minimum_bytes)).resolved()
    assert arena.delta_states == LEAST_DELTA_STATES
    return arena


@pytest.mark.sampled
@pytest.mark.parametrize("delta", [SHARED, ALONE])
@pytest.mark.parametrize("tokens", range(150, 150 + FOLD_TOKENS))
def test_without_places_little_is_computed_again(delta: DeltaShape, tokens: int) -> None:
    """One token back nothing is, and up to eight what follows the base before."""
    with closing(Both(least(delta))) as both:
        both.grow(tokens)
        for back in range(1, FOLD_TOKENS + 1):
            for _ in range(2 * FOLD_TOKENS):
                both.step()
            kept = both.tokens - back
            lost = both.trim(kept)
            # The rows of a fold are there, of which a convolution sees those before its own.
            near = back + delta.before <= FOLD_TOKENS
            same = base_of(kept) == base_of(kept + back) or (kept + back) % FOLD_TOKENS == 0
            assert lost == (0 if near and same else kept % FOLD_TOKENS)
            both.add(DRAFT)
            both.commit(3)
        both.check()


def test_rows_that_were_saved_beyond_those_kept_are_left_out() -> None:
    """As those of a cache without places once were, when it kept two folds' too."""
    tokens = 3 * CHUNK + 5
    with closing(Both(least())) as both, closing(Both(spec().resolved())) as roomy:
        for twins in (both, roomy):
            twins.grow(tokens)
        row_bytes, layers = 4 * delta_row_width(SHARED), SHARED.num_layers
        kept, more = (delta_newest(SHARED, count) for count in (LEAST_DELTA_STATES, STATES))
        small, other = (twins.caches[0].state() for twins in (both, roomy))
        ends = [
            len(saved_state) - delta_state_bytes(SHARED, count)
            for saved_state, count in ((small, LEAST_DELTA_STATES), (other, STATES))
        ]
        start, first = (
            end - layers * count * row_bytes for end, count in zip(ends, (kept, more), strict=True)
        )
        saved = bytearray(small[:start] + other[first : ends[1]] + small[ends[0] :])
        assert len(saved) > len(small)
        saved[HEADER : HEADER + 4] = more.to_bytes(4, "little")
        both.caches[0].trim(CHUNK)
        both.caches[0].load_state(bytes(saved))
        assert both.caches[0].state() == small
        wide, numpy = (twins.caches[1].storage._delta for twins in (roomy, both))
        arrays = numpy.arrays()
        numpy.restore(arrays | {"delta_newest": wide._newest}, tokens)
        np.testing.assert_array_equal(numpy.arrays()["delta_newest"], arrays["delta_newest"])
        both.add(DRAFT)
        both.commit(DRAFT)
        both.check()


def test_places_that_are_none_are_refused(both: Both) -> None:
    for cache in both.caches:
        for tokens in (0, -1, CONTEXT + 1):
            with pytest.raises(CacheError):
                cache.mark(tokens)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(16))
def test_random_traces(seed: int) -> None:
    cache_spec = spec(ALONE if seed % 2 else SHARED, draft_tokens=DRAFT if seed % 4 else 20)
    if seed % 3 == 0:
        cache_spec = replace(cache_spec, budget=Budget(num_bytes=cache_spec.minimum_bytes + 30_000))
    arena = cache_spec.resolved()
    assert seed % 3 == 0 or arena.delta_states == STATES
    with closing(Both(arena, seed)) as both:
        draw, most = np.random.default_rng(seed + 100), arena.draft_tokens
        for _ in range(50):
            if draw.random() < 0.3:
                both.mark(int(draw.integers(1, 350)))
            both.random_step(draw, most, limit=350)
        both.grow(3)
        both.check()


def test_what_is_not_finite_is_refused(both: Both) -> None:
    both.grow(4)
    rows, gates = both.entering(1)
    for cache in both.caches:
        for place in (0, SHARED.conv_width - 1):
            wrong = rows.copy()
            wrong[0, 0, place] = np.inf
            cache.begin(1)
            attend(cache, 1)
            with pytest.raises(CacheError, match="finite"), np.errstate(all="ignore"):
                cache.recur(0, wrong[:, 0], gates[:, 0], both.weights[0])
            cache.rewind()


def test_a_pass_ends_when_every_net_has_seen_it(both: Both) -> None:
    rows, gates = both.entering(2)
    for cache in both.caches:
        with pytest.raises(CacheError, match="begin"):
            cache.recur(0, rows[:, 0], gates[:, 0], both.weights[0])
        cache.begin(2)
        attend(cache, 2)
        cache.recur(0, rows[:, 0], gates[:, 0], both.weights[0])
        with pytest.raises(CacheError):
            cache.commit(2)
        with pytest.raises(CacheError):
            cache.recur(1, rows[:1, 1], gates[:1, 1], both.weights[1])
        cache.recur(1, rows[:, 1], gates[:, 1], both.weights[1])
        cache.commit(2)


def test_what_is_no_net_of_the_cache_is_refused(both: Both) -> None:
    rows, gates = (part[:, 0] for part in both.entering(1))
    plain, net = open_cache(SHAPE, PLAN, 1 << 20, 1000), both.weights[0]
    for cache, layer, entering, gate, weights in (
        (plain, 0, rows, gates, net),
        *((cache, 2, rows, gates, net) for cache in both.caches),
        *((cache, 0, rows[:, 1:], gates, net) for cache in both.caches),
        *((cache, 0, rows, gates[:, 1:], net) for cache in both.caches),
        *((cache, 0, rows, gates, net._replace(conv=net.conv[:, 1:])) for cache in both.caches),
        *((cache, 0, rows, gates, net._replace(key_heads=4)) for cache in both.caches),
    ):
        with pytest.raises(CacheError, match=r"delta net|are not those of"):
            cache.recur(layer, entering, gate, weights)
    plain.close()


@pytest.mark.parametrize(
    "sizes", [(0, 2, 4, 16, 16, 4), (1, 3, 4, 16, 16, 4), (1, 2, 4, 8, 16, 4),
              (1, 2, 4, 16, 272, 4), (1, 2, 4, 16, 16, 1), (1, 2, 4, 16, 16, 17)]
)  # fmt: skip
def test_a_shape_that_is_none_is_refused(sizes: tuple[int, ...]) -> None:
    names = ("num_layers", "key_heads", "value_heads", "key_dim", "value_dim", "taps")
    with pytest.raises(UsageError, match=r"possible|cannot share"):
        DeltaShape(**dict(zip(names, sizes, strict=True)))


def test_nothing_in_the_middle_is_replaced_and_no_layer_left_out(both: Both) -> None:
    refuse_edits_and_silence(both, "delta nets")


def test_no_rows_are_put_where_pages_were_evicted(both: Both) -> None:
    refuse_rows_in_a_gap(both, "delta nets")


def test_no_device_has_them() -> None:
    with pytest.raises(BackendError, match="delta nets have no kernel on the device"):
        ClassCache(spec().resolved(), storage=storage_named("cuda"))


# Snapshots


KEPT_ROWS, LIVE, MARKS, OLDEST, BASES = (HEADER + 4 * i for i in (0, 1, 2, 9, 10))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("at", "number"),
    [
        (KEPT_ROWS, -1),
        (KEPT_ROWS, 3),
        (KEPT_ROWS, delta_newest(SHARED, STATES) + 1),
        (KEPT_ROWS, 1 << 30),
        (MARKS, -1),
        (MARKS, CONTEXT + 1),
        (LIVE, -1),
        (LIVE, 1),
        (LIVE, STATES),
        (OLDEST, -1),
        (OLDEST, CONTEXT + 1),
        (BASES, -2),
        (BASES, -1),
        (BASES, 3),
        (BASES, 1 << 20),
        (-4, float("nan")),
        (-4, float("inf")),
    ],
)
def test_a_damaged_snapshot_is_refused_and_nothing_changes(
    both: Both, at: int, number: int | float
) -> None:
    tokens = 3 * CHUNK + 5
    both.grow(tokens)
    cache = both.caches[0]
    state = cache.state()
    kept_rows, live, *rest = np.frombuffer(
        state, np.int32, 2 + MOST_WANTED + STATES, HEADER
    ).tolist()
    marks, bases = rest[:MOST_WANTED], rest[MOST_WANTED:]
    assert (kept_rows, marks) == (delta_newest(SHARED, STATES), [0] * MOST_WANTED)
    assert bases[live] == base_of(tokens)
    assert live != 1
    assert sorted(bases)[-2:] == [base_of(tokens) - FOLD_TOKENS, base_of(tokens)]
    with pytest.raises(SnapshotError):
        cache.load_state(damaged(state, at % len(state), number))
    assert cache.state() == state


def test_changed_bytes_harm_no_memory(both: Both) -> None:
    """Any byte may be wrong: it is refused, or loads as other numbers that can be worked with."""
    both.grow(3 * CHUNK + 7)
    cache, draw = both.caches[0], np.random.default_rng(0)
    state, outcomes = cache.state(), set[str]()
    first = len(state) - 3 * SHARED.num_layers * SHARED.state_width * 4
    for place in [*range(HEADER, BASES + 16), *draw.integers(first, len(state), 40).tolist()]:
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
            try:
                both.passed(cache, *both.entering(CHUNK))
                cache.commit(CHUNK)
            except CacheError:  # numbers that lead to what is none
                break
    assert outcomes == {"refused", "loaded"}


def test_numpys_damaged_snapshots_are_refused(both: Both) -> None:
    both.grow(3 * CHUNK)
    cache = both.caches[1]
    saved = cache.state()
    delta = cache.storage._delta
    states = delta._states
    for name, value in (
        ("_newest", delta._newest[:, :1]),
        ("_newest", delta._newest[:, :, :5]),
        ("_newest", delta._newest * np.float32(np.nan)),
        ("_marked", (-1, 0)),
        ("_marked", (0, -1)),
        ("_states", {base + 1: state for base, state in states.items()}),
        ("_states", {base + FOLD_TOKENS: state for base, state in states.items()}),
        ("_states", {base: state[:1] for base, state in states.items()}),
    ):
        before, conv = getattr(delta, name), delta._before
        setattr(delta, name, value)
        delta._before = dict(zip(delta._states, conv.values(), strict=True))
        bad = cache.state()
        setattr(delta, name, before)
        delta._before = conv
        with pytest.raises(SnapshotError):
            cache.load_state(bad)
        assert cache.state() == saved


# Bytes


@pytest.mark.parametrize(
    "delta",
    [SHARED, DeltaShape(num_layers=18, key_heads=16, value_heads=16, key_dim=128, value_dim=128,
                        taps=4)],
)  # fmt: skip
@pytest.mark.parametrize("draft_tokens", [1, 8, 96])
@pytest.mark.parametrize("states", [LEAST_DELTA_STATES, LEAST_DELTA_STATES + 1])
def test_the_library_counts_the_same_bytes(
    delta: DeltaShape, draft_tokens: int, states: int
) -> None:
    arena = geometry(SHAPE, PLAN, context_tokens=900, delta=delta, draft_tokens=draft_tokens)
    arena = replace(arena, delta_states=states)
    for columns in (2, 9):
        num_bytes = arena.bytes_for_columns(columns)
        fit, regions = arena.divide(num_bytes)
        layout = native.layout(arena, num_bytes, fit)
        assert layout["regions"] == regions
        assert layout["minimum_bytes"] == arena.minimum_bytes
