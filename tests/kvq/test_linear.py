"""`kvq::Linear` and `kvq::Embed`: the stored bytes, and native products against the definition."""

from itertools import product

import numpy as np
import pytest

from kvq import native_library
from kvq.errors import BackendError
from kvq.native_linear import linear, weight_bytes_read
from kvq.reference import linear as reference
from kvq.reference.linear import (
    PANEL_ROWS,
    WIDTHS,
    BlockFormat,
    Blocks,
    Float,
    Grid,
    PanelFormat,
)
from kvq.reference.stored import normalize
from matrices import FORMATS, KINDS, activations, matrix
from native_calls import embed, select_isa
from tolerances import PREPARED, PRODUCT

pytestmark = pytest.mark.usefixtures("kernels_restored")
needs_native = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
KERNELS = native_library.isas() if native_library.available() else []
# (rows, columns): less than a panel, odd everything, whole panels, more than one row block.
PAIRS = {(32, Grid.MINIMUM), (64, Grid.ZERO_POINT), (64, Grid.SYMMETRIC), (128, Grid.ZERO_POINT)}
FORMS = [
    kind
    for kind in FORMATS
    if (kind.block, kind.grid) in {*PAIRS, (32, Grid.E2M1)} or kind.grid.has_supers
]
SHAPES = [(5, 7), (16, 64), (50, 200), (33, 449), (96, 896), (40, 5000)]


def close(actual: Float, expected: Float) -> None:
    assert actual.shape == expected.shape
    size = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(actual - expected) <= PRODUCT.top * size).all()


# The bytes


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_packed_comes_back(kind: BlockFormat, shape: tuple[int, int]) -> None:
    form = PanelFormat.of(kind, shape)
    blocks, panels = matrix(form)
    assert panels.shape == (form.panels, form.panel_bytes)
    assert form.panel_bytes % 64 == 0
    actual = reference.unpack(form, panels)
    np.testing.assert_array_equal(actual.codes[: form.rows], blocks.codes)
    np.testing.assert_array_equal(actual.scales[: form.rows], blocks.scales)
    assert not actual.scales[form.rows :].any()
    for name in ("offsets", "sub_scales", "sub_offsets"):
        values, expected = getattr(actual, name), getattr(blocks, name)
        assert (values is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(values[: form.rows], expected)
            assert values.dtype == expected.dtype


@pytest.mark.parametrize(
    ("spelled", "bits_per_weight"),
    [
        ("4/64/symmetric", 4.25),
        ("4/64/zero_point", 4.375),
        ("4/32/minimum", 5),
        ("6/64/zero_point", 6.375),
        ("4/32/e2m1", 4.25),
        ("2/32/super_minimum", 2.5),
        ("3/32/super_minimum", 3.5),
        ("4/32/super_minimum", 4.5),
        ("5/32/super_minimum", 5.5),
        ("3/16/super_symmetric", 3.625),
        ("6/16/super_symmetric", 6.625),
        ("2/16/super_minimum", 3.125),
        ("6/16/super_minimum", 7.125),
    ],
)
def test_a_format_says_what_it_takes(spelled: str, bits_per_weight: float) -> None:
    form = BlockFormat.parse(spelled)
    assert str(form) == spelled
    assert form.bits_per_weight == bits_per_weight
    stored = PanelFormat.of(form, (160, 6400))
    whole = stored.panels * stored.panel_bytes
    assert whole == pytest.approx(160 * 6400 * bits_per_weight / 8, rel=1e-3)
    for wrong in (
        "7/64/symmetric",
        "5/32/e2m1",
        "4/48/symmetric",
        "4/64/none",
        "4/64",
        "8/32/super_minimum",
        "3/64/symmetric",
        "3/16/super_minimum",
        "2/16/super_symmetric",
    ):
        with pytest.raises((ValueError, KeyError)):
            BlockFormat.parse(wrong)


def test_what_each_grid_makes_of_a_code() -> None:
    codes = np.array([[0, 5, 15]], np.uint8)
    scale, low = np.array([[0.5]], np.float32), np.array([[-3]], np.float32)
    zero = np.array([[70]], np.uint8)  # code 4.375
    for blocks, bits, expected in (
        (Blocks(codes, scale), 4, [-4, -1.5, 3.5]),
        (Blocks(codes, scale, zero), 4, [-2.1875, 0.3125, 5.3125]),
        (Blocks(codes, scale, zero), 6, [-8.75, -6.25, -1.25]),  # code 17.5
        (Blocks(codes, scale, low), 4, [-3, -0.5, 4.5]),
    ):
        np.testing.assert_array_equal(reference.dequantize(blocks, bits), [expected])


def test_e2m1_is_a_sign_two_bits_of_exponent_and_one_of_mantissa() -> None:
    """The numbers of the OCP's microscaling formats, times a power of two."""
    codes = np.arange(16, dtype=np.uint8)[None]
    blocks = reference.in_weights(Blocks(codes, np.array([[127]], np.uint8)))
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.array([numbers + [-number for number in numbers]], np.float32)
    np.testing.assert_array_equal(reference.dequantize(blocks, 4), expected)
    form = PanelFormat(rows=1, columns=32, bits=4, block=32, grid=Grid.E2M1)
    twice = np.tile(codes, 2)
    for exponent in (0, 1, 100, 127, 247):
        panels = reference.pack(form, Blocks(twice, np.array([[exponent]], np.uint8)))
        # A plane of 4 groups, then sixteen exponents, padded.
        assert (form.plane_bytes, panels[0, 256]) == (256, exponent)
        scale = np.ldexp(np.float64(1), exponent - 127)
        np.testing.assert_array_equal(reference.restore(form, panels)[0, :16], expected[0] * scale)


def test_the_layout_byte_by_byte() -> None:
    form = PanelFormat(rows=18, columns=40, bits=8, block=32)
    codes = np.full((18, 64), 128, np.uint8)
    codes[1, 13], codes[17, 33] = 0xA7, 0x5C
    scales = np.arange(36, dtype=np.float16).reshape(18, 2)
    panels = reference.pack(form, Blocks(codes, scales))
    # Plane: 2 blocks x 4 groups x 64 bytes; scales: 2 blocks x 32 bytes.
    assert (form.plane_bytes, form.constant_bytes, form.panel_bytes) == (512, 64, 1088)
    # Column 13 is in group 1, the second four, byte 13 - 8 - 4 of row 1.
    assert panels[0, 64 + 4 + 1] == 0xA8
    assert panels[0, 512 + 64 + 64 + 4 + 1] == 0x70
    # Column 33 is column 1 of block 1, row 17 row 1 of panel 1.
    assert panels[1, 256 + 4 + 1] == 0x85
    assert panels[1, 576 + 256 + 4 + 1] == 0x0C
    assert panels[1, 512 + 32 + 2 : 512 + 32 + 4].view(np.float16)[0] == 35
    weights = reference.restore(form, panels)
    assert weights[1, 13] == (0xA7 - 128) * 2 / 256
    assert weights[17, 33] == (0x5C - 128) * 35 / 256


def test_a_plane_of_two_bits_and_constants_byte_by_byte() -> None:
    form = PanelFormat(rows=16, columns=32, bits=6, block=32, grid=Grid.ZERO_POINT)
    codes = np.zeros((16, 32), np.uint8)
    codes[3, 22] = 0b101101
    scales, zeros = np.zeros((16, 1), np.float16), np.arange(16, dtype=np.uint8)[:, None]
    scales[5] = 3
    (panel,) = reference.pack(form, Blocks(codes, scales, zeros))
    # 4 groups of nibbles; 16 scales and 16 zero points, padded; 2 groups of pairs of bits.
    assert (form.plane_bytes, form.constant_bytes, form.panel_bytes) == (256, 64, 448)
    # Column 22 is the second four of group 2: its upper bits lie high in byte 2 of row 3.
    assert panel[2 * 64 + 4 * 3 + 2] == 0b1011 << 4
    # Of pairs it is the second four (16 to 31: columns 20 to 23) of group 1.
    assert panel[256 + 64 + 64 + 4 * 3 + 2] == 0b01 << 2
    assert panel[256 + 10 : 256 + 12].view(np.float16)[0] == 3
    np.testing.assert_array_equal(panel[256 + 32 : 256 + 48], np.arange(16))


def test_a_plane_of_the_upper_two_bits_byte_by_byte() -> None:
    form = PanelFormat(rows=16, columns=512, bits=3, block=32, grid=Grid.SUPER_MINIMUM)
    codes, zeros = np.zeros((16, 512), np.uint8), np.zeros((16, 2), np.float16)
    codes[3, 256 + 22], codes[5, 256 + 75] = 0b101, 0b111
    numbers = np.zeros((16, 16), np.uint8)
    (panel,) = reference.pack(form, Blocks(codes, zeros, zeros, numbers, numbers))
    # Of each super-block 256 bytes of constants and 16 groups of two bits; then 2 x 8 of one bit.
    assert (form.plane_bytes, form.constant_bytes, form.panel_bytes) == (2048, 512, 3584)
    second, low = 256 + 1024 + 256, 2 * 1280 + 512
    expected = np.zeros_like(panel)
    # Column 22 is in group 1 of two bits the second four; in group 0 of one bit the sixth.
    expected[second + 64 + 4 * 3 + 2] = 0b10 << 2
    expected[low + 4 * 3 + 2] = 1 << 5
    # Column 75 is in group 4 of two bits the third four (64 + 8); in group 2 of one bit too.
    expected[second + 4 * 64 + 4 * 5 + 3] = 0b11 << 4
    expected[low + 2 * 64 + 4 * 5 + 3] = 1 << 2
    np.testing.assert_array_equal(panel, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.bits <= 4])
def test_codes_of_up_to_four_bits_are_whole_in_every_view(kind: BlockFormat) -> None:
    form = PanelFormat.of(kind, (50, 600))
    blocks, panels = matrix(form)
    assert form.view_bytes("hi") == form.panel_bytes
    x = activations(3, 600)
    full = reference.linear(form, panels, x)
    np.testing.assert_array_equal(reference.linear(form, panels, x, "hi"), full)
    stored = reference.in_weights(blocks)
    weights = reference.dequantize(stored, kind.bits, "hi")
    np.testing.assert_array_equal(weights, reference.dequantize(stored, kind.bits))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_restored_weights(kind: BlockFormat) -> None:
    form = PanelFormat.of(kind, (50, 200))
    _, panels = matrix(form)
    x = activations(6, 200)
    levels, steps = reference.round_rows(x, kind.activation_block)
    rounded = (levels * steps[..., None]).reshape(6, -1)[:, :200]
    assert np.abs(rounded - x).max() <= steps.max() * 0.5001
    exact = rounded.astype(np.float64) @ reference.restore(form, panels)[:50].T.astype(np.float64)
    close(reference.linear(form, panels, x), exact.astype(np.float32))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.bits > 4])
def test_the_upper_nibbles_are_the_middle_of_what_they_may_be(kind: BlockFormat) -> None:
    form, bits, grid = PanelFormat.of(kind, (16, 512)), kind.bits, kind.grid
    blocks, panels = matrix(form)
    levels, steps = reference.round_rows(activations(3, 512), kind.activation_block)
    levels = levels.reshape(3, form.blocks, form.block)
    steps = np.repeat(steps, form.blocks // form.supers, axis=1)
    step = 1 << (bits - 4)
    codes = (blocks.codes // step * step + (step - 1) / 2).reshape(16, form.blocks, form.block)
    each = blocks.without_supers()
    scales, offsets = each.scales[..., None].astype(np.float64) / 256, each.offsets
    if grid.is_symmetric:
        weights = (codes - 2 ** (bits - 1)) * scales
    elif grid is Grid.ZERO_POINT:
        weights = (codes - offsets[..., None] * 2.0 ** (bits - 8)) * scales
    else:
        weights = codes * scales + offsets[..., None].astype(np.float64) / 256
    exact = np.einsum("mbk,mb,nbk->mn", levels, steps, weights)
    close(reference.linear(form, panels, activations(3, 512), "hi"), exact.astype(np.float32))
    hi = reference.dequantize(reference.in_weights(blocks), bits, "hi")
    np.testing.assert_allclose(hi.reshape(weights.shape), weights, rtol=1e-5, atol=1e-6)


# Native products


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_the_definition_for_every_row_count(
    kind: BlockFormat, shape: tuple[int, int]
) -> None:
    """And M rows are, bit for bit, what each row is alone."""
    form = PanelFormat.of(kind, shape)
    _, panels = matrix(form)
    x = activations(130, shape[1])
    views = ("full", "hi")
    expected = {view: reference.linear(form, panels, x, view) for view in views}
    for view, kernels in product(views, KERNELS):
        select_isa(kernels)
        alone = np.concatenate([linear(form, panels, row[None], view=view) for row in x])
        close(alone, expected[view])
        for rows in (*range(2, 18), 31, 49, 130):
            together = linear(form, panels, x[:rows], view=view)
            np.testing.assert_array_equal(together, alone[:rows])


@needs_native
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 3, 48])
def test_the_largest_codes_and_levels_do_not_overflow(kernels: str, rows: int) -> None:
    """Sums of a few products lie in 16 bits of some kernels, fewer of them the larger codes are."""
    select_isa(kernels)
    for sign in (1, -1):
        x = np.full((rows, 64), sign, np.float32)
        for bits in WIDTHS:
            top = (1 << bits) - 1
            form = PanelFormat(rows=16, columns=64, bits=bits, block=32, grid=Grid.SYMMETRIC)
            blocks = Blocks(np.full((16, 64), top, np.uint8), np.ones((16, 2), np.float16))
            actual = linear(form, reference.pack(form, blocks), x)
            expected = sign * 64 * (top - (1 << (bits - 1))) / 256
            np.testing.assert_allclose(actual, expected, rtol=1e-6)
        for kind in (kind for kind in KINDS if kind.grid.has_supers):
            form, top = PanelFormat.of(kind, (16, 256)), (1 << kind.bits) - 1
            wide = np.full((rows, 256), sign, np.float32)
            largest, halves = 63 if kind.block == 32 else -128, np.ones((16, 1), np.float16)
            number = np.full((16, form.blocks), largest, np.int16)
            number = number.astype(np.uint8 if kind.block == 32 else np.int8)
            sides = (halves, number) if kind.grid.has_minimum else (None, None)
            blocks = Blocks(np.full((16, 256), top, np.uint8), halves, sides[0], number, sides[1])
            actual = linear(form, reference.pack(form, blocks), wide)
            middle = 1 << (kind.bits - 1)
            weight = largest * (top - middle if kind.grid.is_symmetric else top + 1)
            np.testing.assert_allclose(actual, sign * 256 * weight / 256, rtol=1e-6)
        form = PanelFormat(rows=16, columns=64, bits=4, block=32, grid=Grid.E2M1)
        for code in (7, 15):
            blocks = Blocks(np.full((16, 64), code, np.uint8), np.full((16, 2), 127, np.uint8))
            actual = linear(form, reference.pack(form, blocks), x)
            np.testing.assert_allclose(actual, sign * 64 * 6 * (1 if code == 7 else -1), rtol=1e-6)


@needs_native
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_activation_bias_and_residual(kernels: str, activation: str) -> None:
    from kvq_models.reference import ACTIVATIONS

    select_isa(kernels)
    form = PanelFormat(rows=50, columns=200, bits=8, block=32)
    _, panels = matrix(form)
    random = np.random.default_rng(4)
    # 400 rows: preparing them is a dispatch of its own.
    for rows in (1, 9, 400):
        x = random.standard_normal((rows, 400)).astype(np.float32) * 3
        x[0, 3], x[0, 7] = 90, -90
        weight, bias = random.uniform(0.5, 2, 200), random.standard_normal(50)
        weight, bias = weight.astype(np.float32), bias.astype(np.float32)
        residual = random.standard_normal((rows, 50)).astype(np.float32)
        first = np.ascontiguousarray(x[:, :200])
        normed = linear(
            form, panels, first, norm=weight, norm_eps=1e-5, bias=bias, residual=residual
        )
        plain = linear(form, panels, normalize(first, weight, 1e-5))
        gated = linear(form, panels, x, activation=activation)
        expected = ACTIVATIONS[activation](first) * x[:, 200:]
        # An activation on the edge between two levels may round to either.
        for actual, definition in (
            (normed, plain + bias + residual),
            (gated, linear(form, panels, expected)),
        ):
            assert np.abs(actual - definition).max() <= PREPARED.top * np.abs(definition).max()
            assert np.median(np.abs(actual - definition)) <= 2e-6 * np.abs(definition).max()


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("spelled", ["8/64/symmetric", "6/64/zero_point", "6/16/super_symmetric"])
def test_two_passes_are_exact_where_it_matters(kernels: str, spelled: str) -> None:
    select_isa(kernels)
    form = PanelFormat.of(BlockFormat.parse(spelled), (9001, 128))
    _, panels = matrix(form)
    x = activations(5, 128)
    full = linear(form, panels, x)
    for count in (1, 20, 200, 9000):
        actual = linear(form, panels, x, exact_rows=count)
        close(actual, reference.linear_in_two_passes(form, panels, x, count))
        # The best so many, in their order, with what a whole product gives them.
        order = np.argsort(-full, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(np.argsort(-actual, axis=1, kind="stable")[:, :count], order)
        best = np.take_along_axis(actual, order, axis=1)
        np.testing.assert_array_equal(best, np.take_along_axis(full, order, axis=1))
        alone = np.concatenate([linear(form, panels, row[None], exact_rows=count) for row in x])
        np.testing.assert_array_equal(actual, alone)
    assert (linear(form, panels, x, exact_rows=20) != full).any()


@needs_native
def test_bytes_read_are_those_a_view_needs() -> None:
    form = PanelFormat(rows=9001, columns=128, bits=8, block=64)
    _, panels = matrix(form)
    x = activations(16, 128)

    def read(rows: int, **options: object) -> int:
        before = weight_bytes_read()
        linear(form, panels, x[:rows], **options)
        return weight_bytes_read() - before

    half = form.panels * form.view_bytes("hi")
    assert form.view_bytes("full") == 2 * form.plane_bytes + form.constant_bytes
    assert read(1) == read(16) == form.panels * form.panel_bytes
    assert read(1, view="hi") == half
    few = read(1, exact_rows=1) - half
    assert few % form.panel_bytes == 0
    assert reference.FIRST_PANELS <= few // form.panel_bytes < form.panels // 2
    assert read(3, first_row=9001) == 0
    assert read(3, first_row=8995) == form.panel_bytes


@needs_native
def test_rows_left_out_are_zeros() -> None:
    form = PanelFormat(rows=50, columns=200, bits=8, block=64)
    _, panels = matrix(form)
    x, residual = activations(9, 200), activations(9, 50)
    full = linear(form, panels, x, residual=residual)
    for first in (1, 16, 21, 48, 50):
        actual = linear(form, panels, x, residual=residual, first_row=first)
        np.testing.assert_array_equal(actual[:, :first], residual[:, :first])
        np.testing.assert_array_equal(actual[:, first:], full[:, first:])


@needs_native
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_sums_of_restored_rows(kernels: str, kind: BlockFormat) -> None:
    select_isa(kernels)
    form = PanelFormat.of(kind, (50, 200))
    _, panels = matrix(form)
    random = np.random.default_rng(2)
    ids = random.integers(0, 50, (7, 3))
    weights = random.uniform(0, 1, (7, 3)).astype(np.float32)
    table = reference.restore(form, panels)
    expected = np.einsum("tk,tkh->th", weights, table[ids])
    close(embed(form, panels, ids, weights), expected)
    for wrong in (-1, 50, 1 << 40):
        with pytest.raises(BackendError, match="do not fit"):
            embed(form, panels, np.array([[wrong]]), np.ones((1, 1), np.float32))


@needs_native
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_its_row_only(kernels: str, value: float) -> None:
    select_isa(kernels)
    form = PanelFormat(rows=20, columns=100, bits=4, block=32)
    _, panels = matrix(form)
    x = activations(3, 100)
    x[1, 99] = value
    actual = linear(form, panels, x)
    assert np.isnan(actual[1]).all()
    np.testing.assert_array_equal(actual[[0, 2]], linear(form, panels, x[[0, 2]]))
    assert np.isnan(reference.linear(form, panels, x)[1]).all()


@needs_native
def test_impossible_products_are_refused() -> None:
    form = PanelFormat(rows=PANEL_ROWS, columns=64, bits=4, block=32)
    _, panels = matrix(form)
    x = np.ones((1, 64), np.float32)
    wrong = PanelFormat(rows=PANEL_ROWS, columns=64, bits=7, block=32)
    with pytest.raises(BackendError, match="do not fit"):
        linear(wrong, panels, x)
    with pytest.raises(BackendError, match="do not fit"):
        linear(form, panels, x, exact_rows=1, bias=np.zeros(16, np.float32))
    assert linear(form, panels, x[:0]).shape == (0, PANEL_ROWS)


@needs_native
@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("count", [(1 << 28) + 1, 1 << 30, (1 << 31) - 1])
def test_a_matrix_whose_sides_no_number_counts_is_refused(side: str, count: int) -> None:
    """Its panels would be counted with numbers below zero."""
    sides = {"rows": PANEL_ROWS, "columns": 64, side: count}
    _, panels = matrix(PanelFormat(rows=PANEL_ROWS, columns=64, bits=4, block=32))
    with pytest.raises(BackendError, match="do not fit"):
        linear(PanelFormat(**sides, bits=4, block=32), panels, np.ones((0, 64), np.float32))
