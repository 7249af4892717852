"""What `kvq::Linear` and `kvq::Embed` mean: the bytes of weights, and the arithmetic over them.

Owns the layout of a stored matrix and the definition native kernels are proved against. Knows no
model and no file; how codes and scales are chosen is the exporter's business.

**Weights.** A row of K weights is cut into blocks of 32, 64 or 128 (the last one padded); a block
keeps unsigned codes and one float16 scale: `weight = scale * SCALE_UNIT * (code - 2**(bits - 1))`.
Sixteen rows make a **panel** (the last one padded with rows of scale 0), which lies in one piece:

    plane   [blocks][block / 8][16 rows][4]   the codes, or of 8-bit codes the upper nibbles
    scales  [blocks][16 rows] float16         padded to 64 bytes
    low     as plane                          8 bits only: the lower nibbles

Byte c of row r in group j of eight columns holds column 8j + c in its low nibble, 8j + 4 + c in its
high one. At 8 bits plane and scales alone are a matrix of 4 bits (the view `hi`): a code is then
taken for the middle of the sixteen it may be, `16 * hi + 7.5`.

**Activations** are rounded to int8 block by block: `scale = max|x| / 127`, `level = rint(x * (127 /
max|x|))`, ties to even. A block below 1e-30 counts as zeros; one that is not finite makes its row
NaN.

**Products.** Within a block they are exact integers; blocks are added in order, each by one fused
multiply-add in float32: `total = fma(dot, weight_scale * (SCALE_UNIT * activation_scale), total)`.
A row's result therefore does not depend on the rows computed with it.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Bytes = NDArray[np.uint8]
View = Literal["full", "hi"]

# The attribute `activation` is a place in this list: none, or what the gate goes through.
ACTIVATIONS = ("", "silu", "gelu_tanh")
PANEL_ROWS = 16
# Of a product in two passes: panels that are read whole at first, and the margin of what it left.
FIRST_PANELS = 128
MARGIN = np.float32(1.5)
BLOCKS = (32, 64, 128)
# Scales of 8-bit codes would leave the range in which float16 has all its digits.
SCALE_UNIT = np.float32(2.0**-8)
TOP_LEVEL = np.float32(127)
SMALLEST = np.float32(1e-30)
ALIGNMENT = 64
NIBBLE, LOW = np.uint8(4), np.uint8(15)


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelFormat:
    """Shape and widths of a stored matrix [rows, columns], and where things lie in a panel."""

    rows: int
    columns: int
    bits: int
    block: int

    @property
    def panels(self) -> int:
        """Groups of sixteen rows, the padded last one included."""
        return -(-self.rows // PANEL_ROWS)

    @property
    def blocks(self) -> int:
        """Blocks per row, the padded last one included."""
        return -(-self.columns // self.block)

    @property
    def plane_bytes(self) -> int:
        """Bytes of one nibble plane of a panel."""
        return self.blocks * self.block * PANEL_ROWS // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of a panel's scales and of the padding after them."""
        return -(-self.blocks * PANEL_ROWS * 2 // ALIGNMENT) * ALIGNMENT

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return self.plane_bytes * self.bits // 4 + self.scale_bytes

    def view_bytes(self, view: View) -> int:
        """Bytes of a panel that a product reads."""
        return self.panel_bytes if view == "full" else self.plane_bytes + self.scale_bytes


def pack(form: PanelFormat, codes: Bytes, scales: NDArray[np.float16]) -> Bytes:
    """Panels uint8 [panels, panel_bytes] of codes uint8 [rows, blocks * block], one per byte.

    `scales` float16 [rows, blocks]. Codes of padding must be `2**(bits - 1)`.
    """
    spare = form.panels * PANEL_ROWS - form.rows
    codes = np.pad(codes, ((0, spare), (0, 0)), constant_values=1 << (form.bits - 1))
    scales = np.pad(scales, ((0, spare), (0, 0)))
    out = np.zeros((form.panels, form.panel_bytes), np.uint8)
    end = form.plane_bytes
    out[:, :end] = _plane(form, codes if form.bits == 4 else codes >> NIBBLE)
    by_block = scales.reshape(form.panels, PANEL_ROWS, form.blocks).swapaxes(1, 2)
    raw = np.ascontiguousarray(by_block).view(np.uint8).reshape(form.panels, -1)
    out[:, end : end + raw.shape[1]] = raw
    if form.bits == 8:
        out[:, end + form.scale_bytes :] = _plane(form, codes & LOW)
    return out


def unpack(form: PanelFormat, panels: Bytes) -> tuple[Bytes, NDArray[np.float16]]:
    """Codes uint8 [P * 16, blocks * block] and scales float16 [P * 16, blocks] of P panels."""
    end = form.plane_bytes
    codes = _nibbles(form, panels[:, :end])
    if form.bits == 8:
        codes = codes << NIBBLE | _nibbles(form, panels[:, end + form.scale_bytes :])
    raw = np.ascontiguousarray(panels[:, end : end + form.blocks * PANEL_ROWS * 2])
    scales = raw.view(np.float16).reshape(-1, form.blocks, PANEL_ROWS).swapaxes(1, 2)
    return codes, scales.reshape(-1, form.blocks)


def restore(form: PanelFormat, panels: Bytes) -> Float:
    """The weights of P panels, float32 [P * 16, columns], rows of padding included."""
    codes, scales = unpack(form, panels)
    return dequantize(codes, scales.astype(np.float32) * SCALE_UNIT, form.bits)[:, : form.columns]


def dequantize(codes: Bytes, scales: Float, bits: int, view: View = "full") -> Float:
    """Codes uint8 [N, K], scales float32 [N, blocks] -> `scale * (code - 2**(bits - 1))` [N, K]."""
    values = codes.astype(np.float32).reshape(*scales.shape, -1)
    if bits == 8 and view == "hi":
        values = values - values % 16 + np.float32(7.5)
    values -= np.float32(1 << (bits - 1))
    values *= scales[..., None]
    return values.reshape(codes.shape)


def round_rows(x: Float, block: int) -> tuple[NDArray[np.int8], Float]:
    """Activations float32 [M, K] -> levels int8 [M, blocks, block], scales float32 [M, blocks]."""
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
    """`x @ weight.T` as the kernels compute it: float32 [M, K] -> [M, rows]."""
    codes, scales = unpack(form, panels)
    levels, steps = round_rows(x, form.block)
    signed, halves = _signed(form, codes, view)
    signed = signed.reshape(len(codes), form.blocks, form.block).astype(np.float64)
    total = np.zeros((len(x), len(codes)), np.float32)
    for block in range(form.blocks):
        dot = levels[:, block].astype(np.float64) @ signed[:, block].T
        unit = SCALE_UNIT * steps[:, block] / np.float32(halves)
        scale = scales[:, block].astype(np.float32) * unit[:, None]
        # Exact in float64 but for the last rounding: what a fused multiply-add gives.
        total = (dot * scale.astype(np.float64) + total).astype(np.float32)
    return total[:, : form.rows]


def best_panels(form: PanelFormat, scores: Float, count: int) -> NDArray[np.bool_]:
    """Which panels a product in two passes reads whole: bool [M, panels].

    Those whose largest score in `scores`, float32 [M, rows] (view `hi`), is among the `count`
    largest: they hold the best `count` rows. Of equal ones the first count.
    """
    tops = panel_tops(form, scores)
    order = np.argsort(-tops, axis=1, kind="stable")[:, :count]
    chosen = np.zeros((len(scores), form.panels), bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen


def linear_in_two_passes(form: PanelFormat, panels: Bytes, x: Float, count: int) -> Float:
    """`linear` in view `hi`, but exact in what can be each row's `count` largest results.

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
    """The largest score of every panel, float32 [M, panels], of scores [M, rows]."""
    spare = form.panels * PANEL_ROWS - form.rows
    padded = np.pad(scores, ((0, 0), (0, spare)), constant_values=-np.inf)
    return padded.reshape(len(scores), form.panels, PANEL_ROWS).max(axis=2)


def _signed(form: PanelFormat, codes: Bytes, view: View) -> tuple[NDArray[np.int32], int]:
    """Signed codes as whole numbers, and how many of them make one step of the scale."""
    wide = codes.astype(np.int32)
    if form.bits == 8 and view == "hi":
        return 32 * (wide >> 4) - 241, 2
    return wide - (1 << (form.bits - 1)), 1


def _plane(form: PanelFormat, nibbles: Bytes) -> Bytes:
    """Nibbles [P * 16, blocks * block] -> bytes [P, plane_bytes]."""
    quads = np.ascontiguousarray(nibbles).view(np.uint32).reshape(form.panels, PANEL_ROWS, -1, 2)
    grouped = quads.swapaxes(1, 2)
    plane = grouped[..., 0] | grouped[..., 1] << np.uint32(4)
    return plane.reshape(form.panels, -1).view(np.uint8)


def _nibbles(form: PanelFormat, plane: Bytes) -> Bytes:
    """The way back of `_plane`."""
    groups = form.blocks * form.block // 8
    packed = plane.reshape(len(plane), groups, PANEL_ROWS, 4).swapaxes(1, 2)
    return np.stack((packed & LOW, packed >> NIBBLE), axis=3).reshape(len(plane) * PANEL_ROWS, -1)
