"""What probes see: native as in numpy, numbers a person can check, drafts that leave no trace."""

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import budget_for_tokens, geometry, open_cache
from kvq import native, native_library
from kvq.class_cache import ClassCache
from kvq.config import PAGE_TOKENS, CacheShape, KvPlan, PageForm
from kvq.errors import CacheError
from kvq.policies import Constants, ObservedAttention
from kvq.reference.stored import PageGrid, mass_code, mass_of, sample_slot, sampled_token
from native_calls import select_isa
from pairs import UNROTATED, Pair, attention, forward, frequencies, pack_heads, random_heads
from tolerances import EVIDENCE, HISTORY

SHAPE = CacheShape(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=64)
WIDTHS = [(8, 8), (6, 6), (4, 4), (2, 2), (4, 2), (2, 8)]


def opened(k_bits: int, v_bits: int, context_tokens: int = 1024, **options) -> Pair:
    plan = KvPlan(k_bits=k_bits, v_bits=v_bits)
    budget = budget_for_tokens(SHAPE, plan, context_tokens) + (1 << 19)
    forms = tuple(map(PageForm, (0, 3, 1, 2)))
    options = {"observed": True, "page_encodings": forms, **options}
    return Pair.open(SHAPE, plan, budget, context_tokens, **options)


def rows(seed: int, tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(SHAPE.num_layers):
        q, k, v = random_heads(rng, SHAPE, tokens)
        k[tokens // 3 : tokens // 3 + 9] *= 3
        layers.append(pack_heads(3 * q, k, v))
    return layers


def assert_alike(pair: Pair, tolerance: float) -> None:
    got, want = (cache.evidence() for cache in pair)
    assert got.attention is not None
    assert want.attention is not None
    for field in fields(ObservedAttention):
        a, b = getattr(got.attention, field.name), getattr(want.attention, field.name)
        slack = HISTORY if field.name in ("peak_weight", "mean_mass") else tolerance
        # An early row gives one page nearly all it gives: what is left of it is a small difference.
        slack *= 2 if field.name == "evict_error" else 1
        assert np.abs(a - b).max() <= slack * np.abs(b).max(), field.name


@pytest.mark.parametrize(("k_bits", "v_bits"), WIDTHS)
def test_native_sees_what_numpy_sees(k_bits: int, v_bits: int) -> None:
    pair = opened(k_bits, v_bits)
    layers = [attention(SHAPE, 0), attention(SHAPE, 1, window_tokens=200)]
    pair.fill(layers, rows(0, 700), frequencies(32))
    pair.shift(3, 5)
    pair.mask(4, 0xFFFF00FFFF)
    if k_bits == v_bits == 8:
        pair.demote([[0, 0, 2, 4, 8], [0, 1, 2, 2, 2], [1, 0, 5, 0, 0]])
    tolerance = max(EVIDENCE[k_bits], EVIDENCE[v_bits])
    if k_bits == v_bits == 8:
        tolerance = EVIDENCE[2]
    for _ in range(3):
        assert_alike(pair, tolerance)
    pair.close()


@pytest.mark.parametrize(("k_bits", "v_bits"), [(8, 8), (4, 2)])
def test_native_sees_of_an_edited_text_what_numpy_sees(k_bits: int, v_bits: int) -> None:
    """Pages with several views, rows of the tail that have moved, probes that an edit forgot."""
    pair = opened(k_bits, v_bits)
    layers = [attention(SHAPE, 0), attention(SHAPE, 1, window_tokens=200)]
    pair.fill(layers, rows(0, 600), frequencies(32))
    for start, stop, count in ((570, 572, 5), (120, 150, 3), (200, 200, 9), (130, 131, 0)):
        for cache in pair:
            cache.edit(start, stop, count)
            if count:
                new = [part[:count] for part in rows(start, count)]
                cache.begin(count, at=start)
                for params, part in zip(layers, new, strict=True):
                    cache.attend(params, part, start + np.arange(count), frequencies(32))
                cache.commit(count)
    pair.fill(layers, rows(1, 90), frequencies(32))
    assert len(pair.native.views()) >= len(pair.native.columns()[0]) + 3
    # Fewer rows are averaged over than in a sum of pages of two bits.
    assert_alike(pair, 1.2 * EVIDENCE[2])
    pair.close()


def test_a_capped_logit_counts_as_capped() -> None:
    pair = opened(8, 8)
    layers = [attention(SHAPE, 0, softcap=4.0), attention(SHAPE, 1, softcap=30.0)]
    pair.fill(layers, rows(1, 400), frequencies(32))
    assert_alike(pair, EVIDENCE[8])
    pair.close()


def test_every_kernel_set_sees_the_same() -> None:
    seen = []
    for isa in native_library.isas():
        select_isa(isa)
        pair = opened(4, 2)
        layers = [attention(SHAPE, layer) for layer in range(2)]
        pair.fill(layers, rows(2, 500), frequencies(32))
        evidence = pair.native.evidence().attention
        assert evidence is not None
        seen.append(evidence)
        pair.close()
    select_isa(native_library.isas()[0])
    for other in seen[1:]:
        for field in fields(ObservedAttention):
            a, b = getattr(seen[0], field.name), getattr(other, field.name)
            assert np.abs(a - b).max() <= HISTORY * max(np.abs(a).max(), 1e-12), field.name


def uniform_pages(cache: ClassCache, values: np.ndarray, tokens: int) -> None:
    """Zero queries and keys: every token weighs the same; values [tokens, D] in all heads."""
    q = np.zeros((tokens, SHAPE.num_heads, 64), np.float32)
    k = np.zeros((tokens, SHAPE.num_kv_heads, 64), np.float32)
    v = np.repeat(values[:, None], SHAPE.num_kv_heads, axis=1).astype(np.float32)
    layers = [attention(SHAPE, layer) for layer in range(2)]
    packed = pack_heads(q, k, v)
    for start in range(0, tokens, 64):
        part = packed[start : start + 64]
        forward(cache, layers, [part, part], np.arange(len(part)) + start)
        cache.commit(len(part))


@pytest.mark.parametrize("use_native", [True, False])
def test_heads_that_share_keys_are_heard_in_turn(use_native: bool) -> None:
    """Of nine query heads a probe keeps four, spread evenly; the next one those one further on."""
    shape = CacheShape(num_layers=1, num_heads=18, num_kv_heads=2, head_dim=16)
    plan = KvPlan(k_bits=8, v_bits=8)
    budget = budget_for_tokens(shape, plan, 1024) + (1 << 19)
    options = {"observed": True, "native": use_native, "chunk_tokens": 64}
    cache = open_cache(shape, plan, budget, 1024, **options)
    # Head h of either KV head says h in its channel h, and no key is asked for.
    q, kv = np.zeros((160, 18, 16), np.float32), np.zeros((160, 2, 16), np.float32)
    for head in range(18):
        q[:, head, head % 9] = 1 + head
    for start in range(0, 160, 32):
        part = slice(start, start + 32)
        packed = [pack_heads(q[part], kv[part], kv[part])]
        forward(cache, [attention(shape)], packed, np.arange(32) + start)
        cache.commit(32)
    evidence = cache.evidence().attention
    assert evidence is not None
    newest = [128, 136, 144, 152]
    sampled = [token for token in map(sampled_token, range(3)) if token < 160 - 16]
    heard = [[(row * 9 // 4 + token // 8) % 9 for row in range(4)] for token in [*newest, *sampled]]
    for kv_head in range(2):
        says = np.zeros((len(heard), 4, 16))
        for place, heads in enumerate(heard):
            for row, head in enumerate(heads):
                says[place, row, head] = (1 + head + 9 * kv_head) * attention(shape).scale
        assert np.allclose(evidence.query_mean[0, kv_head], says.mean(axis=(0, 1)), rtol=1e-3)
    cache.close()


@pytest.mark.parametrize("use_native", [True, False])
def test_a_policy_that_asks_for_no_samples_keeps_none(use_native: bool) -> None:
    """`budget` decides by the newest rows: pages they do not see have no mass of any other."""
    plan = KvPlan(k_bits=8, v_bits=8)
    whole = budget_for_tokens(SHAPE, plan, 1024)
    kept = {}
    for policy in ("budget", "h2o"):
        cache = open_cache(SHAPE, plan, whole - 1, 1024, native=use_native, policy=policy)
        uniform_pages(cache, np.zeros((388, 64)), 388)
        evidence = cache.evidence().attention
        assert evidence is not None
        assert evidence.recent_mass.all()
        kept[policy] = cache.arena.samples, bool(evidence.total_mass.any())
        cache.close()
    assert kept == {"budget": (False, False), "h2o": (True, True)}


@pytest.mark.parametrize("use_native", [True, False])
def test_equal_weights_give_numbers_done_by_hand(use_native: bool) -> None:
    """388 tokens, four sinks: five pages of 64 and a tail of 64; tokens weigh 1 / (t + 1)."""
    plan = KvPlan(k_bits=8, v_bits=8)
    budget = budget_for_tokens(SHAPE, plan, 1024) + (1 << 19)
    cache = open_cache(SHAPE, plan, budget, 1024, observed=True, native=use_native, chunk_tokens=64)
    # Tokens of the second page say 1, all others 0.
    values = np.zeros((388, 64))
    values[68:132] = 1
    uniform_pages(cache, values, 388)
    newest = [360, 368, 376, 384]
    # Three query heads to a KV head: of 21 sampled rows 16 are looked at.
    sampled = np.repeat([t for t in map(sampled_token, range(7)) if t < 388], 3)
    sampled = sampled[np.arange(16) * len(sampled) // 16].tolist()
    recent = [*newest, *newest, *newest]
    probes = sorted([*recent, *sampled])
    evidence = cache.evidence().attention
    assert evidence is not None
    assert evidence.mass.shape == (2, 2, 5)
    for page in range(5):
        first = 4 + 64 * page
        seeing = [t for t in probes if t >= first]
        masses = [min(64, t - first + 1) / (t + 1) for t in seeing]
        assert np.allclose(evidence.mass[..., page], np.mean(masses), rtol=2e-3)
        late = [min(64, t - first + 1) / (t + 1) for t in recent]
        assert np.allclose(evidence.recent_mass[..., page], np.mean(late), rtol=2e-3)
        total = [max(0, min(64, t - first + 1)) / (t + 1) for t in sampled]
        assert np.allclose(evidence.total_mass[..., page], np.mean(total), rtol=2e-3)
        # The first that sees a token weighs it most.
        assert np.allclose(evidence.peak_weight[..., page], 1 / (seeing[0] + 1), rtol=0.03)
    assert np.array_equal(evidence.key_error, np.zeros((2, 2, 5)))
    assert np.array_equal(evidence.value_error, np.zeros((2, 2, 5)))
    assert np.array_equal(evidence.query_square, np.zeros((2, 2, 64)))
    # The output is the weight of what is seen of the second page, in every channel.
    at = np.array(probes)
    weights = np.clip(at - 67, 0, 64) / (at + 1)
    assert np.allclose(evidence.output_square, np.mean(weights**2), rtol=5e-3)
    # Without that page it is 0, without the first, 64 zeros, it grows: for the newest rows.
    gone = 64 / (np.array(recent) + 1)
    assert np.allclose(evidence.evict_error[..., 1], 64 * np.mean(gone**2), rtol=5e-3)
    moved = 64 / (np.array(recent) - 63) - gone
    assert np.allclose(evidence.evict_error[..., 0], 64 * np.mean(moved**2), rtol=2e-2)
    cache.close()


def test_rounding_errors_are_those_of_a_second_look() -> None:
    """key_error and value_error predict what reading at fewer bits does to the output."""
    plan = KvPlan(k_bits=8, v_bits=8)
    budget = budget_for_tokens(SHAPE, plan, 1024) + (1 << 19)
    layers = [attention(SHAPE, layer) for layer in range(2)]
    for side, bits in ((0, 4), (1, 4), (1, 2)):
        cache = open_cache(SHAPE, plan, budget, 1024, observed=True, native=False, chunk_tokens=64)
        packed = rows(5, 500)
        # One query, often: the probes are what is asked afterwards.
        for layer in packed:
            layer[:, : 6 * 64] = layer[0, : 6 * 64] * 0.5
        for start in range(0, 500, 64):
            part = [layer[start : start + 64] for layer in packed]
            forward(cache, layers, part, np.arange(len(part[0])) + start)
            cache.commit(len(part[0]))
        evidence = cache.evidence().attention
        assert evidence is not None
        error = evidence.value_error if side else evidence.key_error
        predicted = error.sum() * 4.0 ** (8 - bits)
        question = [layer[499:500] for layer in packed]
        before = forward(cache, layers, question, np.array([500]))
        cache.rewind()
        columns = cache.columns()[1].shape[2]
        widths = (8, bits) if side else (bits, 8)
        every = [(a, b, c, *widths) for a in range(2) for b in range(2) for c in range(columns)]
        cache.demote(np.array(every, np.int32))
        after = forward(cache, layers, question, np.array([500]))
        cache.rewind()
        # Three query heads share a KV head: the mean over rows against their sum.
        change = sum(np.square(a - b).sum() for a, b in zip(after, before, strict=True)) / 3
        assert 0.3 < predicted / change < 3
        cache.close()


def test_constants_are_the_pages_own() -> None:
    pair = opened(4, 2, policy="lagkv")
    layers = [attention(SHAPE, layer) for layer in range(2)]
    pair.fill(layers, rows(3, 400), frequencies(32))
    pair.demote([[1, 1, 2, 0, 0]])
    both = [cache.evidence() for cache in pair]
    for layer in range(2):
        a, b = (evidence.constants(layer) for evidence in both)
        for field in fields(Constants):
            got, want = getattr(a, field.name), getattr(b, field.name)
            assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()
        for head in range(2):
            stored = pair.native.page(layer, head, 3)
            keys, values = PageGrid.load(stored[:136]), PageGrid.load(stored[136:272])
            assert np.array_equal(a.key_min[head, 3], keys.mid - 120 * keys.scale)
            channels = (layer, head) in ((0, 1), (1, 1))
            scale = np.sqrt(np.square(values.scale).mean()) if channels else values.scale
            assert a.value_range[head, 3] == pytest.approx(240 * scale + np.zeros(64), rel=1e-6)
    assert not both[0].constants(1).key_range[1, 2].any()
    pair.close()


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_squares_are_those_of_the_keys_as_they_are_read(bits: int) -> None:
    pair = opened(8, 8)
    layers = [attention(SHAPE, layer) for layer in range(2)]
    pair.fill(layers, rows(3, 300), frequencies(32))
    pair.demote([[1, 0, c, bits, 8] for c in range(3)] + [[1, 1, 2, 0, 0]])
    a, b = (cache.evidence().key_squares(1) for cache in pair)
    assert b.shape == (2, 3, PAGE_TOKENS)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    assert not a[1, 2].any()
    pair.close()


def test_samples_span_the_text_whatever_its_length() -> None:
    """After any number of runs 8 slots hold 8 of them, evenly spaced but for one doubling."""
    slots: dict[int, int] = {}
    for run in range(5000):
        slot = sample_slot(run)
        if slot is not None:
            slots[slot] = run
        if run >= 8:
            kept = sorted(slots.values())
            assert len(kept) == 8
            gaps = {b - a for a, b in itertools.pairwise([*kept, run + 1])}
            stride = max(min(gaps - {1}, default=1), 1)
            assert kept[0] <= 2 * stride
            assert max(gaps) <= 2 * max(stride, run / 8)


@settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(
    drafts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=30),
    prompt=st.sampled_from([200, 255, 256]),
)
def test_rejected_drafts_leave_the_evidence_of_plain_decoding(
    drafts: Sequence[tuple[int, int]], prompt: int
) -> None:
    """Whatever was drafted and refused, the probes are those of the tokens that stayed."""
    plan = KvPlan(k_bits=4, v_bits=2)
    shape = replace(SHAPE, num_layers=1)
    budget = budget_for_tokens(shape, plan, 1024) + (1 << 19)
    layers = [attention(shape)]
    drafting, plain = (open_cache(shape, plan, budget, 1024, observed=True) for _ in range(2))
    q, k, v = random_heads(np.random.default_rng(0), shape, 1024)
    truth = pack_heads(q, k, v)
    wrong = pack_heads(5 - q, k, v)
    for cache in (drafting, plain):
        forward(cache, layers, [truth[:prompt]], np.arange(prompt))
        cache.commit(prompt)
    for count, accepted in drafts:
        kept = min(accepted, count)
        at = drafting.tokens
        rows = np.concatenate([truth[at : at + kept], wrong[at + kept : at + count]])
        forward(drafting, layers, [rows], np.arange(at, at + count))
        drafting.commit(kept)
        for t in range(at, at + kept):
            forward(plain, layers, [truth[t : t + 1]], np.array([t]))
            plain.commit(1)
    a, b = drafting.evidence().attention, plain.evidence().attention
    assert a is not None
    assert b is not None
    for field in fields(ObservedAttention):
        assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name
    drafting.close()
    plain.close()


@pytest.mark.parametrize("use_native", [True, False])
def test_close_to_a_pages_end_evidence_stands_still(use_native: bool) -> None:
    """Tokens 316 to 323: the next page closes at 324, and a draft of eight could do it from 316."""
    plan = KvPlan(k_bits=4, v_bits=2)
    budget = budget_for_tokens(SHAPE, plan, 1024) + (1 << 19)
    packed = rows(6, 400)
    layers = [attention(SHAPE, layer) for layer in range(2)]
    seen = []
    for tokens in (316, 319, 323):
        cache = open_cache(
            SHAPE, plan, budget, 1024, observed=True, native=use_native, chunk_tokens=512
        )
        part = [layer[:tokens] for layer in packed]
        forward(cache, layers, part, np.arange(tokens), frequencies(32))
        cache.commit(tokens)
        evidence = cache.evidence()
        assert evidence.tokens == min(tokens, 316)
        assert evidence.attention is not None
        seen.append(evidence.attention)
        cache.close()
    for field in fields(ObservedAttention):
        first, middle, last = (getattr(observation, field.name) for observation in seen)
        # Numpy's sums also run over the zero weights of keys that no probe sees.
        slack = 0 if use_native else 1e-5 * np.abs(first).max()
        for later in (middle, last):
            np.testing.assert_allclose(later, first, rtol=0, atol=slack, err_msg=field.name)


# Layers that read the last one's keys


def look(cache: ClassCache, queries_of_readers: Sequence[np.ndarray], rows: Sequence[int]) -> None:
    """Every reader's queries [T, H * D] of these rows of the pass."""
    picked = np.array(rows, np.int64)
    for number, queries in enumerate(queries_of_readers):
        params = attention(SHAPE, 1, window_tokens=150, scale=0.06 * (1 + number))
        cache.attend_shared(params, queries[picked], picked, frequencies(32))


def questions(seed: int, tokens: int, readers: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [2 * rng.standard_normal((tokens, 6 * 64), np.float32) for _ in range(readers)]


def test_native_hears_of_readers_what_numpy_hears() -> None:
    """Of chunks that ask for their last row alone, of steps, and of trees that ask in part."""
    pair = opened(8, 8, kv_shared_layers=2)
    layers = [attention(SHAPE, 0), attention(SHAPE, 1, window_tokens=150)]
    rng = np.random.default_rng(3)
    passes = [(200, None), (193, None), *[(1, None)] * 82, (7, None)]
    passes += [(7, [-1, 0, 0, 1, 1, 2, 4])] * 16
    heard: set[int] = set()
    for number, (count, parents) in enumerate(passes):
        new, queries = rows(number, count), questions(number, count)
        asking = [count - 1] if count > 8 else np.flatnonzero(rng.random(count) < 0.8).tolist()
        depths = np.arange(count) if parents is None else np.array([0, 1, 1, 2, 2, 2, 3])
        for cache in pair:
            forward(cache, layers, new, cache.tokens + depths, frequencies(32), parents=parents)
            look(cache, queries, asking)
            path = [0, 2, 5] if number % 2 else [0, 1, 4, 6]
            cache.commit(path if parents else count)
        if number > 82:
            # Trees leave few rows to average over.
            assert_alike(pair, 2 * EVIDENCE[8])
            heard |= set(readers_alone(pair.numpy))
    # Of the newest tokens and of the sample.
    assert {token % 2 for token in heard} == {0, 1}
    pair.close()


def readers_alone(cache: ClassCache) -> list[int]:
    """Tokens of the first reader's probes, of the definition."""
    newest, sampled = cache.storage._probes.kinds(2, cache.tokens)  # type: ignore[attr-defined]
    return [probe.token for probe in (*newest, *sampled)]


@pytest.mark.parametrize("use_native", [True, False])
def test_what_readers_see_adds_to_what_the_owner_sees(use_native: bool) -> None:
    """All ask alike, so that of three askers masses and errors are three times those of one."""
    plan = KvPlan(k_bits=8, v_bits=8)
    budget = budget_for_tokens(SHAPE, plan, 1024) + (1 << 19)
    layers = [attention(SHAPE, layer) for layer in range(2)]
    observations = []
    for readers in (0, 2):
        cache = open_cache(
            SHAPE, plan, budget, 1024, observed=True, native=use_native, kv_shared_layers=readers
        )
        # Half as sharp: no page has all of the weight, and no history is at its end.
        for start in range(0, 320, 64):
            part = [part_rows[start : start + 64] / 2 for part_rows in rows(5, 320)]
            forward(cache, layers, part, np.arange(64) + start, frequencies(32))
            for _ in range(readers):
                queries = part[1][:, : 6 * 64]
                cache.attend_shared(layers[1], queries, np.arange(64), frequencies(32))
            cache.commit(64)
        evidence = cache.evidence().attention
        assert evidence is not None
        observations.append(evidence)
        cache.close()
    alone, summed = observations
    for field in fields(ObservedAttention):
        a, b = getattr(alone, field.name), getattr(summed, field.name)
        once = field.name == "peak_weight" or field.name.startswith(("query", "output"))
        assert a[1].any()
        np.testing.assert_array_equal(a[0], b[0], err_msg=field.name)
        # A mean of both signs may be next to nothing beside what it is a mean of.
        least = 5e-8 * float(np.abs(a[1]).max()) if field.name == "query_mean" else 1e-9
        np.testing.assert_allclose(b[1], a[1] * (1 if once else 3), rtol=2e-5, atol=least)


def test_a_head_that_looks_back_keeps_the_pages_that_all_others_gave_up() -> None:
    """An eighth of the bytes holds half of all pages at 2 bits; the table has a row for each."""
    shape = CacheShape(num_layers=2, num_heads=8, num_kv_heads=8, head_dim=64)
    retrieval = np.zeros((2, 8), np.float32)
    retrieval[1, 3] = 1
    tokens = 64 * 48
    cache = open_cache(
        shape,
        KvPlan(k_bits=8, v_bits=8),
        tokens * shape.float_bytes_per_token // 8,
        tokens,
        policy="budget",
        retrieval=retrieval,
        chunk_tokens=64,
    )
    packed = pack_heads(*random_heads(np.random.default_rng(0), shape, tokens))
    for start in range(0, tokens, 64):
        part = packed[start : start + 64]
        forward(
            cache,
            [attention(shape, layer) for layer in range(2)],
            [part] * 2,
            start + np.arange(64),
        )
        cache.commit(64)
    facts, widths = cache.columns()
    kept = (widths[..., 0] > 0).sum(axis=-1)
    assert facts[:, 2].tolist() == list(range(4, tokens - 64, 64))
    assert kept[1, 3] == 47
    assert np.delete(kept.ravel(), 11).max() < 30
    cache.close()


@pytest.mark.parametrize("use_native", [True, False])
def test_a_page_that_readers_alone_look_at_is_kept(use_native: bool) -> None:
    """The layer looks at its second page, a reader at its fourth; the budget gives pages up."""
    shape = CacheShape(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=64)
    plan = KvPlan(k_bits=4, v_bits=4)
    marks = np.zeros((2, 64), np.float32)
    marks[0, 40], marks[1, 50] = 8, 8
    q, k, v = random_heads(np.random.default_rng(0), shape, 1200)
    q[:], k[:, :, [40, 50]] = marks[0], 0
    k[4 + 64 : 4 + 128] += marks[0]
    k[4 + 192 : 4 + 256] += marks[1]
    packed = pack_heads(q, k, v)
    queries = np.tile(marks[1], (1200, 2))
    kept = {}
    for readers in (0, 1):
        budget = budget_for_tokens(shape, plan, 525, context_tokens=1200, kv_shared_layers=readers)
        cache = open_cache(
            shape, plan, budget, 1200, policy="h2o", native=use_native, kv_shared_layers=readers
        )
        for start in range(0, 1200, 8):
            forward(cache, [attention(shape)], [packed[start : start + 8]], start + np.arange(8))
            asking = queries[start : start + 8]
            cache.attend_shared(attention(shape), asking, np.arange(8), UNROTATED)
            cache.commit(8)
        facts, widths = cache.columns()
        kept[readers] = set(facts[(widths[0, :, :, 0] > 0).all(axis=0), 2].tolist())
        cache.close()
    assert 4 + 64 in kept[0]
    assert 4 + 192 not in kept[0]
    assert kept[1] >= {4 + 64, 4 + 192}


@pytest.mark.parametrize("use_native", [True, False])
def test_a_readers_probe_is_of_the_token_that_stayed(use_native: bool) -> None:
    """Drafts are refused, and their tokens written again by passes that ask for no row of them."""
    plan = KvPlan(k_bits=4, v_bits=2)
    budget = budget_for_tokens(SHAPE, plan, 1024) + (1 << 19)
    layers = [attention(SHAPE, layer) for layer in range(2)]
    drafting, plain = (
        open_cache(SHAPE, plan, budget, 1024, observed=True, native=use_native, kv_shared_layers=2)
        for _ in range(2)
    )
    truth, wrong = rows(0, 400), rows(1, 400)
    right, false = questions(0, 400), questions(1, 400)

    def run(cache: ClassCache, count: int, kept: int, asking: Sequence[int]) -> None:
        at = cache.tokens
        pieces = [
            [np.concatenate([a[at : at + kept], b[at + kept : at + count]]) for a, b in both]
            for both in (zip(truth, wrong, strict=True), zip(right, false, strict=True))
        ]
        forward(cache, layers, pieces[0], np.arange(at, at + count), frequencies(32))
        look(cache, pieces[1], asking)
        cache.commit(kept)

    for cache in (drafting, plain):
        run(cache, 250, 250, [249])

    def draft(count: int, kept: int) -> None:
        run(drafting, count, kept, range(count))
        for _ in range(kept):
            run(plain, 1, 1, [0])

    for count, kept in ((8, 3), (8, 0), (3, 3)):
        draft(count, kept)
    # Of two rows that might be token 256 the one asks that goes.
    two = [np.concatenate([b[256:257], a[256:257]]) for a, b in zip(truth, wrong, strict=True)]
    forward(drafting, layers, two, np.array([256, 256]), frequencies(32), parents=[-1, -1])
    look(drafting, false, [0])
    drafting.commit([1])
    run(plain, 1, 1, [])
    draft(8, 5)
    # The next multiple of eight was guessed, and then comes in a chunk that asks for its end.
    for cache in (drafting, plain):
        run(cache, 20, 20, [19])
    a, b = (cache.evidence().attention for cache in (drafting, plain))
    assert a is not None
    assert b is not None
    for field in fields(ObservedAttention):
        assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name
    drafting.close()
    plain.close()


@pytest.mark.parametrize("use_native", [True, False])
def test_a_snapshot_keeps_probes_and_history(use_native: bool) -> None:
    """A session that a reader asked in, and one that it did not."""
    plan = KvPlan(k_bits=4, v_bits=2)
    budget = budget_for_tokens(SHAPE, plan, 1024) + (1 << 19)
    layers = [attention(SHAPE, 0, window_tokens=150), attention(SHAPE, 1)]
    source, other = (
        open_cache(SHAPE, plan, budget, 1024, observed=True, native=use_native, kv_shared_layers=2)
        for _ in range(2)
    )
    packed = rows(4, 400)
    for start in (0, 200):
        part = [layer[start : start + 200] for layer in packed]
        forward(source, layers, part, np.arange(200) + start, frequencies(32))
        look(source, questions(4, 200, 1), range(190, 200))
        source.commit(200)
        source.evidence()
    other.load_state(source.state())
    a, b = source.evidence().attention, other.evidence().attention
    assert a is not None
    assert b is not None
    assert a.mean_mass.any()
    for field in fields(ObservedAttention):
        assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name
    source.close()
    other.close()


def test_without_probes_there_is_no_evidence_and_no_byte_for_it() -> None:
    plan = KvPlan()
    options = {"context_tokens": 1024, "chunk_tokens": 256, "threads": 2}
    bare, probing = (geometry(SHAPE, plan, probes=probes, **options) for probes in (False, True))
    assert sum(probing.regions_for(4, 100_000)) > sum(bare.regions_for(4, 100_000))
    budget = budget_for_tokens(SHAPE, plan, 1024, chunk_tokens=256, threads=2)
    # A budget that holds the whole context is never short, so no policy will ever look.
    full = open_cache(SHAPE, plan, budget, 1024, policy="budget", threads=2)
    tight = open_cache(SHAPE, plan, budget - 1, 1024, policy="budget", threads=2)
    assert not full.arena.probes
    assert tight.arena.probes
    with pytest.raises(CacheError, match="out of order"):
        full.storage.evidence(0)
    full.close()
    tight.close()


@pytest.mark.parametrize("readers", [0, 3])
@pytest.mark.parametrize("budget", [1 << 20, 3 << 20])
@pytest.mark.parametrize("policy", ["budget", "h2o"])
def test_python_counts_the_bytes_of_probes_as_the_library_does(
    policy: str, budget: int, readers: int
) -> None:
    options = {"context_tokens": 5000, "threads": 2, "kv_shared_layers": readers, "policy": policy}
    probing = geometry(SHAPE, KvPlan(), probes=True, **options)
    assert probing.samples == (policy == "h2o")
    columns, regions = probing.divide(budget)
    counted = native.layout(probing, budget, columns)
    assert (counted["max_columns"], counted["regions"]) == (columns, regions)
    assert counted["pool_bytes"] == probing.room_for_pages(budget)
    assert counted["minimum_bytes"] == probing.minimum_bytes


def test_masses_are_coded_in_sixteenths_of_an_octave() -> None:
    assert mass_code(1.0) == 255
    assert mass_code(0.5) == 239
    assert mass_code(0.0) == 1
    assert mass_of(0) == 0
    for mass in np.geomspace(2e-5, 1, 50):
        assert abs(mass_of(mass_code(mass)) / mass - 1) < 0.022


def test_sampled_probes_are_one_of_every_run_and_never_recent_ones() -> None:
    tokens = [sampled_token(run) for run in range(2000)]
    assert all(run * PAGE_TOKENS <= t < (run + 1) * PAGE_TOKENS for run, t in enumerate(tokens))
    assert all(t % 2 for t in tokens)
    assert len({t % PAGE_TOKENS for t in tokens}) == 32
