"""The reference itself: codes, planes, bytes and rotation, against hand-made numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.errors import CacheError
from kvq.reference.stored import (
    KEYS,
    VALUES,
    PageGrid,
    decode,
    encode,
    hadamard,
    half_down,
    half_up,
    normalize,
    planes,
    rotate,
)
from planes import codes_of

MANY = settings(deadline=None, database=None, derandomize=True, max_examples=60)
SIDES = pytest.mark.parametrize("side", [KEYS, VALUES])
BOUNDS = {8: 0.5, 6: 2.0, 4: 8.0, 2: 32.0}


def pages(seed: int, dim: int = 64) -> dict[str, np.ndarray]:
    """Pages float32 [64, dim] that have broken quantisers before."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((64, dim)).astype(np.float32)
    loud = noise.copy()
    loud[:, 3] *= 50
    return {
        "noise": noise,
        "far": noise - 100,
        "loud": loud,
        "huge": noise * 15000,
        "denormal": noise * np.float32(1e-7),
        "float denormal": noise * np.float32(1e-40),
        "zeros": np.where(noise > 0, np.float32(0.0), np.float32(-0.0)),
        "constant": np.broadcast_to(np.float16(1.7).astype(np.float32), (64, dim)).copy(),
        "two values": np.where(noise > 0, np.float32(1), np.float32(-1)),
        "half": noise.astype(np.float16).astype(np.float32),
    }


def wide(line: np.ndarray, side: int) -> np.ndarray:
    return np.expand_dims(line.astype(np.float64), 0 if side == KEYS else 1)


@SIDES
@pytest.mark.parametrize("bits", BOUNDS)
@pytest.mark.parametrize("name", list(pages(0)))
def test_a_read_is_within_its_bound_of_the_scale(name: str, bits: int, side: int) -> None:
    """QS-1: half a step for the whole read, eight for the upper four bits of the same codes."""
    for seed in range(3):
        x = pages(seed)[name]
        codes, grid = encode(x, side)
        error = np.abs(decode(codes, grid, bits, side).astype(np.float64) - x)
        # Float32 rounds the value itself, and mid + scale * code, a few times.
        rounding = 4e-7 * (np.abs(x) + np.abs(wide(grid.mid, side)))
        assert (error <= BOUNDS[bits] * wide(grid.scale, side) + rounding).all()


@SIDES
def test_the_bound_of_each_width_is_tight(side: int) -> None:
    """The error really comes near its bound, so a bound twice as wide would hide a fault."""
    x = np.random.default_rng(1).uniform(-1, 1, (64, 128)).astype(np.float32)
    codes, grid = encode(x, side)
    for bits, bound in BOUNDS.items():
        error = np.abs(decode(codes, grid, bits, side) - x)
        assert (error / wide(grid.scale, side)).max() > 0.96 * bound


@SIDES
def test_a_four_bit_read_spans_what_was_encoded(side: int) -> None:
    """The outermost levels stand at the ends, not half a level inside: nothing large shrinks."""
    x = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32)
    codes, grid = encode(x, side)
    read, axis = decode(codes, grid, 4, side), 0 if side == KEYS else 1
    span = np.ptp(x, axis=axis)
    # Mids and scales have 8 bits themselves.
    assert np.abs(np.ptp(read, axis=axis) / span - 1).max() < 0.03
    for end in (np.min, np.max):
        assert np.abs(end(read, axis=axis) - end(x, axis=axis)).max() < 0.02 * span.max()


@SIDES
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 65504.0, -65504.0, 6e-8])
def test_a_constant_page_reads_as_itself_at_every_width(value: float, side: int) -> None:
    x = np.full((64, 64), np.float32(np.float16(value)))
    codes, grid = encode(x, side)
    assert not grid.scale.any()
    for bits in BOUNDS:
        assert (decode(codes, grid, bits, side) == x).all()


@SIDES
def test_a_constant_group_costs_no_more_than_its_mids_rounding(side: int) -> None:
    x = np.random.default_rng(3).uniform(-1, 1, 64).astype(np.float32)
    x = np.broadcast_to(np.expand_dims(x, side), (64, 64))
    codes, grid = encode(x, side)
    rounding = np.ptp(x) / 510 * 1.01
    assert np.abs(decode(codes, grid, 8, side) - x).max() < rounding / 120
    assert np.abs(decode(codes, grid, 4, side) - x).max() < rounding / 15
    assert np.abs(decode(codes, grid, 2, side) - x).max() < rounding / 3


@SIDES
def test_zero_has_one_form(side: int) -> None:
    """A zero of either sign is stored as +0, or equal pages would have different bytes."""
    for x in (np.zeros((64, 64), np.float32), -np.zeros((64, 64), np.float32), pages(0)["zeros"]):
        codes, grid = encode(x, side)
        assert (codes == 128).all()
        assert not any(grid.stored())


@SIDES
def test_a_channel_around_minus_hundred_does_not_clip(side: int) -> None:
    """Float16's step at 100 is 1/16, that of the mids far less than a scale."""
    x = (np.random.default_rng(2).standard_normal((64, 64)) - 100).astype(np.float32)
    codes, grid = encode(x, side)
    assert (np.abs(x - wide(grid.mid, side)) <= 120.001 * wide(grid.scale, side)).all()
    assert codes.min() >= 7
    assert codes.max() <= 248


@SIDES
def test_a_grid_is_read_back_from_its_bytes(side: int) -> None:
    _, grid = encode(pages(4, 80)["loud"], side)
    stored = grid.stored()
    assert len(stored) == 8 + 2 * (64 if side else 80)
    loaded = PageGrid.load(stored)
    assert (loaded.scale == grid.scale).all()
    assert (loaded.mid == grid.mid).all()
    assert np.frombuffer(stored, np.float16)[1] == grid.scales.ends[1]
    assert stored[8] == grid.scales.codes[0]


@SIDES
@pytest.mark.parametrize("value", [1e8, -1e8, 1e30, np.inf, -np.inf, np.nan])
def test_beyond_float16_is_an_error(value: float, side: int) -> None:
    x = pages(0)["noise"]
    x[17, 21] = value
    with pytest.raises(CacheError, match="not finite in float16"):
        encode(x, side)


@SIDES
def test_the_largest_float16_range_is_held(side: int) -> None:
    x = pages(0)["noise"]
    x[3, 4], x[3, 5], x[5, 4] = 65519, -65504, -65504
    codes, grid = encode(x, side)
    error = np.abs(decode(codes, grid, 8, side) - x)
    assert (error <= 0.5001 * wide(grid.scale, side) + 0.05).all()


@MANY
@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=50))
def test_float16_rounds_down_and_up_to_neighbours(values: list[float]) -> None:
    x = np.array(values, np.float32)
    low, high = half_down(x).astype(np.float64), half_up(x).astype(np.float64)
    assert (low <= x).all()
    assert (high >= x).all()
    exact = low == high
    assert (exact == (x.astype(np.float16).astype(np.float64) == x)).all()
    # The next number away from the one nearer to zero is the other one.
    near = np.minimum(np.abs(low), np.abs(high))[~exact].astype(np.float16)
    assert (high - low)[~exact].tolist() == np.spacing(near).astype(np.float64).tolist()


# ---- planes ----------------------------------------------------------------------------------


def position_of_key(token: int, channel: int, dim: int, bits: int) -> tuple[int, int]:
    """(byte, first bit) of a code in its plane, worked out from the comment in `format.h`."""
    group, t = divmod(token, 8)
    if bits == 2:
        j, rest = divmod(channel, 16)
        i, c = divmod(rest, 4)
        return (group * (dim // 16) + j) * 32 + 4 * t + c, 2 * i
    j, rest = divmod(channel, 8)
    high, c = divmod(rest, 4)
    return (group * (dim // 8) + j) * 32 + 4 * t + c, 4 * high


def position_of_value(token: int, channel: int, bits: int) -> tuple[int, int]:
    """Likewise for values: vectors run over tokens, groups over channels."""
    group, c = divmod(channel, 8)
    if bits == 2:
        j, rest = divmod(token, 16)
        i, t = divmod(rest, 4)
        return (group * 4 + j) * 32 + 4 * c + t, 2 * i
    j, rest = divmod(token, 8)
    high, t = divmod(rest, 4)
    return (group * 8 + j) * 32 + 4 * c + t, 4 * high


@pytest.mark.parametrize(
    ("token", "channel", "byte", "bit"),
    [
        (0, 0, 0, 0),
        (0, 4, 0, 4),
        (0, 3, 3, 0),
        (1, 0, 4, 0),
        (7, 7, 31, 4),
        (0, 8, 32, 0),
        (8, 0, 256, 0),
        (63, 63, 2047, 4),
    ],
)
def test_key_nibbles_lie_where_the_format_says(
    token: int, channel: int, byte: int, bit: int
) -> None:
    codes = np.zeros((64, 64), np.uint8)
    codes[token, channel] = 0xA5
    stored = planes(codes, 8, KEYS)
    expected = np.zeros(4096, np.uint8)
    expected[byte], expected[2048 + byte] = 0xA << bit, 0x5 << bit
    assert (stored == expected).all()
    assert position_of_key(token, channel, 64, 4) == (byte, bit)


@pytest.mark.parametrize(
    ("token", "channel", "byte", "bit"),
    [
        (0, 0, 0, 0),
        (4, 0, 0, 4),
        (3, 0, 3, 0),
        (0, 1, 4, 0),
        (7, 7, 31, 4),
        (8, 0, 32, 0),
        (0, 8, 256, 0),
        (63, 63, 2047, 4),
    ],
)
def test_value_nibbles_lie_where_the_format_says(
    token: int, channel: int, byte: int, bit: int
) -> None:
    codes = np.zeros((64, 64), np.uint8)
    codes[token, channel] = 0xA5
    expected = np.zeros(4096, np.uint8)
    expected[byte], expected[2048 + byte] = 0xA << bit, 0x5 << bit
    assert (planes(codes, 8, VALUES) == expected).all()
    assert position_of_value(token, channel, 4) == (byte, bit)


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_two_bit_codes_lie_where_the_format_says(dim: int) -> None:
    rng = np.random.default_rng(dim)
    for _ in range(40):
        token, channel, top = (int(n) for n in rng.integers((64, dim, 4)))
        codes = np.zeros((64, dim), np.uint8)
        codes[token, channel] = top << 6 | 63
        for side, (byte, bit) in (
            (KEYS, position_of_key(token, channel, dim, 2)),
            (VALUES, position_of_value(token, channel, 2)),
        ):
            expected = np.zeros(16 * dim, np.uint8)
            expected[byte] = top << bit
            assert (planes(codes, 2, side) == expected).all()
            stored = planes(codes >> 4, 6, side)
            assert (stored[32 * dim :] == expected).all()
            assert not stored[: 32 * dim].any()


@SIDES
@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256])
def test_planes_give_back_all_codes(dim: int, side: int) -> None:
    """QS-2: both planes are the 8-bit codes again, one of them their upper bits."""
    codes = np.random.default_rng(dim).integers(0, 256, (64, dim)).astype(np.uint8)
    for bits, kept in ((8, 0xFF), (6, 0xFC), (4, 0xF0), (2, 0xC0)):
        stored = planes(codes, bits, side)
        assert stored.dtype == np.uint8
        assert len(stored) == 64 * dim * bits // 8
        assert (codes_of(stored, bits, side, dim) == codes & kept).all()


@SIDES
def test_demoting_in_steps_equals_reading_two_bits_directly(side: int) -> None:
    x = pages(5)["loud"]
    codes, grid = encode(x, side)
    four = codes
    for bits in (8, 6, 4):
        four = codes_of(planes(four, bits, side), bits, side, 64)
    stepped = planes(four, 2, side)
    assert (stepped == planes(codes, 2, side)).all()
    two = codes_of(stepped, 2, side, 64)
    assert (decode(two, grid, 2, side) == decode(codes, grid, 2, side)).all()
    assert (decode(four, grid, 4, side) == decode(codes, grid, 4, side)).all()


@SIDES
def test_an_eight_bit_read_is_plain_int8(side: int) -> None:
    x = pages(6)["noise"]
    codes, grid = encode(x, side)
    plain = wide(grid.mid, side) + wide(grid.scale, side) * (codes - 127.5)
    assert np.abs(decode(codes, grid, 8, side) - plain).max() <= 4e-7


@SIDES
def test_centred_reads_have_no_bias(side: int) -> None:
    """Without the offsets 7.5 and 31.5 the mean error would be that many scales."""
    x = np.random.default_rng(9).uniform(-1, 1, (64, 256)).astype(np.float32)
    codes, grid = encode(x, side)
    for bits in (4, 2):
        error = (decode(codes, grid, bits, side) - x) / wide(grid.scale, side)
        assert abs(error.mean()) < 0.02 * 2 ** (8 - bits)


# ---- forms of pages ---------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "length"), [(16, 16), (64, 64), (80, 16), (96, 32), (256, 256)])
def test_the_hadamard_transform_is_the_matrix(dim: int, length: int) -> None:
    x = np.random.default_rng(dim).standard_normal((5, dim)).astype(np.float32)
    matrix = np.ones((1, 1))
    while len(matrix) < length:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    expected = (x.reshape(5, -1, length) @ matrix / np.sqrt(length)).reshape(5, dim)
    assert np.abs(hadamard(x) - expected).max() < 1e-5
    assert np.abs(hadamard(hadamard(x)) - x).max() < 1e-5


def test_a_transform_spreads_a_loud_channel() -> None:
    """What 4 bits cost in all channels falls where one of them had the whole range."""
    x = pages(1)["loud"]
    codes, grid = encode(x, 1)
    turned, wide_grid = encode(hadamard(x), 1)
    plain = np.square(decode(codes, grid, 4, 1) - x).mean()
    spread = np.square(hadamard(decode(turned, wide_grid, 4, 1)) - x).mean()
    assert spread < plain / 4


# ---- rotation ----------------------------------------------------------------------------------


def rotate_exactly(x: np.ndarray, position: int, inv_freq: np.ndarray) -> np.ndarray:
    pairs = len(inv_freq)
    c, s = np.cos(position * inv_freq), np.sin(position * inv_freq)
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * pairs :]], axis=-1)


def test_rotation_is_the_rotate_half_convention() -> None:
    x = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 8)
    quarter = np.array([np.pi / 2, 0.0, np.pi / 2], np.float32)
    turned = rotate(x, np.array([1]), quarter)
    assert turned.ravel() == pytest.approx([-4, 2, -6, 1, 5, 3, 7, 8], abs=1e-6)
    doubled = rotate(x, np.array([1]), quarter, 2.0)
    assert doubled.ravel() == pytest.approx([-8, 4, -12, 2, 10, 6, 7, 8], abs=1e-6)


def test_rotation_matches_double_precision() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 2, 64)).astype(np.float32)
    inv_freq = (10000.0 ** (-np.arange(24) / 24)).astype(np.float32)
    positions = np.array([0, 1, 77, 1000, 4095])
    turned = rotate(x, positions, inv_freq)
    for row, position in enumerate(positions):
        exact = rotate_exactly(
            x[row].astype(np.float64), int(position), inv_freq.astype(np.float64)
        )
        assert np.abs(turned[row] - exact).max() < 2e-6 * max(1, position / 4)


def test_normalisation_is_rms_norm() -> None:
    x = np.array([[3.0, 4.0]], np.float32)
    weight = np.array([2.0, 0.5], np.float32)
    root = np.sqrt(12.5)
    assert normalize(x, weight, 0.0)[0] == pytest.approx([6 / root, 2 / root])
    assert normalize(x, weight, 12.5)[0] == pytest.approx([6 / 5, 2 / 5])
