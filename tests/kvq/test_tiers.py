"""A cache in two tiers, a device's memory and the host's, gives what one on the device gives.

Bit for bit, on the emulated device: its second stream copies as late as it may or as early. With
`-m gpu` on a real one.
"""

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from caches import spec
from emulated import DEVICES, ready
from kvq import devices, native_library
from kvq.class_cache import ClassCache
from kvq.config import Budget, CacheShape, KvPlan, parse_offload
from kvq.errors import BudgetError, CacheError, UsageError
from kvq.formats import constant_bytes
from kvq.sizing import ClassArena
from numpy_cache import storage_named
from pairs import attend_alike
from regions import column_bytes
from shelf import Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

CONTEXT, RESIDENT = 900, 2
PLAN = KvPlan(k_bits=6, v_bits=2)
ALL = 1 << 30


@pytest.fixture(scope="module", autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest, shelf: Shelf) -> str:
    ready(request.param, shelf)
    return request.param


def shape(layers: int) -> CacheShape:
    return CacheShape(num_layers=layers, num_heads=2, num_kv_heads=2, head_dim=64)


def whole(layers: int, read: str = "all") -> ClassArena:
    cache_spec = spec(
        shape(layers), PLAN, CONTEXT, chunk_tokens=128, page_encodings=(1, 2) * layers, read=read
    )
    return cache_spec.resolved()


def in_tiers(
    layers: int, num_bytes: int, offload: int = ALL, plan: KvPlan = PLAN, read: str = "all"
) -> ClassArena:
    cache_spec = spec(
        shape(layers), plan, CONTEXT, chunk_tokens=128, page_encodings=(1, 2) * layers, read=read,
        budget=Budget(num_bytes=num_bytes), offload_bytes=offload,
    )  # fmt: skip
    return cache_spec.resolved()


def plane_bytes(arena: ClassArena) -> int:
    """Of a column: what the host's memory holds of it."""
    constants = constant_bytes(arena.shape.head_dim, arena.value_groups)
    return column_bytes(arena, PLAN.k_bits, PLAN.v_bits) - arena.streams * constants


class Pair:
    """One cache with all its pages on the device, one with two columns there, told the same."""

    def __init__(self, device: str, layers: int, read: str = "all") -> None:
        self.rng = np.random.default_rng(layers)
        needed = whole(layers).bytes_with_resident(RESIDENT)
        self.arena = in_tiers(layers, needed, read=read)
        assert self.arena.resident_columns == RESIDENT
        arenas = whole(layers, read), self.arena
        self.caches = [ClassCache(arena, storage=storage_named(device)) for arena in arenas]

    @property
    def tiered(self) -> ClassCache:
        return self.caches[1]

    def every(self, call: Callable[[ClassCache], object]) -> None:
        for cache in self.caches:
            call(cache)

    def run(self, count: int, at: int | None = None) -> None:
        attend_alike(self.caches, self.rng, count, at)

    def check(self) -> None:
        states = [cache.state() for cache in self.caches]
        assert states[0] == states[1]
        assert self.tiered.storage.device_bytes == self.arena.bytes_with_resident(RESIDENT)


@pytest.fixture
def opened(device: str) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def open_pair(layers: int, **options: str) -> Pair:
        made.append(Pair(device, layers, **options))
        return made[-1]

    yield open_pair
    for pair in made:
        pair.every(lambda cache: cache.close())


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "early"), [(3, True), (3, False), (4, False)])
def test_tiers_give_what_one_gives(
    layers: int, early: bool, device: str, opened: Callable[..., Pair]
) -> None:
    pair = opened(layers)
    library = ctypes.CDLL(str(devices.opened(device).library))
    if early and device != "emulated":
        pytest.skip("a GPU copies when it likes")
    try:
        if early:
            library.kvq_cuda_take_turns(-1, None)
        check_tiers(pair, layers)
    finally:
        if early:
            library.kvq_cuda_take_turns(0, None)


def check_tiers(pair: Pair, layers: int) -> None:
    page = plane_bytes(pair.arena)
    for count in (128, 128, 128, 30, 1, 1):
        pair.run(count)
    assert len(pair.tiered.columns()[0]) == 5
    # Of three layers the second is alone in its room, and stays there.
    streamed = 3 * page if layers == 4 else 2 * page
    assert pair.tiered.storage.offloaded_bytes == 3 * page
    assert pair.tiered.storage.streamed_bytes == streamed
    pair.check()

    # What is there goes, and what comes takes its places.
    pair.every(lambda cache: cache.trim(250))
    assert len(pair.tiered.columns()[0]) == 4
    assert pair.tiered.usage().offloaded_bytes == 3 * page
    for count in (128, 128, 1):
        pair.run(count)
    pair.every(lambda cache: cache.edit(30, 140, 100))
    pair.run(100, at=30)
    pair.run(1)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 4])
def test_of_the_host_only_chosen_pages_come_over(
    layers: int, device: str, opened: Callable[..., Pair]
) -> None:
    pair = opened(layers, read="quest:share=0.4")
    page = plane_bytes(pair.arena) // pair.arena.streams
    for count in (128, 128, 128, 30):
        pair.run(count)
    # Steps of one row and of several, between them a prompt that reads all.
    came = []
    for count in (1, 1, 3, 1, 100, 1, 6):
        seen, read = pair.tiered.storage.pages_seen, pair.tiered.storage.pages_read
        pair.run(count)
        columns = len(pair.tiered.columns()[0])
        if count < 100:
            engine, streams = pair.tiered.storage, pair.arena.streams
            away = columns - RESIDENT
            assert engine.pages_seen - seen == count * streams * columns
            assert engine.pages_read - read == count * streams * -(-2 * columns // 5)
            came.append(engine.streamed_bytes / page / streams / away)
    assert all(0 < share < 1 for share in came)
    assert min(came) < 0.5
    pair.check()


@pytest.mark.slow
def test_a_session_moves_between_one_tier_and_two(opened: Callable[..., Pair]) -> None:
    pair = opened(4)
    for count in (128, 128, 70):
        pair.run(count)
    states = [cache.state() for cache in pair.caches]
    for cache, state in zip(pair.caches, reversed(states), strict=True):
        cache.load_state(state)
    pair.run(1)
    pair.run(128)
    pair.check()


def test_a_copy_that_waits_for_nothing_is_refused(device: str, opened: Callable[..., Pair]) -> None:
    if device != "emulated":
        pytest.skip("only the emulated device sees it")
    library = ctypes.CDLL(str(devices.opened(device).library))
    facts = (ctypes.c_char * 1024)()
    assert library.kvq_cuda_open(facts) == 0
    opened(3).run(1)
    # The stream for copies is the structure's last member.
    ends = np.frombuffer(facts.raw, np.uint64)
    copies = ctypes.c_void_p(int(ends[np.flatnonzero(ends)[-1]]))
    room = (ctypes.c_char * 8)()
    count = ctypes.c_int64(1)
    arguments = (room, count, room, count, count, count, copies)
    try:
        assert library.kvq_cuda_copy(*arguments) != 0
    finally:
        library.kvq_cuda_fail(b"", None)
    assert library.kvq_cuda_after(copies, None) == 0
    assert library.kvq_cuda_copy(*arguments) == 0
    assert library.kvq_cuda_wait(copies) == 0


def test_tiers_take_what_they_are_given_and_no_less() -> None:
    arena = whole(4)
    least = arena.bytes_with_resident(2)
    with pytest.raises(BudgetError, match=r"twice those of a layer; .* can"):
        in_tiers(4, least - 1)
    for more in range(2, 13):
        tiered = in_tiers(4, arena.bytes_with_resident(more))
        assert tiered.resident_columns == more
        assert tiered.offload_bytes == (arena.max_columns - more) * plane_bytes(arena)
    assert in_tiers(4, least, in_tiers(4, least).offload_bytes).resident_columns == 2
    with pytest.raises(BudgetError, match=r"cannot hold what a context of 900 tokens .* can"):
        in_tiers(4, least, in_tiers(4, least).offload_bytes - 1)
    assert in_tiers(4, ALL).resident_columns == 0


def test_what_tiers_cannot_do_is_refused_by_name(device: str) -> None:
    arena = in_tiers(4, whole(4).bytes_with_resident(2))
    for engine in ("native", "numpy"):
        with pytest.raises(UsageError, match="offload_file=True"):
            ClassCache(arena, storage=storage_named(engine))
    with pytest.raises(UsageError, match=r"fp.* has none"):
        in_tiers(4, 1 << 20, plan=KvPlan(k_bits=16, v_bits=16))
    cache = ClassCache(arena, storage=storage_named(device))
    with pytest.raises(CacheError, match="keep their widths"):
        cache.demote(np.array([[0, 0, 0, 4, 2]], np.int32))
    cache.close()
    for text in ("25%", "900tok", "much", "0"):
        with pytest.raises(UsageError, match=r"kv_offload .* give bytes"):
            parse_offload(text)
    assert parse_offload("2KiB") == 2048
