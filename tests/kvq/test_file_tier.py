"""Pages in a file behind a processor's memory: what they give, what leaves it and comes back."""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from caches import spec
from kvq import native_library
from kvq.class_cache import ClassCache
from kvq.config import Budget, CacheShape, KvPlan
from kvq.errors import BackendError, BudgetError, UsageError
from kvq.geometry import as_config
from kvq.selectors import rule_named
from kvq.sizing import ClassArena
from numpy_cache import storage_named
from pairs import attend_alike

pytestmark = [
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
    pytest.mark.skipif(sys.platform != "linux", reason="refused elsewhere"),
]

SHAPE = CacheShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
PLAN = KvPlan(k_bits=6, v_bits=4)
PLANES = (3 + 2) * 1024  # bytes of a page's
CONTEXT = 3000
ALL = 1 << 30
# Of madvise: everything comes to memory and is seen there; what is seen there leaves it.
POPULATE_READ, PAGEOUT = 22, 21
MS_SYNC = 4


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def resolved(**options: Any) -> ClassArena:
    options = {"chunk_tokens": 256, "page_encodings": (1, 2) * 2, **options}
    return spec(SHAPE, PLAN, CONTEXT, **options).resolved()


def over_file(num_bytes: int, offload: int = ALL, **options: Any) -> ClassArena:
    budget = Budget(num_bytes=num_bytes)
    return resolved(budget=budget, offload_bytes=offload, offload_file=True, **options)


def least_bytes() -> int:
    with pytest.raises(BudgetError) as refused:
        over_file(200_000)
    return int(str(refused.value).rpartition("(")[2].partition(" ")[0])


class Two:
    """One cache all in memory, one with most of its pages in a file, told the same."""

    def __init__(self, num_bytes: int, **options: Any) -> None:
        self.rng = np.random.default_rng(0)
        self.caches = [ClassCache(resolved(**options)), ClassCache(over_file(num_bytes, **options))]

    @property
    def filed(self) -> ClassCache:
        return self.caches[1]

    def run(self, count: int, at: int | None = None) -> None:
        attend_alike(self.caches, self.rng, count, at)

    def fill(self, tokens: int) -> None:
        while tokens:
            self.run(min(tokens, 256))
            tokens -= min(tokens, 256)


@pytest.mark.parametrize("read", ["all", "blasst", "quest:share=0.3"])
def test_a_file_gives_what_memory_gives(read: str) -> None:
    two = Two(least_bytes(), read=read)
    two.fill(1500)
    for count in (1, 5, 1):
        two.run(count)
    for cache in two.caches:
        cache.trim(1203)
    two.fill(700)
    for cache in two.caches:
        cache.edit(300, 420, 200)
    two.run(200, at=300)
    two.run(1)
    states = [cache.state() for cache in two.caches]
    assert states[0] == states[1]
    for cache, state in zip(two.caches, reversed(states), strict=True):
        cache.load_state(state)
    two.run(1)


def test_the_oldest_pages_lie_in_the_file_until_it_is_full() -> None:
    arena = over_file(least_bytes() + 300_000)
    assert arena.file_bytes == arena.offload_bytes == arena.num_bytes - least_bytes() - 300_000
    assert arena.num_bytes == resolved().num_bytes
    two = Two(least_bytes() + 300_000)
    planes = 2 * 2 * PLANES  # of a column
    for tokens in (256, 1024, 1600):
        two.fill(tokens)
        columns = len(two.filed.columns()[0])
        file_bytes = min(columns * planes, arena.file_bytes)
        assert two.filed.usage().offloaded_bytes == file_bytes
    assert columns * planes > arena.file_bytes
    assert two.caches[0].usage().offloaded_bytes == 0
    assert two.filed.used_bytes == two.caches[0].used_bytes


def views(folder: Path) -> list[tuple[int, int]]:
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{folder}/" in line:
            first, last = line.split()[0].split("-")
            ranges.append((int(first, 16), int(last, 16)))
    return ranges


def in_memory(folder: Path) -> int:
    """System pages of the file that are."""
    count = 0
    for first, last in views(folder):
        residency = (ctypes.c_ubyte * ((last - first) // resource.getpagesize()))()
        room = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
        assert ctypes.CDLL(None).mincore(*room, residency) == 0
        count += sum(byte & 1 for byte in residency)
    return count


def evict(folder: Path) -> None:
    for first, last in views(folder):
        room = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
        ctypes.CDLL(None).msync(*room, MS_SYNC)
        for advice in (POPULATE_READ, PAGEOUT):
            ctypes.CDLL(None).madvise(*room, advice)
    if in_memory(folder):
        pytest.skip("this file system keeps what it was told to let go")


def test_a_step_brings_what_its_selection_names_and_no_more(folder: Path) -> None:
    two = Two(least_bytes())
    two.fill(CONTEXT - 10)
    whole = two.filed.arena.file_bytes // resource.getpagesize()
    brought = {}
    for read in ("all", "quest:share=0.1"):
        for cache in two.caches:
            cache.storage.read_by(rule_named(read))
        evict(folder)
        two.run(1)
        brought[read] = in_memory(folder)
    # A page of 64 tokens is 5 KiB here, which may begin and end within pages of the system.
    assert brought["all"] > 0.95 * whole
    assert 0.1 * whole <= brought["quest:share=0.1"] < 0.25 * whole


def test_a_closed_cache_leaves_no_file(folder: Path) -> None:
    cache = ClassCache(over_file(least_bytes()))
    assert len(views(folder)) == 1
    assert not list(folder.glob("**/*.*"))
    cache.close()
    assert not views(folder)


def test_budgets_are_held_to_the_byte_and_refused_by_name() -> None:
    least = least_bytes()
    arena = over_file(least)
    # The planes of all pages may lie in the file, and nothing else.
    assert arena.file_bytes == arena.max_columns * 2 * 2 * PLANES
    with pytest.raises(BudgetError, match=r"moves to a file, the page table, .* can"):
        over_file(least - 1)
    assert over_file(least, arena.file_bytes).file_bytes == arena.file_bytes
    with pytest.raises(BudgetError, match=r"cannot hold what a context of 3000 tokens .* can"):
        over_file(least, arena.file_bytes - 1)
    assert over_file(ALL).file_bytes == 0
    with pytest.raises(UsageError, match="the device 'cuda' has none"):
        ClassCache(arena, storage=storage_named("cuda"))
    behind = resolved(budget=Budget(num_bytes=arena.num_bytes - 1), offload_bytes=ALL)
    with pytest.raises(UsageError, match="offload_file=True"):
        ClassCache(behind)


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_without_room_is_an_error_that_says_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = over_file(least_bytes())
    with (
        no_file_longer_than(4096),
        pytest.raises(BudgetError, match=r"kv_offload needs .* in .*: File too large; make room"),
    ):
        ClassCache(arena)
    assert not list(folder.glob("**/*.*"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(BudgetError, match="Not a directory; make room"):
        ClassCache(arena)


def test_systems_that_keep_what_was_read_refuse_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = over_file(least_bytes())
    monkeypatch.setattr("kvq.native.sys", Mock(platform="darwin"))
    with pytest.raises(BackendError, match=r"does not take out of memory .* use Linux"):
        ClassCache(arena)
    ClassCache(resolved()).close()


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    arena, handle = over_file(least_bytes()), ctypes.c_int64()

    def opened(file: int, file_bytes: int) -> str:
        arguments = ctypes.byref(as_config(arena)), arena.num_bytes, arena.max_columns, None
        status = native_library.library().kvq_cache_open(
            *arguments, 0, 0, file, file_bytes, ctypes.byref(handle)
        )
        return native_library.library().kvq_status_text(status).decode()

    with (tmp_path / "short").open("wb+") as stream:
        stream.truncate(arena.file_bytes - 4096)
        assert "no memory" in opened(stream.fileno(), arena.file_bytes)
    assert "no memory" in opened(-1, arena.file_bytes)
    assert "argument" in opened(-1, arena.pool_bytes + 1)
    assert "argument" in opened(-1, -1)
    assert handle.value == 0
