"""The library's edges: calls from two threads, calls that make no sense, files that lie."""

import ctypes
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from caches import open_cache
from environment import ROOTS
from kvq import abi, native, native_library
from kvq.class_cache import ClassCache
from kvq.config import CacheShape, KvPlan
from kvq.errors import CacheError, SnapshotError
from kvq.formats import PAGE_VERSION
from pairs import BOTH, UNROTATED, attention, forward, packed_rows

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

SHAPE = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
LAYERS = [attention(SHAPE, layer) for layer in range(2)]
# A snapshot's header: thirteen or more int32 of the config, then columns, tail rows and tokens.
COUNTS = 4 * len(abi.NativeConfig._fields_)
HEADER = (COUNTS + 3 * 4 + 7) // 8 * 8 + 16

_CLOSE_DURING_A_CALL = """
import threading, time
from contextlib import suppress
import numpy as np
from caches import open_cache
from kvq.config import CacheShape, KvPlan
from kvq.errors import CacheError
from pairs import UNROTATED, attention, forward, packed_rows

shape = CacheShape(num_layers=1, num_heads=8, num_kv_heads=8, head_dim=128)
(rows,) = packed_rows(shape, np.random.default_rng(0), 512)
for turn in range(12):
    cache = open_cache(shape, KvPlan(), 64 << 20, 8192, chunk_tokens=512)
    for start in range(0, 2048, 512):
        forward(cache, [attention(shape)], [rows], np.arange(512) + start)
        cache.commit(512)
    cache.begin(512)
    def work():
        with suppress(CacheError):  # it was closed before the call had begun
            cache.attend(attention(shape), rows, np.arange(512) + 2048, UNROTATED)
    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.003)
    cache.close()
    filler = np.ones(8 << 20)  # memory that was given back too early is written over
    thread.join()
    try:
        cache.commit(512)
    except CacheError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_cache_may_be_closed_while_another_thread_attends() -> None:
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", _CLOSE_DURING_A_CALL],
        env=ROOTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.count("no open cache has this handle") == 12


def filled(tokens: int = 100, *, native: bool = True) -> ClassCache:
    cache = open_cache(SHAPE, KvPlan(k_bits=8, v_bits=8), 1 << 20, 1000, native=native)
    add(cache, tokens)
    return cache


def add(cache: ClassCache, tokens: int) -> None:
    at = np.arange(tokens) + cache.tokens
    rows = packed_rows(SHAPE, np.random.default_rng(tokens), tokens)
    forward(cache, LAYERS, rows, at)
    cache.commit(tokens)


def raw_attend(cache: ClassCache, layer: int, tokens: int) -> int:
    """The C call itself, which Python's own checks would never let through."""
    params = LAYERS[layer]
    facts = abi.NativeAttention(layer, 2, 1, 16, params.scale, 0, 1, 1e-6, 0, 0)
    rows = np.zeros((256, 64), np.float32)
    positions, out = np.zeros(256, np.int64), np.zeros((256, 32), np.float32)
    return native_library.library().kvq_cache_attend(
        cache.handle,
        ctypes.byref(facts),
        tokens,
        native.pointer(rows),
        native.pointer(positions),
        native.pointer(np.zeros(1, np.float32)),
        None,
        None,
        None,
        native.pointer(out),
    )


@pytest.mark.parametrize("tokens", [0, -1])
def test_no_tokens_close_no_page_after_a_chunk_was_given_up(tokens: int) -> None:
    cache = filled(131)
    before = cache.state()
    cache.begin(64)
    cache.rewind()
    assert raw_attend(cache, 0, tokens) != 0
    assert cache.state() == before
    cache.load_state(before)
    assert raw_attend(cache, 0, tokens) != 0
    assert cache.state() == before
    add(cache, 64)
    assert cache.tokens == 195
    cache.close()


def lie(at: int, value: int) -> Callable[[bytes], bytes]:
    return lambda state: state[:at] + struct.pack("<i", value) + state[at + 4 :]


WIDTHS_BYTES = 2 * 3  # forms, then K and V, of two streams, behind the header
TAIL_AT = HEADER + WIDTHS_BYTES + 2 * 24 + 2 * 2 * 4  # two columns, four entries
LIES = {
    "a first token beyond the tokens": lie(HEADER + WIDTHS_BYTES + 8, 2**31 - 1),
    "a first token before the start": lie(HEADER + WIDTHS_BYTES + 8, -(2**31)),
    "a page's position that overflows": lie(HEADER + WIDTHS_BYTES, 2**31 - 1),
    "a page's position below 0": lie(HEADER + WIDTHS_BYTES, -1),
    "a tail position that overflows": lie(TAIL_AT + 4 * 50, 2**31 - 1),
    "a tail position below 0": lie(TAIL_AT, -5),
    "more tokens than the context": lie(COUNTS + 8, 1001),
    "fewer tokens than tail rows": lie(COUNTS + 8, 3),
}


@pytest.mark.parametrize("how", LIES)
def test_a_snapshot_that_lies_about_positions_is_refused(how: str) -> None:
    cache = filled(4 + 64 + 2 * 64 + 10)
    facts, state = cache.columns()[0], cache.state()
    assert facts[:, 2].tolist() == [4, 68]
    with pytest.raises(SnapshotError):
        cache.load_state(LIES[how](state))
    assert cache.state() == state
    cache.close()


def test_positions_that_overflow_are_refused() -> None:
    cache = filled(10)
    rows = packed_rows(SHAPE, np.random.default_rng(1), 1)[0]
    for position in (-1, 2**31 - 1, 2**31, 2**62):
        cache.begin(1)
        with pytest.raises(CacheError):
            cache.attend(LAYERS[0], rows, np.array([position]), UNROTATED)
        cache.rewind()
    cache.close()


@BOTH
def test_numbers_beyond_32_bits_are_refused_and_not_wrapped(use_native: bool) -> None:
    cache = filled(200, native=use_native)
    before, far = cache.state(), 1 << 32
    cache.begin(2)
    for layer in LAYERS:
        cache.attend(layer, np.zeros((2, 64), np.float32), np.arange(2) + 200, UNROTATED)
    branched = (
        lambda: cache.commit(far + 1),
        lambda: cache.commit([far]),
        lambda: cache.rewind(far),
    )
    for call in branched:
        with pytest.raises(CacheError):
            call()
    with pytest.raises(CacheError):
        cache.begin(1, [far - 1])
    cache.rewind()
    idle = (
        lambda: cache.trim(far + 3),
        lambda: cache.edit(far + 8, far + 9, 0),
        lambda: cache.page(0, 0, far),
        lambda: cache.shift(far, 1),
        lambda: cache.demote(np.zeros((3, 4), np.int32)),
        lambda: cache.lower_new_page_widths(np.full((1, 1, 2), 2, np.uint8)),
    )
    for call in idle:
        with pytest.raises(CacheError):
            call()
    assert cache.state() == before
    cache.close()


def test_a_number_of_queries_that_no_pass_has_is_refused() -> None:
    cache = filled(10)
    forward(cache, LAYERS, packed_rows(SHAPE, np.random.default_rng(1), 2), np.arange(2) + 10)
    most = cache.chunk_tokens
    rows, q = np.zeros(most + 1, np.int64), np.zeros((most + 1, 32), np.float32)
    facts = abi.as_attention(LAYERS[1], 0)
    pointers = [native.pointer(part) for part in (rows, q, UNROTATED)]
    for queries, status in ((-1, 2), (-(2**31), 2), (most + 1, 2), (most, 0)):
        call = (cache.handle, ctypes.byref(facts), queries, *pointers, None, native.pointer(q))
        assert native_library.library().kvq_cache_look(*call) == status
    cache.close()


def test_convolutions_and_delta_nets_are_in_no_cache_together() -> None:
    """Layers that have seen a pass are counted in order, of either kind."""
    plain = (2, 2, 1, 16, 4, 4, 4, 64, 200, 64, 1000, 1, 0, 8, 64, PAGE_VERSION)
    conv, delta, out = (1, 16, 2, 4), (1, 1, 1, 16, 16, 2, 2, 8), abi.NativeLayout()
    for mixers, status in ((conv + (0,) * 8, 0), ((0,) * 4 + delta, 0), (conv + delta, 2)):
        config = abi.NativeConfig(*plain, *mixers)
        assert (
            native_library.library().kvq_layout_of(ctypes.byref(config), 1 << 30, 15, out) == status
        )


def test_sizes_beyond_64_bits_are_none_of_a_cache() -> None:
    """2^28 streams of 2^30 rows of a KiB are 2^68 bytes, which would count as none at all."""
    most = (1 << 16, 1 << 12, 1 << 12, 256, 16, 16, 4, 64, 1 << 30, 8, 1 << 30, 1, 0, 8, 64)
    config, out = abi.NativeConfig(*most, PAGE_VERSION), abi.NativeLayout()
    call = native_library.library().kvq_layout_of
    assert call(ctypes.byref(config), 1 << 60, 0, ctypes.byref(out)) == 2
    config.layers = config.kv_heads = config.heads = 1 << 10
    assert call(ctypes.byref(config), 1 << 60, 0, ctypes.byref(out)) == 6
    assert out.minimum_bytes > 1 << 60


@pytest.mark.parametrize(
    ("steps", "threads"),
    [(150, 1), *(pytest.param(*run, marks=pytest.mark.slow) for run in ((5000, 1), (400, 3)))],
)
def test_random_calls_of_the_c_abi_end_without_a_crash(steps: int, threads: int) -> None:
    """A short run; README says how to let it run for long, stopped by sanitizers."""
    script = Path(__file__).parents[1] / "support" / "abi_fuzz.py"
    arguments = [str(native_library.library_path()), "0", str(steps), str(threads)]
    finished = subprocess.run(
        [sys.executable, "-W", "error", script, *arguments],
        env=ROOTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


@pytest.mark.cross
def test_weights_that_are_no_numbers_are_not_counted_as_such(tmp_path: Path) -> None:
    """A damaged row must end as NaN, which sampling names, and not in a number's overflow."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    tests = Path(__file__).parents[1]
    kernels = tests.parent / "kvq" / "csrc" / "kernels"
    sources = [tests / "support" / "not_finite.cpp", kernels / "generic.cpp"]
    program = tmp_path / "not_finite"
    flags = ["-std=c++17", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run(["g++", *flags, f"-I{kernels}", *sources, "-o", program], check=True)
    finished = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "1000", "")
