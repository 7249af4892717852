"""Caches of several classes of layers in one budget; layers that read what another has stored."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvq import native_library
from kvq.cache import Cache, CacheSpec
from kvq.class_cache import ClassCache
from kvq.config import Budget, CacheShape, KvPlan, PageForm
from kvq.errors import BudgetError, CacheError, SnapshotError, UsageError
from kvq.sizing import ClassSpec
from numpy_cache import storage_named
from pairs import Float, attention, forward, frequencies, packed_rows

NARROW = CacheShape(num_layers=2, num_heads=4, num_kv_heads=1, head_dim=32)
WIDE = CacheShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
CONTEXT, CHUNK, WINDOW = 4000, 128, 100
ENGINES = ["numpy", *(["native"] if native_library.available() else [])]


def two_classes(budget: Budget | None = None, **options: Any) -> CacheSpec:
    """Two layers with a window, one without that has other heads."""
    shared = {"plan": KvPlan(), "context_tokens": CONTEXT, "chunk_tokens": CHUNK}
    return CacheSpec.of(
        {"shape": NARROW, "windows": (WINDOW,) * 2},
        {"shape": WIDE, "windows": (0,)},
        budget=budget,
        **shared | {"policy": "oldest"} | options,
    )


def opened(engine: str = ENGINES[-1], **options: Any) -> Cache:
    return Cache(two_classes(**options).resolved(), storage=storage_named(engine))


def read(cache: Cache, rng: np.random.Generator, tokens: int) -> list[Float]:
    """What every layer gave for the next tokens of a text, chunk by chunk."""
    outputs: list[Float] = []
    while tokens > 0:
        size = min(tokens, cache.chunk_tokens)
        cache.begin(size)
        positions = np.arange(cache.tokens, cache.tokens + size)
        for index, (shape, window) in enumerate(((NARROW, WINDOW), (WIDE, 0))):
            for layer, rows in enumerate(packed_rows(shape, rng, size)):
                params = replace(attention(shape, layer, window_tokens=window), cache=index)
                outputs.append(
                    cache.attend(params, rows, positions, frequencies(shape.head_dim // 2))
                )
        cache.commit(size)
        assert cache.used_bytes <= cache.peak_bytes <= cache.budget_bytes
        tokens -= size
    return outputs


# Budgets


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1.2), context=st.integers(200, 20_000))
def test_the_classes_take_exactly_the_budget_and_each_what_it_can_use(
    share: float, context: int
) -> None:
    spec = two_classes(context_tokens=context)
    least, whole = spec.minimum_bytes, spec.whole_bytes
    num_bytes = least + int(share * (whole - least))
    arena = replace(spec, budget=Budget(num_bytes=num_bytes)).resolved()
    assert arena.num_bytes == sum(part.num_bytes for part in arena.parts) == num_bytes
    window, other = arena.parts
    for part, part_spec in zip(arena.parts, spec.parts, strict=True):
        assert part.num_bytes >= part_spec.minimum_bytes
    if other.num_bytes > spec.parts[1].minimum_bytes:
        assert window.num_bytes == spec.parts[0].whole_bytes, "what has a window is served first"
    if num_bytes >= whole:
        assert arena.whole_tokens == context


def test_a_budget_that_is_too_small_names_the_one_that_opens() -> None:
    least = two_classes().minimum_bytes
    with pytest.raises(BudgetError, match=f"{least} bytes\\) can"):
        two_classes(Budget(num_bytes=least - 1)).resolved()
    assert two_classes(Budget(num_bytes=least)).resolved().num_bytes == least


def test_a_budget_in_tokens_or_as_a_share_is_of_all_classes() -> None:
    spec = two_classes(Budget(tokens=1000))
    assert spec.budget_bytes == sum(part.bytes_for_tokens(1000) for part in spec.parts)
    assert spec.resolved().whole_tokens >= 1000
    half = two_classes(Budget(fraction=0.5))
    narrow, wide = 2 * 32 * 2 * 2, 2 * 64 * 2 * 2
    assert half.float_bytes == WINDOW * narrow + CONTEXT * wide
    assert half.budget_bytes == half.float_bytes // 2


def test_an_unquantised_cache_has_the_context_its_budget_holds() -> None:
    float_plan = KvPlan(k_bits=16, v_bits=16)
    whole = two_classes(plan=float_plan).whole_bytes
    short = two_classes(Budget(num_bytes=whole // 3), plan=float_plan).shortened()
    assert 2 <= short.context_tokens < CONTEXT
    assert short.minimum_bytes <= whole // 3
    longer = short.changed(context_tokens=short.context_tokens + 1)
    assert longer.minimum_bytes > whole // 3
    assert two_classes(Budget(tokens=700), plan=float_plan).shortened().context_tokens == 700


@pytest.mark.parametrize("budget", [None, Budget(tokens=300), Budget(fraction=0.8)])
def test_one_class_is_the_simple_case(budget: Budget | None) -> None:
    shared: dict[str, Any] = {"plan": KvPlan(), "context_tokens": 500, "policy": "oldest"}
    spec = CacheSpec.of({"shape": WIDE}, budget=budget, **shared)
    alone = ClassSpec(shape=WIDE, budget=budget or Budget(), **shared)
    assert (spec.budget_bytes, spec.minimum_bytes) == (alone.budget_bytes, alone.minimum_bytes)
    assert spec.resolved().parts == (alone.resolved(),)
    cache, part = Cache(spec.resolved()), ClassCache(alone.resolved())
    rows = packed_rows(WIDE, np.random.default_rng(0), 100)[0]
    for each in (cache, part):
        each.begin(100)
        each.attend(attention(WIDE), rows, np.arange(100), frequencies(32))
        each.commit(100)
    # A saved session of one class has the bytes of its cache and no more.
    assert cache.state() == part.state()
    cache.load_state(part.state())
    assert cache.usage() == part.usage()


def test_two_tiers_are_refused_for_several_classes() -> None:
    with pytest.raises(UsageError, match="offload is for models whose layers are all alike"):
        two_classes(offload_bytes=1 << 20)


# One face


@pytest.mark.parametrize("engine", ENGINES)
def test_each_layer_gets_what_it_would_get_in_a_cache_of_its_class_alone(engine: str) -> None:
    both = opened(engine, budget=Budget(tokens=CONTEXT))
    outputs = read(both, np.random.default_rng(4), 700)
    per_chunk = NARROW.num_layers + WIDE.num_layers
    rng = np.random.default_rng(4)
    alone = [ClassCache(part, storage=storage_named(engine)) for part in both.arena.parts]
    place = 0
    for start in range(0, 700, CHUNK):
        size = min(CHUNK, 700 - start)
        positions = np.arange(start, start + size)
        for cache, shape, window in zip(alone, (NARROW, WIDE), (WINDOW, 0), strict=True):
            layers = [
                attention(shape, layer, window_tokens=window) for layer in range(shape.num_layers)
            ]
            rows = packed_rows(shape, rng, size)
            for out in forward(cache, layers, rows, positions, frequencies(shape.head_dim // 2)):
                np.testing.assert_array_equal(outputs[place], out)
                place += 1
            cache.commit(size)
    assert place == len(outputs) == per_chunk * -(-700 // CHUNK)


def test_what_one_class_refuses_no_class_begins() -> None:
    cache = opened(budget=Budget(tokens=CONTEXT))
    read(cache, np.random.default_rng(0), 300)
    wide = cache.parts[1]
    wide.begin(1)  # out of step: it cannot begin a chunk now
    with pytest.raises(BudgetError, match="a branch of this session holds"):
        cache.begin(CHUNK)
    assert [part.branch_rows for part in cache.parts] == [0, 1]
    with pytest.raises(CacheError, match="cannot be left out"):
        cache.begin(1, kv_only_layers=(0,))
    with pytest.raises(CacheError, match="class 2 is none of 2"):
        cache.attend(
            replace(attention(WIDE, 0), cache=2),
            packed_rows(WIDE, np.random.default_rng(0), 1)[0],
            np.arange(1),
            frequencies(32),
        )


def test_all_classes_go_back_as_far_as_the_one_that_must() -> None:
    cache = opened(budget=Budget(num_bytes=two_classes().whole_bytes))
    read(cache, np.random.default_rng(1), 2500)
    cache.trim(2499)
    assert {part.tokens for part in cache.parts} == {2499}
    cache.trim(1200)  # the window has left behind what token 1200 sees
    assert {part.tokens for part in cache.parts} == {0}


def test_a_refused_edit_leaves_what_stands_before_it_in_every_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = opened(budget=Budget(tokens=CONTEXT), edits=True)
    read(cache, np.random.default_rng(1), 900)
    cache.edit(400, 410, 5)
    assert {part.tokens for part in cache.parts} == {895}
    cache.trim(400)
    read(cache, np.random.default_rng(2), 500)

    def refuse(start: int, stop: int, count: int) -> None:
        raise CacheError("no view is left")

    monkeypatch.setattr(cache.parts[1], "edit", refuse)
    with pytest.raises(CacheError, match="no view is left"):
        cache.edit(600, 601, 1)
    assert {part.tokens for part in cache.parts} == {600}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_saved_state_goes_on_and_a_wrong_one_changes_nothing(engine: str) -> None:
    first, second = (opened(engine, budget=Budget(tokens=1500)) for _ in range(2))
    read(first, np.random.default_rng(5), 900)
    state = first.state()
    second.load_state(state)
    for ours, theirs in zip(
        read(first, np.random.default_rng(6), 200),
        read(second, np.random.default_rng(6), 200),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)
    before = second.state()
    lengths = np.frombuffer(state[:16], "<i8")
    swapped = state[:16] + state[16 + lengths[0] :] + state[16 : 16 + lengths[0]]
    half = opened(engine, budget=Budget(tokens=1500))
    read(half, np.random.default_rng(5), 300)
    mixed = half.parts[0].state(), second.parts[1].state()
    joined = np.array([len(part_state) for part_state in mixed], "<i8").tobytes() + b"".join(mixed)
    for wrong in (b"", state[:9], state[:-1], state + b"x", swapped, joined, b"\xff" * 64):
        with pytest.raises(SnapshotError):
            second.load_state(wrong)
        assert second.state() == before


def test_usage_counts_every_number_once() -> None:
    cache = opened(budget=Budget(tokens=CONTEXT))
    read(cache, np.random.default_rng(1), 1000)
    narrow, wide = (part.usage() for part in cache.parts)
    weights = [part.tally().stored for part in cache.parts]
    usage = cache.usage()
    expected = np.average([narrow.mean_k_bits, wide.mean_k_bits], weights=weights)
    assert usage.mean_k_bits == pytest.approx(expected)
    assert usage.evicted_share == 0
    wide_part = cache.parts[1]
    wide_part.demote(np.array([[0, 0, 0, 0, 0]], np.int32))
    gone = 64 * WIDE.head_dim
    expected_numbers = sum(part.tally().seen for part in cache.parts)
    assert cache.usage().evicted_share == pytest.approx(gone / expected_numbers)


# Layers that read what another has stored


def looks(cache: ClassCache, shape: CacheShape, size: int, rows: list[int], rng: Any) -> Float:
    """What queries of these rows of the pass find in the last layer."""
    queries = rng.standard_normal((len(rows), shape.num_heads * shape.head_dim), np.float32)
    norm = np.linspace(0.5, 1.5, shape.head_dim, dtype=np.float32)
    last = attention(shape, shape.num_layers - 1, window_tokens=90, softcap=5.0)
    picked = np.array([row for row in rows if row < size], np.int64)
    inv_freq = frequencies(shape.head_dim // 2)
    return cache.attend_shared(last, queries[: len(picked)], picked, inv_freq, norm)


@pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
@pytest.mark.parametrize(
    "shape", [NARROW, CacheShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=512)]
)
@pytest.mark.parametrize("forms", [PageForm.PLAIN, PageForm.ROTATED_KEYS | PageForm.CHANNEL_VALUES])
def test_a_reading_layer_finds_what_the_definition_does(shape: CacheShape, forms: PageForm) -> None:
    """Of chunks that close pages, of the tail, of drafts and of trees."""
    streams = shape.num_layers * shape.num_kv_heads
    spec = ClassSpec(
        shape=shape,
        plan=KvPlan(k_bits=8, v_bits=8),
        context_tokens=900,
        chunk_tokens=300,
        policy="oldest",
        page_encodings=(forms,) * streams,
    )
    ours, theirs = (
        ClassCache(spec.resolved()),
        ClassCache(spec.resolved(), storage=storage_named("numpy")),
    )
    layers = [attention(shape, layer) for layer in range(shape.num_layers)]
    for size, parents in ((300, None), (7, None), (256, None), (5, [-1, 0, 0, 1, 3]), (1, None)):
        outputs: list[Float] = []
        for cache in (ours, theirs):
            rng = np.random.default_rng(size)
            rows = packed_rows(shape, rng, size)
            depths = [0] * size
            for row, parent in enumerate(range(-1, size - 1) if parents is None else parents):
                depths[row] = 0 if parent < 0 else depths[parent] + 1
            positions = cache.tokens + np.array(depths)
            freq = frequencies(shape.head_dim // 2)
            forward(cache, layers, rows, positions, freq, parents=parents)
            outputs.append(looks(cache, shape, size, [0, 2, 2, size - 1], rng))
            assert cache.attend_shared(layers[-1], outputs[0][:0], np.arange(0), freq).shape == (
                0,
                shape.num_heads * shape.head_dim,
            )
            cache.commit([0, 1, 3, 4] if parents else size)
        scale = np.abs(outputs[1]).max()
        np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=0.01 * scale)


@pytest.mark.parametrize("engine", ENGINES)
def test_reading_a_layer_with_its_own_queries_gives_its_own_output(engine: str) -> None:
    spec = ClassSpec(
        shape=NARROW, plan=KvPlan(), context_tokens=700, chunk_tokens=200, policy="oldest"
    )
    cache, rng = (
        ClassCache(spec.resolved(), storage=storage_named(engine)),
        np.random.default_rng(0),
    )
    layers = [attention(NARROW, layer, window_tokens=150) for layer in range(2)]
    for size in (200, 200, 3):
        rows = packed_rows(NARROW, rng, size)
        outs = forward(cache, layers, rows, np.arange(size) + cache.tokens, frequencies(16))
        asking = np.arange(0, size, 2)
        queries = rows[1][asking, : 4 * 32]
        actual = cache.attend_shared(layers[1], queries, asking, frequencies(16))
        np.testing.assert_allclose(actual, outs[1][asking], rtol=0, atol=1e-6)
        cache.commit(size)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_read_before_every_layer_has_seen_the_pass(engine: str) -> None:
    spec = ClassSpec(
        shape=NARROW, plan=KvPlan(), context_tokens=700, chunk_tokens=200, policy="oldest"
    )
    cache, freq = ClassCache(spec.resolved(), storage=storage_named(engine)), frequencies(16)
    layers = [attention(NARROW, layer) for layer in range(2)]
    queries, row = np.zeros((1, 128), np.float32), np.array([0])
    with pytest.raises(CacheError):
        cache.attend_shared(layers[1], queries, row, freq)
    cache.begin(2)
    rows = packed_rows(NARROW, np.random.default_rng(0), 2)
    cache.attend(layers[0], rows[0], np.arange(2), freq)
    with pytest.raises(CacheError):
        cache.attend_shared(layers[0], queries, row, freq)
    cache.attend(layers[1], rows[1], np.arange(2), freq)
    for wrong in (np.array([2]), np.array([-1]), np.zeros(201, np.int64)):
        with pytest.raises(CacheError):
            cache.attend_shared(layers[1], queries.repeat(len(wrong), axis=0), wrong, freq)
    with pytest.raises(CacheError, match="are not those of 2 rows"):
        cache.attend_shared(layers[1], queries, np.array([0, 1]), freq)
    assert np.isfinite(cache.attend_shared(layers[1], queries, row, freq)).all()


def test_windows_of_a_class_give_way_while_the_others_keep_all() -> None:
    """The context grows by the class without a window alone."""
    short, long = (two_classes(context_tokens=tokens).whole_bytes for tokens in (6_000, 12_000))
    wide = [
        ClassSpec(
            shape=WIDE, plan=KvPlan(), context_tokens=tokens, chunk_tokens=CHUNK, policy="oldest"
        ).whole_bytes
        for tokens in (6_000, 12_000)
    ]
    grown, alone = long - short, wide[1] - wide[0]
    # And rows of the page table of the two layers with windows.
    assert alone < grown < 1.2 * alone
    cache = opened(budget=Budget(num_bytes=two_classes().whole_bytes))
    read(cache, np.random.default_rng(2), CONTEXT - 10)
    widths: NDArray[np.uint8] = cache.parts[1].columns()[1]
    assert (widths == 4).all()
    assert cache.usage().evicted_share == 0
