"""Which pages give way: the order, no more than needed, and what is never touched."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvq.cache import Cache, minimum_budget
from kvq.config import CacheShape, KvPlan
from kvq.errors import BudgetError, UsageError
from kvq.formats import page_bytes
from kvq.policies import POLICIES, Evidence, policy_named
from pairs import attention, forward, pack_heads

DIM = 64
MANY = settings(deadline=None, database=None, derandomize=True, max_examples=100)


def evidence(
    widths: NDArray[np.uint8], *, windows: tuple[int, ...] = (), tokens: int | None = None
) -> Evidence:
    """Columns one page apart from position 4 on; widths [L, Hk, C, 2]."""
    columns = widths.shape[2]
    facts = np.zeros((columns, 4), np.int64)
    facts[:, 0] = facts[:, 2] = 4 + 64 * np.arange(columns)
    facts[:, 3] = -1
    return Evidence(
        facts=facts,
        widths=widths,
        windows=np.array(windows or [0] * len(widths), np.int64),
        tokens=4 + 64 * columns + 64 if tokens is None else tokens,
        head_dim=DIM,
    )


def all_at(k_bits: int, v_bits: int, *, layers: int = 2, heads: int = 2, columns: int = 3):
    return np.full((layers, heads, columns, 2), (k_bits, v_bits), np.uint8)


def relieve(facts: Evidence, bytes_short: int, columns_short: int = 0) -> list[list[int]]:
    return policy_named("oldest").relieve(facts, bytes_short, columns_short).tolist()


def apply(widths: NDArray[np.uint8], actions: list[list[int]]) -> NDArray[np.uint8]:
    """Widths after the actions, which may only lower them."""
    after = widths.copy()
    for layer, head, column, k_bits, v_bits in actions:
        held = after[layer, head, column]
        assert held.any(), "an evicted page was named again"
        assert k_bits <= held[0]
        assert v_bits <= held[1]
        assert (k_bits == 0) == (v_bits == 0)
        after[layer, head, column] = k_bits, v_bits
    return after


def bytes_of(widths: NDArray[np.uint8]) -> int:
    pairs = widths.reshape(-1, 2).tolist()
    return sum(page_bytes(DIM, k_bits, v_bits) for k_bits, v_bits in pairs if k_bits)


def every_page(column: int, k_bits: int, v_bits: int) -> list[list[int]]:
    return [[layer, head, column, k_bits, v_bits] for layer in (0, 1) for head in (0, 1)]


def test_the_oldest_page_falls_from_8_to_4_first() -> None:
    assert relieve(evidence(all_at(8, 8)), 1) == every_page(0, 4, 4)


def test_all_fall_to_4_before_any_falls_to_2_and_all_to_2_before_any_is_evicted() -> None:
    eight_to_four = 4 * (page_bytes(DIM, 8, 8) - page_bytes(DIM, 4, 4))
    four_to_two = 4 * (page_bytes(DIM, 4, 4) - page_bytes(DIM, 2, 2))
    gone = 4 * page_bytes(DIM, 2, 2)
    order = [every_page(c, 4, 4) for c in range(3)]
    order += [every_page(c, 2, 2) for c in range(3)]
    order += [every_page(c, 0, 0) for c in range(3)]
    freed = [eight_to_four] * 3 + [four_to_two] * 3 + [gone] * 3
    for steps in range(1, 10):
        enough = sum(freed[:steps])
        expected = [action for step in order[:steps] for action in step]
        assert relieve(evidence(all_at(8, 8)), enough) == expected
        assert relieve(evidence(all_at(8, 8)), enough - freed[steps - 1] + 1) == expected


def test_sides_fall_only_where_they_are_wider() -> None:
    assert relieve(evidence(all_at(8, 2)), 1) == every_page(0, 4, 2)
    assert relieve(evidence(all_at(2, 8)), 1) == every_page(0, 2, 4)
    assert relieve(evidence(all_at(4, 2)), 1) == every_page(0, 2, 2)
    assert relieve(evidence(all_at(2, 2)), 1) == every_page(0, 0, 0)


def test_pages_already_lower_are_left_alone() -> None:
    widths = all_at(8, 8)
    widths[0, 1, 0] = 2, 2
    widths[1, 0, 0] = 0, 0
    assert relieve(evidence(widths), 1) == [[0, 0, 0, 4, 4], [1, 1, 0, 4, 4]]


def test_nothing_short_means_no_action() -> None:
    assert relieve(evidence(all_at(8, 8)), 0) == []
    assert relieve(evidence(all_at(8, 8, columns=0)), 1000) == []


def test_more_than_there_is_frees_everything() -> None:
    widths = all_at(4, 2)
    after = apply(widths, relieve(evidence(widths), 10**9))
    assert not after.any()


def test_columns_are_freed_whole_and_oldest_first() -> None:
    """Demotion frees no row of the table, so only eviction is of use."""
    widths = all_at(8, 8)
    assert relieve(evidence(widths), 0, 1) == every_page(0, 0, 0)
    assert relieve(evidence(widths), 0, 2) == every_page(0, 0, 0) + every_page(1, 0, 0)
    widths[:, :, 0] = 0
    widths[0, 0, 0] = 2, 2
    assert relieve(evidence(widths), 0, 1) == [[0, 0, 0, 0, 0]]


def test_pages_no_window_can_see_go_first_and_alone() -> None:
    """Layer 0 sees 100 tokens: its pages more than a margin behind are free to take."""
    widths = all_at(8, 8, columns=8)
    tokens = 4 + 64 * 8 + 64
    one_layer = 2 * page_bytes(DIM, 8, 8)
    facts = evidence(widths, windows=(100, 0), tokens=tokens)
    assert relieve(facts, 1) == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    unseen = [c for c in range(8) if 4 + 64 * c + 64 + 256 < tokens - 100]
    assert unseen == [0, 1, 2]
    actions = relieve(facts, 3 * one_layer + 1)
    assert actions[:6] == [[0, head, c, 0, 0] for c in unseen for head in (0, 1)]
    assert actions[6:] == [[1, 0, 0, 4, 4], [1, 1, 0, 4, 4]]


def test_a_page_moved_into_sight_is_not_unseen() -> None:
    facts = evidence(all_at(8, 8, columns=8), windows=(100, 100), tokens=4 + 64 * 9)
    facts.facts[0, 1] = 400
    assert relieve(facts, 1) == every_page(1, 0, 0)


WIDTH_PAIRS = st.sampled_from([(0, 0), *((k, v) for k in (8, 4, 2) for v in (8, 4, 2))])


@MANY
@given(
    st.lists(WIDTH_PAIRS, min_size=12, max_size=12),
    st.integers(0, 120_000),
    st.integers(0, 3),
    st.sampled_from([(), (100, 0), (100, 100)]),
)
def test_actions_free_enough_and_no_step_too_many(
    pairs: list[tuple[int, int]], short: int, columns: int, windows: tuple[int, ...]
) -> None:
    widths = np.array(pairs, np.uint8).reshape(2, 1, 6, 2)
    facts = evidence(widths, windows=windows, tokens=4 + 64 * 12)
    before = widths.copy()
    actions = relieve(facts, short, columns)
    assert (widths == before).all(), "the evidence was changed"
    assert actions == relieve(facts, short, columns), "the same evidence gave other actions"

    def still_short(done: list[list[int]]) -> bool:
        after = apply(widths, done)
        lost = int((widths.any(axis=(0, 1, 3)) & ~after.any(axis=(0, 1, 3))).sum())
        return bytes_of(widths) - bytes_of(after) < short or lost < columns

    after = apply(widths, actions)
    assert not still_short(actions) or not after.any()
    if actions:
        last = actions[-1][2:]
        step = [a for a in actions if a[2:] == last]
        assert still_short(actions[: len(actions) - len(step)]), "the last step was not needed"


def test_unknown_policy_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match="--kv-policy 'newest' is unknown; possible: oldest"):
        policy_named("newest")
    shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=DIM)
    with pytest.raises(UsageError, match="'newest' is unknown"):
        Cache(shape, KvPlan(), 1 << 20, 100, policy="newest")


def test_every_row_of_the_table_imports() -> None:
    for name, place in POLICIES.items():
        module, attribute = place.split(":")
        assert isinstance(policy_named(name), getattr(import_module(module), attribute))


# ---- through the cache -------------------------------------------------------------------------


@settings(deadline=None, database=None, derandomize=True, max_examples=30)
@given(
    st.data(),
    st.sampled_from([(8, 8), (8, 2), (4, 4), (4, 2), (2, 8), (2, 2)]),
    st.integers(0, 64),
    st.sampled_from([(), (90, 0), (64, 300)]),
    st.booleans(),
)
def test_any_budget_holds_and_keeps_sinks_and_recent_tokens(
    data: st.DataObject,
    widths: tuple[int, int],
    sinks: int,
    windows: tuple[int, ...],
    use_native: bool,
) -> None:
    """Prompts of any length under any budget from the minimum on: never above it, never refused,

    and the sinks and the last 64 tokens keep their floating-point rows. Each token's value is its
    number, so the rows say which tokens they are.
    """
    shape = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=sinks)
    least = minimum_budget(shape, plan, 1500)
    budget = least + data.draw(st.one_of(st.integers(0, 3000), st.integers(0, 60_000)), "extra")
    cache = Cache(shape, plan, budget, 1500, windows=windows, native=use_native)
    layers = [
        attention(shape, layer, window_tokens=window)
        for layer, window in enumerate(windows or (0, 0))
    ]
    rng = np.random.default_rng(0)
    for count in data.draw(st.lists(st.integers(1, 300), min_size=2, max_size=7), "prompts"):
        for start in range(0, count, cache.chunk_tokens):
            size = min(cache.chunk_tokens, count - start)
            first = cache.tokens
            numbers = np.arange(first, first + size, dtype=np.float32)[:, None, None]
            q = rng.standard_normal((size, 2, 16)).astype(np.float32)
            k = rng.standard_normal((size, 1, 16)).astype(np.float32)
            rows = pack_heads(q, k, np.broadcast_to(numbers, (size, 1, 16)))
            cache.begin(size)
            assert cache.used_bytes <= budget
            cache.abort()
            forward(cache, layers, [rows, rows], np.arange(first, first + size))
            cache.commit(size)
            assert cache.used_bytes <= cache.peak_bytes <= budget
            held = cache.tail(1, 0)[1][:, 0].astype(int).tolist()
            assert held[:sinks] == list(range(min(sinks, cache.tokens)))
            recent = min(64, max(0, cache.tokens - sinks))
            assert held[len(held) - recent :] == list(range(cache.tokens - recent, cache.tokens))
    cache.close()


def test_a_full_context_is_refused_with_what_to_do() -> None:
    shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    cache = Cache(shape, KvPlan(), 1 << 20, 100)
    with pytest.raises(BudgetError, match=r"0 \+ 101 tokens exceed .* of 100; .*larger --ctx-size"):
        cache.begin(101)
    cache.begin(100)
    cache.close()
