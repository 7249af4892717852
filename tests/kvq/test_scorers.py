"""What sets the eviction scorers apart, on cases small enough to work out by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest

from caches import geometry, open_cache
from kvq.config import PAGE_WIDTHS, CacheShape, KvPlan
from kvq.formats import page_bytes
from kvq.policies import Evidence, policy_named
from kvq.policies.expected_attention import ExpectedAttention
from kvq.policies.l2norm import L2Norm
from kvq.policies.lagkv import LagKV
from kvq.policies.snapkv import SnapKV
from kvq.sizing import tight_plan
from pairs import attention, forward, pack_heads
from policy_evidence import DIM, after, all_at, evidence, free_space, one_head

MIDDLE = page_bytes(DIM, 4, 4)
SMALL = page_bytes(DIM, 2, 2)


def evicted(policy: str, facts: Evidence, pages: int) -> list[tuple[int, int, int]]:
    """The first pages to be evicted, all pages being of one size."""
    size = page_bytes(DIM, *facts.widths[0, 0, 0].tolist())
    actions = free_space(policy, facts, pages * size)
    assert all(action[3:] == [0, 0] for action in actions)
    return [tuple(action[:3]) for action in actions]


# ---- eviction by attention -------------------------------------------------------------------


def test_h2o_keeps_the_recent_half_and_the_heavy_hitters() -> None:
    """Each head loses the least of its older two, then the other, then the least recent."""
    mass = [[[0.1, 0.4, 0.2, 0.3], [0.5, 0.2, 0.1, 0.1]]]
    facts = evidence(all_at(4, 2, layers=1, columns=4), total_mass=mass)
    order = [(0, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 1), (0, 0, 2), (0, 1, 2), (0, 0, 3), (0, 1, 3)]
    for pages in range(1, 9):
        assert evicted("h2o", facts, pages) == order[:pages]


def test_h2o_forgets_nothing_and_a2sf_does() -> None:
    """Page 0 was what mattered once, page 1 is now: the papers' sums disagree.

    Seven queries gave page 0 .9 of their attention, then five .1. H2O's sum is 6.8 of 12; A2SF's
    with a = .8 a step, the newest first, is .32.
    """
    weights = np.array([0.9] * 7 + [0.1] * 5)
    forgotten = 0.8 ** np.arange(12)[::-1]
    total, late = weights.mean(), float((weights * forgotten).sum() / forgotten.sum())
    assert (round(total * 12, 6), round(late, 2)) == (6.8, 0.32)
    facts = evidence(
        all_at(4, 2, layers=1, heads=1, columns=2),
        total_mass=[total, 1 - total],
        mean_mass=[late, 1 - late],
    )
    assert evicted("h2o:recent=0", facts, 1) == [(0, 0, 1)]
    assert evicted("a2sf:recent=0", facts, 1) == [(0, 0, 0)]


def test_h2o_without_a_recent_share_goes_by_attention_alone() -> None:
    facts = evidence(all_at(4, 2, layers=1, heads=1, columns=4), total_mass=[0.1, 0.4, 0.2, 0.3])
    assert [page[2] for page in evicted("h2o:recent=0", facts, 4)] == [0, 2, 3, 1]
    assert [page[2] for page in evicted("h2o:recent=0.25", facts, 4)] == [0, 2, 1, 3]
    assert [page[2] for page in evicted("h2o:recent=1", facts, 4)] == [0, 2, 3, 1]


def test_demote_spends_the_same_order_on_bits_first() -> None:
    widths = all_at(8, 8, layers=1, heads=1, columns=3)
    facts = evidence(widths, total_mass=[0.3, 0.1, 0.2])
    falls = [(column, bits) for bits in (6, 4, 2, 0) for column in (1, 2, 0)]
    sizes = [page_bytes(DIM, bits, bits) for bits in PAGE_WIDTHS] + [0]
    gained = [above - below for above, below in pairwise(sizes) for _ in range(3)]
    bits = [8, 8, 8]
    for step, (column, left) in enumerate(falls, start=1):
        bits[column] = left
        kept = after(widths, free_space("h2o:recent=0,demote=1", facts, sum(gained[:step])))
        assert kept[0, 0].tolist() == [[b, b] for b in bits]


def test_demote_spares_what_eviction_spares() -> None:
    """The recent half is evicted last, and it keeps its bits until the others are gone."""
    facts = evidence(all_at(4, 4, layers=1, heads=1, columns=2), total_mass=[0.9, 0.1])
    assert free_space("h2o:demote=1", facts, MIDDLE) == [[0, 0, 0, 0, 0]]
    assert free_space("h2o:demote=1", facts, MIDDLE + 1) == [[0, 0, 0, 0, 0], [0, 0, 1, 2, 2]]


def test_every_head_keeps_as_many_pages() -> None:
    """A head with little attention everywhere loses no more pages than one with much."""
    rng = np.random.default_rng(0)
    mass = rng.random((2, 2, 6)) * np.array([[1, 1e-3], [1e-6, 1]])[..., None]
    facts = evidence(all_at(4, 2, columns=6), recent_mass=mass, total_mass=mass)
    for policy in ("h2o", "snapkv"):
        gone = evicted(policy, facts, 12)
        assert [sum(page[:2] == head for page in gone) for head in np.ndindex(2, 2)] == [3] * 4


def test_columns_are_freed_by_importance_not_by_age() -> None:
    mass = [[[0.4, 0.1, 0.3, 0.2], [0.3, 0.2, 0.4, 0.1]]] * 2
    facts = evidence(all_at(4, 2, columns=4), total_mass=mass)
    gone = free_space("h2o:recent=0", facts, 0, columns_short=2)
    assert gone == [[layer, head, c, 0, 0] for c in (1, 3) for layer in (0, 1) for head in (0, 1)]


def test_snapkv_pools_over_pages_that_are_still_there() -> None:
    facts = evidence(all_at(4, 2, layers=1, heads=1, columns=4), recent_mass=[0, 0.5, 0, 0.25])
    pooled = SnapKV(pool=3).importance(facts)[0, 0]
    assert pooled.tolist() == [0.25, 0.5 / 3, 0.25, 0.125]
    assert [page[2] for page in evicted("snapkv:pool=3", facts, 4)] == [3, 1, 0, 2]
    assert [page[2] for page in evicted("snapkv", facts, 4)] == [0, 2, 3, 1]
    facts.widths[0, 0, 0] = 0
    assert SnapKV(pool=3).importance(facts)[0, 0].tolist() == [0.5, 0.25, 0.25, 0.125]
    assert SnapKV(pool=7).importance(facts)[0, 0].tolist() == [0.25] * 4


def test_chunkkv_evicts_a_page_of_all_heads_and_of_the_layers_that_follow() -> None:
    mass = [
        [[0.1, 0.5], [0.4, 0.1]],  # 0.5 and 0.6 over the heads: page 0 goes, here and in layer 1
        [[0.9, 0.1], [0.9, 0.1]],
        [[0.3, 0.2], [0.3, 0.2]],  # page 1 goes, here and in layer 3
        [[0.0, 0.9], [0.0, 0.9]],
    ]
    widths = all_at(4, 2, layers=4, columns=2)
    first = [(layer, head, 0) for layer in (0, 1) for head in (0, 1)]
    second = [(layer, head, 1) for layer in (2, 3) for head in (0, 1)]
    assert evicted("chunkkv", evidence(widths, recent_mass=mass), 8) == first + second
    chosen = [(layer, head, 0) for layer in (0, 3) for head in (0, 1)]
    followers = [(layer, head, 1) for layer in (1, 2) for head in (0, 1)]
    assert evicted("chunkkv:reuse=1", evidence(widths, recent_mass=mass), 8) == chosen + followers


def test_chunkkv_follows_no_layer_with_another_window() -> None:
    mass = [[[0.1, 0.5]], [[0.9, 0.1]]]
    widths = all_at(4, 2, heads=1, columns=2)
    wide = evidence(widths, recent_mass=mass, windows=(4096, 0))
    assert evicted("chunkkv", wide, 2) == [(0, 0, 0), (1, 0, 1)]
    same = evidence(widths, recent_mass=mass, windows=(4096, 4096))
    assert evicted("chunkkv", same, 2) == [(0, 0, 0), (1, 0, 0)]


# ---- eviction by keys and values -------------------------------------------------------------


def test_l2norm_keeps_the_pages_that_hold_short_keys_whatever_their_mean() -> None:
    """Of 192 tokens the 48 shortest are kept by the paper: page 0 has 40 of them, page 2 eight."""
    squares = np.full((3, 1, 3, 64), 100.0)
    squares[:, :, 0, :40], squares[:, :, 0, 40:] = 1, 900  # the longest keys on average
    squares[:, :, 2, :8] = 4
    facts = evidence(all_at(4, 2, layers=3, heads=1), key_squares=squares)
    kept = np.argsort(squares[2, 0].ravel(), kind="stable")[:48]
    assert np.bincount(kept // 64, minlength=3).tolist() == [40, 0, 8]
    assert L2Norm().importance(facts)[2, 0].astype(int).tolist() == [40, 0, 8]
    order = [(2, 0, c) for c in (1, 2, 0)] + [(layer, 0, c) for c in (1, 2, 0) for layer in (0, 1)]
    assert evicted("l2norm", facts, 9) == order
    assert evicted("l2norm:skip=0", facts, 3) == [(layer, 0, 1) for layer in (0, 1, 2)]


def test_l2norm_lets_the_shortest_key_decide_between_pages_with_as_many() -> None:
    squares = np.full((1, 1, 3, 64), 9.0)
    squares[..., :21], squares[0, 0, :, 0] = 4, [3, 1, 2]
    facts = evidence(all_at(4, 2, layers=1, heads=1), key_squares=squares)
    assert [page[2] for page in evicted("l2norm:skip=0", facts, 3)] == [0, 2, 1]
    # An evicted page has no short keys, and its zeros are no norms.
    facts.widths[0, 0, 1] = 0
    assert [page[2] for page in evicted("l2norm:skip=0", facts, 2)] == [0, 2]


def test_lagkv_scores_a_page_by_the_spread_the_next_one_gives_it() -> None:
    """Channels in two kinds; page 1 measures page 0, page 2 measures page 1, page 2 stays."""
    kinds = np.arange(DIM) % 2
    smallest = np.stack([0 * kinds, kinds, 0 * kinds])
    span = np.stack([2 + 0 * kinds, 4 - 2 * kinds, 1 + 0 * kinds])
    facts = evidence(
        all_at(4, 2, layers=1, heads=1),
        key_min=smallest,
        key_range=span,
        value_min=one_head(0, 0, 1),
        value_range=one_head(1, 2, 4),
    )
    # Page 0 by page 1: middles (1 - 0)/4 and (1 - 1)/2, spans 2/4 and 2/2.
    first_key = math.sqrt(0.125**2 + (0.25 + 1) / 2 / 12)
    # Page 1 by page 2: middles 2/1 and 2/1, spans 4 and 2.
    second_key = math.sqrt((16 + 4) / 2 / 12)
    # Values: spans 1 of 2, and 2 of 4.
    shares = math.exp(first_key) / (math.exp(first_key) + math.exp(second_key))
    scores = LagKV().importance(facts)[0, 0]
    np.testing.assert_allclose(scores, [(shares + 0.5) / 2, (1 - shares + 0.5) / 2, 0], rtol=1e-6)
    assert [page[2] for page in evicted("lagkv", facts, 3)] == [0, 1, 2]


def test_lagkv_measures_by_the_next_page_that_is_held() -> None:
    facts = evidence(
        all_at(4, 2, layers=1, heads=1, columns=4),
        key_range=one_head(1, 2, 4, 8),
        value_range=one_head(1, 1, 1, 1),
    )
    # All spreads are 1/2 of sqrt(1/12): the oldest goes, the newest last.
    assert [page[2] for page in evicted("lagkv", facts, 4)] == [0, 1, 2, 3]
    facts.widths[0, 0, 2] = 0
    # Page 1 is measured by page 3 now, which makes it look a quarter as wide.
    scores = LagKV().importance(facts)[0, 0]
    assert scores[1] < scores[0]
    assert scores[2] == scores[3] == 0
    assert [page[2] for page in evicted("lagkv", facts, 3)] == [1, 0, 3]


def test_lagkv_estimates_what_the_paper_computes_from_the_tokens() -> None:
    """Three pages of tokens: what the stored constants say against the paper's own formula."""
    rng = np.random.default_rng(1)
    low, high = np.sort(rng.normal(0, [[[3]], [[1]], [[0.4]]], (3, 2, DIM)), axis=1).swapaxes(0, 1)
    keys = rng.uniform(low[:, None], high[:, None], (3, 64, DIM))
    values = rng.uniform(-1, 1, (3, 64, DIM)) * np.array([0.5, 1.5, 0.7])[:, None, None]
    scores = []
    for x in (keys, values):
        lowest, highest = x[1:].min(axis=1, keepdims=True), x[1:].max(axis=1, keepdims=True)
        spread = ((x[:-1] - lowest) / (highest - lowest)).std(axis=-1).mean(axis=-1)
        scores.append(np.exp(spread) / np.exp(spread).sum())
    facts = evidence(
        all_at(4, 2, layers=1, heads=1),
        key_min=keys.min(axis=1),
        key_range=np.ptp(keys, axis=1),
        value_min=values.min(axis=2),
        value_range=np.ptp(values, axis=2),
    )
    exact = np.mean(scores, axis=0)
    assert abs(exact[0] - 0.5) > 0.1
    np.testing.assert_allclose(LagKV().importance(facts)[0, 0, :2], exact, atol=0.02)


def test_expected_attention_is_the_mean_of_exp_times_the_length_of_the_value() -> None:
    """Channel 0 has mean query 0.5 and variance 0.04; a key of 2 there, a value of 3 throughout."""
    key = np.zeros((2, DIM))
    key[0, 0] = 1
    span = np.zeros((2, DIM))
    span[0, 0] = 2
    mean, square = np.zeros(DIM), np.zeros(DIM)
    mean[0], square[0] = 0.5, 0.29
    facts = evidence(
        all_at(4, 2, layers=1, heads=1, columns=2),
        key_min=key,
        key_range=span,
        value_min=one_head(3, 4),
        query_mean=mean,
        query_square=square,
    )
    scores = ExpectedAttention().importance(facts)[0, 0]
    expected = [0.5 * 2 + 0.04 * 2**2 / 2 + math.log(3), math.log(4)]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    assert evicted("expected-attention", facts, 1) == [(0, 0, 1)]


def test_expected_attention_agrees_with_sampled_queries() -> None:
    rng = np.random.default_rng(2)
    mean, deviation = rng.normal(0, 0.1, DIM), rng.uniform(0, 0.1, DIM)
    keys = rng.normal(size=(3, DIM))
    queries = rng.normal(mean, deviation, (200_000, DIM))
    facts = evidence(
        all_at(4, 2, layers=1, heads=1),
        key_min=keys,
        value_min=1,
        query_mean=mean,
        query_square=mean**2 + deviation**2,
    )
    scores = ExpectedAttention().importance(facts)[0, 0]
    np.testing.assert_allclose(scores, np.log(np.exp(queries @ keys.T).mean(axis=0)), atol=0.02)


def test_expected_attention_gives_up_pages_without_values_first() -> None:
    facts = evidence(all_at(4, 2, layers=1, heads=1), value_min=one_head(1, 0, 2), key_min=1)
    assert [page[2] for page in evicted("expected-attention", facts, 3)] == [1, 0, 2]


# ---- through the cache -----------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("budget", True),
        ("chunkkv", True),
        ("expected-attention", True),
        ("a2sf", True),
        ("h2o", True),
        ("qaq", True),
        ("snapkv", True),
        ("zipcache", True),
        ("l2norm:skip=0", False),
        ("streaming", False),
        ("uniform", False),
    ],
)
def test_a_page_all_queries_look_for_outlives_the_others(
    policy: str, kept: bool, native: bool
) -> None:
    """Twenty pages in the room of six; attention asks for the third, whose keys are longer."""
    shape = CacheShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    plan = KvPlan(k_bits=8, v_bits=8)
    probes = "attention" in policy_named(policy).needs
    budget = geometry(
        shape, tight_plan(plan), context_tokens=1280, chunk_tokens=64, probes=probes
    ).bytes_for_columns(6)
    cache = open_cache(shape, plan, budget, 1280, chunk_tokens=64, policy=policy, native=native)
    rng = np.random.default_rng(0)
    look = rng.standard_normal(16, np.float32)
    sought = range(4 + 2 * 64, 4 + 3 * 64)
    while cache.tokens < 1280:
        where = np.arange(cache.tokens, cache.tokens + 32)
        q, k, v = (rng.standard_normal((32, heads, 16), np.float32) for heads in (2, 1, 1))
        q, k = look + 0.3 * q, 0.3 * k
        k[np.isin(where, sought)] += 0.4 * look
        forward(cache, [attention(shape)], [pack_heads(q, k, v)], where)
        cache.commit(32)
    facts, _ = cache.columns()
    assert len(facts) < 20
    assert (sought[0] in facts[:, 2]) == kept
    cache.close()
