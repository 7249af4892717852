"""What sets the policies that lower widths apart, on cases small enough to work out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from caches import minimum_budget, open_cache
from kvq import native_library
from kvq.config import CacheShape, KvPlan
from kvq.formats import granule_bytes, page_bytes
from kvq.policies import Evidence
from kvq.policies.qaq import key_targets, value_targets
from pairs import attention, forward, frequencies, pack_heads, random_heads, relative_rms
from policy_evidence import (
    DIM,
    after,
    all_at,
    bytes_of,
    evidence,
    free_space,
    one_head,
    random_evidence,
)

MIDDLE = page_bytes(DIM, 4, 4)
SMALL = page_bytes(DIM, 2, 2)


# ---- by age ----------------------------------------------------------------------------------


def test_streaming_drops_the_oldest_column_whole_and_never_demotes() -> None:
    facts = evidence(all_at(8, 4))
    every_page = [[layer, head, 0, 0, 0] for layer in (0, 1) for head in (0, 1)]
    assert free_space("streaming", facts, 1) == every_page
    facts.widths[:, :, 0] = 0
    facts.widths[1, 1, 0] = 8, 4
    assert free_space("streaming", facts, 1) == [[1, 1, 0, 0, 0]]


@pytest.mark.parametrize("use_native", [True, False])
def test_streaming_counts_positions_inside_the_cache(use_native: bool) -> None:
    """What is left attends as a text of these tokens alone would, at positions from 0 on."""
    if use_native and not native_library.available():
        pytest.skip(native_library.why_not())
    shape = CacheShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)
    plan = KvPlan(k_bits=8, v_bits=8)
    of, turned = attention(shape), frequencies(16)
    rows = pack_heads(*random_heads(np.random.default_rng(0), shape, 900))
    budget = minimum_budget(shape, plan, 900) + 6 * page_bytes(32, 8, 8)
    cache = open_cache(shape, plan, budget, 900, policy="streaming", native=use_native)
    for start in range(0, 896, 64):
        forward(cache, [of], [rows[start : start + 64]], np.arange(start, start + 64), turned)
        cache.commit(64)
    got = forward(cache, [of], [rows[896:]], np.arange(896, 900), turned)[0]
    first = cache.columns()[0][0, 2]
    assert first > 4 + 64
    assert cache.storage.places()[:4].tolist() == [[i, first - 4 + i, first - 4] for i in range(4)]
    kept_rows = np.concatenate([rows[:4], rows[first:896]])
    exact = open_cache(shape, KvPlan(k_bits=16, v_bits=16), 1 << 22, 900, native=use_native)
    for start in range(0, len(kept_rows), 64):
        part = kept_rows[start : start + 64]
        forward(exact, [of], [part], np.arange(start, start + len(part)), turned)
        exact.commit(len(part))
    want = forward(exact, [of], [rows[896:]], np.arange(4) + len(kept_rows), turned)[0]
    assert relative_rms(got, want) < 0.01
    cache.close()
    exact.close()


def test_uniform_walks_its_ladder_with_all_pages_alike() -> None:
    widths = all_at(8, 8, layers=1, heads=1, columns=2)
    granule = granule_bytes(DIM)
    # 8:8 -> 8:4 -> 4:4 -> 4:2 -> 2:2 frees 2, 2, 1 and 1 granules a page.
    rungs = [(8, 4), (4, 4), (4, 2), (2, 2)]
    gained = [2, 2, 1, 1]
    pair_widths = [(8, 8), (8, 8)]
    for step in range(8):
        pair_widths[step % 2] = rungs[step // 2]
        freed = sum(gained[i // 2] for i in range(step + 1)) * granule
        left = after(widths, free_space("uniform", evidence(widths), freed))
        assert [tuple(pair) for pair in left[0, 0].tolist()] == pair_widths
    assert free_space("uniform", evidence(widths), 12 * granule + 1) == [
        [0, 0, 1, 2, 2],
        [0, 0, 0, 0, 0],
    ]


def test_uniform_takes_other_ladders_and_other_first_widths() -> None:
    facts = evidence(all_at(8, 8, layers=1, heads=1, columns=1))
    assert free_space("uniform:order=4:8/2:8", facts, 1) == [[0, 0, 0, 4, 8]]
    assert free_space("uniform:order=4:8/2:8", facts, 3 * granule_bytes(DIM)) == [[0, 0, 0, 2, 8]]
    assert free_space("uniform:order=4:8/2:8", facts, 3 * granule_bytes(DIM) + 1) == [
        [0, 0, 0, 0, 0]
    ]
    assert free_space("uniform", evidence(all_at(2, 8, layers=1, heads=1)), 1) == [[0, 0, 0, 2, 4]]


def test_uniform_brings_a_new_page_down_before_the_others_go_on() -> None:
    widths = all_at(4, 2, layers=1, heads=1, columns=4)
    widths[0, 0, 3] = 8, 8
    assert free_space("uniform", evidence(widths), 1) == [[0, 0, 3, 8, 4]]
    assert free_space("uniform", evidence(widths), 5 * granule_bytes(DIM)) == [[0, 0, 3, 4, 2]]


# ---- zipcache --------------------------------------------------------------------------------


def zipcache_evidence(bits: int) -> Evidence:
    """Ten pages of two heads; by falling mass (h, c): 04 13 02 11 00 10 01 12 03 14."""
    mass = [[[0.6, 0.4, 0.8, 0.2, 1.0], [0.5, 0.7, 0.3, 0.9, 0.1]]]
    return evidence(all_at(bits, bits, layers=1, columns=5), mass=mass)


RANKED = [(0, 4), (1, 3), (0, 2), (1, 1), (0, 0), (1, 0), (0, 1), (1, 2), (0, 3), (1, 4)]


def zipcache_widths(policy: str, facts: Evidence, short: int) -> list[int]:
    """Widths of the pages by falling saliency."""
    left = after(facts.widths, free_space(policy, facts, short))
    assert (left[..., 0] == left[..., 1]).all()
    return [int(left[0, head, column, 0]) for head, column in RANKED]


def test_zipcache_lowers_the_unsalient_then_the_salient_then_the_fraction() -> None:
    facts = zipcache_evidence(8)
    large = page_bytes(DIM, 8, 8)
    widths, freed = [8] * 10, 0
    steps = [(i, 2, large - SMALL) for i in (9, 8, 7, 6)]
    steps += [(i, 4, large - MIDDLE) for i in (5, 4, 3, 2, 1, 0)]
    steps += [(i, 2, MIDDLE - SMALL) for i in (5, 4, 3, 2, 1, 0)]
    steps += [(i, 0, SMALL) for i in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)]
    for page, bits, gained in steps:
        widths[page] = bits
        freed += gained
        assert zipcache_widths("zipcache", facts, freed) == widths
        assert zipcache_widths("zipcache", facts, freed - gained + 1) == widths


def test_zipcache_fraction_and_widths_are_options() -> None:
    facts = zipcache_evidence(8)
    large = page_bytes(DIM, 8, 8)
    enough = 8 * (large - SMALL) + 2 * (large - MIDDLE)
    assert zipcache_widths("zipcache:salient=0.2", facts, enough) == [4] * 2 + [2] * 8
    enough = 4 * (large - MIDDLE)
    assert zipcache_widths("zipcache:high=8,low=4", facts, enough) == [8] * 6 + [4] * 4


def test_zipcache_ranks_the_heads_of_a_layer_together_and_layers_apart() -> None:
    """Layer 0's mass is all above layer 1's; within a layer head 1 has all the mass."""
    mass = np.array([[[1, 2], [7, 8]], [[0.1, 0.2], [0.7, 0.8]]])
    facts = evidence(all_at(4, 4, columns=2), mass=mass)
    left = after(facts.widths, free_space("zipcache:salient=0.5", facts, 4 * (MIDDLE - SMALL)))
    assert left[:, 0].tolist() == [[[2, 2]] * 2] * 2
    assert left[:, 1].tolist() == [[[4, 4]] * 2] * 2


def test_zipcache_lowers_all_that_is_unsalient_before_anything_salient() -> None:
    """Of layer 0 three of six pages, of layer 1 one of two, whatever its rank."""
    widths = all_at(8, 8, heads=1, columns=6)
    widths[1, 0, 2:] = 0
    facts = evidence(widths, mass=np.arange(6) * (widths[..., 0] > 0))
    short = 4 * (page_bytes(DIM, 8, 8) - SMALL)
    left = after(widths, free_space("zipcache:salient=0.5", facts, short))
    assert left[..., 0].tolist() == [[[2, 2, 2, 8, 8, 8]], [[2, 8, 0, 0, 0, 0]]]
    short += page_bytes(DIM, 8, 8) - MIDDLE
    left = after(widths, free_space("zipcache:salient=0.5", facts, short))
    assert left[..., 0].tolist() == [[[2, 2, 2, 4, 8, 8]], [[2, 8, 0, 0, 0, 0]]]


def test_zipcache_saliency_is_the_papers_mean_over_the_rows_that_see_a_token() -> None:
    """Two pages, rows at 1/2 and at the end: p~ divides by the rows that see the page, H2O not.

    Page 0 has .5 and .3 of two rows, page 1 .5 of the only row that sees it: p~ .4 and .5.
    """
    seen = [[0.5, 0.3], [0.5]]
    saliency = [sum(rows) / len(rows) for rows in seen]
    assert saliency == [0.4, 0.5]
    facts = evidence(
        all_at(4, 4, layers=1, heads=1, columns=2),
        mass=saliency,
        total_mass=[sum(rows) / 2 for rows in seen],
    )
    assert free_space("zipcache:salient=0.5", facts, 1) == [[0, 0, 0, 2, 2]]
    assert free_space("h2o:recent=0", facts, 1) == [[0, 0, 1, 0, 0]]


# ---- qaq (T7) --------------------------------------------------------------------------------

EXACT_LENGTH = {"query_mean": 0.125, "query_square": 1 / 64}  # |q|^2 = 1, always


def width_for(bits: int) -> int:
    """The least width a page can have that is no less than the bits asked for."""
    return next(width for width in (0, 2, 4, 8, bits) if width >= min(bits, 8))


def width_at(targets: NDArray[np.float64], widths: tuple[int, ...], target: float) -> int:
    """The least width whose own target is reached."""
    reached = [w for w, log in zip(widths, targets, strict=True) if log <= math.log(target) + 1e-9]
    return min(reached, default=8)


@pytest.mark.parametrize(
    ("attention", "target", "bits"),
    [
        # T = 1024 and S = 1/1024: sigma = 32 t deviations, bits = ceil(log2(1 / (32 t))).
        (1 / 1024, 2.0**-13, 8),
        (1 / 1024, 2.0**-10, 5),
        (1 / 1024, 2.0**-9, 4),
        (1 / 1024, 2.0**-8, 3),
        (1 / 1024, 2.0**-7, 2),
        (1 / 1024, 2.0**-6, 1),
        (1 / 1024, 2.0**-5, 0),
        (1 / 1024, 1.0, -5),
        # Eight times the attention needs three bits more.
        (1 / 128, 2.0**-9, 7),
        (1 / 128, 2.0**-6, 4),
        (1 / 128, 2.0**-4, 2),
        (1 / 128, 2.0**-2, 0),
    ],
)
def test_t7_value_bits_follow_attention(attention: float, target: float, bits: int) -> None:
    sigma = target * 1.0 / (math.sqrt(1024) * attention)
    deviation = 3 / (2 * math.sqrt(3))
    assert math.ceil(math.log2(3 / (2 * math.sqrt(3) * sigma * deviation))) == bits
    facts = evidence(
        all_at(8, 8, layers=1, heads=1),
        tokens=1024,
        peak_weight=attention,
        value_range=3,
        **EXACT_LENGTH,
    )
    targets = value_targets(facts, (4, 2, 0))[0, 0, 1]
    assert width_at(targets, (4, 2, 0), target) == width_for(bits)


def test_t7_value_bits_follow_the_range_against_the_heads_usual_one() -> None:
    """Ranges 1 and 7: the usual one is 5, so page 1 needs log2(7) bits more than page 0."""
    facts = evidence(
        all_at(8, 8, layers=1, heads=1, columns=2),
        tokens=1024,
        peak_weight=1 / 1024,
        value_range=one_head(1, 7),
    )
    targets = np.exp(value_targets(facts, (0,))[0, 0, :, 0])
    np.testing.assert_allclose(targets, [1 / 32 / 5, 7 / 32 / 5], rtol=1e-6)


def test_t7_one_hot_token_keeps_its_page() -> None:
    """The paper's S_t is a maximum over the window: the mean over a page would hide the token."""
    weights = np.full((4, 64), 1e-4)
    weights[2, 17] = 0.5
    flat = np.full((4, 64), 4e-3)
    peaks = [float(weights.max()), float(flat.max())]
    assert weights.mean() < flat.mean()
    facts = evidence(
        all_at(2, 2, layers=1, heads=1, columns=2), peak_weight=peaks, value_range=1, key_range=1
    )
    assert free_space("qaq", facts, 1) == [[0, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("span", "tokens", "target", "bits"),
    [
        # T = 2: sigma^2 = ln(8 (t^2 / 2) + 1); t = 1/2 gives ln 2 and sigma = 0.8326.
        (4 * math.sqrt(12), 2, 0.5, 3),
        (3 * math.sqrt(12), 2, 0.5, 2),
        (16 * math.sqrt(12), 2, 0.5, 5),
        (100 * math.sqrt(12), 2, 0.5, 7),
        # T = 1025: sigma^2 = ln(1026.001 t^2 + 1); t = 0.05 gives 1.2712 and sigma = 1.1275.
        (8 * math.sqrt(12), 1025, 0.05, 3),
        (20 * math.sqrt(12), 1025, 0.05, 5),
        (4 * math.sqrt(12), 1025, 0.05, 2),
        (4 * math.sqrt(12), 1025, 0.001, 7),
        (300 * math.sqrt(12), 1025, 0.05, 9),
    ],
)
def test_t7_key_bits_follow_range_and_length(
    span: float, tokens: int, target: float, bits: int
) -> None:
    sigma_s = target / math.sqrt(tokens)
    sigma = math.sqrt(math.log(tokens**3 / (tokens - 1) * sigma_s**2 + 1) / 1.0)
    assert math.ceil(math.log2(span / (2 * math.sqrt(3) * sigma))) == bits
    facts = evidence(all_at(8, 8, layers=1, heads=1), tokens=tokens, key_range=span, **EXACT_LENGTH)
    targets = key_targets(facts, (4, 2))[0, 0, 1]
    assert width_at(targets, (4, 2), target) == max(2, width_for(bits))


def test_t7_the_query_norm_counts_by_its_upper_quantile() -> None:
    """|q|^2 of 64 standard normals over 64 is chi-squared: 78.86 / 64 at 90 %."""
    span = math.sqrt(12)
    varied = evidence(all_at(8, 8, layers=1, heads=1), key_range=span, query_square=1 / 64)
    steady = evidence(
        all_at(8, 8, layers=1, heads=1), key_range=span * math.sqrt(78.86 / 64), **EXACT_LENGTH
    )
    np.testing.assert_allclose(key_targets(varied, (4,)), key_targets(steady, (4,)), atol=0.01)
    fewer = evidence(all_at(8, 8, layers=1, heads=1), key_range=span, **EXACT_LENGTH)
    assert (key_targets(fewer, (4,)) < key_targets(varied, (4,)) - 0.08).all()


def test_t7_a_channel_counts_by_what_queries_look_for_in_it() -> None:
    square = np.zeros(DIM)
    square[0] = 1
    wide = np.ones(DIM)
    wide[1:] = 1000
    unlooked = evidence(all_at(8, 8, layers=1, heads=1), key_range=wide, query_square=square)
    narrow = evidence(all_at(8, 8, layers=1, heads=1), key_range=1, query_square=square)
    assert (key_targets(unlooked, (4,)) == key_targets(narrow, (4,))).all()


@settings(deadline=None, database=None, derandomize=True, max_examples=40)
@given(st.integers(0, 2**32), st.floats(0.001, 1))
def test_qaq_ends_where_a_bisection_for_the_target_would(seed: int, share: float) -> None:
    """All pages stand at the widths of one target, but for those whose turn comes at it."""
    rng = np.random.default_rng(seed)
    facts = random_evidence(rng, all_at(8, 8))
    short = int(share * bytes_of(facts.widths))
    left = after(facts.widths, free_space("qaq", facts, short)).astype(int)

    def needed(log_target: float) -> NDArray[np.int64]:
        enough = [
            [t <= log_target for t in channels_last(targets)]
            for targets in (key_targets(facts, (2, 4, 6)), value_targets(facts, (0, 2, 4, 6)))
        ]
        keys = np.select(enough[0], [2, 4, 6], 8)
        values = np.select(enough[1], [0, 2, 4, 6], 8)
        return np.stack([np.where(values == 0, 0, keys), values], axis=-1)

    everything = np.concatenate(
        [key_targets(facts, (6, 4, 2)), value_targets(facts, (6, 4, 2, 0))], -1
    )
    candidates = np.unique(everything)
    fits = [bytes_of(facts.widths) - bytes_of(needed(t)) >= short for t in candidates]
    at = int(np.argmax(fits))
    assert fits[at]
    before = needed(candidates[at - 1]) if at else facts.widths.astype(int)
    assert (left <= before).all()
    assert (left >= needed(candidates[at])).all()


def channels_last(targets: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return [targets[..., i] for i in range(targets.shape[-1])]


# ---- kv-adaquant -----------------------------------------------------------------------------


def falls(facts: Evidence, policy: str = "kv-adaquant") -> list[tuple[int, str, int]]:
    """(layer, side, width) in the order kv-adaquant lowers whole layers in."""
    sequence: list[tuple[int, str, int]] = []
    before = facts.widths
    for freed in range(0, bytes_of(facts.widths), granule_bytes(DIM)):
        left = after(facts.widths, free_space(policy, facts, freed))
        if not left.all():
            break
        for layer, head, column, side in np.argwhere(left < before).tolist():
            fall = (layer, "kv"[side], int(left[layer, head, column, side]))
            if fall not in sequence:
                sequence.append(fall)
        before = left
    return sequence


def test_kv_adaquant_lowers_by_the_papers_norms_where_that_adds_least_error_per_bit() -> None:
    """Norms of keys 8 and 4, of values 2 and 3: s^2 (4^-4 - 4^-8) / 4 for 8 to 4 bits, and so on.

    In units of 4^-8 / 2: 8 to 4 adds s^2 127.5, 4 to 2 adds s^2 3840, so a norm's square must be
    30.1 times another's for its first rung to come after the other's second.
    """
    norms = {(0, "k"): 8.0, (1, "k"): 4.0, (0, "v"): 2.0, (1, "v"): 3.0}
    added = {
        (layer, side, low): norm**2 * (4.0**-low - 4.0**-high) / (high - low)
        for (layer, side), norm in norms.items()
        for high, low in ((8, 4), (4, 2))
    }
    facts = evidence(all_at(8, 8), weight_norms=np.array([[8.0, 2.0], [4.0, 3.0]]))
    order = sorted(added, key=lambda rung: added[rung])
    assert order[:3] == [(0, "v", 4), (1, "v", 4), (1, "k", 4)]
    assert falls(facts) == order
    # Where values weigh more than keys, keys go first: no rule but the norms'.
    turned = evidence(all_at(8, 8), weight_norms=np.array([[1.0, 9.0]] * 2))
    assert falls(turned)[:2] == [(0, "k", 4), (1, "k", 4)]


def test_kv_adaquant_takes_a_layer_from_its_oldest_page_on() -> None:
    facts = evidence(all_at(8, 8, heads=1), weight_norms=np.array([[9.0, 2.0], [9.0, 1.0]]))
    step = 2 * granule_bytes(DIM)
    assert free_space("kv-adaquant", facts, 2 * step) == [[1, 0, 0, 8, 4], [1, 0, 1, 8, 4]]
    assert free_space("kv-adaquant", facts, 3 * step + 1)[-1] == [0, 0, 0, 8, 4]


def test_kv_adaquant_evicts_the_oldest_pages_when_all_are_at_2_bits() -> None:
    facts = evidence(all_at(2, 2))
    gone = [[layer, head, 0, 0, 0] for layer in (0, 1) for head in (0, 1)]
    assert free_space("kv-adaquant", facts, 4 * SMALL) == gone
    assert free_space("kv-adaquant", facts, 4 * SMALL + 1) == [*gone, [0, 0, 1, 0, 0]]


def test_kv_adaquant_uncalibrated_spends_values_first_and_edge_layers_last() -> None:
    middle, edge = (2, 3), (0, 1, 4, 5)
    order = [(middle, "v", 4), (middle, "k", 4), (middle, "v", 2), (edge, "v", 4)]
    order += [(middle, "k", 2), (edge, "k", 4), (edge, "v", 2), (edge, "k", 2)]
    expected = [(layer, side, bits) for layers, side, bits in order for layer in layers]
    assert falls(evidence(all_at(8, 8, layers=6, heads=1, columns=2))) == expected
