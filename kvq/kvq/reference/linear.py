"""Defines `kvq::Linear` and `kvq::Embed`: the bytes of weights, and the arithmetic over them.

Tests compare native kernels with this module. It knows no model and no file; an export chooses
codes and scales.

**Weights.** A row of K weights is cut into blocks of 32, 64 or 128 (the last one padded); a block
keeps unsigned codes of 4, 5, 6 or 8 bits, one scale (float16) and, by its grid, an offset:

    grid        offset    weight
    symmetric   none      SCALE_UNIT * scale * (code - 2**(bits - 1))
    zero_point  uint8     SCALE_UNIT * scale * (code - 2**bits * offset / 256)
    minimum     float16   SCALE_UNIT * (scale * code + offset)
    e2m1        none      2**(exponent - E2M1_BIAS) * (E2M1_CODES[code] - E2M1_MIDDLE)

The last has codes of 4 bits alone, floating-point numbers of a sign, two bits of exponent and one
of mantissa: twice each is whole, and one of sixteen levels. Its scale is a power of two, of which a
block keeps the exponent, uint8, 247 at most: MXFP4 of the OCP's microscaling formats as it is.

**Super-blocks** are the form of llama.cpp's K-quants: 256 columns under one float16 scale and
perhaps one offset, and sub-blocks of 32 or 16 columns with whole numbers that multiply these:

    grid             sub-block   weight
    super_minimum    32 or 16    SCALE_UNIT * (scale * sub_scale * code + offset * sub_offset)
    super_symmetric  16          SCALE_UNIT * scale * sub_scale * (code - 2**(bits - 1))

The whole numbers have six bits (0 to 63) where a sub-block has 32 columns, and are int8 where it
has 16. The sums of a sub-block's products are multiplied in whole numbers too. Codes of 2 and 3
bits exist in super-blocks alone.

Sixteen rows make a **panel** (the last one padded with rows of scale 0), which lies in one piece:

    plane     [blocks][block u / 32][16 rows][4]   the codes' upper u bits
    constants [blocks]{[16 rows] scales, [16 rows] offsets}   padded to 64 bytes
    low       [blocks][block b / 32][16 rows][4]   the codes' lower b bits, of 3, 5, 6 and 8 bits

The upper bits are four, of codes of 2 and 3 bits two; the lower ones are what is left of a code.

Of super-blocks a panel begins `[super-blocks]{constants padded to 64 bytes, plane}`, then `low`.

Constants of a super-block are `[16 rows] scales, [16 rows] offsets`, then its sub-blocks' numbers:
the first scale of each sub-block, then the offsets. Of six bits they lie as codes of six bits do, a
row's as columns, plane before low. Of int8 they lie `[sub-block / 4][16 rows][4]`.

A plane of b bits: byte c of row r in group j holds columns (32 / b) j + 4 i + c at its bits b i, so
of nibbles column 8j + c in the low one, 8j + 4 + c in the high one. Plane and constants alone are a
matrix of 4 bits (the view `hi`): a code is then taken for the middle of the 2**b it may be, of 8
bits `16 * hi + 7.5`. Of codes of up to 4 bits that view is the whole code.

**Activations** are rounded to int8 block by block: `scale = max|x| / 127`, `level = rint(x * (127 /
max|x|))`, ties to even. A block below 1e-30 counts as zeros; one that is not finite makes its row
NaN.

Super-blocks are rounded as blocks of 256.

**Products.** With `raw` the sum of a block's levels times codes and `sum` that of its levels, both
exact integers, `dot = raw - middle * sum`, rounded once to float32 (`middle` is what the grid takes
off a code, 0 of a minimum; in place of codes of e2m1 it is `E2M1_CODES` of them). Blocks are added
in order by fused multiply-adds in float32: `total = fma(dot, weight_scale * unit, total)` with
`unit = SCALE_UNIT * activation_scale`, and of a minimum then `total = fma(offset, sum * unit,
total)`. A row's result therefore does not depend on the rows computed with it. Of a super-block
`dot` is the sum of `sub_scale * (raw - middle * sum)` over its sub-blocks, and in place of `sum` a
minimum takes that of `sub_offset * sum`: whole numbers, rounded once to float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]
View = Literal["full", "hi"]
Stored = TypeVar("Stored", bound=np.generic)

# Activations of a gate, none first; the attribute `activation` is an index here. The last one takes
# both halves (`kvq.reference.experts.clamped_swiglu`).
ACTIVATIONS = ("", "silu", "gelu_tanh", "clamped_swiglu")
PANEL_ROWS = 16
# A product in two passes reads so many panels whole at first. How far these err, times the margin,
# decides which others it reads.
FIRST_PANELS = 128
MARGIN = np.float32(1.5)
BLOCKS = (32, 64, 128)
SUPER_BLOCK = 256
_SIX_BITS = 6
# Bits of the codes in blocks, and of all codes: 2 and 3 are in super-blocks alone.
WIDTHS = (4, 5, 6, 8)
CODE_BITS = (2, 3, *WIDTHS)
# Scales of 8-bit codes would leave the range in which float16 has all its digits.
SCALE_UNIT = np.float32(2.0**-8)
# Parts of the range of codes that a zero point, an offset of uint8, counts in.
ZERO_PARTS = 256
TOP_LEVEL = np.float32(127)
SMALLEST = np.float32(1e-30)
ALIGNMENT = 64
NIBBLE = 4
# Twice the numbers of e2m1 are whole: `E2M1_CODES` has them by the four bits, shifted by
# `E2M1_MIDDLE` to be no less than 0. The bias takes the factor 2 off a block's exponent again.
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
E2M1_MIDDLE, E2M1_BIAS, E2M1_TOP = 12, 128, 247
E2M1_CODES = (E2M1_MIDDLE + np.concatenate([_DOUBLED, -_DOUBLED])).astype(np.uint8)


class Grid(IntEnum):
    """Names which weights the codes of a block stand for."""

    SYMMETRIC = 0
    ZERO_POINT = 1
    MINIMUM = 2
    E2M1 = 3
    SUPER_MINIMUM = 4
    SUPER_SYMMETRIC = 5

    @property
    def has_supers(self) -> bool:
        """Tells whether blocks are sub-blocks of super-blocks."""
        return self in (Grid.SUPER_MINIMUM, Grid.SUPER_SYMMETRIC)

    @property
    def is_symmetric(self) -> bool:
        """Tells whether the middle code stands for zero."""
        return self in (Grid.SYMMETRIC, Grid.SUPER_SYMMETRIC)

    @property
    def has_minimum(self) -> bool:
        """Tells whether an offset is a weight, not a code."""
        return self in (Grid.MINIMUM, Grid.SUPER_MINIMUM)

    @property
    def offset_type(self) -> type[np.uint8] | type[np.float16] | None:
        """Returns the type of a block's offset as a panel keeps it."""
        return (None, np.uint8, np.float16, None, np.float16, None)[self]

    @property
    def scale_bytes(self) -> int:
        """Returns the bytes of a block's scale: float16, or an exponent, uint8."""
        return 1 if self is Grid.E2M1 else 2

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of a block's constants."""
        offset = self.offset_type
        return self.scale_bytes + (0 if offset is None else np.dtype(offset).itemsize)


# Columns of a sub-block and bits of a code that kernels know.
_SUPER_FORMATS: Mapping[Grid, tuple[tuple[int, int], ...]] = {
    Grid.SUPER_MINIMUM: ((32, 2), (32, 3), (32, 4), (32, 5), (32, 6), (16, 2), (16, 4), (16, 6)),
    Grid.SUPER_SYMMETRIC: ((16, 3), (16, 4), (16, 6), (16, 8)),
}


class Blocks(NamedTuple):
    """Holds rows of a matrix: codes uint8 [n, blocks * block], one per byte, and constants.

    `scales` [n, blocks] and `offsets` [n, blocks], None of a grid without: as a panel keeps them
    (float16, in SCALE_UNIT; exponents uint8) or as float32 in units of the weights; zero points are
    uint8 in both. Where blocks are sub-blocks, both are [n, super-blocks], and `sub_scales` and
    `sub_offsets` [n, blocks] are uint8 of six bits, or int8.
    """

    codes: Bytes
    scales: NDArray[np.float16] | Bytes | Float
    offsets: NDArray[np.generic] | None = None
    sub_scales: NDArray[np.integer] | None = None
    sub_offsets: NDArray[np.integer] | None = None

    def changed(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Blocks":
        """Changes every array alike."""
        return Blocks._make(None if array is None else change(array) for array in self)

    def picked(self, rows: NDArray[np.intp] | slice) -> "Blocks":
        """Returns some of the rows."""
        return self.changed(lambda array: array[rows])

    def without_supers(self) -> "Blocks":
        """Multiplies the numbers of sub-blocks, in units of the weights, by their super-blocks'."""
        if self.sub_scales is None:
            return self
        each = self.sub_scales.shape[1] // max(1, self.scales.shape[1])
        scales = np.repeat(self.scales.astype(np.float32), each, axis=1) * self.sub_scales
        offsets = self.offsets
        if offsets is not None and self.sub_offsets is not None:
            offsets = np.repeat(offsets.astype(np.float32), each, axis=1) * self.sub_offsets
        return Blocks(self.codes, scales.astype(np.float32), offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """Says how a matrix's weights are stored, whatever its shape."""

    bits: int = 4
    block: int = 64
    grid: Grid = Grid.SYMMETRIC

    @property
    def bits_per_weight(self) -> float:
        """Counts the bits of a weight, its share of the constants among them."""
        if self.grid.has_supers:
            return self.bits + 8 * self.super_bytes / SUPER_BLOCK
        return self.bits + 8 * self.grid.block_bytes / self.block

    @property
    def activation_block(self) -> int:
        """Counts the columns of activations under one scale."""
        return SUPER_BLOCK if self.grid.has_supers else self.block

    @property
    def super_bytes(self) -> float:
        """Returns the bytes of a super-block's constants in a row, with its share of padding."""
        sides = 2 if self.grid.has_minimum else 1
        number_bytes = _SIX_BITS / 8 if self.block == BLOCKS[0] else 1
        used = PANEL_ROWS * sides * (2 + number_bytes * SUPER_BLOCK / self.block)
        return -(-used // ALIGNMENT) * ALIGNMENT / PANEL_ROWS

    @property
    def possible(self) -> bool:
        """Returns whether kernels know it."""
        if self.grid.has_supers:
            return (self.block, self.bits) in _SUPER_FORMATS[self.grid]
        widths = (NIBBLE,) if self.grid is Grid.E2M1 else WIDTHS
        return self.bits in widths and self.block in BLOCKS

    def __str__(self) -> str:
        return f"{self.bits}/{self.block}/{self.grid.name.lower()}"

    @classmethod
    def parse(cls, spelled: str) -> "BlockFormat":
        """Reads what `str` writes. Raises `ValueError`."""
        bits, block, grid = spelled.split("/")
        block_format = cls(bits=int(bits), block=int(block), grid=Grid[grid.upper()])
        if not block_format.possible:
            raise ValueError(f"weights cannot be stored as {spelled}")
        return block_format


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelFormat:
    """Describes a stored matrix [rows, columns] and where things lie in its panels."""

    rows: int
    columns: int
    bits: int
    block: int
    grid: Grid = Grid.SYMMETRIC

    @classmethod
    def of(cls, form: BlockFormat, shape: tuple[int, ...]) -> "PanelFormat":
        """Describes a matrix of `shape` [rows, columns] stored as `form`."""
        rows, columns = shape
        return cls(
            rows=rows, columns=columns, bits=form.bits, block=form.block, grid=Grid(form.grid)
        )

    @property
    def format(self) -> BlockFormat:
        """Returns how it is stored, whatever its shape."""
        return BlockFormat(bits=self.bits, block=self.block, grid=self.grid)

    @property
    def panels(self) -> int:
        """Counts the groups of sixteen rows, the padded last one included."""
        return -(-self.rows // PANEL_ROWS)

    @property
    def blocks(self) -> int:
        """Counts the blocks per row, with padding up to a whole block or super-block."""
        wide = self.format.activation_block
        return -(-self.columns // wide) * (wide // self.block)

    @property
    def supers(self) -> int:
        """Counts the super-blocks per row, or blocks where there are none."""
        return self.blocks * self.block // self.format.activation_block

    @property
    def upper_bits(self) -> int:
        """Counts the bits of a code in the upper plane."""
        return NIBBLE if self.bits >= NIBBLE else 2

    @property
    def low_bits(self) -> int:
        """Counts the bits of a code beside those in the upper plane."""
        return self.bits - self.upper_bits

    @property
    def plane_bytes(self) -> int:
        """Returns the bytes of a panel's upper plane."""
        return self.blocks * self.block * PANEL_ROWS * self.upper_bits // 8

    @property
    def constant_bytes(self) -> int:
        """Returns the bytes of a panel's scales and offsets and of the padding after them."""
        used = self.supers * self.super_constants  # of super-blocks whole lines already
        return -(-used // ALIGNMENT) * ALIGNMENT

    @property
    def super_constants(self) -> int:
        """Returns the bytes of the constants of sixteen rows' super-blocks, or blocks."""
        if self.grid.has_supers:
            return int(PANEL_ROWS * self.format.super_bytes)
        return PANEL_ROWS * self.grid.block_bytes

    @property
    def panel_bytes(self) -> int:
        """Returns the bytes of a panel."""
        return self.low_at + self.plane_bytes * self.low_bits // self.upper_bits

    @property
    def low_at(self) -> int:
        """Returns where a panel's lower bits begin: behind its upper plane and constants."""
        return self.plane_bytes + self.constant_bytes

    def view_bytes(self, view: View) -> int:
        """Returns the bytes of a panel that a product reads."""
        return self.low_at if view == "hi" and self.bits > NIBBLE else self.panel_bytes


def pack(form: PanelFormat, blocks: Blocks) -> Bytes:
    """Packs rows, with constants as a panel keeps them, to panels uint8 [panels, panel_bytes].

    Codes of padding must be a zero: `2**(bits - 1)` where the grid is symmetric, or of e2m1.
    """
    spare = ((0, form.panels * PANEL_ROWS - form.rows), (0, 0))
    codes = np.pad(blocks.codes, spare, constant_values=1 << (form.bits - 1))
    out = np.zeros((form.panels, form.panel_bytes), np.uint8)
    plane, fields = _upper_parts(form, out)
    plane[:] = _plane(form, codes >> np.uint8(form.low_bits), form.upper_bits).reshape(plane.shape)
    scales_end = form.grid.scale_bytes * PANEL_ROWS
    fields[..., :scales_end] = _by_block(form, np.pad(blocks.scales, spare))
    offsets_end = scales_end
    if blocks.offsets is not None:
        offsets_end += blocks.offsets.dtype.itemsize * PANEL_ROWS
        fields[..., scales_end:offsets_end] = _by_block(form, np.pad(blocks.offsets, spare))
    if blocks.sub_scales is not None:
        sides = (blocks.sub_scales, blocks.sub_offsets)
        numbers = [np.pad(side, spare) for side in sides if side is not None]
        packed = _pack_numbers(form, numbers)
        fields[..., offsets_end : offsets_end + packed.shape[2]] = packed
    if form.low_bits:
        out[:, form.low_at :] = _plane(form, codes, form.low_bits)
    return out


def unpack(form: PanelFormat, panels: Bytes) -> Blocks:
    """Unpacks the P * 16 rows of P panels, constants as a panel keeps them."""
    plane, fields = _upper_parts(form, panels)
    codes = _codes(np.ascontiguousarray(plane).reshape(len(panels), -1), form, form.upper_bits)
    if form.low_bits:
        low = _codes(panels[:, form.low_at :], form, form.low_bits)
        codes = codes << np.uint8(form.low_bits) | low
    scales_end = form.grid.scale_bytes * PANEL_ROWS
    stored = fields[..., :scales_end]
    exponents = form.grid is Grid.E2M1
    scales = _by_row(stored, np.uint8) if exponents else _by_row(stored, np.float16)
    kind = form.grid.offset_type
    offsets_end = scales_end + (0 if kind is None else np.dtype(kind).itemsize * PANEL_ROWS)
    offsets = None if kind is None else _by_row(fields[..., scales_end:offsets_end], kind)
    if not form.grid.has_supers:
        return Blocks(codes, scales, offsets)
    return Blocks(codes, scales, offsets, *_unpack_numbers(form, fields[..., offsets_end:]))


def _upper_parts(form: PanelFormat, panels: Bytes) -> tuple[Bytes, Bytes]:
    """Returns views of panels: the upper bits, and constants [P, supers, bytes]."""
    if form.grid.has_supers:
        each = form.super_constants + form.plane_bytes // form.supers
        supers = panels[:, : form.low_at].reshape(len(panels), form.supers, each)
        return supers[..., form.super_constants :], supers[..., : form.super_constants]
    end = form.plane_bytes
    fields = panels[:, end : end + form.supers * form.super_constants]
    return panels[:, :end], fields.reshape(len(panels), form.supers, -1)


def restore(form: PanelFormat, panels: Bytes) -> Float:
    """Restores the weights of P panels, float32 [P * 16, columns], with rows of padding."""
    return dequantize(in_weights(unpack(form, panels)), form.bits)[:, : form.columns]


def in_weights(blocks: Blocks) -> Blocks:
    """Returns the blocks with constants in the weights' units; of e2m1 levels and a minimum."""
    if blocks.scales.dtype == np.uint8:
        scales = unit_scales(blocks.scales) * SCALE_UNIT
        return Blocks(E2M1_CODES[blocks.codes], scales, -np.float32(E2M1_MIDDLE) * scales)
    offsets = blocks.offsets
    if offsets is not None and offsets.dtype == np.float16:
        offsets = offsets.astype(np.float32) * SCALE_UNIT
    return blocks._replace(scales=blocks.scales.astype(np.float32) * SCALE_UNIT, offsets=offsets)


def unit_scales(scales: NDArray[np.float16] | Bytes | Float) -> Float:
    """Turns scales as a panel keeps them into float32 in SCALE_UNIT."""
    if scales.dtype != np.uint8:
        return scales.astype(np.float32)
    return np.ldexp(1 / SCALE_UNIT, scales.astype(np.int32) - E2M1_BIAS).astype(np.float32)


def zero_points(offsets: NDArray[np.generic], bits: int) -> Float:
    """Returns the codes that stand for zero, whole or between two codes."""
    return offsets.astype(np.float32) * np.float32((1 << bits) / ZERO_PARTS)


def dequantize(blocks: Blocks, bits: int, view: View = "full") -> Float:
    """Restores weights [n, blocks * block] from blocks with constants in units of the weights."""
    blocks = blocks.without_supers()
    values = blocks.codes.astype(np.float32).reshape(*blocks.scales.shape, -1)
    if view == "hi":
        step = np.float32(_step(bits))
        values += (step - 1) / 2 - values % step
    offsets = blocks.offsets
    if offsets is None:
        values -= np.float32(1 << (bits - 1))
    elif offsets.dtype == np.uint8:
        values -= zero_points(offsets, bits)[..., None]
    values *= blocks.scales[..., None]
    if offsets is not None and offsets.dtype != np.uint8:
        values += offsets[..., None].astype(np.float32)
    return values.reshape(blocks.codes.shape)


def round_rows(x: Float, block: int) -> tuple[NDArray[np.int8], Float]:
    """Rounds activations float32 [M, K] to levels int8 [M, blocks, block].

    Returns them with their scales, float32 [M, blocks].
    """
    rows, columns = x.shape
    padded = np.pad(x, ((0, 0), (0, -columns % block))).reshape(rows, -1, block)
    top = np.abs(padded).max(axis=2)
    finite = np.isfinite(top)
    alive = finite & (top >= SMALLEST)
    inverse = np.divide(TOP_LEVEL, top, out=np.zeros_like(top), where=alive)
    levels = np.rint(np.where(alive[..., None], padded, 0) * inverse[..., None]).astype(np.int8)
    scales = np.where(alive, top / TOP_LEVEL, np.float32(0))
    return levels, np.where(finite, scales, np.float32(np.nan))


def linear(form: PanelFormat, panels: Bytes, x: Float, view: View = "full") -> Float:
    """Computes `x @ weight.T` as the kernels do: float32 [M, K] -> [M, rows]."""
    if form.grid.has_supers:
        return _super_linear(form, unpack(form, panels), x, view)
    codes, scales, offsets, *_ = unpack(form, panels)
    values, middle = _read(form, codes, view), _middles(form, offsets, len(codes))
    values = values.reshape(len(codes), form.blocks, form.block)
    levels, steps = round_rows(x, form.block)
    total = np.zeros((len(x), len(codes)), np.float32)
    for block in range(form.blocks):
        raw = levels[:, block].astype(np.float64) @ values[:, block].T
        sums = levels[:, block].sum(axis=1, dtype=np.float64)[:, None]
        # Exact in float64 but for the last rounding: what a fused multiply-add gives.
        dot = (raw - middle[:, block] * sums).astype(np.float32)
        unit = (SCALE_UNIT * steps[:, block])[:, None]
        scale = unit_scales(scales[:, block]) * unit
        total = (dot.astype(np.float64) * scale + total).astype(np.float32)
        if form.grid is Grid.MINIMUM:
            assert offsets is not None
            low = (sums.astype(np.float32) * unit).astype(np.float64)
            total = (low * offsets[:, block].astype(np.float64) + total).astype(np.float32)
    return total[:, : form.rows]


def _super_linear(form: PanelFormat, blocks: Blocks, x: Float, view: View) -> Float:
    """Computes `linear` of a grid with super-blocks."""
    rows, supers, each = len(blocks.codes), form.supers, SUPER_BLOCK // form.block
    values = _read(form, blocks.codes, view) - _middles(form, None, rows)[0, 0]
    values = values.reshape(rows, supers, each, form.block)
    levels, steps = round_rows(x, SUPER_BLOCK)
    levels = levels.reshape(len(x), supers, each, form.block).astype(np.float64)
    assert blocks.sub_scales is not None
    sub_scales = blocks.sub_scales.reshape(rows, supers, each).astype(np.float64)
    total = np.zeros((len(x), rows), np.float32)
    for i in range(supers):
        dots = np.einsum("mec,rec->mre", levels[:, i], values[:, i])
        dot = np.einsum("mre,re->mr", dots, sub_scales[:, i]).astype(np.float32)
        unit = (SCALE_UNIT * steps[:, i])[:, None]
        scale = unit_scales(blocks.scales[:, i]) * unit
        total = (dot.astype(np.float64) * scale + total).astype(np.float32)
        if form.grid is Grid.SUPER_MINIMUM:
            assert blocks.offsets is not None
            assert blocks.sub_offsets is not None
            minima = blocks.sub_offsets.reshape(rows, supers, each)[:, i].astype(np.float64)
            low = (levels[:, i].sum(axis=2) @ minima.T).astype(np.float32)
            offset = blocks.offsets[:, i].astype(np.float32) * unit
            total = (low.astype(np.float64) * offset + total).astype(np.float32)
    return total[:, : form.rows]


def best_panels(form: PanelFormat, scores: Float, count: int) -> NDArray[np.bool_]:
    """Chooses the panels that a product in two passes reads whole: bool [M, panels].

    Their largest score in `scores`, float32 [M, rows] (view `hi`), is among the `count` largest:
    they hold the best `count` rows. Of equal ones the first count.
    """
    tops = panel_tops(form, scores)
    order = np.argsort(-tops, axis=1, kind="stable")[:, :count]
    chosen = np.zeros((len(scores), form.panels), bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def linear_in_two_passes(form: PanelFormat, panels: Bytes, x: Float, count: int) -> Float:
    """Computes `linear` in view `hi`, but exactly what can be each row's `count` largest results.

    Exact are the best `FIRST_PANELS` panels, which tell how far the upper nibbles alone err, and
    then every panel that would reach the `count`-th largest if it erred `MARGIN` times as far.
    """
    scores, whole = linear(form, panels, x, "hi"), linear(form, panels, x)
    chosen = best_panels(form, scores, max(count, FIRST_PANELS))
    rows = np.repeat(chosen, PANEL_ROWS, axis=1)[:, : form.rows]
    deviation = np.where(rows, np.abs(whole - scores), np.float32(0)).max(axis=1, keepdims=True)
    ranked = -np.sort(-np.where(rows, whole, -np.inf), axis=1)
    least = ranked[:, min(count, form.rows) - 1, None]
    chosen |= panel_tops(form, scores) + MARGIN * deviation >= least
    rows = np.repeat(chosen, PANEL_ROWS, axis=1)[:, : form.rows]
    return np.where(rows, whole, scores)


def panel_tops(form: PanelFormat, scores: Float) -> Float:
    """Returns the largest score of every panel, float32 [M, panels], of scores [M, rows]."""
    spare = form.panels * PANEL_ROWS - form.rows
    padded = np.pad(scores, ((0, 0), (0, spare)), constant_values=-np.inf)
    return padded.reshape(len(scores), form.panels, PANEL_ROWS).max(axis=2)


def _read(form: PanelFormat, codes: Bytes, view: View) -> NDArray[np.float64]:
    """Returns what a view makes of codes: whole and half numbers."""
    if form.grid is Grid.E2M1:
        return E2M1_CODES[codes].astype(np.float64)
    if view == "full":
        return codes.astype(np.float64)
    step = _step(form.bits)
    return (codes // step * step).astype(np.float64) + (step - 1) / 2


def _step(bits: int) -> int:
    """Counts the codes that are one to the view `hi`."""
    return 1 << max(0, bits - NIBBLE)


def _middles(
    form: PanelFormat, offsets: NDArray[np.generic] | None, rows: int
) -> NDArray[np.float64]:
    """Returns what each block's grid takes off its codes [rows, blocks]."""
    if form.grid is Grid.ZERO_POINT:
        assert offsets is not None
        return zero_points(offsets, form.bits).astype(np.float64)
    middle = 1 << (form.bits - 1) if form.grid.is_symmetric else 0
    if form.grid is Grid.E2M1:
        middle = E2M1_MIDDLE
    return np.full((rows, form.blocks), float(middle))


def _pack_numbers(form: PanelFormat, sides: list[NDArray[np.integer]]) -> Bytes:
    """Packs numbers of sub-blocks [P * 16, blocks] to bytes [P, supers, bytes]."""
    each = SUPER_BLOCK // form.block
    per_super = [side.reshape(form.panels, PANEL_ROWS, form.supers, each) for side in sides]
    rows = np.concatenate(per_super, axis=3).swapaxes(1, 2)
    if form.block == BLOCKS[0]:
        columns = rows.astype(np.uint8).reshape(-1, PANEL_ROWS, len(sides) * each)
        matrix = PanelFormat(
            rows=len(columns) * PANEL_ROWS, columns=columns.shape[2], bits=_SIX_BITS, block=16
        )
        flat = columns.reshape(-1, columns.shape[2])
        planes = [
            _plane(matrix, flat >> np.uint8(matrix.low_bits), NIBBLE),
            _plane(matrix, flat, matrix.low_bits),
        ]
        return np.concatenate(planes, axis=1).reshape(form.panels, form.supers, -1)
    quads = rows.reshape(form.panels, form.supers, PANEL_ROWS, -1, 4).swapaxes(2, 3)
    raw = np.ascontiguousarray(quads).astype(np.int8).view(np.uint8)
    return raw.reshape(form.panels, form.supers, -1)


def _unpack_numbers(form: PanelFormat, fields: Bytes) -> list[NDArray[np.integer]]:
    """Reads what `_pack_numbers` writes."""
    each = SUPER_BLOCK // form.block
    sides = 2 if form.grid.has_minimum else 1
    count = fields.shape[0] * fields.shape[1]
    used = PANEL_ROWS * sides * each * (_SIX_BITS if form.block == BLOCKS[0] else 8) // 8
    fields = fields[..., :used]
    if form.block == BLOCKS[0]:
        matrix = PanelFormat(
            rows=count * PANEL_ROWS, columns=sides * each, bits=_SIX_BITS, block=16
        )
        planes = np.ascontiguousarray(fields).reshape(count, -1)
        end = matrix.plane_bytes
        upper, low = _codes(planes[:, :end], matrix, NIBBLE), _codes(planes[:, end:], matrix, 2)
        numbers: NDArray[np.integer] = upper << np.uint8(2) | low
    else:
        quads = np.ascontiguousarray(fields).reshape(count, -1, PANEL_ROWS, 4)
        numbers = quads.swapaxes(1, 2).reshape(count * PANEL_ROWS, -1).view(np.int8)
    rows = numbers.reshape(len(fields), form.supers, PANEL_ROWS, sides, each)
    rows = rows.transpose(3, 0, 2, 1, 4).reshape(sides, len(fields) * PANEL_ROWS, form.blocks)
    return [np.ascontiguousarray(side) for side in rows]


def _by_block(form: PanelFormat, constants: NDArray[np.generic]) -> Bytes:
    """Packs constants [P * 16, supers] to bytes [P, supers, 16 * size]."""
    turned = constants.reshape(form.panels, PANEL_ROWS, form.supers).swapaxes(1, 2)
    raw = np.ascontiguousarray(turned).view(np.uint8)
    return raw.reshape(form.panels, form.supers, -1)


def _by_row(fields: Bytes, kind: type[Stored]) -> NDArray[Stored]:
    """Reads what `_by_block` writes."""
    values = np.ascontiguousarray(fields).view(kind)
    return values.swapaxes(1, 2).reshape(-1, fields.shape[1])


def _plane(form: PanelFormat, codes: Bytes, bits: int) -> Bytes:
    """Packs the lowest `bits` bits of codes [P * 16, blocks * block] to bytes [P, plane bytes]."""
    low = np.ascontiguousarray(codes & np.uint8((1 << bits) - 1)).view(np.uint32)
    fields = low.reshape(form.panels, PANEL_ROWS, -1, 8 // bits).swapaxes(1, 2)
    plane = fields[..., 0].copy()
    for i in range(1, 8 // bits):
        plane |= fields[..., i] << np.uint32(bits * i)
    return plane.reshape(form.panels, -1).view(np.uint8)


def _codes(plane: Bytes, form: PanelFormat, bits: int) -> Bytes:
    """Reads what `_plane` writes."""
    groups = form.blocks * form.block * bits // 32
    packed = plane.reshape(len(plane), groups, PANEL_ROWS, 4).swapaxes(1, 2)
    fields = [packed >> np.uint8(bits * i) & np.uint8((1 << bits) - 1) for i in range(8 // bits)]
    return np.stack(fields, axis=3).reshape(len(plane) * PANEL_ROWS, -1)
