"""Bytes: Python's count is the native library's, and a budget holds what it promises."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvq import native
from kvq.cache import Cache, budget_bytes, budget_for_tokens, minimum_budget
from kvq.config import Budget, CacheShape, KvPlan, parse_budget
from kvq.errors import BudgetError
from kvq.formats import (
    FORMATS,
    Arena,
    arena_for,
    bytes_per_token,
    constant_bytes,
    format_bytes,
    granule_bytes,
    page_bytes,
)
from kvq.policies import POLICIES, policy_named
from pairs import attention, forward, pack_heads, random_heads

MANY = settings(deadline=None, database=None, derandomize=True, max_examples=200)
FEW = settings(deadline=None, database=None, derandomize=True, max_examples=25)

WIDTHS = st.tuples(st.sampled_from((8, 4, 2)), st.sampled_from((8, 4, 2)))


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
def arenas(draw: st.DrawFn) -> Arena:
    return arena_for(
        draw(shapes()),
        draw(plans()),
        context_tokens=draw(st.one_of(st.integers(1, 600), st.integers(1, 200_000))),
        chunk_tokens=draw(st.integers(1, 2048)),
        threads=draw(st.integers(1, 16)),
    )


def test_page_bytes_of_known_models() -> None:
    """Qwen2.5-0.5B and Qwen3-0.6B: codes, then float16 scale and minimum of channels and tokens."""
    assert page_bytes(64, 4, 2) == 64 * 64 * 6 // 8 + 4 * 64 + 4 * 64
    assert page_bytes(128, 4, 2) == 64 * 128 * 6 // 8 + 4 * 128 + 4 * 64 == 6912
    assert page_bytes(128, 8, 8) == 2 * 64 * 128 + 768
    qwen = CacheShape(num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64)
    per_token = {
        (kv.k_bits, kv.v_bits): bytes_per_token(qwen, kv)
        for kv in (KvPlan(k_bits=k, v_bits=v) for k in (8, 4, 2) for v in (8, 4, 2))
    }
    assert per_token[8, 8] == 6528
    assert per_token[8, 4] == 4992
    assert per_token[4, 4] == 3456
    assert per_token[4, 2] == 2688
    assert per_token[2, 2] == 1920
    assert bytes_per_token(qwen, KvPlan(k_bits=16, v_bits=16)) == 12288


def test_formats_table_is_what_a_page_holds() -> None:
    assert list(FORMATS) == [8, 4, 2]
    for bits, row in FORMATS.items():
        assert row.bits == bits
        assert row.granules * granule_bytes(80) == 64 * 80 * bits // 8
    assert constant_bytes(80) == 576  # 4 * 80 + 256, already a multiple of 64
    assert constant_bytes(16) == 320
    assert page_bytes(80, 8, 2) == 576 + 5 * 16 * 80


@MANY
@given(arenas(), st.floats(0, 3), st.integers(0, 4096))
def test_python_and_native_count_the_same_bytes(arena: Arena, share: float, extra: int) -> None:
    pages = arena.wanted_columns * arena.column_bytes(*_widths(arena)) if _paged(arena) else 0
    budget = arena.minimum_bytes + int(share * pages) + extra
    columns, pool = arena.divide(budget)
    assert native.layout(arena, budget) == {
        "fixed_bytes": arena.fixed_bytes(columns, budget - arena.fixed_bytes(0, 0) - 512),
        "pool_bytes": pool,
        "granule_bytes": granule_bytes(arena.shape.head_dim),
        "constant_bytes": constant_bytes(arena.shape.head_dim),
        "minimum_bytes": arena.minimum_bytes,
        "max_columns": columns,
        "reserved": 0,
    }
    assert pool + native.layout(arena, budget)["fixed_bytes"] == budget


@MANY
@given(arenas(), st.floats(0, 3), st.integers(0, 4096))
def test_any_budget_that_opens_has_room_for_a_page(arena: Arena, share: float, extra: int) -> None:
    assume(_paged(arena))
    one = arena.column_bytes(*_widths(arena))
    budget = arena.minimum_bytes + int(share * one * arena.wanted_columns) + extra
    columns, pool = arena.divide(budget)
    assert 1 <= columns <= arena.wanted_columns
    assert pool >= one
    # The table has a row for every page the pool can hold at two bits, or the context needs.
    smallest = arena.column_bytes(2, 2)
    rows = 2 + (columns + 1) * (44 * arena.streams + 24) // smallest
    assert columns == arena.wanted_columns or columns + rows + one // smallest >= pool // smallest


@MANY
@given(arenas(), st.integers(1, 10_000))
def test_columns_asked_for_fit(arena: Arena, columns: int) -> None:
    assume(_paged(arena))
    columns = min(columns, arena.wanted_columns)
    exact = replace(arena, context_tokens=arena.plan.sink_tokens + 64 + 64 * columns)
    assert exact.wanted_columns == columns
    held, pool = exact.divide(exact.bytes_for_columns(columns))
    assert held == columns
    assert pool >= columns * exact.column_bytes(*_widths(exact))


@MANY
@given(arenas())
def test_one_byte_below_the_minimum_is_refused_by_both(arena: Arena) -> None:
    least = arena.minimum_bytes
    with pytest.raises(
        BudgetError, match=f"{re.escape(format_bytes(least))} \\({least} bytes\\) can"
    ):
        arena.divide(least - 1)
    assert native.layout(arena, least - 1)["pool_bytes"] == 0
    assert native.layout(arena, least)["pool_bytes"] == arena.divide(least)[1]


@pytest.mark.parametrize("use_native", [True, False])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("context_tokens", [60, 100, 250, 1000])
def test_cache_opens_at_the_minimum_and_not_a_byte_below(
    use_native: bool, policy: str, context_tokens: int
) -> None:
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    options = {"policy": policy, "chunk_tokens": 128}
    for plan in (KvPlan(), KvPlan(k_bits=8, v_bits=8), KvPlan(k_bits=16, v_bits=16)):
        least = minimum_budget(shape, plan, context_tokens, **options)
        cache = Cache(shape, plan, least, context_tokens, native=use_native, **options)
        assert cache.used_bytes <= least
        assert cache.peak_bytes == cache.used_bytes
        cache.close()
        with pytest.raises(BudgetError, match=f"{least} bytes"):
            Cache(shape, plan, least - 1, context_tokens, native=use_native, **options)


def test_the_minimum_counts_the_probes_of_policies_that_ask_for_attention() -> None:
    """12 query rows of 64 float16 for each of 2 x 4 heads, and what each layer saw last."""
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    bare = minimum_budget(shape, KvPlan(), 1000)
    probes = 12 * 8 + 32 + 12 * 8 * 64 * 2 + 2 * 552 + 48
    for policy in POLICIES:
        asks = "attention" in policy_named(policy).needs
        least = minimum_budget(shape, KvPlan(), 1000, policy=policy)
        assert least == bare + (probes if asks else 0), policy


def test_a_short_context_held_whole_is_cheaper_than_probes() -> None:
    shape = CacheShape(num_layers=2, num_heads=16, num_kv_heads=1, head_dim=64)
    whole = budget_for_tokens(shape, KvPlan(), 250, chunk_tokens=64)
    assert minimum_budget(shape, KvPlan(), 250, chunk_tokens=64, policy="budget") == whole
    cache = Cache(shape, KvPlan(), whole, 250, chunk_tokens=64, policy="budget")
    assert not cache.arena.probes
    _fill(cache, 250)
    assert (cache.columns()[1] == (4, 2)).all()
    cache.close()
    longer = minimum_budget(shape, KvPlan(), 1000, chunk_tokens=64, policy="budget")
    assert longer < budget_for_tokens(shape, KvPlan(), 1000, chunk_tokens=64)


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
    cache = Cache(shape, plan, budget, tokens, policy=policy, native=use_native)
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
    cache = Cache(shape, plan, budget, tokens, native=use_native)
    assert cache.chunk_tokens == 256
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
    cache = Cache(shape, plan, budget, context, policy=policy)
    _fill(cache, tokens)
    assert (cache.columns()[1] == (plan.k_bits, plan.v_bits)).all()
    cache.close()


def test_budget_in_any_unit_becomes_bytes() -> None:
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    plan = KvPlan()
    assert budget_bytes(parse_budget("3MiB"), shape, plan, 1000) == 3 << 20
    assert budget_bytes(parse_budget("25%"), shape, plan, 4096) == 4096 * 2 * 2 * 64 * 4 // 4
    assert budget_bytes(Budget(tokens=700), shape, plan, 700) == budget_for_tokens(shape, plan, 700)
    assert budget_bytes(Budget(tokens=700), shape, plan, 4000) == budget_for_tokens(
        shape, plan, 700, context_tokens=4000
    )
    for policy in POLICIES:
        assert budget_bytes(
            Budget(tokens=700), shape, plan, 4000, policy=policy
        ) == budget_for_tokens(shape, plan, 700, context_tokens=4000, policy=policy)


def test_a_tight_budget_shortens_the_chunk() -> None:
    """A chunk's pages must fit the pool at full width, so a small pool means small chunks."""
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
    for widths in ((8, 8), (4, 2), (2, 2)):
        plan = KvPlan(k_bits=widths[0], v_bits=widths[1])
        for extra in range(0, 400_000, 20_001):
            budget = minimum_budget(shape, plan, 4096) + extra
            cache = Cache(shape, plan, budget, 4096)
            pages = math.ceil(cache.chunk_tokens / 64)
            assert cache.arena.divide(budget)[1] >= pages * cache.arena.column_bytes(*widths)
            cache.close()
    assert Cache(shape, KvPlan(), 4 << 20, 4096).chunk_tokens == 256
    assert Cache(shape, KvPlan(), minimum_budget(shape, KvPlan(), 4096), 4096).chunk_tokens == 64


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (67108864, "64.0 MiB"),
        (1536 << 20, "1.50 GiB"),
        (12_345_678, "11.8 MiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


def _paged(arena: Arena) -> bool:
    return arena.wanted_columns > 0


def _widths(arena: Arena) -> tuple[int, int]:
    return arena.plan.k_bits, arena.plan.v_bits


def _fill(cache: Cache, tokens: int) -> None:
    """Random tokens through every layer, in the largest chunks."""
    rng = np.random.default_rng(tokens)
    layers = [attention(cache.shape, i, window_tokens=1) for i in range(cache.shape.num_layers)]
    while cache.tokens < tokens:
        count = min(cache.chunk_tokens, tokens - cache.tokens)
        rows = pack_heads(*random_heads(rng, cache.shape, count))
        forward(cache, layers, [rows] * len(layers), np.arange(count) + cache.tokens)
        cache.commit(count)
        assert cache.used_bytes <= cache.budget_bytes
