"""Layers with a sliding window hold what they see: bytes, results, rollbacks and edits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.caches import spec
from tests.support.pairs import attention, forward, packed_rows

from kvq.class_cache import ClassCache
from kvq.config import Budget, CacheShape, KvPlan
from kvq.errors import CacheError, UsageError
from kvq.formats import page_bytes
from kvq.geometry import WINDOW_MARGIN_TOKENS
from kvq.sizing import ClassSpec
from numpy_cache import storage_named

SHAPE = CacheShape(num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16)
WINDOWS = (100, 0, 100)
CONTEXT, CHUNK = 6000, 64
# Of each layer with a window: it, the margin, a draft and a chunk, and a page in part at both ends.
MOST_COLUMNS = -(-(100 + WINDOW_MARGIN_TOKENS + 8 + CHUNK) // 64) + 2


def window_spec(windows: tuple[int, ...] = WINDOWS, **options: Any) -> ClassSpec:
    return spec(SHAPE, KvPlan(), CONTEXT, windows=windows, chunk_tokens=CHUNK, **options)


def held_whole(engine: str = "native", **options: Any) -> ClassCache:
    """With the smallest budget that holds the whole context."""
    cache_spec = window_spec(**options)
    whole = replace(cache_spec, budget=Budget(num_bytes=cache_spec.whole_bytes))
    return ClassCache(whole.resolved(), storage=storage_named(engine))


def read(cache: ClassCache, rng: np.random.Generator, tokens: int) -> list[NDArray[np.float32]]:
    """Chunks of a text; what each layer gave for each."""
    outs: list[NDArray[np.float32]] = []
    layers = [
        attention(SHAPE, layer, window_tokens=window)
        for layer, window in enumerate(cache.windows.tolist())
    ]
    while tokens > 0:
        size = min(tokens, CHUNK)
        positions = np.arange(cache.tokens, cache.tokens + size)
        outs += forward(cache, layers, packed_rows(SHAPE, rng, size), positions)
        cache.commit(size)
        assert cache.used_bytes <= cache.budget_bytes
        tokens -= size
    return outs


def test_a_layer_with_a_window_takes_its_window_and_no_context() -> None:
    window, whole = (
        window_spec().geometry(tight=False, probes=False, places=0),
        window_spec(windows=()),
    )
    columns = window.context_columns
    assert columns > MOST_COLUMNS
    assert window.held_pages(columns) == columns + 2 * MOST_COLUMNS
    assert window.held_pages(3) == 9
    saved = 2 * (columns - MOST_COLUMNS) * page_bytes(16, 4, 4)
    saving = whole.whole_bytes - window_spec().whole_bytes
    # And the table of granules is shorter by as much.
    assert saved < saving < 1.1 * saved
    assert window_spec(edits=True).whole_bytes == whole.whole_bytes
    # A share of fp16 is one of what a peer that knows windows holds.
    assert window_spec().float_bytes == (CONTEXT + 2 * 100) * 2 * 16 * 2
    assert whole.float_bytes == 3 * CONTEXT * 2 * 16 * 2
    with pytest.raises(UsageError, match="2 windows were given for 3 layers"):
        window_spec(windows=(0, 1))


@pytest.mark.parametrize("engine", ["native", "numpy"])
def test_what_no_query_sees_goes_and_changes_nothing(engine: str) -> None:
    """Bit for bit what a cache computes that keeps everything, and not a bit is lost in sight."""
    tight, full = held_whole(engine), held_whole(engine, edits=True)
    tokens = CONTEXT - 372 if engine == "native" else 1500
    for count in (tokens, 1, 7, 64, 300):
        for ours, theirs in zip(
            read(tight, np.random.default_rng(count), count),
            read(full, np.random.default_rng(count), count),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, theirs)
    counts = [(cache.columns()[1][..., 0] > 0).sum(axis=(1, 2)).tolist() for cache in (tight, full)]
    columns = counts[1][0]
    assert counts[1] == [columns] * 3
    assert counts[0][1] == columns, "the layer without a window keeps all"
    if engine == "native":
        assert tight.tokens == CONTEXT
        assert sum(counts[0]) <= columns + 2 * MOST_COLUMNS
    assert (tight.columns()[1].max(), tight.usage().evicted_share) == (4, 0.0)
    tight.close()
    full.close()


def test_a_context_that_only_windows_see_needs_no_more_with_its_length() -> None:
    short, long = (
        spec(SHAPE, KvPlan(), tokens, windows=(100,) * 3, chunk_tokens=CHUNK)
        for tokens in (3000, 6000)
    )
    # Rows of the page table alone.
    rows = 6000 // 64 - 3000 // 64
    assert long.whole_bytes - short.whole_bytes < (rows + 1) * (3 * 44 + 48) + 128
    cache = held_whole(windows=(100,) * 3)
    read(cache, np.random.default_rng(0), 5900)
    assert cache.columns()[0].shape[0] <= MOST_COLUMNS
    assert cache.usage().evicted_share == 0.0
    state = cache.state()
    other = held_whole(windows=(100,) * 3)
    other.load_state(state)
    assert other.usage().evicted_share == 0.0
    other.trim(4000)
    assert other.tokens == 0, "no column is left that says so, and yet it is gone"


def test_a_rollback_is_exact_or_begins_anew() -> None:
    cache, full = held_whole(), held_whole(edits=True)
    for each in (cache, full):
        read(each, np.random.default_rng(1), 4000)
    back = 4000 - WINDOW_MARGIN_TOKENS
    for each in (cache, full):
        each.trim(back)
    assert cache.tokens == back
    for ours, theirs in zip(
        *(read(each, np.random.default_rng(2), 1) for each in (cache, full)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    cache.trim(2000)
    full.trim(2000)
    assert (cache.tokens, full.tokens) == (0, 2000)
    assert cache.columns()[0].shape[0] == 0
    for text in (300, 300):  # what was computed anew rolls back as ever
        read(cache, np.random.default_rng(3), text)
        cache.trim(200)
        assert cache.tokens == 200


def test_before_anything_is_gone_every_rollback_and_edit_is_exact() -> None:
    cache = held_whole()
    read(cache, np.random.default_rng(1), 1200)
    cache.edit(300, 310, 5)
    cache.trim(100)
    assert cache.tokens == 100


def test_an_edit_before_what_is_left_is_refused_and_changes_nothing() -> None:
    cache = held_whole()
    read(cache, np.random.default_rng(1), 4000)
    before = cache.state()
    with pytest.raises(CacheError, match=r"windows? have given up tokens .* from token 2000 on"):
        cache.edit(2000, 2010, 10)
    assert cache.state() == before
    cache.edit(3990, 3995, 5)
    kept = held_whole(edits=True)
    read(kept, np.random.default_rng(1), 4000)
    kept.edit(2000, 2010, 10)
    assert kept.tokens == 4000


def test_a_saved_cache_knows_what_its_windows_left_behind() -> None:
    cache, other = held_whole(), held_whole()
    read(cache, np.random.default_rng(1), 4000)
    other.load_state(cache.state())
    with pytest.raises(CacheError, match="given up tokens"):
        other.edit(2000, 2010, 10)
    assert other.usage() == cache.usage()
    other.trim(4000 - WINDOW_MARGIN_TOKENS)
    assert other.tokens == 4000 - WINDOW_MARGIN_TOKENS
    other.trim(2000)
    assert other.tokens == 0
    young = held_whole()
    read(young, np.random.default_rng(1), 1000)
    other.load_state(young.state())
    other.trim(10)
    assert other.tokens == 10


@pytest.mark.parametrize("policy", ["budget", "uniform", "oldest", "h2o"])
def test_under_a_budget_the_windows_pages_go_before_any_bit(policy: str) -> None:
    """A budget that holds what is seen, but not the context in every layer, loses no bit."""
    cache_spec = window_spec(policy=policy)
    budget = Budget(num_bytes=cache_spec.bytes_for_tokens(3000))
    cache = ClassCache(replace(cache_spec, budget=budget).resolved())
    read(cache, np.random.default_rng(1), 2900)
    widths = cache.columns()[1][:, 0]
    assert set(widths[widths > 0].tolist()) == {4}
    assert (widths[1] > 0).all(), "the layer without a window lost nothing"
    assert cache.usage().evicted_share == 0.0
    read(cache, np.random.default_rng(1), 3000)  # and now it does
    widths = cache.columns()[1][1, 0]
    assert (widths != 4).any() or len(widths) < 5900 // 64 - 1


def test_a_second_tier_keeps_all() -> None:
    cache_spec = window_spec(offload_bytes=1 << 30)
    assert cache_spec.geometry(tight=False, probes=False, places=0).windows == ()
