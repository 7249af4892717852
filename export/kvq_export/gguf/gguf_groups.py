"""Decodes the blocks of ggml's types: levels, and a scale and perhaps an offset for each group.

`weight = scale * level + offset`. Owns the bit layouts of the types that people's files are made
of; for the rare ones with large tables, see `decode`. Knows no file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvq.errors import BackendError, UnsupportedModelError
from kvq.reference.linear import E2M1_BIAS, E2M1_TOP, BlockFormat, Blocks, Grid
from kvq_runtime.bundle.gguf_format import TensorType

FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}
# Types whose blocks a bundle keeps as they are, and the narrowest format that does.
GRIDS: Mapping[str, BlockFormat] = {
    "Q4_0": BlockFormat(bits=4, block=32),
    "Q4_1": BlockFormat(bits=4, block=32, grid=Grid.MINIMUM),
    "Q5_0": BlockFormat(bits=5, block=32),
    "Q5_1": BlockFormat(bits=5, block=32, grid=Grid.MINIMUM),
    "Q8_0": BlockFormat(bits=8, block=32),
    "Q2_K": BlockFormat(bits=4, block=16, grid=Grid.SUPER_MINIMUM),
    "Q3_K": BlockFormat(bits=4, block=16, grid=Grid.SUPER_SYMMETRIC),
    "Q4_K": BlockFormat(bits=4, block=32, grid=Grid.SUPER_MINIMUM),
    "Q5_K": BlockFormat(bits=5, block=32, grid=Grid.SUPER_MINIMUM),
    "Q6_K": BlockFormat(bits=6, block=16, grid=Grid.SUPER_SYMMETRIC),
    "IQ4_NL": BlockFormat(bits=8, block=32),
    "IQ4_XS": BlockFormat(bits=8, block=16, grid=Grid.SUPER_SYMMETRIC),
    "MXFP4": BlockFormat(bits=4, block=32, grid=Grid.E2M1),
}
# For K-quants whose super-blocks are cut, because columns lie in another order: codes are kept, and
# the products of two scales are rounded to float16.
CUT_GRIDS: Mapping[str, BlockFormat] = {
    "Q4_K": BlockFormat(bits=4, block=32, grid=Grid.MINIMUM),
    "Q5_K": BlockFormat(bits=5, block=32, grid=Grid.MINIMUM),
}
# The levels that four bits choose among.
_UNEVEN = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
# Numbers of two bits of exponent and one of mantissa, doubled to be whole.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True, slots=True)
class Groups:
    """Holds levels int8 [n, groups, size]; scales and offsets (or None) float32 [n, groups].

    Where each group has whole numbers too, `sub_scales` and `sub_offsets` [n, groups], scales
    and offsets are [n, 1].
    """

    levels: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    sub_scales: np.ndarray | None = None
    sub_offsets: np.ndarray | None = None

    def multiplied(self) -> "Groups":
        """Returns the same groups, each with the products of its numbers alone."""
        if self.sub_scales is None:
            return self
        offsets = None
        if self.offsets is not None and self.sub_offsets is not None:
            offsets = self.offsets * self.sub_offsets
        return Groups(self.levels, self.scales * self.sub_scales, offsets)

    def values(self) -> np.ndarray:
        """Returns weights float32 [n, groups * size]."""
        groups = self.multiplied()
        values = self.levels.astype(np.float32)
        values *= groups.scales[..., None]
        if groups.offsets is not None:
            values += groups.offsets[..., None]
        return values.reshape(len(values), -1)


def check_type(kind: TensorType) -> None:
    """Raises `UnsupportedModelError` for a type of no known form, `BackendError` for a rare one."""
    if kind.name not in FLOATS and kind.name not in _DECODERS:
        _rare_type(kind)


def decode(kind: TensorType, raw: np.ndarray) -> np.ndarray:
    """Decodes rows uint8 [n, bytes] of a type: float32 [n, weights].

    The types that choose among thousands of vectors (IQ1 to IQ3) and other rare ones are read by
    the gguf package, which keeps their tables.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if kind.name in FLOATS:
            return raw.view(FLOATS[kind.name]).astype(np.float32, copy=False)
        if kind.name in _DECODERS:
            return groups(kind, raw).values().reshape(len(raw), -1)
        from gguf import quants

        return quants.dequantize(raw, _rare_type(kind))


def groups(kind: TensorType, raw: np.ndarray) -> Groups:
    """Returns the blocks of rows uint8 [n, bytes], one after the other."""
    return _DECODERS[kind.name](raw.reshape(-1, kind.block_bytes))


def blocks_of(kind: TensorType, raw: np.ndarray, grid: BlockFormat) -> Blocks:
    """Returns rows uint8 [n, bytes] on a grid of `GRIDS` or `CUT_GRIDS`.

    Constants are in units of the weights.
    """
    if grid.grid is Grid.E2M1:
        blocks = raw.reshape(-1, kind.block_bytes)
        codes, scales = _fields(blocks[:, 1:], 4, 16), _powers(blocks)
        return Blocks(codes.reshape(len(raw), -1), scales.reshape(len(raw), -1))
    decoded = groups(kind, raw)
    if not grid.grid.has_supers:
        decoded = decoded.multiplied()
    middle = 1 << (grid.bits - 1) if grid.grid.is_symmetric else 0
    codes = (decoded.levels.astype(np.int16) + middle).astype(np.uint8)
    constants = (decoded.scales, decoded.offsets, decoded.sub_scales, decoded.sub_offsets)
    return Blocks(codes, *constants).changed(lambda array: array.reshape(len(raw), -1))


def keeps_exponents(kind: TensorType, raw: np.ndarray) -> bool:
    """Tells whether a bundle keeps the powers of two that blocks of rows uint8 [n, bytes] share."""
    return bool((raw.reshape(-1, kind.block_bytes)[:, 0] <= E2M1_TOP).all())


def _rare_type(kind: TensorType) -> Any:
    """Returns what the gguf package calls a type that it can read."""
    try:
        import gguf
    except ImportError as error:
        raise BackendError(
            f"weights of type {kind.name} are read by the gguf package: "
            'pip install "kvq-runtime[export]"'
        ) from error
    number: Any = getattr(gguf.GGMLQuantizationType, kind.name, None)
    try:
        gguf.quants.dequantize(np.zeros((1, kind.block_bytes), np.uint8), number)
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
        raise UnsupportedModelError(
            f"weights of type {kind.name} cannot be read; choose a file of another type, such as "
            "Q4_K_M or Q8_0"
        ) from error
    return number


def _fields(packed: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Returns the fields of `bits` bits in bytes uint8 [n, bytes], uint8 [n, bytes * 8 / bits].

    Of each `run` bytes the lowest fields come first, then those above them, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return parts.reshape(len(packed), -1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the float16 numbers at byte `at` of each block, float32 [n, 1]."""
    raw = np.ascontiguousarray(blocks[:, at : at + 2])
    return raw.view(np.float16).astype(np.float32)


def _levels(fields: np.ndarray, size: int, middle: int = 0) -> np.ndarray:
    return (fields.astype(np.int8) - np.int8(middle)).reshape(len(fields), -1, size)


def _q4_0(blocks: np.ndarray) -> Groups:
    return Groups(_levels(_fields(blocks[:, 2:], 4, 16), 32, 8), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Groups:
    levels = _levels(_fields(blocks[:, 4:], 4, 16), 32)
    return Groups(levels, _halves(blocks, 0), _halves(blocks, 2))


def _five_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Joins the fifth bits of 32 weights, which come first, with their lower four bits."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return _fields(blocks[:, at + 4 :], 4, 16) | high << 4


def _q5_0(blocks: np.ndarray) -> Groups:
    return Groups(_levels(_five_bits(blocks, 2), 32, 16), _halves(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Groups:
    return Groups(_levels(_five_bits(blocks, 4), 32), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Groups:
    return Groups(blocks[:, None, 2:].view(np.int8), _halves(blocks, 0))


def _q2_k(blocks: np.ndarray) -> Groups:
    packed = blocks[:, :16].view(np.int8)
    levels = _levels(_fields(blocks[:, 16:80], 2, 32), 16)
    return Groups(levels, _halves(blocks, 80), -_halves(blocks, 82), packed & 15, packed >> 4 & 15)


def _q3_k(blocks: np.ndarray) -> Groups:
    fields = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    numbers = scales.view(np.int8) - np.int8(32)
    return Groups(_levels(fields, 16, 4), _halves(blocks, 108), sub_scales=numbers)


def _scales_and_offsets(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns scale and offset of blocks, then those of eight groups, six bits each."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return _halves(blocks, 0), -_halves(blocks, 2), scales, offsets


def _q4_k(blocks: np.ndarray) -> Groups:
    return Groups(_levels(_fields(blocks[:, 16:], 4, 32), 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: np.ndarray) -> Groups:
    fields = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return Groups(_levels(fields, 32), *_scales_and_offsets(blocks))


def _q6_k(blocks: np.ndarray) -> Groups:
    fields = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    numbers = blocks[:, 192:208].view(np.int8)
    return Groups(_levels(fields, 16, 32), _halves(blocks, 208), sub_scales=numbers)


def _iq4_nl(blocks: np.ndarray) -> Groups:
    return Groups(_UNEVEN[_fields(blocks[:, 2:], 4, 16)][:, None], _halves(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Groups:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    # Sub-blocks of 32 with signed numbers are two of 16.
    numbers = np.repeat(scales.view(np.int8) - np.int8(32), 2, axis=1)
    levels = _UNEVEN[_fields(blocks[:, 8:], 4, 16)].reshape(len(blocks), 16, 16)
    return Groups(levels, _halves(blocks, 0), sub_scales=numbers)


def _mxfp4(blocks: np.ndarray) -> Groups:
    """Decodes MXFP4: a power of two per block, and doubled levels."""
    return Groups(_E2M1[_fields(blocks[:, 1:], 4, 16)][:, None], _powers(blocks))


def _powers(blocks: np.ndarray) -> np.ndarray:
    """Returns the powers of two for doubled levels, as their exponents say, float32 [n, 1]."""
    return np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - E2M1_BIAS)


_DECODERS: Mapping[str, Callable[[np.ndarray], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
