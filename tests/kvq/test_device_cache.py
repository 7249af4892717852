"""A cache on a device does what the same cache on the processor does, to the byte where it stores.

The device is emulated, and with `-m gpu` a real one. Nothing is rotated where bytes must be equal:
two cosines need not agree.
"""

import ctypes
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from caches import budget_for_tokens, spec
from emulated import DEVICES, ready
from kvq import devices, native_library
from kvq.class_cache import ClassCache
from kvq.config import Budget, CacheShape, KvPlan
from kvq.errors import BackendError, CacheError
from numpy_cache import storage_named
from pairs import (
    UNROTATED,
    attention,
    frequencies,
    packed_rows,
    relative_rms,
    some_feedback,
)
from shelf import Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

SHAPE = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
CONTEXT = 1200
# By the narrower width: a device rounds what meets codes to float16, the processor to 7 or 15 bits.
TOLERANCE = {2: 0.05, 4: 0.05, 6: 0.004, 8: 0.004, 16: 0.001}


@pytest.fixture(scope="module", autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest, shelf: Shelf) -> str:
    ready(request.param, shelf)
    return request.param


class Both:
    """The processor's cache and the device's, told the same."""

    def __init__(
        self,
        device: str,
        seed: int,
        widths: tuple[int, int],
        *,
        rotated: bool = False,
        read: str = "all",
    ) -> None:
        self.chance, self.rng = random.Random(seed), np.random.default_rng(seed)
        plan = KvPlan(k_bits=widths[0], v_bits=widths[1], tail_tokens=self.chance.choice((0, 32)))
        forms = (self.chance.randrange(4),) * 2 if widths[0] < 16 else ()
        whole_tokens = 400 if widths[0] < 16 else CONTEXT
        needed = budget_for_tokens(
            SHAPE, plan, whole_tokens, context_tokens=CONTEXT, policy="budget"
        )
        cache_spec = spec(
            SHAPE, plan, CONTEXT, budget=Budget(num_bytes=needed), policy="budget",
            page_encodings=forms, windows=(0, 150), read=read,
        )  # fmt: skip
        self.arena = cache_spec.resolved()
        self.inv_freq = frequencies(16) if rotated else UNROTATED
        shape = (SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim)
        feedback = some_feedback(self.rng, *shape) if seed % 2 else None
        self.caches = [
            ClassCache(self.arena, feedback=feedback, storage=storage_named(engine))
            for engine in ("native", device)
        ]
        self.layers = [attention(SHAPE, 0), attention(SHAPE, 1, window_tokens=150, softcap=30.0)]
        self.tolerance = TOLERANCE[min(widths)]
        self.widths = widths

    def every(self, call: Callable[[ClassCache], object]) -> None:
        for cache in self.caches:
            call(cache)

    def run(
        self, count: int, view: str = "full", at: int | None = None, tree: bool = False
    ) -> list[int]:
        """Both attend alike; returns the path to the last row."""
        rows, cache = packed_rows(SHAPE, self.rng, count), self.caches[0]
        parents = [self.chance.randint(-1, i - 1) for i in range(count)] if tree else None
        paths: list[list[int]] = []
        for i in range(count):
            parent = i - 1 if parents is None else parents[i]
            paths.append([*(paths[parent] if parent >= 0 else []), i])
        depths = np.array([len(path) - 1 for path in paths])
        positions = (cache.tokens if at is None else at) + depths
        outs = []
        for twin in self.caches:
            twin.begin(count, parents, view=view, at=at)
            per_layer = zip(self.layers, rows, strict=True)
            outs.append([twin.attend(a, x, positions, self.inv_freq) for a, x in per_layer])
        tolerance = max(self.tolerance, TOLERANCE[4] if view == "hi" else 0)
        for want, got in zip(*outs, strict=True):
            assert relative_rms(got, want) < tolerance
        return paths[-1]

    def append(self, count: int | None = None) -> None:
        count = count or self.chance.choice((1, 30, 64, 128))
        if self.caches[0].tokens + count <= CONTEXT:
            self.run(count)
            self.every(lambda cache: cache.commit(count))

    def draft(self) -> None:
        count, kept = self.chance.randint(1, 8), self.chance.randint(0, 1)
        self.run(count, self.chance.choice(("full", "hi")))
        self.every(lambda cache: cache.rewind())
        path = self.run(count, tree=True)
        self.every(lambda cache: cache.commit(path[: kept * len(path)]))

    def trim(self) -> None:
        tokens = self.chance.randint(self.caches[0].tokens * 2 // 3, self.caches[0].tokens)
        self.every(lambda cache: cache.trim(tokens))

    def edit(self) -> None:
        tokens = self.caches[0].tokens
        if tokens > 40:
            start = self.chance.randint(8, tokens - 20)
            count = 90 if start % 2 and tokens + 90 <= CONTEXT else 3
            self.every(lambda cache: cache.edit(start, start + 7, count))
            self.run(count, at=start)
            self.every(lambda cache: cache.commit(count))

    def demote(self) -> None:
        _, widths = self.caches[0].columns()
        present = np.argwhere(widths[..., 0] > 2)
        if len(present):
            layer, head, column = present[self.chance.randrange(len(present))]
            k_bits, v_bits = widths[layer, head, column]
            lower = [self.chance.choice([w for w in (2, 4, 6, 8) if w <= bits])
                     for bits in (k_bits, v_bits)]  # fmt: skip
            actions = np.array([[layer, head, column, *lower]], np.int32)
            self.every(lambda cache: cache.demote(actions))

    def swap(self) -> None:
        """Each goes on from what the other saved."""
        states = [cache.state() for cache in self.caches]
        for cache, state in zip(self.caches, reversed(states), strict=True):
            cache.load_state(state)

    def close(self) -> None:
        self.every(lambda cache: cache.close())


@pytest.fixture
def opened(device: str) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def open_both(*arguments: object, **options: bool) -> Both:
        made.append(Both(device, *arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield open_both
    for both in made:
        both.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "widths"), [(0, (4, 2)), (1, (8, 8)), (2, (6, 4)), (3, (2, 6)), (4, (16, 16))]
)
def test_what_is_kept_is_the_same_to_the_byte(
    seed: int, widths: tuple[int, int], opened: Callable[..., Both]
) -> None:
    both = opened(seed, widths)
    both.append(128)
    both.append(102)
    for _ in range(8):
        steps = [both.append, both.draft, both.trim, both.edit, both.swap, both.append]
        both.chance.choice([*steps, both.demote] if widths[0] < 16 else steps)()
        on_host, on_device = (cache.state() for cache in both.caches)
        assert on_host == on_device
    assert both.caches[0].tokens > 100


def test_moved_pages_and_rows_meet_turned_queries(opened: Callable[..., Both]) -> None:
    both = opened(3, (8, 8), rotated=True)
    both.append(128)
    both.append(102)
    for _ in range(2):
        both.edit()
    both.every(lambda cache: cache.storage.shift_sinks(5))
    both.append(20)
    both.draft()


@pytest.mark.parametrize("read", ["quest:share=0.3", "quest:share=0.5"])
def test_a_device_chooses_the_processors_pages(read: str, opened: Callable[..., Both]) -> None:
    both = opened(2, (6, 4), rotated=True, read=read)
    for count in (128, 128, 90):
        both.append(count)
    both.every(lambda cache: cache.edit(100, 110, 3))
    both.run(3, at=100)
    both.every(lambda cache: cache.commit(3))
    for _ in range(4):
        before = [(cache.storage.pages_seen, cache.storage.pages_read) for cache in both.caches]
        both.append(1)
        after = [(cache.storage.pages_seen, cache.storage.pages_read) for cache in both.caches]
        steps = [np.subtract(*pair).tolist() for pair in zip(after, before, strict=True)]
        assert steps[0] == steps[1]
        assert steps[0][1] < steps[0][0]
    both.draft()


def test_evidence_of_a_device_is_that_of_the_processor(opened: Callable[..., Both]) -> None:
    both = opened(1, (4, 4))
    for count in (128, 128, 60):
        both.append(count)
    (facts, queries), (same_facts, same_queries) = (
        cache.storage.evidence(cache.tokens) for cache in both.caches
    )
    assert facts.any()
    np.testing.assert_array_equal(facts, same_facts)
    np.testing.assert_array_equal(queries, same_queries)


def test_a_device_that_fails_says_why(device: str, opened: Callable[..., Both]) -> None:
    if device != "emulated":
        pytest.skip("a GPU fails only by a defect")
    both = opened(1, (8, 8))
    library = ctypes.CDLL(str(devices.opened(device).library))
    library.kvq_cuda_fail(b"cudaErrorIllegalAddress", None)
    message = r"failed \(cudaErrorIllegalAddress\).* open the model"
    try:
        with pytest.raises(CacheError, match=message):
            both.append(3)
    finally:
        library.kvq_cuda_fail(b"", None)


def queued(device: str, call: Callable[[], object]) -> tuple[int, int]:
    """(launches, copies and clearings of memory) that `call` asks the emulated device for."""
    library, counts = ctypes.CDLL(str(devices.opened(device).library)), np.zeros((2, 2), np.int64)
    for i, act in enumerate((lambda: None, call)):
        act()
        launches, copies = (counts[i, kind:].ctypes.data for kind in range(2))
        library.kvq_cuda_queued(ctypes.c_void_p(launches), ctypes.c_void_p(copies), None)
    return int(counts[1, 0] - counts[0, 0]), int(counts[1, 1] - counts[0, 1])


@pytest.mark.parametrize(("heads", "pages"), [(1, 2), (3, 5)])
def test_what_is_queued_does_not_grow_with_pages_and_heads(
    device: str, heads: int, pages: int
) -> None:
    if device != "emulated":
        pytest.skip("the emulator alone counts")
    shape = CacheShape(num_layers=2, num_heads=heads, num_kv_heads=heads, head_dim=64)
    plan = KvPlan(k_bits=8, v_bits=8, tail_tokens=0)
    room = {"chunk_tokens": 512, "draft_tokens": 64}
    budget = Budget(num_bytes=budget_for_tokens(shape, plan, 600, **room))
    cache = ClassCache(
        spec(shape, plan, 600, budget=budget, **room).resolved(), storage=storage_named(device)
    )
    rng, layers = np.random.default_rng(0), range(shape.num_layers)

    def run(count: int) -> None:
        positions, rows = cache.tokens + np.arange(count), packed_rows(shape, rng, count)
        cache.begin(count, kv_only_layers=layers)
        for layer in layers:
            cache.attend(attention(shape, layer), rows[layer], positions, UNROTATED)

    run(84)
    cache.commit(84)
    # In each layer keys and values are stored, pages close, and what stays moves; six copies are
    # those of what comes in and goes out, zeros there, the tail's rows, the page table, and the
    # table of what closes. Two are of the pass.
    assert queued(device, lambda: run(64 * pages)) == (2 * 3, 2 * 6 + 2)
    cache.commit(64 * pages)
    run(60)
    assert queued(device, lambda: cache.commit(60)) == (2 * 2, 2 * 1)
    assert len(cache.columns()[0]) == pages + 2
    lower = np.array([[*at, 6, 2] for at in np.ndindex(2, heads, pages + 2)], np.int32)
    assert queued(device, lambda: cache.demote(lower)) == (1, 1)
    assert queued(device, lambda: cache.edit(70, 75, 0)) == (0, 0)
    assert queued(device, lambda: cache.edit(cache.tokens - 9, cache.tokens - 5, 2)) == (1, 1)
    cache.close()


def test_what_a_device_cannot_do_is_refused_by_name(device: str) -> None:
    plan = KvPlan(k_bits=4, v_bits=4)
    small = CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=48)
    with pytest.raises(BackendError, match=r"heads of 48 channels .* 64, 80, 96, 128, 256"):
        ClassCache(spec(small, plan, 100).resolved(), storage=storage_named(device))
    if device != "emulated":
        return
    big = CacheShape(num_layers=40, num_heads=8, num_kv_heads=8, head_dim=256)
    with pytest.raises(CacheError, match="no memory for the arena"):
        ClassCache(
            spec(big, KvPlan(k_bits=16, v_bits=16), 5000).resolved(), storage=storage_named(device)
        )
