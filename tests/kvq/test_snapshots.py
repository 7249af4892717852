"""Snapshots of a cache, whole and damaged, and the memory of the process that holds one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from caches import open_cache
from environment import ROOTS
from kvq import native_library
from kvq.class_cache import ClassCache
from kvq.config import CacheShape, KvPlan
from kvq.errors import (
    KvqError,
    SnapshotError,
)
from kvq.formats import grid_bytes
from pairs import (
    BOTH,
    LAYERS,
    SMALL,
    attention,
    filled_cache,
    forward,
    numbered_rows,
    pack_heads,
    random_heads,
    step,
)

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())


@BOTH
def test_a_snapshot_of_another_cache_is_refused_and_nothing_changes(use_native: bool) -> None:
    cache = filled_cache(use_native)
    state = cache.state()
    shape = CacheShape(num_layers=2, num_heads=4, num_kv_heads=1, head_dim=16)
    plan = KvPlan(k_bits=8, v_bits=4)
    other_states = [
        open_cache(shape, plan, 1 << 20, 1000, native=use_native),
        open_cache(SMALL, KvPlan(k_bits=8, v_bits=8), 1 << 20, 1000, native=use_native),
        open_cache(
            SMALL, KvPlan(k_bits=8, v_bits=4, sink_tokens=3), 1 << 20, 1000, native=use_native
        ),
        open_cache(SMALL, plan, (1 << 20) + 1, 1000, native=use_native),
        open_cache(SMALL, plan, 1 << 20, 900, native=use_native),
    ]
    for other in other_states:
        with pytest.raises(SnapshotError, match="another shape, plan or budget"):
            cache.load_state(other.state())
        assert cache.state() == state
        other.close()
    cache.close()


@BOTH
def test_a_damaged_snapshot_is_refused_and_nothing_changes(use_native: bool) -> None:
    cache = filled_cache(use_native)
    state = cache.state()
    for damaged in (
        b"",
        b"kvq",
        state[:50],
        state[:-1],
        state[: len(state) // 2],
        b"\0" * len(state),
    ):
        with pytest.raises(SnapshotError):
            cache.load_state(damaged)
        assert cache.state() == state
    step(cache)
    cache.close()


@BOTH
@pytest.mark.parametrize("half", [np.nan, np.inf, -np.inf])
def test_a_snapshot_with_what_is_no_number_is_refused(use_native: bool, half: float) -> None:
    """Nothing that is not finite is ever stored, so no kernel need ask for it."""
    cache = filled_cache(use_native)
    state = cache.state()
    damaged = _damaged_native if use_native else _damaged_numpy
    for bad in damaged(cache, np.float16(half).tobytes()):
        with pytest.raises(SnapshotError):
            cache.load_state(bad)
        assert cache.state() == state
    step(cache)
    cache.close()


def _damaged_native(cache: ClassCache, half: bytes) -> Iterator[bytes]:
    """A key of the tail, then each constant of a page's keys and of its values."""
    state, page = cache.state(), cache.page(1, 0, 2)
    grid = grid_bytes(SMALL.head_dim)
    start = state.index(page)
    places = [start + at + 2 * i for at in (0, grid) for i in range(4)]
    for at in (state.index(cache.tail(1, 0)[0].tobytes()), *places):
        yield state[:at] + half + state[at + 2 :]


def _damaged_numpy(cache: ClassCache, half: bytes) -> Iterator[bytes]:
    state = dict(np.load(BytesIO(cache.state())))
    for name, i in [("tail1k", 0), *((f"page2.1.{side}g", i) for side in (0, 1) for i in range(4))]:
        array = state[name].copy()
        array.reshape(-1).view(np.uint8)[2 * i : 2 * i + 2] = np.frombuffer(half, np.uint8)
        damaged = BytesIO()
        np.savez(damaged, allow_pickle=False, **(state | {name: array}))
        yield damaged.getvalue()


def test_native_snapshots_are_sized_exactly() -> None:
    cache = filled_cache(True)
    state = cache.state()
    with pytest.raises(SnapshotError):
        cache.load_state(state + b"\0")
    page_bytes = sum(len(cache.page(layer, 0, c)) for layer in (0, 1) for c in range(3))
    tail = 300 - 3 * 64
    assert len(state) - page_bytes - tail * (2 * 2 * 16 * 2 + 12) < 248
    cache.close()


def test_changed_bytes_in_a_native_snapshot_harm_no_memory() -> None:
    """Any byte may be wrong: it is refused, or loads as other numbers that can be worked with."""
    cache = filled_cache(True)
    state = cache.state()
    rng = np.random.default_rng(0)
    outcomes = set()
    places = [*range(220), *rng.integers(0, len(state), 200).tolist()]
    for place in places:
        damaged = bytearray(state)
        damaged[place] ^= int(rng.integers(1, 256))
        try:
            cache.load_state(bytes(damaged))
        except SnapshotError:
            outcomes.add("refused")
            continue
        outcomes.add("loaded")
        assert cache.used_bytes <= cache.peak_bytes <= cache.budget_bytes
        with suppress(KvqError):
            forward(cache, LAYERS, numbered_rows(rng, 2), np.arange(2) + 300)
        cache.rewind()
        columns = len(cache.columns()[0])
        cache.demote(np.array([[0, 0, c, 0, 0] for c in range(columns)], np.int32).reshape(-1, 5))
    assert outcomes == {"refused", "loaded"}
    cache.load_state(state)
    assert cache.state() == state
    cache.close()


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_a_snapshot_loads_with_another_number_of_threads(head_dim: int) -> None:
    shape = CacheShape(num_layers=2, num_heads=8, num_kv_heads=1, head_dim=head_dim)
    layers = [attention(shape, layer) for layer in (0, 1)]
    caches = [open_cache(shape, KvPlan(), 4 << 20, 4000, threads=threads) for threads in (1, 8, 2)]
    rng = np.random.default_rng(0)
    rows = [pack_heads(*random_heads(rng, shape, 250)) for _ in layers]
    forward(caches[0], layers, rows, np.arange(250))
    caches[0].commit(250)
    for source, other in pairwise(caches):
        other.load_state(source.state())
        # Only the number of splits and the peak, which counts scratch, differ in the header.
        assert len(other.state()) == len(source.state())
        assert other.state()[144:] == source.state()[144:]
        for column in range(2):
            assert other.page(1, 0, column) == source.page(1, 0, column)
    for cache in caches:
        cache.close()


def test_equal_contents_give_equal_snapshots_whatever_came_before() -> None:
    """A snapshot holds what is held: no memory of evicted pages, and nothing uninitialised."""
    direct, busy = filled_cache(True), filled_cache(True, 100)
    saved = direct.state()
    step(busy, 200)
    busy.demote(np.array([[layer, 0, 1, 0, 0] for layer in (0, 1)], np.int32))
    busy.trim(0)
    step(busy, 256)
    step(busy, 256)
    busy.load_state(saved)
    assert busy.state() == saved
    for cache in (direct, busy):
        step(cache, 100)
    assert busy.state() == direct.state()
    direct.close()
    busy.close()


# ---- memory --------------------------------------------------------------------------------------


MEMORY_SLACK_BYTES = 6 << 20
_FILL = """
import resource
import numpy as np
from caches import open_cache
from kvq.config import CacheShape, KvPlan
from pairs import attention, forward, pack_heads, random_heads

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

shape = CacheShape(num_layers=4, num_heads=4, num_kv_heads=4, head_dim=256)
layers = [attention(shape, layer, window_tokens=4) for layer in range(4)]
rows = [pack_heads(*random_heads(np.random.default_rng(0), shape, 128))] * 4

def fill(cache, tokens):
    while cache.tokens < tokens:
        forward(cache, layers, rows, np.arange(128) + cache.tokens)
        cache.commit(128)
        yield resident()

plan = KvPlan(k_bits=8, v_bits=8)
# Already short of room, so that what the first relief loads is not counted.
warm = open_cache(shape, plan, 8 << 20, 2048)
list(fill(warm, 2048))
warm.close()
before = resident()
cache = open_cache(shape, plan, BUDGET, 12800)
peak = max(fill(cache, 12800))
assert cache.columns()[1].min() < 8
print(peak - before, cache.peak_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_process_memory_grows_by_the_budget_and_a_constant() -> None:
    """A session that fills its budget twice over, everything touched."""
    budget = 48 << 20
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", _FILL.replace("BUDGET", str(budget))],
        env=os.environ | ROOTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    growth, peak = map(int, finished.stdout.split())
    assert 0.95 * budget < peak <= budget
    assert 0.9 * budget < growth <= budget + MEMORY_SLACK_BYTES
