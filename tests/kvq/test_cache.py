"""The cache as a whole: drafts, its pool of pages, calls out of order, no native code."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from caches import budget_for_tokens, minimum_budget, open_cache
from environment import ROOTS
from kvq import native_library
from kvq.class_cache import CacheUsage, ClassCache
from kvq.config import CacheShape, KvPlan
from kvq.errors import (
    BackendError,
    BudgetError,
    CacheError,
    SnapshotError,
)
from kvq.formats import page_bytes
from kvq.policies import Evidence, Relief
from kvq.sizing import tight_plan
from pairs import (
    ALL,
    BOTH,
    LAYERS,
    SMALL,
    UNROTATED,
    WIDTHS,
    Float,
    Pair,
    attention,
    filled_cache,
    forward,
    frequencies,
    numbered_rows,
    pack_heads,
    random_heads,
    step,
)
from regions import SPARE_VIEWS, column_bytes

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("use_native", "widths", "share"),
    [
        *((True, w, s) for w in ((8, 8), (4, 2), (16, 16)) for s in (0.0, 0.3, 1.0)),
        (False, (4, 2), 0.3),
        (False, (16, 16), 1.0),
    ],
)
def test_accepted_drafts_leave_the_state_of_sequential_decoding(
    use_native: bool, widths: tuple[int, int], share: float
) -> None:
    """Byte for byte, whatever was rejected in between, in any budget."""
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1])
    total = 700
    least, most = minimum_budget(SMALL, plan, total), budget_for_tokens(SMALL, plan, total)
    budget = least + int(share * max(0, most - least))
    sequential, drafting = (
        open_cache(SMALL, plan, budget, total, native=use_native) for _ in range(2)
    )
    rng = np.random.default_rng(11)
    true_rows = numbered_rows(rng, total)
    while drafting.tokens < total - 8:
        start, count = drafting.tokens, int(rng.integers(1, 9))
        kept = int(rng.integers(0, count + 1))
        wrong = numbered_rows(rng, count - kept)
        rows = [
            np.concatenate([true[start : start + kept], bad])
            for true, bad in zip(true_rows, wrong, strict=True)
        ]
        forward(drafting, LAYERS, rows, np.arange(start, start + count))
        drafting.commit(kept)
        for token in range(start, start + kept):
            step = [rows[token : token + 1] for rows in true_rows]
            forward(sequential, LAYERS, step, np.array([token]))
            sequential.commit(1)
        # Drafts near a page's end make the room it will need a few tokens early.
        if (drafting.tokens - plan.sink_tokens) % 64 < 50:
            assert drafting.state() == sequential.state()
    assert len(sequential.columns()[0]) > 0 or not plan.quantized
    sequential.close()
    drafting.close()


# ---- the pool ------------------------------------------------------------------------------------


class Scattered:
    """Takes bits and pages from anywhere, no more than asked."""

    needs = frozenset()

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        widths = evidence.widths.astype(int)
        lost_columns = np.flatnonzero(widths.any(axis=(0, 1, 3)))
        actions = []
        for column in self.rng.permutation(lost_columns)[:columns_short]:
            for layer, head in np.argwhere(widths[:, :, column].any(axis=-1)):
                bytes_short -= page_bytes(evidence.head_dim, *widths[layer, head, column])
                widths[layer, head, column] = 0
                actions.append((layer, head, column, 0, 0))
        while bytes_short > 0:
            live = np.argwhere(widths.any(axis=-1))
            layer, head, column = live[self.rng.integers(len(live))]
            before = tuple(widths[layer, head, column])
            lower = [w for w in WIDTHS if w[0] <= before[0] and w[1] <= before[1] and w != before]
            lower.append((0, 0))
            after = lower[self.rng.integers(len(lower))]
            bytes_short -= page_bytes(evidence.head_dim, *before)
            bytes_short += page_bytes(evidence.head_dim, *after) if after[0] else 0
            widths[layer, head, column] = after
            actions.append((layer, head, column, *after))
        return Relief(actions=np.array(actions, np.int32).reshape(-1, 5))


def exact_budget(shape: CacheShape, plan: KvPlan, context: int, pages: int, spare: int) -> int:
    """A budget whose pool holds just `pages` full pages of every stream, and `spare` bytes."""
    arena_of = open_cache(shape, tight_plan(plan), 64 << 20, context).arena
    budget = arena_of.bytes_for_columns(pages)
    pool_bytes = pages * column_bytes(arena_of, plan.k_bits, plan.v_bits) + spare
    while (short := pool_bytes - arena_of.room_for_pages(budget)) != 0:
        budget += short
    return budget


@pytest.mark.sampled
@pytest.mark.parametrize("widths", [(8, 8), (2, 2), (4, 2), (8, 2)])
@pytest.mark.parametrize("spare", [0, 7, 255, 300])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_pages_survive_any_mixture_of_evictions_and_new_pages(
    widths: tuple[int, int], spare: int, head_dim: int
) -> None:
    """A pool full to the last byte: what moves inside it keeps its bytes and its owner."""
    shape = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=0)
    context = 64 * 64
    budget = exact_budget(shape, plan, context, 5, spare)
    pair = Pair.open(shape, plan, budget, context, chunk_tokens=64)
    layers = [attention(shape, layer, window_tokens=1) for layer in range(2)]
    fullest = 0
    for cache in pair:
        cache.policy = Scattered(head_dim + spare)
    rng = np.random.default_rng(spare)
    for turn in range(50):
        rows = [pack_heads(*random_heads(rng, shape, 64)) for _ in layers]
        pair.fill(layers, rows)
        fullest = max(fullest, pair.native.used_bytes)
        if turn % 7 == 6:
            # Everything that is left becomes small, so that the next pages need other slots.
            page_widths = pair.native.columns()[1]
            lower = [(*at, 2, 2) for at in np.argwhere(page_widths.any(axis=-1)).tolist()]
            pair.demote(lower)
        if turn % 11 == 10:
            page_widths = pair.native.columns()[1]
            gone = [
                (*at, 0, 0) for at in np.argwhere(page_widths.any(axis=-1)).tolist() if at[2] % 2
            ]
            pair.demote(gone)
        assert_same_pages(pair)
        assert pair.native.peak_bytes <= budget
    # The table's rows run out before the bytes do where many pages are half evicted.
    pages = 1 if widths == (8, 8) else 10
    assert budget - fullest < pages * page_bytes(head_dim, *widths)
    pair.close()


def assert_same_pages(pair: Pair) -> None:
    facts, widths = pair.native.columns()
    expected = pair.numpy.columns()
    assert (facts == expected[0]).all()
    assert (widths == expected[1]).all()
    for layer, head, column in np.ndindex(*widths.shape[:3]):
        stored = pair.native.page(layer, head, column)
        assert stored == pair.numpy.page(layer, head, column)
    assert pair.native.used_bytes == pair.numpy.used_bytes


@BOTH
def test_closed_pages_never_change_over_thousands_of_steps(use_native: bool) -> None:
    """Single steps, some rejected; a page's bytes are those it was closed with."""
    plan = KvPlan(k_bits=8, v_bits=8)
    steps = 3000 if use_native else 600
    cache = open_cache(SMALL, plan, budget_for_tokens(SMALL, plan, steps), steps, native=use_native)
    rng = np.random.default_rng(1)
    closed: list[bytes] = []
    layers = [attention(SMALL, layer, window_tokens=8) for layer in range(2)]
    while cache.tokens < steps:
        count = int(rng.integers(1, 5))
        count = min(count, steps - cache.tokens)
        rows = numbered_rows(rng, count)
        forward(cache, layers, rows, np.arange(count) + cache.tokens)
        cache.commit(int(rng.integers(1, count + 1)))
        columns = len(cache.columns()[0])
        if columns > len(closed):
            closed.append(cache.page(1, 0, columns - 1))
            assert [cache.page(1, 0, column) for column in range(columns)] == closed
    assert len(closed) == (steps - 4) // 64 - 1
    cache.close()


# ---- calls out of order --------------------------------------------------------------------------


def forward_and_commit(cache: ClassCache, rows: list[Float], positions: NDArray[np.int64]) -> None:
    forward(cache, LAYERS, rows, positions)
    cache.commit(len(positions))


@BOTH
def test_calls_out_of_order_are_refused_and_do_no_harm(use_native: bool) -> None:
    cache = filled_cache(use_native)
    before = cache.state()
    rows, at = numbered_rows(np.random.default_rng(0), 2), np.array([300, 301])
    for call in (
        lambda: cache.attend(LAYERS[0], rows[0], at, UNROTATED),  # begin was not called
        lambda: cache.commit(0),
        lambda: cache.commit(1),
        lambda: cache.trim(-1),
        lambda: cache.trim(301),
    ):
        with pytest.raises(CacheError):
            call()
    for count in (0, -1, 257):
        with pytest.raises(BudgetError, match=f"1 to 256 tokens .* {count} were given"):
            cache.begin(count)
    cache.begin(2)
    for call in (
        lambda: cache.begin(2),
        lambda: cache.attend(LAYERS[0], rows[0][:1], at[:1], UNROTATED),
        lambda: cache.commit(2),  # no layer has seen the tokens
        lambda: cache.trim(100),
        lambda: cache.demote(np.array([[0, 0, 0, 2, 2]], np.int32)),
        lambda: cache.shift(0, 1),
        lambda: cache.mask(0, 1),
    ):
        with pytest.raises(CacheError):
            call()
    cache.attend(LAYERS[0], rows[0], at, UNROTATED)
    with pytest.raises(CacheError):
        cache.commit(1)  # one layer of two
    cache.attend(LAYERS[1], rows[1], at, UNROTATED)
    for count in (3, -1):
        with pytest.raises(CacheError):
            cache.commit(count)
    cache.rewind()
    cache.rewind()
    assert cache.state() == before
    step(cache, 2)
    assert cache.tokens == 302
    cache.close()


@BOTH
def test_actions_that_do_not_fit_a_page_change_nothing(use_native: bool) -> None:
    cache = filled_cache(use_native)
    columns = len(cache.columns()[0])
    assert columns == 3
    before = cache.state()
    good = [0, 0, 0, 2, 2]
    for bad in (
        [0, 0, 1, 8, 8],  # wider than the 8:4 it has
        [0, 0, 1, 3, 2],
        [0, 0, 1, 4, 0],
        [0, 0, 1, 0, 4],
        [0, 0, 1, -2, 2],
        [0, 0, columns, 2, 2],
        [0, 0, -1, 2, 2],
        [2, 0, 0, 2, 2],
        [0, 1, 0, 2, 2],
        [-1, 0, 0, 2, 2],
    ):
        with pytest.raises(CacheError):
            cache.demote(np.array([good, bad], np.int32))
        assert cache.state() == before
    for entering in ((8, 8), (0, 0), (3, 2), (8, 0)):  # pages enter at 8:4
        with pytest.raises(CacheError):
            cache.lower_new_page_widths(np.full((2, 1, 2), entering, np.uint8))
    for call in (
        lambda: cache.shift(columns, 1),
        lambda: cache.shift(-1, 1),
        lambda: cache.mask(columns, 1),
        lambda: cache.mask(-1, 1),
        lambda: cache.page(0, 0, columns),
        lambda: cache.page(0, 1, 0),
        lambda: cache.page(2, 0, 0),
    ):
        with pytest.raises(CacheError):
            call()
    assert cache.state() == before
    cache.demote(np.array([good], np.int32))
    assert cache.state() != before
    cache.close()


@BOTH
def test_wrong_shapes_are_refused_with_the_right_ones(use_native: bool) -> None:
    cache = filled_cache(use_native)
    cache.begin(2)
    rows, at = numbered_rows(np.random.default_rng(0), 2)[0], np.array([300, 301])
    ones = np.ones(16, np.float32)
    other = CacheShape(num_layers=1, num_heads=4, num_kv_heads=1, head_dim=16)
    for message, arguments in (
        ("none of CacheShape", (attention(SMALL, 2), rows, at, UNROTATED)),
        ("none of CacheShape", (attention(SMALL, -1), rows, at, UNROTATED)),
        ("none of CacheShape", (attention(other), rows, at, UNROTATED)),
        (r"\(2, 63\) is not the \(2, 64\)", (LAYERS[0], rows[:, :63], at, UNROTATED)),
        (r"\(2, 64\) is not the \(1, 64\)", (LAYERS[0], rows, at[:1], UNROTATED)),
        (r"\(2, 64\) is not the", (LAYERS[0], rows, at[:, None], UNROTATED)),
        ("frequencies do not fit 16", (LAYERS[0], rows, at, frequencies(9))),
        ("frequencies do not fit 16", (LAYERS[0], rows, at, frequencies(8)[:, None])),
        ("norm's weights are not", (LAYERS[0], rows, at, UNROTATED, ones[:8])),
        ("norm's weights are not", (LAYERS[0], rows, at, UNROTATED, None, ones[None])),
    ):
        with pytest.raises(CacheError, match=message):
            cache.attend(*arguments)
    wide = cache.attend(LAYERS[0], rows.astype(np.float64), at.astype(np.int32), UNROTATED)
    assert (wide == cache.attend(LAYERS[0], rows, at, UNROTATED)).all()
    normed = cache.attend(LAYERS[0], rows, at, UNROTATED, 2 * ones.astype(np.float64))
    assert (normed == cache.attend(LAYERS[0], rows, at, UNROTATED, 2 * ones)).all()
    cache.close()


@BOTH
def test_a_page_has_a_view_for_every_run_of_positions(use_native: bool) -> None:
    """As far as there are views; then a token that needs one more is refused."""
    plan = KvPlan(k_bits=8, v_bits=8, sink_tokens=4)
    for count in (8, 64):  # in the tail, and staged
        cache = open_cache(SMALL, plan, 1 << 20, 1000, native=use_native)
        rows = numbered_rows(np.random.default_rng(0), 127)
        positions = np.arange(127) + (np.arange(127) > 50)
        forward(cache, LAYERS, rows, positions)
        cache.commit(127)
        more = numbered_rows(np.random.default_rng(1), count)
        scattered = 2 * np.arange(count) + 128
        forward_and_commit(cache, more, scattered)
        assert cache.views()[:, 1:4].tolist() == [[4, 0, 4], [5, 0, 4]]
        assert cache.views()[:, 4].tolist() == [(1 << 47) - 1, -(1 << 47)]
        before = cache.tokens

        def fill(cache: ClassCache = cache, more: list[Float] = more, count: int = count) -> None:
            while cache.tokens < 900:
                forward_and_commit(cache, more, 2 * np.arange(count) + 2 * cache.tokens)

        with pytest.raises(CacheError):
            fill()
        assert cache.tokens - before >= SPARE_VIEWS - 2 * count
        cache.rewind()
        cache.trim(40)
        step(cache, 50)
        assert cache.tokens == 90
        cache.close()


@BOTH
def test_a_gap_between_sinks_and_pages_is_allowed(use_native: bool) -> None:
    cache = open_cache(SMALL, KvPlan(sink_tokens=4), 1 << 20, 1000, native=use_native)
    positions = np.r_[0:4, 100:228]
    forward(cache, LAYERS, numbered_rows(np.random.default_rng(0), 132), positions)
    cache.commit(132)
    assert cache.columns()[0].tolist() == [[100, 0, 4, -1]]
    assert cache.tail(0, 0)[2].tolist() == [*range(4), *range(164, 228)]
    cache.close()


@BOTH
def test_usage_is_counted_over_layers_heads_and_tokens(use_native: bool) -> None:
    plan = KvPlan(k_bits=8, v_bits=4, sink_tokens=4)
    cache = open_cache(SMALL, plan, 1 << 20, 1000, native=use_native)
    streams = SMALL.num_layers * SMALL.num_kv_heads
    assert cache.usage() == CacheUsage(mean_k_bits=0, mean_v_bits=0, evicted_share=0)
    step(cache, 200)
    step(cache, 66)
    # Three pages of 64 tokens; 4 sinks and 70 newer tokens are not quantised.
    usage = cache.usage()
    assert usage.mean_k_bits == pytest.approx((3 * 64 * 8 + 74 * 16) / 266)
    assert usage.mean_v_bits == pytest.approx((3 * 64 * 4 + 74 * 16) / 266)
    assert usage.evicted_share == 0

    cache.demote(np.array([[0, 0, 0, 2, 2], [0, 0, 1, 0, 0]], np.int32))
    usage, tokens = cache.usage(), 266 * streams
    k_bits = (3 * 64 * 8 + 74 * 16) * streams - 64 * (6 + 8)
    v_bits = (3 * 64 * 4 + 74 * 16) * streams - 64 * (2 + 4)
    assert usage.mean_k_bits == pytest.approx(k_bits / (tokens - 64))
    assert usage.mean_v_bits == pytest.approx(v_bits / (tokens - 64))
    assert usage.evicted_share == pytest.approx(64 / tokens)

    # A page gone everywhere leaves the table and still counts; so do masked tokens.
    gone = [[layer, head, 1, 0, 0] for layer in range(2) for head in range(SMALL.num_kv_heads)]
    cache.demote(np.array(gone[1:], np.int32))
    assert len(cache.columns()[0]) == 2
    assert cache.usage().evicted_share == pytest.approx(64 / 266)
    cache.mask(1, ALL >> 16)
    assert cache.usage().evicted_share == pytest.approx(80 / 266)
    cache.trim(4 + 40)
    usage = cache.usage()
    assert usage.evicted_share == 0
    k_bits = (40 * 8 + 4 * 16) * streams - 40 * 6
    assert usage.mean_k_bits == pytest.approx(k_bits / (44 * streams))
    cache.close()


def test_a_mask_shows_nothing_that_was_rolled_back() -> None:
    """Tokens behind the end would stand beside those that come next; no saved state has them."""
    shape = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    pair = Pair.open(shape, KvPlan(sink_tokens=0, tail_tokens=0), 1 << 20, 1000)
    rows = pack_heads(*random_heads(np.random.default_rng(0), shape, 128))
    pair.fill([attention(shape, 0)], [rows])
    pair.trim(100)
    for cache in pair:
        cache.mask(1, ALL)
        assert cache.columns()[0][:, 3].tolist() == [-1, (1 << 36) - 1]
        cache.load_state(cache.state())
    pair.close()


def test_an_unquantised_cache_holds_everything_at_16_bits() -> None:
    cache = open_cache(SMALL, KvPlan(k_bits=16, v_bits=16), 1 << 20, 300)
    step(cache, 200)
    assert cache.usage() == CacheUsage(mean_k_bits=16, mean_v_bits=16, evicted_share=0)
    cache.close()


def test_a_chunk_is_committed_whole_and_its_layers_come_in_order() -> None:
    """Native pages of a chunk close layer by layer, so it can be neither cut nor repeated."""
    cache = filled_cache(True)
    rows = numbered_rows(np.random.default_rng(0), 200)
    at = np.arange(300, 500)
    cache.begin(200)
    with pytest.raises(CacheError):
        cache.attend(LAYERS[1], rows[1], at, UNROTATED)
    cache.attend(LAYERS[0], rows[0], at, UNROTATED)
    used = cache.used_bytes
    with pytest.raises(CacheError):
        cache.attend(LAYERS[0], rows[0], at, UNROTATED)
    assert cache.used_bytes == used
    cache.attend(LAYERS[1], rows[1], at, UNROTATED)
    with pytest.raises(CacheError):
        cache.commit(199)
    cache.commit(200)
    assert cache.tokens == 500
    assert len(cache.columns()[0]) == 6
    cache.close()


def test_a_chunk_that_fails_half_way_ends_the_session_until_a_snapshot_is_loaded() -> None:
    cache = filled_cache(True)
    saved = cache.state()
    rows, at = numbered_rows(np.random.default_rng(0), 200), np.arange(300, 500)
    rows[1][7, 40] = np.nan
    with pytest.raises(CacheError, match="not finite in float16"):
        forward(cache, LAYERS, rows, at)
    cache.rewind()
    for call in (lambda: cache.begin(1), lambda: cache.trim(0), cache.state):
        with pytest.raises(CacheError, match="an earlier chunk failed"):
            call()
    cache.load_state(saved)
    assert cache.state() == saved
    step(cache)
    cache.close()


def test_a_chunk_that_fails_in_its_first_layer_does_no_harm() -> None:
    cache = filled_cache(True)
    saved = cache.state()
    rows, at = numbered_rows(np.random.default_rng(0), 200), np.arange(300, 500)
    rows[0][199, 32] = np.inf
    with pytest.raises(CacheError, match="not finite in float16"):
        forward(cache, LAYERS, rows, at)
    cache.rewind()
    assert cache.state() == saved
    step(cache)
    cache.close()


def test_a_closed_cache_refuses_every_call() -> None:
    cache, other = filled_cache(True), filled_cache(True)
    handle, state = cache.handle, cache.state()
    cache.close()
    cache.close()
    rows, at = numbered_rows(np.random.default_rng(0), 1)[0], np.array([300])
    for call in (
        lambda: cache.tokens,
        lambda: cache.used_bytes,
        lambda: cache.begin(1),
        lambda: cache.attend(LAYERS[0], rows, at, UNROTATED),
        lambda: cache.commit(1),
        cache.rewind,
        lambda: cache.trim(0),
        cache.columns,
        cache.state,
        lambda: cache.page(0, 0, 0),
        lambda: cache.tail(0, 0),
        lambda: cache.shift(0, 1),
        lambda: cache.mask(0, 1),
        lambda: cache.demote(np.zeros((0, 5), np.int32)),
    ):
        with pytest.raises(CacheError):
            call()
    with pytest.raises(SnapshotError):
        cache.load_state(state)
    assert other.handle != handle
    assert filled_cache(True).handle not in (handle, other.handle)
    assert other.tokens == 300
    other.close()


def test_without_the_native_library_no_cache_opens_and_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_library, "library_path", lambda: None)
    native_library.load.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"cannot run a model here: .*; .*pip install"):
            open_cache(SMALL, KvPlan(), 1 << 20, 100)
    finally:
        monkeypatch.undo()
        native_library.load.cache_clear()
    open_cache(SMALL, KvPlan(), 1 << 20, 100).close()


def test_an_unknown_instruction_set_in_the_environment_is_refused() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", "from kvq import native_library; native_library.isa()"],
        env=os.environ | ROOTS | {"KVQ_ISA": "neon"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{BackendError.__name__}: KVQ_ISA=neon is not possible here" in finished.stderr
