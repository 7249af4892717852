"""A branch: rows after the committed tokens, seen by their descendants, kept or forgotten."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import budget_for_tokens, minimum_budget, open_cache
from kvq import native_library
from kvq.class_cache import ClassCache, KeyTransform
from kvq.config import CacheShape, KvPlan
from kvq.errors import BudgetError, CacheError, UsageError
from kvq.reference.stored import ancestry
from pairs import BOTH, Float, attention, frequencies, packed_rows
from tolerances import BETWEEN_SPLITS, RANDOM, Tolerance

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

SHAPE = CacheShape(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32)
PROPERTY = settings(deadline=None, database=None, derandomize=True, max_examples=40)
INV_FREQ = frequencies(8)


@st.composite
def trees(draw: st.DrawFn, most: int = 40) -> list[int]:
    """Parents of a branch's rows, -1 for the committed end: chains, stars and all between."""
    depth = draw(st.sampled_from([0, 0, 1, 4]))  # of how many newest rows a parent is chosen
    count = draw(st.integers(1, most))
    choose = [draw(st.integers(-1, row - 1)) for row in range(count)]
    return [row - 1 if depth == 0 else max(-1, min(p, row - depth)) for row, p in enumerate(choose)]


def path_to(parents: Sequence[int], row: int) -> list[int]:
    return np.flatnonzero(ancestry(parents)[row]).tolist()


def depths(parents: Sequence[int]) -> np.ndarray:
    return ancestry(parents).sum(axis=1) - 1


packed = partial(packed_rows, SHAPE)


def layers(window: int = 0, softcap: float = 0.0) -> list:
    return [
        attention(SHAPE, 0, softcap=softcap),
        attention(SHAPE, 1, window_tokens=window),
    ]


def run(
    cache: ClassCache,
    rows: list[Float],
    at: np.ndarray,
    parents: Sequence[int] | None = None,
    view: str = "full",
    of: list | None = None,
) -> list[Float]:
    """One pass: every layer's output [rows, H * D]."""
    cache.begin(len(at), parents, view=view)
    parts = zip(of or layers(), rows, strict=True)
    return [cache.attend(params, part, at, INV_FREQ) for params, part in parts]


def filled(tokens: int, widths: tuple[int, int] = (8, 8), *, use_native: bool = True, **options):
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1])
    options = {"draft_tokens": 40} | options
    budget = budget_for_tokens(SHAPE, plan, 1200, **options)
    cache = open_cache(SHAPE, plan, budget, 1200, native=use_native, **options)
    fill(cache, tokens)
    return cache


def fill(cache: ClassCache, tokens: int) -> None:
    rng = np.random.default_rng(1)
    while cache.tokens < tokens:
        count = min(100, tokens - cache.tokens)
        run(cache, packed(rng, count), np.arange(count) + cache.tokens)
        cache.commit(count)


def close(got: Float, want: Float, limit: Tolerance) -> None:
    error = got.astype(np.float64) - want
    scale = np.square(want, dtype=np.float64)
    assert np.sqrt(np.mean(error**2)) <= limit.rms * np.sqrt(np.mean(scale))
    assert np.abs(error).max() <= limit.top * np.abs(want).max()


@PROPERTY
@given(
    parents=trees(),
    tokens=st.sampled_from([0, 3, 60, 130, 400]),
    widths=st.sampled_from([(8, 8), (4, 2), (16, 16)]),
    window=st.sampled_from([0, 3, 90]),
    threads=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_a_tree_equals_its_paths_run_one_by_one(
    parents: list[int], tokens: int, widths: tuple[int, int], window: int, threads: int, seed: int
) -> None:
    """Outputs of every row; and kept along a path, the bytes are those of that path alone."""
    of = layers(window, softcap=3.0 if seed % 2 else 0.0)
    rows = packed(np.random.default_rng(seed), len(parents))
    at = tokens + depths(parents)
    tree, alone = (filled(tokens, widths, threads=threads) for _ in range(2))
    room = tree.tree_room
    outputs = run(tree, rows, at, parents, of=of)
    leaves = sorted(set(range(len(parents))) - set(parents))
    exact = len(parents) <= room
    for leaf in leaves:
        path = path_to(parents, leaf)
        expected = run(alone, [part[path] for part in rows], at[path], of=of)
        for got, want in zip(outputs, expected, strict=True):
            close(got[path], want, BETWEEN_SPLITS)
            assert not exact or (got[path] == want).all()
        if leaf != leaves[-1]:
            alone.rewind()
    kept = path_to(parents, leaves[-1])
    tree.commit(kept)
    alone.commit(len(kept))
    assert tree.state() == alone.state()
    assert tree.tokens == tokens + len(kept)
    for cache in (tree, alone):
        cache.close()


@PROPERTY
@given(
    parents=trees(24),
    cuts=st.lists(st.integers(1, 12), max_size=4),
    tokens=st.sampled_from([0, 3, 131, 300]),
    widths=st.sampled_from([(8, 8), (4, 2), (16, 16)]),
    view=st.sampled_from(["full", "hi"]),
    window=st.sampled_from([0, 20]),
)
def test_native_trees_in_several_passes_are_the_references(
    parents: list[int],
    cuts: list[int],
    tokens: int,
    widths: tuple[int, int],
    view: str,
    window: int,
) -> None:
    """Passes that add to one branch, some of them rewound and computed anew."""
    rng = np.random.default_rng(len(parents))
    rows, at = packed(rng, len(parents)), tokens + depths(parents)
    read = tuple(4 if bits in (8, 6) and view == "hi" else bits for bits in widths)
    pair = [filled(tokens, widths, use_native=use) for use in (True, False)]
    one_pass = filled(tokens, widths)
    of = layers(window)
    whole = run(one_pass, rows, at, parents, view, of)
    ends = sorted({min(c, len(parents)) for c in np.cumsum(cuts).tolist()} | {len(parents)})
    for turn, (start, stop) in enumerate(pairwise([0, *ends])):
        part = [r[start:stop] for r in rows]
        new = parents[start:stop]
        outputs = [run(cache, part, at[start:stop], new, view, of) for cache in pair]
        if turn % 2:
            for cache in pair:
                cache.rewind(start)
                assert cache.branch_rows == start
            again = [run(cache, part, at[start:stop], new, view, of) for cache in pair]
            for first, second in zip(outputs, again, strict=True):
                assert all((x == y).all() for x, y in zip(first, second, strict=True))
        limit = RANDOM[read]
        for got, want, same in zip(*outputs, whole, strict=True):
            close(got, want, limit)
            close(got, same[start:stop], BETWEEN_SPLITS)
    kept = path_to(parents, len(parents) - 1)
    for cache in (*pair, one_pass):
        cache.commit(kept)
    assert pair[0].state() == one_pass.state()
    for layer in range(2):
        for got, want in zip(*(cache.tail(layer, 1) for cache in pair), strict=True):
            assert got.shape == want.shape
    for cache in (*pair, one_pass):
        cache.close()


@PROPERTY
@given(
    passes=st.lists(trees(10), min_size=1, max_size=3),
    tokens=st.sampled_from([0, 3, 131, 300]),
    widths=st.sampled_from([(8, 8), (4, 2), (16, 16)]),
    view=st.sampled_from(["full", "hi"]),
    how=st.sampled_from(["rewind", "commit 0"]),
)
def test_a_forgotten_branch_leaves_every_byte(
    passes: list[list[int]], tokens: int, widths: tuple[int, int], view: str, how: str
) -> None:
    cache, untouched = filled(tokens, widths), filled(tokens, widths)
    before = cache.state()
    rng = np.random.default_rng(len(passes))
    for parents in passes:
        run(cache, packed(rng, len(parents)), tokens + depths(parents), parents, view)
    if how == "rewind":
        cache.rewind()
    else:
        cache.commit(0)
    assert cache.branch_rows == 0
    assert cache.state() == before
    more = packed(rng, 70)
    for twin in (cache, untouched):
        outputs = run(twin, more, np.arange(70) + tokens)
        twin.commit(70)
        if twin is cache:
            first = outputs
    assert all((x == y).all() for x, y in zip(first, outputs, strict=True))
    assert cache.state() == untouched.state()
    for twin in (cache, untouched):
        twin.close()


def test_drafting_by_the_hi_plane_and_verifying_in_the_same_rows() -> None:
    """QuantSpec (2502.10424): the draft's rows are rewound; verifying equals plain passes."""
    drafting, plain = filled(300), filled(300)
    rows = packed(np.random.default_rng(0), 6)
    drafts = []
    for step in range(6):
        part = [r[step : step + 1] for r in rows]
        drafts.append(run(drafting, part, np.array([300 + step]), view="hi")[0][0])
    assert drafting.branch_rows == 6
    drafting.rewind(0)
    verified = run(drafting, rows, np.arange(6) + 300)
    drafting.commit(4)
    exact = run(plain, rows, np.arange(6) + 300)
    plain.commit(4)
    assert all((x == y).all() for x, y in zip(verified, exact, strict=True))
    assert drafting.state() == plain.state()
    assert 0 < np.abs(np.array(drafts) - exact[0]).max() < 0.2
    for cache in (drafting, plain):
        cache.close()


@pytest.mark.parametrize("widths", [(8, 8), (8, 4), (2, 8), (4, 2)])
def test_the_hi_view_reads_eight_bits_as_four(widths: tuple[int, int]) -> None:
    """As if every 8-bit side had been demoted, and nothing has."""
    cache, lowered = filled(400, widths), filled(400, widths)
    columns = len(cache.columns()[0])
    narrow = [min(4, bits) for bits in widths]
    actions = [(*at, *narrow) for at in np.ndindex(2, 2, columns)]
    lowered.demote(np.array(actions, np.int32))
    rows, at = packed(np.random.default_rng(4), 5), np.arange(5) + 400
    seen = [run(cache, rows, at, view="hi"), run(lowered, rows, at)]
    assert all((x == y).all() for x, y in zip(*seen, strict=True))
    cache.rewind()
    exact = run(cache, rows, at)
    same = all((x == y).all() for x, y in zip(exact, seen[0], strict=True))
    assert same == (8 not in widths)
    for twin in (cache, lowered):
        twin.close()


@BOTH
def test_what_is_no_branch_is_refused_and_does_no_harm(use_native: bool) -> None:
    cache = filled(100, use_native=use_native, draft_tokens=8)
    before = cache.state()
    rows, at = packed(np.random.default_rng(0), 4), np.array([100, 101, 101, 102])
    for parents in ([-1, 0, 0, 3], [-2, 0, 0, 1], [0, 0, 0, 1], [-1, 0, 9, 1]):
        with pytest.raises(CacheError):
            cache.begin(4, parents)
    with pytest.raises(CacheError, match="3 parents were given for 4 rows"):
        cache.begin(4, [-1, 0, 0])
    with pytest.raises(BudgetError, match="holds 8 rows, 0 \\+ 9 were given"):
        cache.begin(9, [-1] * 9)
    with pytest.raises(UsageError, match="view 'low' is not known; choose full or hi"):
        cache.begin(4, view="low")
    assert cache.state() == before
    run(cache, rows, at, [-1, 0, 0, 1])
    for call in (
        lambda: cache.commit([0, 1, 2]),  # siblings
        lambda: cache.commit([1]),  # without its parent
        lambda: cache.commit([0, 2, 3]),
        lambda: cache.commit([0, 1, 3, 4]),
        lambda: cache.commit([0, -1]),
        lambda: cache.commit(3),  # the first three rows are no chain
        lambda: cache.commit(5),
        lambda: cache.rewind(5),
        lambda: cache.rewind(-1),
        lambda: cache.trim(50),
        lambda: cache.shift(0, 1),
        lambda: cache.mask(0, 1),
        cache.state,
        lambda: cache.begin(1, [4]),
    ):
        with pytest.raises(CacheError):
            call()
    for count in (5, 100):
        with pytest.raises(BudgetError, match=f"holds 8 rows, 4 \\+ {count} were given"):
            cache.begin(count)
    cache.begin(2)
    with pytest.raises(CacheError):
        cache.commit([0])  # no layer has seen the newest rows
    with pytest.raises(CacheError):
        cache.rewind(5)  # nor can one of them be kept
    cache.rewind(4)
    with pytest.raises(CacheError):
        cache.attend(layers()[0], rows[0][:2], at[:2], INV_FREQ)  # their pass is gone
    cache.commit([0, 1, 3])
    assert (cache.tokens, cache.branch_rows) == (103, 0)
    cache.close()


@BOTH
def test_a_branch_at_the_end_may_be_told_where_it_is(use_native: bool) -> None:
    cache = open_cache(SHAPE, KvPlan(), 1 << 20, 40, native=use_native)
    fill(cache, 38)
    for token in (38, 39):
        cache.begin(1, at=38)
        for params, part in zip(layers(), packed(np.random.default_rng(0), 1), strict=True):
            cache.attend(params, part, np.array([token]), INV_FREQ)
    says = (
        "38 \\+ 3 tokens exceed this session's context of 40; open it with a larger context_tokens"
    )
    with pytest.raises(BudgetError, match=says):
        cache.begin(1, at=38)
    cache.commit(2)
    cache.close()


@BOTH
def test_room_is_made_for_every_pass_of_a_branch(use_native: bool) -> None:
    """Pages may lose bits between its passes, and its rows close pages when they are kept."""
    plan = KvPlan(k_bits=8, v_bits=8)
    least = minimum_budget(SHAPE, plan, 1200, draft_tokens=100, chunk_tokens=64)
    cache = open_cache(
        SHAPE, plan, least + 4000, 1200, native=use_native, draft_tokens=100, chunk_tokens=64
    )
    rng = np.random.default_rng(0)
    while cache.tokens < 900:
        for _ in range(3):
            count = int(rng.integers(1, 34))
            run(cache, packed(rng, count), np.arange(count) + cache.tokens + cache.branch_rows)
            assert cache.used_bytes <= cache.budget_bytes
        cache.commit(cache.branch_rows)
        assert cache.used_bytes <= cache.peak_bytes <= cache.budget_bytes
    usage = cache.usage()
    assert usage.evicted_share > 0
    assert len(cache.tail(0, 0)[2]) < 4 + 64
    cache.close()


def test_what_a_chunk_was_rewound_to_may_become_a_tree() -> None:
    """Longer than a branch can be: of its rows those that one holds know whom they follow."""
    pair = [filled(0, use_native=use, draft_tokens=8) for use in (True, False)]
    chunk, more = (packed(np.random.default_rng(7), count) for count in (60, 3))
    outputs = []
    for cache in pair:
        run(cache, packed(np.random.default_rng(8), 8), np.array([0, *[1] * 7]), [-1, *[0] * 7])
        cache.rewind()
        run(cache, chunk, np.arange(60))
        cache.rewind(5)
        outputs.append(run(cache, more, np.array([5, 5, 6]), [4, 4, 6]))
        cache.commit([0, 1, 2, 3, 4, 6, 7])
        assert cache.places()[:, :2].tolist() == [[token, token] for token in range(7)]
        cache.close()
    for got, want in zip(*outputs, strict=True):
        close(got, want, RANDOM[8, 8])


def test_probes_of_a_tree_are_those_of_the_path_that_was_kept() -> None:
    """Evidence after trees is the reference's; after chains, however rewound, that of decoding."""
    options = {"observed": True, "draft_tokens": 40}
    pair = [filled(300, use_native=use, **options) for use in (True, False)]
    rng = np.random.default_rng(5)
    for _ in range(8):
        parents = [-1, 0, 0, 1, 1, 3, 5, 5, 6, 6, 8, 10, 11, 12, 12]
        rows = packed(rng, len(parents))
        for cache in pair:
            run(cache, rows, cache.tokens + depths(parents), parents)
            cache.rewind(14)
            cache.commit(path_to(parents, 13))
    for got, want in zip(*(cache.storage.evidence(cache.tokens) for cache in pair), strict=True):
        assert (want != 0).any()
        np.testing.assert_allclose(got, want, rtol=0.1, atol=0.02 * np.abs(want).max())
    for cache in pair:
        cache.close()


def test_a_rewound_chain_leaves_the_evidence_of_decoding() -> None:
    options = {"observed": True, "draft_tokens": 40}
    busy, plain = filled(300, **options), filled(300, **options)
    rng = np.random.default_rng(6)
    for _ in range(6):
        true = packed(rng, 9)
        for wrong in (33, 5):
            run(busy, packed(rng, wrong), np.arange(wrong) + busy.tokens, view="hi")
            busy.rewind()
        run(busy, true, np.arange(9) + busy.tokens)
        busy.commit(9)
        for token in range(9):
            part = [r[token : token + 1] for r in true]
            run(plain, part, np.array([plain.tokens]))
            plain.commit(1)
    for got, want in zip(*(c.storage.evidence(busy.tokens) for c in (busy, plain)), strict=True):
        assert (got == want).all()
    for cache in (busy, plain):
        cache.close()


def kv_only_pass(cache: ClassCache, tokens: int, kv_only: Sequence[int], first: int) -> list[Float]:
    """Normed rows at `first` on, committed; what four more rows then get in every layer."""
    rng = np.random.default_rng(5)
    norm = rng.random(32, np.float32) + 1
    outputs: list[Float] = []
    for rows, count in ((packed(rng, tokens), tokens), (packed(rng, 4), 4)):
        cache.begin(count, kv_only_layers=kv_only if count == tokens else ())
        at = first + np.arange(count)
        parts = zip(layers(), rows, strict=True)
        outputs = [cache.attend(params, part, at, INV_FREQ, norm, norm) for params, part in parts]
        if count == tokens:
            assert [bool(out.any()) for out in outputs] == [0 not in kv_only, 1 not in kv_only]
        cache.commit(count)
        first += count
    return outputs


@pytest.mark.parametrize("tokens", [3, 90])
def test_rows_that_ask_nothing_are_stored_as_those_that_ask(tokens: int) -> None:
    """A branch, and a chunk that closes pages layer by layer."""
    caches = [filled(150), filled(150), filled(150, use_native=False)]
    outputs = [
        kv_only_pass(cache, tokens, kv_only, 150)
        for cache, kv_only in zip(caches, [(), (1,), (1,)], strict=True)
    ]
    for layer in (0, 1):
        np.testing.assert_array_equal(outputs[1][layer], outputs[0][layer])
        close(outputs[1][layer], outputs[2][layer], RANDOM[8, 8])
    for cache in caches[1:]:
        for part, expected in zip(cache.tail(1, 0), caches[0].tail(1, 0), strict=True):
            np.testing.assert_array_equal(part, expected)
    with pytest.raises(CacheError, match="layers \\(2,\\) are not among 2"):
        caches[0].begin(1, kv_only_layers=(2,))


def test_stored_keys_are_normed_and_stand_at_their_positions() -> None:
    """KVP-7: an offset common to all positions changes the keys and no attention."""
    caches = [filled(0, use_native=use_native) for use_native in (True, True, False)]
    near, far, numpy = (
        kv_only_pass(cache, 30, (0, 1), first)
        for cache, first in zip(caches, (0, 1000, 1000), strict=True)
    )
    keys = [cache.tail(1, 0)[0].astype(np.float32) for cache in caches]
    assert np.abs(keys[0] - keys[1]).max() > 0.5
    close(keys[1], keys[2], RANDOM[8, 8])
    for layer in (0, 1):
        close(far[layer], near[layer], Tolerance(rms=2e-3, top=5e-3))
        close(far[layer], numpy[layer], RANDOM[8, 8])


@BOTH
@pytest.mark.parametrize("widths", [(16, 16), (8, 4)])
def test_keys_and_values_made_elsewhere_are_stored_as_a_pass_stores_its_own(
    widths: tuple[int, int], use_native: bool
) -> None:
    """KVP-7: unrotated and before their norm; pages close and bytes are those of a pass."""
    rng, at = np.random.default_rng(8), 70 + np.arange(90)
    rows = packed(rng, 90)
    norm = rng.random(32, np.float32) + 1
    states, outputs = [], []
    for append in (True, False):
        cache = filled(70, widths, use_native=use_native)
        if append:
            kept = [row.reshape(90, -1, 32)[:, SHAPE.num_heads :] for row in rows]
            keys, values = (
                np.stack([part[:, side : side + 2] for part in kept]) for side in (0, 2)
            )
            transforms = [
                KeyTransform(params=params, inv_freq=INV_FREQ, k_norm=norm) for params in layers()
            ]
            with pytest.raises(CacheError, match="are not the"):
                cache.append(keys[:, :-1], values, at, transforms)
            bad = np.where(np.arange(90)[:, None, None] == 40, np.nan, keys)
            with pytest.raises(CacheError, match="not finite"):
                cache.append(bad.astype(np.float32), values, at, transforms)
            assert (cache.tokens, cache.branch_rows) == (70, 0)
            cache.append(keys, values, at, transforms)
        else:
            cache.begin(90)
            for params, part in zip(layers(), rows, strict=True):
                cache.attend(params, part, at, INV_FREQ, norm, norm)
            cache.commit(90)
        states.append(cache.state())
        outputs.append(run(cache, packed(np.random.default_rng(9), 3), 160 + np.arange(3)))
    assert states[0] == states[1]
    for actual, expected in zip(*outputs, strict=True):
        np.testing.assert_array_equal(actual, expected)


@BOTH
def test_a_chunk_made_elsewhere_that_cannot_be_stored_changes_nothing(use_native: bool) -> None:
    """Also where a later layer is to blame, when the pages of those before it would be closed."""
    cache = filled(70, use_native=use_native)
    before = cache.state()
    keys, values = np.random.default_rng(3).standard_normal((2, 2, 150, 2, 32)).astype(np.float32)
    good, at = (
        [KeyTransform(params=params, inv_freq=INV_FREQ) for params in layers()],
        70 + np.arange(150),
    )
    for bad in (np.nan, np.inf, 1e5, -1e5):
        with pytest.raises(CacheError, match="not finite"):
            cache.append(np.where(np.indices(keys.shape)[0] == 1, bad, keys), values, at, good)
    with pytest.raises(BudgetError, match="takes 1 to"):
        cache.append(keys[:, :0], values[:, :0], at[:0], good)
    wide = KeyTransform(params=layers()[1], inv_freq=frequencies(17))
    with pytest.raises(CacheError, match="frequencies do not fit"):
        cache.append(keys, values, at, [good[0], wide])
    assert cache.state() == before
    cache.append(keys, values, at, good)
    assert cache.tokens == 220
    cache.close()
