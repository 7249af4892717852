"""The allocator: convex hulls against brute force, and what each term of the damage does."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.config import PAGE_WIDTHS
from kvq.errors import UsageError
from kvq.formats import page_bytes
from kvq.policies import POLICIES, policy_named
from kvq.policies.budget import (
    DOUBT,
    EDGE,
    RUNGS,
    UNKNOWN_SHARE,
    BudgetPolicy,
    eviction_prices,
    hull_steps,
    tempered,
)
from kvq.policies.spend import page_bytes_at, present_pages
from policy_evidence import DIM, after, all_at, bytes_of, evidence, random_evidence

SIZES = page_bytes_at(RUNGS, evidence(all_at(8, 8)))
# Of a model of one or two layers, which are edges: an error counts as what it is.
UNIT = EDGE / DIM


def free_space(facts, bytes_short, columns_short=0, policy="budget"):
    return policy_named(policy).free_space(facts, bytes_short, columns_short).actions.tolist()


def test_rungs_and_their_bytes() -> None:
    assert RUNGS.tolist()[0] == [8, 8]
    assert RUNGS.tolist()[-2:] == [[2, 2], [0, 0]]
    assert [page_bytes(DIM, *rung) for rung in RUNGS[:-1].tolist()] == SIZES[:-1].tolist()
    assert SIZES[-1] == 0


def damages(rng: np.random.Generator, pages: int) -> np.ndarray:
    """Costs [pages, rungs] of the additive form every page has."""
    key, value, gone = rng.lognormal(0, 2, (3, pages))
    narrow = 4.0 ** (8 - RUNGS[:-1])
    costs = key[:, None] * narrow[:, 0] + value[:, None] * narrow[:, 1]
    return np.column_stack([costs, costs.max(axis=1) * (1 + gone)])


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(seed=st.integers(0, 10_000), share=st.floats(0.02, 0.98))
def test_greedy_hull_is_the_best_there_is_for_the_bytes_it_frees(seed: int, share: float) -> None:
    """Brute force over all 4913 choices of three pages' rungs (T8)."""
    rng = np.random.default_rng(seed)
    pages = present_pages(evidence(all_at(8, 8, layers=1, heads=1, columns=3)))
    costs = damages(rng, 3)
    steps = hull_steps(pages, costs, SIZES)
    short = share * 3 * SIZES[0]
    at = np.zeros(3, int)
    freed = 0
    for step in steps:
        if freed >= short:
            break
        rung = RUNGS.tolist().index(step[3:].tolist())
        freed += SIZES[at[step[2]]] - SIZES[rung]
        at[step[2]] = rung
    damage = costs[np.arange(3), at].sum()
    choices = np.array(list(product(range(len(RUNGS)), repeat=3)))
    enough = 3 * SIZES[0] - SIZES[choices].sum(axis=1) >= freed
    best = costs[np.arange(3), choices].sum(axis=1)[enough].min()
    assert damage <= best * (1 + 1e-9)


def test_steps_of_a_page_fall_and_end_in_eviction_and_prices_rise() -> None:
    rng = np.random.default_rng(0)
    pages = present_pages(evidence(all_at(8, 4, columns=5)))
    costs = damages(rng, len(pages))
    steps = hull_steps(pages, costs, SIZES)
    prices = []
    for page in pages:
        steps_of_page = steps[(steps[:, :3] == page[:3]).all(axis=1)]
        widths = [page[3:].tolist(), *steps_of_page[:, 3:].tolist()]
        assert widths[-1] == [0, 0]
        for before, later in pairwise(widths):
            assert before != later
            assert all(a >= b for a, b in zip(before, later, strict=True))
    at = {tuple(page[:3]): RUNGS.tolist().index(page[3:].tolist()) for page in pages}
    row = {tuple(page[:3]): index for index, page in enumerate(pages)}
    for step in steps:
        place = tuple(step[:3])
        rung = RUNGS.tolist().index(step[3:].tolist())
        cost = costs[row[place]]
        prices.append((cost[rung] - cost[at[place]]) / (SIZES[at[place]] - SIZES[rung]))
        at[place] = rung
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(prices))


def test_the_side_that_costs_less_loses_its_bits() -> None:
    errors = {"key_error": 1e-4, "value_error": 1e-6, "evict_error": 1.0}
    cheap_values = evidence(all_at(8, 8), output_square=UNIT, **errors)
    assert {tuple(a[3:]) for a in free_space(cheap_values, 1)} == {(8, 6)}
    errors = {"key_error": 1e-6, "value_error": 1e-4, "evict_error": 1.0}
    cheap_keys = evidence(all_at(8, 8), output_square=UNIT, **errors)
    assert {tuple(a[3:]) for a in free_space(cheap_keys, 1)} == {(6, 8)}


def test_an_ignored_page_loses_its_bits_first() -> None:
    error = np.array([1e-5, 1e-9, 1e-5])[None, None]
    facts = evidence(
        all_at(8, 8), output_square=UNIT, key_error=error, value_error=error, evict_error=1.0
    )
    assert {action[2] for action in free_space(facts, 4 * (SIZES[0] - SIZES[8]))} == {1}


def test_a_page_nobody_asked_for_yet_keeps_two_bits_by_the_prior() -> None:
    """Without it an unobserved page is free to evict; with it, evicting costs what it holds."""
    quiet = {"key_range": 1.0, "value_range": 1.0, "query_square": 1.0, "key_error": 1e-9}
    facts = evidence(all_at(8, 8), output_square=UNIT, **quiet)
    short = 2 * (SIZES[0] - SIZES[8])
    assert {tuple(a[3:]) for a in free_space(facts, short, policy="budget:prior=0")} == {(0, 0)}
    kept = after(facts.widths, free_space(facts, short, policy="budget:prior=0.5"))
    assert kept.all()
    with pytest.raises(UsageError, match=r"prior=2\.0 is not possible: a chance from 0 to 1"):
        policy_named("budget:prior=2")


def test_the_prior_is_the_damage_of_looking_for_one_token() -> None:
    facts = evidence(
        all_at(8, 8, layers=1, heads=1, columns=4),
        output_square=UNIT,
        key_range=2.4,
        value_range=4.8,
        query_square=3.0,
    )
    costs = BudgetPolicy(prior=0.4).costs(facts)[0, 0, 0]
    chance = UNKNOWN_SHARE**2 * 0.4 / 4
    noise = DIM * 3.0 * 0.01**2 / 12
    size = DIM * (2.4**2 + 4.8**2 / 20)
    keys, values = chance * DOUBT * noise * size, chance * 0.02**2 * DIM / 12
    assert np.isclose(costs[0], keys + values, rtol=1e-5)
    assert np.isclose(costs[-2], 4.0**6 * (keys + values), rtol=1e-5)
    assert np.isclose(costs[-1], chance * size, rtol=1e-5)
    # Where an export told heads apart, each by its own share.
    with_retrieval = replace(facts, retrieval=np.full((1, 1), 0.7, np.float32))
    times = (0.7 / UNKNOWN_SHARE) ** 2
    assert np.allclose(
        BudgetPolicy(prior=0.4).costs(with_retrieval)[0, 0, 0], costs * times, rtol=1e-5
    )


def test_pages_of_heads_that_look_back_outlast_those_of_others() -> None:
    """Else alike, and none of them was asked for."""
    quiet = {"key_range": 1.0, "value_range": 1.0, "query_square": 1.0, "key_error": 1e-9}
    widths = all_at(8, 8)
    retrieval = np.array([[0.01, 0.9], [0.9, 0.01]], np.float32)
    facts = evidence(widths, output_square=UNIT, retrieval=retrieval, **quiet)
    left = after(widths, free_space(facts, bytes_of(widths) * 3 // 4))
    present = left[..., 0] > 0
    assert present[retrieval > 0.5].all()
    assert not present[retrieval < 0.5].all()
    assert bytes_of(left[retrieval > 0.5]) > 4 * bytes_of(left[retrieval < 0.5])


def test_the_ith_eviction_of_a_head_costs_2i_minus_1_times_its_own() -> None:
    """What is gone points the same way: n pages err n times as far, n^2 in squares."""
    widths = all_at(8, 8, layers=1, heads=2, columns=4)
    widths[0, 1, 3] = 0
    facts = evidence(widths, output_square=UNIT, evict_error=0.5 * (widths[..., 0] > 0))
    prices = BudgetPolicy(prior=0).costs(facts)[0, ..., -1]
    assert np.allclose(prices[0], [0.5, 1.5, 2.5, 3.5])
    assert prices[0].cumsum().tolist() == [0.5 * n**2 for n in (1, 2, 3, 4)]
    # One is gone already: the next is the second.
    assert np.allclose(prices[1, :3], [1.5, 2.5, 3.5])
    # The least harmful goes first, so its place is the first.
    assert eviction_prices(np.array([[4.0, 1, 2]]), np.ones((1, 3), bool)).tolist() == [[20, 1, 6]]


def test_estimates_go_half_way_to_their_heads_mean() -> None:
    """Errors 1, 4 and 7 of held pages, mean 4: sqrt(4), sqrt(16), sqrt(28)."""
    present = np.array([[True, True, True, False]])
    estimates = tempered(np.array([[1.0, 4, 7, 0]]), present)
    np.testing.assert_allclose(estimates, [[2, 4, math.sqrt(28), 0]])


def test_layers_count_by_their_output_and_the_edges_more() -> None:
    output = np.array([1.0, 2.0, 4.0, 1.0])[:, None, None] / DIM
    facts = evidence(
        all_at(8, 8, layers=4, heads=1, columns=1), key_error=1.0, output_square=output
    )
    costs = BudgetPolicy(prior=0).costs(facts)[:, 0, 0, 0]
    assert np.allclose(costs, [EDGE, 1 / 2, 1 / 4, EDGE], rtol=1e-5)


def test_columns_go_where_their_loss_is_least() -> None:
    gone = np.array([1.0, 0.1, 1.0])[None, None]
    facts = evidence(all_at(2, 2), output_square=UNIT, evict_error=gone)
    actions = free_space(facts, 0, 1)
    assert {action[2] for action in actions} == {1}
    assert not after(facts.widths, actions)[:, :, 1].any()


def test_enough_is_freed_and_no_more_than_a_step() -> None:
    rng = np.random.default_rng(3)
    facts = evidence(
        all_at(8, 8, columns=9),
        output_square=UNIT,
        key_error=rng.lognormal(-9, 2, (2, 2, 9)),
        value_error=rng.lognormal(-9, 2, (2, 2, 9)),
        evict_error=rng.lognormal(0, 1, (2, 2, 9)),
    )
    full = bytes_of(facts.widths)
    for short in range(1, full, full // 50):
        left = bytes_of(after(facts.widths, free_space(facts, short)))
        assert short <= full - left < short + SIZES[0]


def test_pages_enter_at_what_the_newest_ones_of_their_stream_are_worth() -> None:
    """Room for a page at 8:8 is not made by taking bits from pages that need them more."""
    widths = all_at(8, 8, layers=1, heads=2, columns=6)
    key_error = np.full((1, 2, 6), 1e-3)
    # What the second head's newest pages hold is worth little; its older ones are as dear as all.
    key_error[0, 1, 2:] = 1e-9
    errors = {"key_error": key_error, "value_error": key_error, "evict_error": 1e9}
    facts = evidence(widths, output_square=UNIT, **errors)
    facts = replace(facts, closing_pages=1, new_page_widths=np.full((1, 2, 2), 8, np.uint8))
    short = 5 * (SIZES[0] - SIZES[-2])
    relief = policy_named("budget").free_space(facts, short, 0)
    assert {tuple(a[:3]) for a in relief.actions.tolist()} == {(0, 1, c) for c in (2, 3, 4, 5)}
    assert relief.new_page_widths is not None
    assert relief.new_page_widths.tolist() == [[[8, 8], [2, 2]]]


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0.02, 0.98),
    closing_pages=st.integers(0, 4),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_what_is_freed_counts_every_page_that_enters(
    seed: int, share: float, closing_pages: int, policy: str
) -> None:
    rng = np.random.default_rng(seed)
    widths = rng.choice(np.array(PAGE_WIDTHS, np.uint8), (2, 2, 5, 2))
    widths_of_new = rng.choice(np.array(PAGE_WIDTHS, np.uint8), (2, 2, 2))
    facts = random_evidence(rng, widths)
    facts = replace(facts, closing_pages=closing_pages, new_page_widths=widths_of_new)
    short = int(share * bytes_of(widths))
    relief = policy_named(policy).free_space(facts, short, 0)
    freed = bytes_of(widths) - bytes_of(after(widths, relief.actions.tolist()))
    if relief.new_page_widths is not None:
        assert (relief.new_page_widths <= widths_of_new).all()
        assert relief.new_page_widths.all(), "what enters cannot be evicted before it is there"
        freed += closing_pages * (bytes_of(widths_of_new) - bytes_of(relief.new_page_widths))
    assert freed >= short
