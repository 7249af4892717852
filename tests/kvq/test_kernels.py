"""Native kernels against the reference, for every instruction set this machine runs.

Bytes must be equal. Attention must be within `tolerances.py`; where the data are such that the
kernels' own rounding is exact (`sharp_heads`, `flat_heads`), within float32's: a token too many or
too few shows there.
"""

import itertools
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caches import budget_for_tokens, open_cache
from kvq import native, native_library
from kvq.class_cache import ClassCache
from kvq.config import HEAD_DIMS, CacheShape, KvPlan, PageForm
from kvq.errors import BackendError, CacheError
from kvq.formats import grid_bytes
from kvq.reference.stored import attention_weights, encode, planes, two_bit_plane
from native_calls import select_isa
from pairs import (
    UNROTATED,
    Float,
    Pair,
    adversarial,
    attention,
    flat_heads,
    forward,
    frequencies,
    pack_heads,
    random_heads,
    relative_max,
    relative_rms,
    sharp_heads,
    some_feedback,
    structured_heads,
)
from tolerances import (
    BETWEEN_KERNELS,
    BETWEEN_SPLITS,
    EXACT,
    FLOAT_PAIR,
    PAIRS,
    RANDOM,
    ROTATED,
    STRUCTURED,
    Tolerance,
)

pytestmark = [
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
    pytest.mark.usefixtures("kernels_restored"),
]

KERNELS = native_library.isas() if native_library.available() else []
ROWS = 8
SINKS = 4
EMULATOR = "qemu-x86_64-static"


def assert_close(got: Float, want: Float, tolerance: Tolerance) -> None:
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert relative_rms(got, want) <= tolerance.rms
    assert relative_max(got, want) <= tolerance.top


# ---- encoding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [16, 48, *HEAD_DIMS])
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_pages_are_packed_to_the_reference_bytes(kernels: str, dim: int, side: int) -> None:
    select_isa(kernels)
    for (name, x), axis in itertools.product(adversarial(64, dim).items(), (0, 1)):
        stored, grid = native.pack(x, side, axis=axis)
        codes, expected = encode(x, axis)
        assert grid.tobytes() == expected.stored(), (name, axis)
        assert (stored == planes(codes, 8, side)).all(), (name, axis)


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [16, 48, *HEAD_DIMS])
def test_carried_keys_are_packed_to_the_reference_bytes(kernels: str, dim: int) -> None:
    select_isa(kernels)
    feedback = some_feedback(np.random.default_rng(dim), dim)
    for bits, (name, x) in zip(itertools.cycle((4, 2, 8, 6)), adversarial(64, dim).items()):
        stored, grid = native.pack(x, 0, bits, feedback=feedback)
        codes, expected = encode(x, 0, bits=bits, feedback=feedback)
        assert grid.tobytes() == expected.stored(), (name, bits)
        assert (stored == planes(codes, bits, 0)).all(), (name, bits)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dim", [16, 80, 256])
def test_carried_keys_are_narrowed_to_the_reference_bytes(kernels: str, dim: int) -> None:
    """By every step down, several in one call too; values lose bytes alone."""
    select_isa(kernels)
    shape = CacheShape(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=dim)
    plan, rng = KvPlan(k_bits=8, v_bits=8), np.random.default_rng(dim)
    feedback = some_feedback(rng, 1, 2, dim)
    pair = Pair.open(shape, plan, 4 << 20, 400, feedback=feedback)
    pair.fill([attention(shape)], [pack_heads(*random_heads(rng, shape, 400))])
    before = [pair.native.page(0, 0, column) for column in range(3)]
    for steps in (
        [(0, 6, 8), (1, 4, 8), (2, 2, 8)], [(0, 4, 6), (1, 2, 8)], [(0, 4, 4), (0, 2, 4), (2, 2, 2)]
    ):  # fmt: skip
        pair.demote([(0, head, c, k, v) for c, k, v in steps for head in (0, 1)])
        for head, column in itertools.product((0, 1), range(3)):
            assert pair.native.page(0, head, column) == pair.numpy.page(0, head, column)
    assert before[1][: grid_bytes(dim)] == pair.native.page(0, 0, 1)[: grid_bytes(dim)]
    pair.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e8, 1e30])
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
def test_beyond_float16_is_refused(kernels: str, value: float, side: int) -> None:
    select_isa(kernels)
    for where in ((0, 0), (63, 79), (31, 40)):
        x = adversarial(64, 80)["noise"]
        x[where] = value
        with pytest.raises(CacheError, match="not finite in float16"):
            native.pack(x, side)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("dim", [16, *HEAD_DIMS])
def test_the_two_bit_plane_is_the_top_of_the_high_plane(kernels: str, dim: int, side: int) -> None:
    select_isa(kernels)
    x = adversarial(64, dim)["noise"]
    codes, _ = encode(x, side)
    assert (native.pack(x, side, 4)[0] == planes(codes, 4, side)).all()
    assert (native.pack(x, side, 2)[0] == two_bit_plane(codes >> 6, side)).all()
    assert (native.pack(x, side, 6)[0] == planes(codes, 6, side)).all()


def test_kernels_are_chosen_by_name() -> None:
    assert KERNELS[-1] == "generic"
    assert native_library.isa() in KERNELS
    for name in KERNELS:
        select_isa(name)
        assert native_library.isa() == name
    with pytest.raises(
        BackendError, match=r"kernels 'abacus' cannot run here; choose from .*generic"
    ):
        select_isa("abacus")
    assert native_library.isa() == "generic"


@pytest.mark.skipif(
    shutil.which(EMULATOR) is None or platform.machine() not in ("x86_64", "AMD64"),
    reason=f"needs {EMULATOR} and a library for such processors",
)
@pytest.mark.parametrize(
    ("processor", "kernels"), [("Nehalem", ["generic"]), ("Haswell", ["avx2", "generic"])]
)
def test_older_processors_get_the_kernels_they_run(processor: str, kernels: list[str]) -> None:
    """Looks for kernels on a processor without what others need, where an instruction may fault."""
    code = "from kvq import native_library; print(*native_library.isas())"
    command = [EMULATOR, "-cpu", processor, sys.executable, "-c", code]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.split() == kernels


# ---- attention on data with a tolerance --------------------------------------------------------


def filled(
    shape: CacheShape,
    widths: tuple[int, int],
    heads: Callable[..., tuple[Float, Float, Float]],
    tokens: int,
    *,
    inv_freq: Float = UNROTATED,
    seed: int = 0,
    more: int = 4 * ROWS,
    **options: Any,
) -> tuple[Pair, np.random.Generator]:
    """One-layer caches holding `tokens` tokens at full width, with room for `more`."""
    rng = np.random.default_rng(seed)
    plan = KvPlan(k_bits=widths[0], v_bits=widths[1], sink_tokens=SINKS)
    context = tokens + more
    budget = budget_for_tokens(shape, plan, context, **options)
    pair = Pair.open(shape, plan, budget, context, **options)
    pair.fill([attention(shape)], [pack_heads(*heads(rng, shape, tokens))], inv_freq)
    return pair, rng


def attend_by_each_kernel(
    pair: Pair, rows: Float, inv_freq: Float = UNROTATED, **changes: float
) -> dict[str, Float]:
    """Outputs of the rows at the next positions, per kernels; nothing is committed."""
    layers = [attention(pair.native.shape, 0, **changes)]
    positions = np.arange(len(rows)) + pair.native.tokens
    outputs = {}
    for name in KERNELS:
        select_isa(name)
        outputs[name] = forward(pair.native, layers, [rows], positions, inv_freq)[0]
        pair.native.rewind()
    return outputs


def attend_by_reference(
    pair: Pair, rows: Float, inv_freq: Float = UNROTATED, **changes: float
) -> Float:
    layers = [attention(pair.native.shape, 0, **changes)]
    positions = np.arange(len(rows)) + pair.native.tokens
    out = forward(pair.numpy, layers, [rows], positions, inv_freq)[0]
    pair.numpy.rewind()
    return out


GROUPS = (1, 2, 4, 7)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("head_dim", "group"),
    # Every size of heads meets one group quickly, and all of them in what is slow.
    [
        pytest.param(head_dim, group, marks=[pytest.mark.slow] * ((i + j) % len(GROUPS) > 0))
        for i, head_dim in enumerate(HEAD_DIMS)
        for j, group in enumerate(GROUPS)
    ],
)
def test_attention_is_the_references_for_every_width_pair(head_dim: int, group: int) -> None:
    """M = 8 rows; the first m of them see what m rows see, so m rows must give the same bits."""
    shape = CacheShape(num_layers=1, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim)
    inv_freq = frequencies(head_dim // 2)
    kinds = [(random_heads, RANDOM), (structured_heads, STRUCTURED)]
    for heads, limits in kinds if group in (1, 4) else kinds[:1]:
        for widths in (*PAIRS, FLOAT_PAIR):
            pair, rng = filled(shape, widths, heads, 200, inv_freq=inv_freq, seed=head_dim + group)
            rows = pack_heads(*heads(rng, shape, ROWS))
            want = attend_by_reference(pair, rows, inv_freq)
            outputs = attend_by_each_kernel(pair, rows, inv_freq)
            for got in outputs.values():
                assert_close(got, want, limits[widths])
                assert_close(got, outputs["generic"], BETWEEN_KERNELS)
            alike = heads is random_heads and widths[0] == widths[1]
            for count in range(1, ROWS) if alike else ():
                fewer = attend_by_each_kernel(pair, rows[:count], inv_freq)
                for name, got in fewer.items():
                    assert (got == outputs[name][:count]).all()
            pair.close()


@pytest.mark.parametrize("head_dim", [16, *HEAD_DIMS])
def test_every_form_of_pages_is_the_references(head_dim: int) -> None:
    """Rotated keys and values on a grid of channels, beside heads without: bytes and attention."""
    shape = CacheShape(num_layers=1, num_heads=8, num_kv_heads=4, head_dim=head_dim)
    inv_freq = frequencies(head_dim // 2)
    for widths in ((8, 8), (4, 2), (2, 4)):
        pair, rng = filled(
            shape,
            widths,
            random_heads,
            200,
            page_encodings=tuple(map(PageForm, range(4))),
        )
        for head, column in itertools.product(range(4), range(2)):
            assert pair.native.page(0, head, column) == pair.numpy.page(0, head, column)
        pair.shift(1, -7)
        rows = pack_heads(*random_heads(rng, shape, ROWS))
        want = attend_by_reference(pair, rows, inv_freq)
        for got in attend_by_each_kernel(pair, rows, inv_freq).values():
            assert_close(got, want, RANDOM[widths])
        pair.close()


def test_rotated_keys_are_met_by_rotated_queries() -> None:
    """At 8 bits every form gives what unquantised keys and values give."""
    shape = CacheShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
    inv_freq, outputs = frequencies(32), []
    for widths, forms in ((FLOAT_PAIR, ()), ((8, 8), (PageForm(3), PageForm(3)))):
        pair, rng = filled(
            shape, widths, structured_heads, 300, inv_freq=inv_freq, page_encodings=forms, more=8
        )
        rows = pack_heads(*structured_heads(rng, shape, 8))
        outputs.append(attend_by_reference(pair, rows, inv_freq))
        pair.close()
    assert relative_rms(outputs[1], outputs[0]) < 0.02


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("widths", [(8, 8), (4, 2), FLOAT_PAIR])
def test_eight_rows_equal_eight_steps(kernels: str, widths: tuple[int, int]) -> None:
    """Verifying drafts gives bit for bit what decoding them one by one gives."""
    select_isa(kernels)
    shape = CacheShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64)
    inv_freq = frequencies(32)
    pair, rng = filled(shape, widths, random_heads, 300, inv_freq=inv_freq)
    rows = pack_heads(*random_heads(rng, shape, ROWS))
    cache, layers = pair.native, [attention(shape)]
    at_once = forward(cache, layers, [rows], np.arange(300, 300 + ROWS), inv_freq)[0]
    cache.rewind()
    for step in range(ROWS):
        out = forward(cache, layers, [rows[step : step + 1]], np.array([300 + step]), inv_freq)[0]
        assert (out == at_once[step]).all()
        cache.commit(1)
    assert len(cache.columns()[0]) == (3 if widths != FLOAT_PAIR else 0)
    pair.close()


@pytest.mark.sampled
@pytest.mark.parametrize("widths", [(8, 8), (4, 4), (4, 2), (2, 8), FLOAT_PAIR])
@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_prefill_in_chunks_is_the_references(widths: tuple[int, int], chunk: int) -> None:
    """Chunks over pages, tail and staged rows; the last chunk's rows are compared."""
    shape = CacheShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64)
    inv_freq = frequencies(32)
    for name in KERNELS:
        select_isa(name)
        pair, rng = filled(shape, widths, random_heads, 290, inv_freq=inv_freq, more=chunk)
        rows = pack_heads(*random_heads(rng, shape, chunk))
        got, want = (
            forward(cache, [attention(shape)], [rows], np.arange(290, 290 + chunk), inv_freq)[0]
            for cache in pair
        )
        assert_close(got, want, RANDOM[widths])
        pair.close()


# ---- attention where the kernels' rounding is exact --------------------------------------------


EXACT_HEADS = pytest.mark.parametrize("heads", [sharp_heads, flat_heads])


def plain(pair: Pair) -> None:
    """Pages as they were closed."""


def holes(pair: Pair) -> None:
    """Masks: every third token, none, one token, all but the ends."""
    pair.mask(0, 0x9249249249249249)
    pair.mask(1, 0)
    pair.mask(2, 1 << 37)
    pair.mask(3, (1 << 63) - 2)


def moved(pair: Pair) -> None:
    """Shifts: two that differ, none, one repeated, and one beyond the queries."""
    for column, delta in enumerate((7, -3, 0, 7, 5000)):
        pair.shift(column, delta)


def moved_before_the_start(pair: Pair) -> None:
    pair.shift(0, -300)
    pair.shift(3, -199)


def moved_among_the_queries(pair: Pair) -> None:
    """Each query sees one token more of page 0, and none of page 2 but for the last query."""
    pair.shift(0, 400 - SINKS - 20)
    pair.shift(2, 400 + ROWS - 1 - SINKS - 128)


def gone_for_one_head(pair: Pair) -> None:
    columns = len(pair.native.columns()[0])
    pair.demote([(0, 1, column, 0, 0) for column in range(columns)])


def scattered(pair: Pair) -> None:
    """Evictions of some heads, then of whole columns, so that the table closes up."""
    pair.demote([(0, 0, 0, 0, 0), (0, 1, 3, 0, 0)])
    pair.demote([(0, 0, 2, 0, 0), (0, 1, 2, 0, 0)])
    pair.shift(1, -11)


CASES = pytest.mark.parametrize(
    "change",
    [
        plain,
        holes,
        moved,
        moved_before_the_start,
        moved_among_the_queries,
        gone_for_one_head,
        scattered,
    ],
)


@pytest.mark.sampled
@EXACT_HEADS
@CASES
@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_exactly_the_visible_tokens_are_attended(
    heads: Callable[..., tuple[Float, Float, Float]],
    change: Callable[[Pair], None],
    head_dim: int,
) -> None:
    """Masks, shifts and evictions under windows and soft caps."""
    shape = CacheShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=head_dim)
    inv_freq = frequencies(32)
    for widths in ((8, 8), (4, 2), (2, 4)):
        pair, rng = filled(shape, widths, heads, 400, seed=head_dim)
        change(pair)
        q, k, v = heads(rng, shape, ROWS)
        rows = pack_heads(q, 0 * k, v)  # zero keys rotate to themselves in any arithmetic
        for window, softcap in ((0, 0.0), (150, 0.0), (1, 0.0), (201, 3.0), (0, 0.5)):
            options = {"window_tokens": window, "softcap": softcap}
            want = attend_by_reference(pair, rows, inv_freq, **options)
            for got in attend_by_each_kernel(pair, rows, inv_freq, **options).values():
                assert_close(got, want, EXACT)
        pair.close()


@EXACT_HEADS
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_pages_of_mixed_widths_are_merged_exactly(
    heads: Callable[..., tuple[Float, Float, Float]], head_dim: int
) -> None:
    """Demoted pages beside full ones, at every head_dim (QS-9)."""
    shape = CacheShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    inv_freq = frequencies(32)
    pair, rng = filled(shape, (8, 8), heads, 400, seed=head_dim)
    steps = [(4, 8), (2, 4), (8, 2), (2, 2)]
    pair.demote([(0, head, c, *steps[(c + head) % 4]) for c in range(4) for head in (0, 1)])
    q, k, v = heads(rng, shape, ROWS)
    rows = pack_heads(q, 0 * k, v)
    want = attend_by_reference(pair, rows, inv_freq)
    for got in attend_by_each_kernel(pair, rows, inv_freq).values():
        assert_close(got, want, EXACT)
    pair.close()


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("widths", [(8, 8), (4, 2), (2, 2)])
def test_loud_and_faint_keys_keep_the_softmax_stable(kernels: str, widths: tuple[int, int]) -> None:
    """Logits of thousands: the best token wins in whatever page it is, all others vanish."""
    select_isa(kernels)
    shape = CacheShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64)
    for winner in (0, 5, 70, 131, 260, 398):

        def heads(
            rng: np.random.Generator, shape: CacheShape, tokens: int, winner: int = winner
        ) -> tuple[Float, Float, Float]:
            q, k, v = random_heads(rng, shape, tokens)
            q[:], k[:] = 0, 0
            q[:, :, 0], k[:, :, 0] = 300, -300
            v[:] = np.arange(tokens, dtype=np.float32)[:, None, None]
            if tokens > winner:
                k[winner, :, 0] = 300
            return q, k, v

        pair, rng = filled(shape, widths, heads, 400)
        q, k, v = heads(rng, shape, 3)
        out = attend_by_each_kernel(pair, pack_heads(q, k, v))[kernels]
        assert np.abs(out - winner).max() < 0.1
        pair.close()


@EXACT_HEADS
def test_splits_only_change_the_order_of_sums(
    heads: Callable[..., tuple[Float, Float, Float]],
) -> None:
    """Work divided over page ranges for threads, empty ranges included."""
    shape = CacheShape(num_layers=1, num_heads=4, num_kv_heads=1, head_dim=64)
    plan = KvPlan(k_bits=4, v_bits=4)
    outputs = []
    for threads in (1, 2, 3):
        budget = budget_for_tokens(shape, plan, 2100, threads=threads)
        cache = open_cache(shape, plan, budget, 2100, threads=threads)
        rng = np.random.default_rng(3)
        qkv = pack_heads(*heads(rng, shape, 2000))
        for start in range(0, 2000, 250):
            positions = np.arange(start, start + 250)
            forward(cache, [attention(shape)], [qkv[start : start + 250]], positions)
            cache.commit(250)
        assert len(cache.columns()[0]) == 30
        rows = pack_heads(*heads(rng, shape, ROWS))
        for window in (0, 300):
            layers = [attention(shape, 0, window_tokens=window)]
            outputs.append(forward(cache, layers, [rows], np.arange(2000, 2000 + ROWS))[0])
            cache.rewind()
        cache.close()
    for whole, *splits in (outputs[0::2], outputs[1::2]):
        for output in splits:
            assert_close(output, whole, BETWEEN_SPLITS)


# ---- what happens to rows before they are cached -----------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("pairs", [0, 1, 16, 24, 40])
@pytest.mark.parametrize("norms", ["none", "q", "k", "both"])
def test_rotation_and_norms_are_the_references(kernels: str, pairs: int, norms: str) -> None:
    """Partial rotary, a rotary factor, and RMSNorm of q and k; floating-point cache."""
    select_isa(kernels)
    shape = CacheShape(num_layers=1, num_heads=6, num_kv_heads=3, head_dim=80)
    plan = KvPlan(k_bits=16, v_bits=16)
    pair = Pair.open(shape, plan, budget_for_tokens(shape, plan, 100), 100)
    rng = np.random.default_rng(pairs)
    weights = [rng.uniform(0.5, 2, 80).astype(np.float32) for _ in range(2)]
    q_norm = weights[0] if norms in ("q", "both") else None
    k_norm = weights[1] if norms in ("k", "both") else None
    params = attention(shape, rope_factor=1.1, norm_eps=1e-3)
    for start, count in ((0, 1), (1, 70), (71, 8)):
        rows = pack_heads(*random_heads(rng, shape, count))
        positions = np.arange(start, start + count)
        outputs = []
        for cache in pair:
            cache.begin(count)
            inv_freq = frequencies(pairs)
            outputs.append(cache.attend(params, rows, positions, inv_freq, q_norm, k_norm))
            cache.commit(count)
        assert_close(*outputs, ROTATED)
    for head in range(3):
        got, want = (cache.tail(0, head) for cache in pair)
        assert np.abs(got[0].astype(np.float32) - want[0]).max() <= 0.004
        assert (got[1] == want[1]).all()
        assert got[2].tolist() == list(range(79))
    pair.close()


@pytest.mark.parametrize("window", [0, 100])
def test_a_heads_sink_shares_in_its_softmax(window: int) -> None:
    """Over floating-point rows, pages in several parts, a long chunk and a step."""
    shape = CacheShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64)
    plan, tokens = KvPlan(k_bits=8, v_bits=8), 1400
    options = {"threads": 2, "chunk_tokens": 1300}
    budget = budget_for_tokens(shape, plan, tokens, **options)
    caches = {name: open_cache(shape, plan, budget, tokens, **options) for name in KERNELS}
    reference = open_cache(shape, plan, budget, tokens, native=False, **options)
    rng = np.random.default_rng(window)
    params = attention(shape, window_tokens=window)
    sinks = np.array([-40, 0, 6, 2, 30, 5], np.float32)

    def attended(cache: ClassCache, rows: Float) -> Float:
        positions = np.arange(len(rows)) + cache.tokens
        cache.begin(len(rows))
        output = cache.attend(params, rows, positions, frequencies(32), sink_logits=sinks)
        cache.commit(len(rows))
        return output

    for count in (1, 1300, 3, 1):
        rows = pack_heads(*random_heads(rng, shape, count))
        expected = attended(reference, rows)
        for name, cache in caches.items():
            select_isa(name)
            actual = attended(cache, rows)
            assert_close(actual, expected, RANDOM[8, 8])
            heads = actual.reshape(count, 6, 64)
            assert np.abs(heads[:, 4]).max() < 1e-6, "all of it goes to the sink"
            assert np.abs(heads[:, 0]).max() > 0.05
    for cache in (reference, *caches.values()):
        cache.close()


def test_a_sink_takes_its_share_of_what_keys_weigh() -> None:
    params = attention(CacheShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16))
    logits = np.log(np.array([[1, 2, 5], [3, 4, 9]], np.float32))
    seen = np.array([[True, True, False], [True, True, True]])
    weights = attention_weights(params, logits, seen, sink_logit=float(np.log(4)))
    np.testing.assert_allclose(weights, [[1 / 7, 2 / 7, 0], [0.15, 0.2, 0.45]], rtol=1e-6)
    nothing = attention_weights(params, logits, np.zeros_like(seen), sink_logit=1.0)
    np.testing.assert_array_equal(nothing, 0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_empty_and_one_token_caches(kernels: str) -> None:
    select_isa(kernels)
    for head_dim, plan in itertools.product(HEAD_DIMS, (KvPlan(), KvPlan(k_bits=16, v_bits=16))):
        shape = CacheShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=head_dim)
        pair = Pair.open(shape, plan, 4 << 20, 64)
        rng = np.random.default_rng(head_dim)
        q, k, v = random_heads(rng, shape, 1)
        outputs = [
            forward(cache, [attention(shape)], [pack_heads(q, k, v)], np.array([0]))[0]
            for cache in pair
        ]
        values = np.repeat(v.astype(np.float16).astype(np.float32), 2, axis=1).reshape(1, -1)
        assert (outputs[0] == values).all()
        assert (outputs[1] == values).all()
        for cache in pair:
            cache.commit(1)
        rows = pack_heads(*random_heads(rng, shape, ROWS))
        want = attend_by_reference(pair, rows)
        assert_close(attend_by_each_kernel(pair, rows)[kernels], want, RANDOM[FLOAT_PAIR])
        pair.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("tokens", "threads"), [(0, 1), (200, 1), (1400, 8)])
def test_a_query_that_is_no_number_has_no_answer_and_spoils_no_other(
    kernels: str, tokens: int, threads: int
) -> None:
    """Zeros would go on as if nothing had happened; sampling says what is wrong with NaN."""
    select_isa(kernels)
    shape = CacheShape(num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16)
    pair, rng = filled(shape, (8, 4), random_heads, tokens, threads=threads)
    q, k, v = random_heads(rng, shape, 1)
    plain = attend_by_each_kernel(pair, pack_heads(q, k, v))[kernels].reshape(q.shape)
    q[0, 1, 3], q[0, 3, 15] = np.nan, -np.inf
    lost = ~np.isfinite(q).all(axis=2)
    got = attend_by_each_kernel(pair, pack_heads(q, k, v))[kernels].reshape(q.shape)
    with np.errstate(invalid="ignore"):
        want = attend_by_reference(pair, pack_heads(q, k, v)).reshape(q.shape)
    for out in (got, want):
        assert np.isnan(out[lost]).all()
    np.testing.assert_array_equal(got[~lost], plain[~lost])
    pair.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_token_pages(kernels: str) -> None:
    """Rolling back into a page leaves a mask of one token; rows written after it are seen."""
    select_isa(kernels)
    shape = CacheShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
    pair, rng = filled(shape, (8, 8), sharp_heads, 300)
    pair.trim(SINKS + 64 + 1)
    facts = pair.native.columns()[0]
    assert facts[:, 3].tolist() == [-1, 1]
    rows = pack_heads(*sharp_heads(rng, shape, ROWS))
    want = attend_by_reference(pair, rows)
    assert_close(attend_by_each_kernel(pair, rows)[kernels], want, EXACT)
    pair.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of the processor")
def test_kernels_are_those_of_the_processor() -> None:
    said = set(Path("/proc/cpuinfo").read_text().split())
    avx2 = {"avx2", "fma", "f16c"}
    vectors = avx2 | {"avx512_vnni", "avx512f", "avx512vl", "avx512bw", "avx512dq"}
    needs = {
        "amxint8": vectors | {"amx_tile", "amx_int8"},
        "avx512vnni": vectors,
        "avxvnni": avx2 | {"avx_vnni"},
        "avx2": avx2,
        "neon": {"asimddp"},
    }
    announced = [*(name for name in needs if needs[name] <= said), "generic"]
    # AMX may be announced and not work (test_tiles); then there is a reason.
    refused = native_library.isa_refused().partition(":")[0]
    assert native_library.isas() == [name for name in announced if name != refused]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ABI", native_library.ABI + 1, "belongs to another version of kvq; "),
        ("library_path", lambda: None, "is not in this installation; "),
    ],
)
def test_no_library_is_a_reason_and_the_command_that_mends_it(
    name: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions of another version may take other arguments: numpy is slower than a crash."""
    monkeypatch.setattr(native_library, name, value)
    native_library.load.cache_clear()
    try:
        reason, _, command = native_library.why_not().rpartition(said)
        assert native_library.LIBRARY in reason
        assert "pip install" in command
    finally:
        monkeypatch.undo()
        native_library.load.cache_clear()
    assert native_library.why_not() == ""
