"""What the blocks of ggml's types hold: levels, and a scale and perhaps an offset for each group.

`weight = scale * level + offset`. Owns the bit layouts of the types that people's files are made
of; for the rare ones with large tables, see `decode`. Knows no file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from kvq.errors import BackendError, UnsupportedModelError
from kvq.reference_linear import E2M1_BIAS, E2M1_TOP, BlockFormat, Blocks, Grid
from kvq_runtime.gguf_format import TensorType

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
    "Q4_K": BlockFormat(bits=4, block=32, grid=Grid.MINIMUM),
    "Q5_K": BlockFormat(bits=5, block=32, grid=Grid.MINIMUM),
    "IQ4_NL": BlockFormat(bits=8, block=32),
    "MXFP4": BlockFormat(bits=4, block=32, grid=Grid.E2M1),
}
# Of these the codes are kept, and scales, products of two numbers, within float16's rounding.
ROUNDED = frozenset({"Q4_K", "Q5_K"})
# The levels that four bits choose among.
_UNEVEN = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
# Of two bits of exponent and one of mantissa, doubled: whole numbers.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


@dataclass(frozen=True, slots=True)
class Groups:
    """`levels` int8 [n, groups, size], `scales` and `offsets` float32 [n, groups]; None: zeros."""

    levels: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """Weights float32 [n, groups * size]."""
        values = self.levels.astype(np.float32)
        values *= self.scales[..., None]
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.reshape(len(values), -1)


def check_type(kind: TensorType) -> None:
    """Raises `UnsupportedModelError` for a type of no known form, `BackendError` for a rare one."""
    if kind.name not in FLOATS and kind.name not in _DECODERS:
        _rare_type(kind)


def decode(kind: TensorType, raw: np.ndarray) -> np.ndarray:
    """Rows uint8 [n, bytes] of a type as float32 [n, weights].

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
    """The blocks of rows uint8 [n, bytes], one after the other."""
    return _DECODERS[kind.name](raw.reshape(-1, kind.block_bytes))


def blocks_of(kind: TensorType, raw: np.ndarray) -> Blocks:
    """Rows uint8 [n, bytes] on the grid of `GRIDS`, constants in units of the weights."""
    grid = GRIDS[kind.name]
    if grid.grid is Grid.E2M1:
        blocks = raw.reshape(-1, kind.block_bytes)
        codes, scales = _fields(blocks[:, 1:], 4, 16), _powers(blocks)
        return Blocks(codes.reshape(len(raw), -1), scales.reshape(len(raw), -1))
    found = groups(kind, raw)
    middle = 1 << (grid.bits - 1) if grid.grid is Grid.SYMMETRIC else 0
    codes = (found.levels.astype(np.int16) + middle).astype(np.uint8)
    offsets = None if found.offsets is None else found.offsets.reshape(len(raw), -1)
    return Blocks(codes.reshape(len(raw), -1), found.scales.reshape(len(raw), -1), offsets)


def holds_exponents(kind: TensorType, raw: np.ndarray) -> bool:
    """Whether a bundle can keep the powers of two that blocks of rows uint8 [n, bytes] share."""
    return bool((raw.reshape(-1, kind.block_bytes)[:, 0] <= E2M1_TOP).all())


def _rare_type(kind: TensorType) -> Any:
    """What the gguf package calls a type that it can read."""
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
    """Fields of `bits` bits of bytes uint8 [n, bytes], uint8 [n, bytes * 8 / bits].

    Of each `run` bytes the lowest fields come first, then those above them, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return parts.reshape(len(packed), -1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 numbers at byte `at` of each, float32 [n, 1]."""
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
    """The fifth bits of 32 weights, in order, then their lower four bits."""
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return _fields(blocks[:, at + 4 :], 4, 16) | high << 4


def _q5_0(blocks: np.ndarray) -> Groups:
    return Groups(_levels(_five_bits(blocks, 2), 32, 16), _halves(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Groups:
    return Groups(_levels(_five_bits(blocks, 4), 32), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Groups:
    return Groups(blocks[:, None, 2:].view(np.int8), _halves(blocks, 0))


def _q2_k(blocks: np.ndarray) -> Groups:
    packed = blocks[:, :16]
    return Groups(
        _levels(_fields(blocks[:, 16:80], 2, 32), 16),
        _halves(blocks, 80) * (packed & 15),
        -_halves(blocks, 82) * (packed >> 4),
    )


def _q3_k(blocks: np.ndarray) -> Groups:
    fields = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return Groups(
        _levels(fields, 16, 4), _halves(blocks, 108) * (scales.astype(np.float32) - np.float32(32))
    )


def _scales_and_offsets(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of eight groups: twelve bytes of six bits each after the two numbers they multiply."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return _halves(blocks, 0) * scales, -_halves(blocks, 2) * offsets


def _q4_k(blocks: np.ndarray) -> Groups:
    return Groups(_levels(_fields(blocks[:, 16:], 4, 32), 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: np.ndarray) -> Groups:
    fields = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return Groups(_levels(fields, 32), *_scales_and_offsets(blocks))


def _q6_k(blocks: np.ndarray) -> Groups:
    fields = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Groups(_levels(fields, 16, 32), _halves(blocks, 208) * scales)


def _iq4_nl(blocks: np.ndarray) -> Groups:
    return Groups(_UNEVEN[_fields(blocks[:, 2:], 4, 16)][:, None], _halves(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Groups:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    return Groups(
        _UNEVEN[_fields(blocks[:, 8:], 4, 16)].reshape(len(blocks), 8, 32),
        _halves(blocks, 0) * (scales.astype(np.float32) - np.float32(32)),
    )


def _mxfp4(blocks: np.ndarray) -> Groups:
    """A power of two per block; its levels are doubled."""
    return Groups(_E2M1[_fields(blocks[:, 1:], 4, 16)][:, None], _powers(blocks))


def _powers(blocks: np.ndarray) -> np.ndarray:
    """Of twice the numbers, as their exponents say, float32 [n, 1]."""
    return np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - E2M1_BIAS)


_DECODERS: Mapping[str, Callable[[np.ndarray], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
