"""Sizing: Python's count is the native library's, and a budget holds what it promises."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from caches import budget_for_tokens, geometry, minimum_budget, open_cache, spec
from kvq import native
from kvq.abi import Regions
from kvq.class_cache import ClassCache
from kvq.config import PAGE_WIDTHS, Budget, CacheShape, ConvShape, DeltaShape, KvPlan, parse_budget
from kvq.errors import BudgetError, UsageError
from kvq.formats import (
    constant_bytes,
    format_bytes,
    granule_bytes,
)
from kvq.geometry import SLACK_BYTES, Geometry
from kvq.policies import POLICIES, policy_named
from kvq.sizing import tight_plan
from pairs import attention, forward, pack_heads, random_heads
from regions import column_bytes, expected_regions

MANY = settings(deadline=None, database=None, derandomize=True, max_examples=200)
FEW = settings(deadline=None, database=None, derandomize=True, max_examples=25)

WIDTHS = st.tuples(st.sampled_from(PAGE_WIDTHS), st.sampled_from(PAGE_WIDTHS))


@st.composite
def shapes(draw: st.DrawFn, largest_dim: int = 256, most_streams: int = 300) -> CacheShape:
    kv_heads = draw(st.integers(1, 10))
    return CacheShape(
        num_layers=draw(st.integers(1, max(1, most_streams // kv_heads))),
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, largest_dim // 16)),
    )


@st.composite
def plans(draw: st.DrawFn, floats: bool = True) -> KvPlan:
    widths = draw(st.one_of(WIDTHS, st.just((16, 16))) if floats else WIDTHS)
    return KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=draw(st.integers(0, 64)))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    shape, window = draw(shapes()), st.sampled_from((0, 0, 33, 512, 4096))
    layers = shape.num_layers
    return geometry(
        shape,
        draw(plans()),
        context_tokens=draw(st.one_of(st.integers(1, 600), st.integers(1, 200_000))),
        chunk_tokens=draw(st.integers(1, 2048)),
        draft_tokens=draw(st.one_of(st.just(8), st.integers(1, 128))),
        threads=draw(st.integers(1, 16)),
        windows=draw(st.one_of(st.just(()), st.lists(window, min_size=layers, max_size=layers))),
        probes=draw(st.booleans()),
    )


@MANY
@given(geometries(), st.floats(0, 3), st.integers(0, 4096))
def test_the_regions_have_the_bytes_that_they_must(
    arena: Geometry, share: float, extra: int
) -> None:
    num_bytes = _some_bytes(arena, share, extra)
    columns, regions = arena.divide(num_bytes)
    room = num_bytes - expected_regions(arena, 0, 0).num_bytes - SLACK_BYTES
    assert regions == expected_regions(arena, columns, room)
    layout = native.layout(arena, num_bytes, columns)
    for name, ours, theirs in zip(Regions._fields, regions, layout.pop("regions"), strict=True):
        assert ours == theirs, name
    assert layout == {
        "fixed_bytes": regions.num_bytes,
        "pool_bytes": arena.room_for_pages(num_bytes),
        "granule_bytes": granule_bytes(arena.shape.head_dim),
        "constant_bytes": constant_bytes(arena.shape.head_dim),
        "minimum_bytes": arena.minimum_bytes,
        "max_columns": columns,
        "reserved": 0,
    }
    assert layout["pool_bytes"] + layout["fixed_bytes"] == num_bytes


@MANY
@given(geometries(), st.floats(0, 3), st.integers(0, 4096))
def test_any_budget_that_opens_has_room_for_what_a_draft_closes(
    arena: Geometry, share: float, extra: int
) -> None:
    assume(arena.context_columns)
    full = column_bytes(arena, *_widths(arena))
    closed = min(math.ceil(arena.draft_tokens / 64), arena.context_columns)
    num_bytes = _some_bytes(arena, share, extra)
    columns, pool = arena.divide(num_bytes)[0], arena.room_for_pages(num_bytes)
    assert closed <= columns <= arena.context_columns
    assert pool >= closed * full
    # The table has a row for every page the pool can hold at two bits, or the context needs.
    if any(arena.windows):
        return
    smallest = column_bytes(arena, 2, 2)
    rows = 2 + (columns + 1) * (44 * arena.streams + 24) // smallest
    at_most = columns + rows + closed * full // smallest
    assert columns == arena.context_columns or at_most >= pool // smallest


@MANY
@given(geometries(), st.integers(1, 10_000))
def test_columns_asked_for_fit(arena: Geometry, columns: int) -> None:
    assume(arena.context_columns)
    columns = min(columns, arena.context_columns)
    exact = replace(arena, context_tokens=arena.plan.sink_tokens + 64 + 64 * columns)
    assert exact.context_columns == columns
    num_bytes = max(exact.bytes_for_columns(columns), exact.minimum_bytes)
    assert exact.divide(num_bytes)[0] == columns
    assert exact.room_for_pages(num_bytes) >= exact.pages_bytes(columns)


@MANY
@given(geometries())
def test_one_byte_below_the_minimum_is_refused_by_both(arena: Geometry) -> None:
    least = arena.minimum_bytes
    with pytest.raises(
        BudgetError, match=f"{re.escape(format_bytes(least))} \\({least} bytes\\) can"
    ):
        arena.divide(least - 1)
    columns = arena.divide(least)[0]
    assert native.layout(arena, least - 1, columns)["pool_bytes"] == 0
    assert native.layout(arena, least, columns)["pool_bytes"] == arena.room_for_pages(least)


@MANY
@given(geometries(), st.floats(0, 1.5), st.sampled_from(sorted(POLICIES)))
def test_what_is_held_is_no_more_than_what_was_asked(
    arena: Geometry, share: float, policy: str
) -> None:
    cache_spec = spec(
        arena.shape,
        arena.plan,
        arena.context_tokens,
        chunk_tokens=arena.chunk_tokens,
        draft_tokens=arena.draft_tokens,
        policy=policy,
    )
    least, whole = cache_spec.minimum_bytes, cache_spec.whole_bytes
    bounded = replace(cache_spec, budget=Budget(num_bytes=least + int(share * (whole - least))))
    opened = bounded.resolved()
    assert opened.spec == bounded
    assert opened.num_bytes == opened.regions.num_bytes + opened.pool_bytes == bounded.budget_bytes
    assert opened.chunk_tokens <= arena.chunk_tokens
    assert opened.max_columns <= opened.context_columns
    # Given bytes for its context a cache is just what was asked; below that it has no tail.
    if opened.num_bytes >= whole:
        # Scratch for a chunk longer than the context would never be used.
        longest = min(arena.chunk_tokens, arena.context_tokens)
        assert (opened.plan, opened.chunk_tokens) == (arena.plan, longest)
        assert not opened.probes
    else:
        assert opened.plan == replace(arena.plan, tail_tokens=0)
    assert native.layout(opened, opened.num_bytes, opened.max_columns)["regions"] == opened.regions
    with pytest.raises(BudgetError, match=f"{least} bytes"):
        replace(cache_spec, budget=Budget(num_bytes=least - 1)).resolved()


@pytest.mark.parametrize("draft_tokens", [0, 129])
def test_an_impossible_room_for_drafts_is_refused(draft_tokens: int) -> None:
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    with pytest.raises(UsageError, match="give 1 to 128"):
        spec(shape, KvPlan(), 100, draft_tokens=draft_tokens)


def test_convolutions_and_delta_nets_are_in_no_cache_together() -> None:
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    conv = ConvShape(num_layers=1, width=16, taps=3)
    delta = DeltaShape(num_layers=1, key_heads=1, value_heads=1, key_dim=16, value_dim=16, taps=4)
    spec(shape, KvPlan(), 100, conv=conv)
    with pytest.raises(UsageError, match="not both"):
        spec(shape, KvPlan(), 100, conv=conv, delta=delta)


@pytest.mark.parametrize("use_native", [True, False])
@pytest.mark.parametrize("draft_tokens", [1, 96, 128])
def test_a_minimum_budget_takes_drafts_of_the_room_asked_for(
    use_native: bool, draft_tokens: int
) -> None:
    shape, plan = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64), KvPlan()
    options = {"policy": "budget", "draft_tokens": draft_tokens}
    least = minimum_budget(shape, plan, 1000, **options)
    cache = open_cache(shape, plan, least, 1000, native=use_native, **options)
    _fill(cache, 1000)
    assert cache.peak_bytes <= least
    cache.close()


@pytest.mark.parametrize("use_native", [True, False])
# The last one of each set of needs: nothing else of a policy counts here.
@pytest.mark.parametrize(
    "policy", {policy_named(name).needs: name for name in sorted(POLICIES)}.values()
)
@pytest.mark.parametrize("context_tokens", [60, 100, 250, 1000])
def test_cache_opens_at_the_minimum_and_not_a_byte_below(
    use_native: bool, policy: str, context_tokens: int
) -> None:
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    options = {"policy": policy, "chunk_tokens": 128}
    for plan in (KvPlan(), KvPlan(k_bits=8, v_bits=8), KvPlan(k_bits=16, v_bits=16)):
        least = minimum_budget(shape, plan, context_tokens, **options)
        cache = open_cache(shape, plan, least, context_tokens, native=use_native, **options)
        assert cache.used_bytes <= least
        assert cache.peak_bytes == cache.used_bytes
        cache.close()
        with pytest.raises(BudgetError, match=f"{least} bytes"):
            open_cache(shape, plan, least - 1, context_tokens, native=use_native, **options)


def test_the_minimum_counts_the_probes_of_policies_that_ask_for_attention() -> None:
    """6 query rows of 64 float16 for each of 2 x 4 heads, or 14, and what each layer saw last."""
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    bare = minimum_budget(shape, KvPlan(), 1000)
    layers = 2 * 552 + 48
    probes = {
        frozenset[str](): 0,
        frozenset({"attention"}): 6 * 8 + 16 + 6 * 8 * 64 * 2 + layers,
        frozenset({"attention", "samples"}): 14 * 8 + 16 + 14 * 8 * 64 * 2 + layers,
    }
    for policy in POLICIES:
        least = minimum_budget(shape, KvPlan(), 1000, policy=policy)
        assert least == bare + probes[policy_named(policy).needs], policy
    # Of sixteen heads that share keys each row holds four.
    wide = CacheShape(num_layers=2, num_heads=32, num_kv_heads=2, head_dim=64)
    more = minimum_budget(wide, KvPlan(), 1000, policy="budget") - minimum_budget(
        wide, KvPlan(), 1000
    )
    assert more == 6 * 8 + 16 + 6 * 2 * 2 * 4 * 64 * 2 + layers


def test_heads_that_give_up_different_pages_share_a_longer_table() -> None:
    """Without probes all rows' pages fit at 2 bits; with them rows take a twentieth of the room."""
    shape, num_bytes = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64), 10 << 20
    arena = geometry(shape, tight_plan(KvPlan()), context_tokens=1_000_000)
    columns, _ = arena.divide(num_bytes)
    used_bytes = columns * column_bytes(arena, 2, 2)
    assert 0.99 < used_bytes / arena.room_for_pages(num_bytes) <= 1
    probed = replace(arena, probes=True)
    longer, regions = probed.divide(num_bytes)
    table = regions.views + regions.entries + regions.constant_owners
    assert 0.0499 < table / (table + probed.room_for_pages(num_bytes)) < 0.0502
    assert longer > 2 * columns
    # No longer than the text.
    short = geometry(shape, tight_plan(KvPlan()), context_tokens=2000, probes=True)
    assert short.divide(10 << 20)[0] == short.context_columns


def test_a_short_context_held_whole_is_cheaper_than_probes() -> None:
    """Of twenty layers that read the last one's keys there are many."""
    shape = CacheShape(num_layers=2, num_heads=16, num_kv_heads=1, head_dim=64)
    options = {"chunk_tokens": 64, "kv_shared_layers": 20}
    whole = budget_for_tokens(shape, KvPlan(), 250, **options)
    assert minimum_budget(shape, KvPlan(), 250, policy="h2o", **options) == whole
    cache = open_cache(shape, KvPlan(), whole, 250, policy="h2o", **options)
    assert not cache.arena.probes
    _fill(cache, 250)
    assert (cache.columns()[1] == (4, 4)).all()
    cache.close()
    longer = minimum_budget(shape, KvPlan(), 4000, policy="h2o", **options)
    assert longer < budget_for_tokens(shape, KvPlan(), 4000, **options)


@FEW
@given(
    shapes(largest_dim=64, most_streams=6),
    plans(floats=False),
    st.integers(70, 700),
    st.sampled_from(sorted(POLICIES)),
    st.booleans(),
)
def test_a_minimum_budget_takes_any_number_of_tokens(
    shape: CacheShape, plan: KvPlan, tokens: int, policy: str, use_native: bool
) -> None:
    """One page of every stream at a time: older pages are given up, and no step is refused."""
    budget = minimum_budget(shape, plan, tokens, policy=policy)
    cache = open_cache(shape, plan, budget, tokens, policy=policy, native=use_native)
    _fill(cache, tokens)
    assert cache.tokens == tokens
    assert cache.peak_bytes <= cache.budget_bytes
    cache.close()


@FEW
@given(
    shapes(largest_dim=64, most_streams=6),
    plans(),
    st.integers(1, 12),
    st.integers(0, 63),
    st.booleans(),
)
def test_budget_for_tokens_holds_them_at_full_width(
    shape: CacheShape, plan: KvPlan, pages: int, rest: int, use_native: bool
) -> None:
    tokens = plan.sink_tokens + 64 * pages + rest or 1
    budget = budget_for_tokens(shape, plan, tokens)
    cache = open_cache(shape, plan, budget, tokens, native=use_native)
    assert cache.chunk_tokens == min(256, tokens)
    _fill(cache, tokens)
    facts, widths = cache.columns()
    closed = max(0, (tokens - plan.sink_tokens) // 64 - 1) if plan.quantized else 0
    assert facts[:, 2].tolist() == [plan.sink_tokens + 64 * i for i in range(closed)]
    assert (widths == (plan.k_bits, plan.v_bits)).all()
    assert len(cache.tail(0, 0)[2]) == tokens - 64 * closed
    assert cache.used_bytes <= budget
    cache.close()


@FEW
@given(
    shapes(largest_dim=64, most_streams=4),
    plans(floats=False),
    st.integers(200, 900),
    st.one_of(st.integers(1, 300), st.just(20_000)),
    st.sampled_from(sorted(POLICIES)),
)
def test_budget_for_tokens_of_a_longer_context(
    shape: CacheShape, plan: KvPlan, tokens: int, more: int, policy: str
) -> None:
    context = tokens + more
    budget = budget_for_tokens(shape, plan, tokens, context_tokens=context, policy=policy)
    assert budget <= budget_for_tokens(shape, plan, context)
    cache = open_cache(shape, plan, budget, context, policy=policy)
    _fill(cache, tokens)
    assert (cache.columns()[1] == (plan.k_bits, plan.v_bits)).all()
    cache.close()


def test_budget_in_any_unit_becomes_bytes() -> None:
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    plan = KvPlan()

    def in_bytes(budget: Budget, context_tokens: int, **options: str) -> int:
        return spec(shape, plan, context_tokens, budget=budget, **options).budget_bytes

    assert in_bytes(parse_budget("3MiB"), 1000) == 3 << 20
    assert in_bytes(parse_budget("25%"), 4096) == 4096 * 2 * 2 * 64 * 4 // 4
    assert in_bytes(Budget(tokens=700), 700) == budget_for_tokens(shape, plan, 700)
    assert in_bytes(Budget(tokens=700), 300) == budget_for_tokens(shape, plan, 300)
    assert in_bytes(Budget(), 20_000) == in_bytes(Budget(tokens=8192), 20_000)
    for policy in POLICIES:
        assert in_bytes(Budget(tokens=700), 4000, policy=policy) == budget_for_tokens(
            shape, plan, 700, context_tokens=4000, policy=policy
        )


def test_what_a_chunk_takes_of_a_short_budget_is_left_to_pages() -> None:
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)

    def chunk_tokens(num_bytes: int, context_tokens: int) -> int:
        cache_spec = spec(shape, KvPlan(), context_tokens, budget=Budget(num_bytes=num_bytes))
        return cache_spec.resolved().chunk_tokens

    # Keys and values of two heads in float16, the positions and the rotary table of 256 tokens.
    rows = 256 * (2 * 2 * 64 * 2 + 4 + 64 * 4)
    assert chunk_tokens(32 * rows - 1, 60_000) == 128
    assert chunk_tokens(32 * rows, 60_000) == 256
    assert chunk_tokens(600_000, 4096) == 128
    # Which holds all of the context, and has no better use for them.
    assert chunk_tokens(2 << 20, 4096) == 256


def test_a_tight_budget_shortens_the_chunk() -> None:
    """A chunk's pages must fit the pool at full width, so a small pool means small chunks."""
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    for widths in ((8, 8), (4, 2), (2, 2)):
        plan = KvPlan(k_bits=widths[0], v_bits=widths[1])
        for extra in range(0, 400_000, 20_001):
            budget = minimum_budget(shape, plan, 4096) + extra
            cache = open_cache(shape, plan, budget, 4096)
            pages = math.ceil(cache.chunk_tokens / 64)
            assert cache.arena.pool_bytes >= pages * column_bytes(cache.arena, *widths)
            cache.close()
    assert open_cache(shape, KvPlan(), 4 << 20, 4096).chunk_tokens == 256
    assert (
        open_cache(shape, KvPlan(), minimum_budget(shape, KvPlan(), 4096), 4096).chunk_tokens == 64
    )


def _widths(arena: Geometry) -> tuple[int, int]:
    return arena.plan.k_bits, arena.plan.v_bits


def _some_bytes(arena: Geometry, share: float, extra: int) -> int:
    """The least it opens with, a share of all its pages, and `extra`."""
    columns = arena.context_columns
    pages = columns * column_bytes(arena, *_widths(arena)) if columns else 0
    return arena.minimum_bytes + int(share * pages) + extra


def _fill(cache: ClassCache, tokens: int) -> None:
    """Random tokens through every layer, in the largest chunks."""
    rng = np.random.default_rng(tokens)
    layers = [attention(cache.shape, i, window_tokens=1) for i in range(cache.shape.num_layers)]
    while cache.tokens < tokens:
        count = min(cache.chunk_tokens, tokens - cache.tokens)
        rows = pack_heads(*random_heads(rng, cache.shape, count))
        forward(cache, layers, [rows] * len(layers), np.arange(count) + cache.tokens)
        cache.commit(count)
        assert cache.used_bytes <= cache.budget_bytes


def test_a_budget_holds_its_whole_tokens_at_the_plans_widths() -> None:
    """A token beyond them costs bits; a floating-point cache has no pages to give up."""
    shape = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32)
    for k_bits, v_bits in ((16, 16), (8, 4), (2, 2)):
        plan = KvPlan(k_bits=k_bits, v_bits=v_bits)
        roomy = spec(shape, plan, 1024, budget=Budget(tokens=1024)).resolved()
        assert roomy.whole_tokens == 1024
    tight = replace(roomy.spec, budget=Budget(num_bytes=minimum_budget(shape, plan, 1024) + 4096))
    opened = tight.resolved()
    assert 0 < opened.whole_tokens < 1024
    columns = (opened.whole_tokens - opened.plan.sink_tokens - opened.plan.tail_tokens) / 64
    assert columns == min(opened.max_columns, opened.pool_bytes // column_bytes(opened, 2, 2)) > 0
