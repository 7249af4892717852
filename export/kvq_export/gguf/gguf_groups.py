"""Decodes the blocks of ggml's types as `kvq.reference.linear.Blocks`.

Owns the bit layouts of the types that people's files are made of; for the rare ones with large
tables, see `decode`. Knows no file.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kvq.errors import BackendError, UnsupportedModelError
from kvq.reference.linear import E2M1_BIAS, BlockFormat, Blocks, Grid, dequantize
from kvq_export.read.checkpoint import FLOAT_DTYPES, LEVELS, as_levels
from kvq_runtime.bundle.gguf_format import TensorType

FLOATS: Mapping[str, DTypeLike] = {**FLOAT_DTYPES, "F64": np.float64}
# Types whose blocks a bundle keeps as they are, and the narrowest format that does.
GRIDS = {
    name: BlockFormat.parse(form)
    for name, form in {
        "Q4_0": "4/32/symmetric", "Q4_1": "4/32/minimum", "Q5_0": "5/32/symmetric",
        "Q5_1": "5/32/minimum", "Q8_0": "8/32/symmetric", "Q2_K": "2/16/super_minimum",
        "Q3_K": "3/16/super_symmetric", "Q4_K": "4/32/super_minimum", "Q5_K": "5/32/super_minimum",
        "Q6_K": "6/16/super_symmetric", "IQ4_NL": "8/32/symmetric",
        "IQ4_XS": "8/16/super_symmetric", "MXFP4": "4/32/e2m1",
    }.items()
}  # fmt: skip
# For K-quants whose super-blocks are cut, because columns lie in another order: codes are kept, and
# the products of two scales are rounded to float16.
CUT_GRIDS = {
    "Q4_K": BlockFormat(bits=4, block=32, grid=Grid.MINIMUM),
    "Q5_K": BlockFormat(bits=5, block=32, grid=Grid.MINIMUM),
}
# The levels that four bits choose among, as codes of eight bits.
_UNEVEN_CODES = np.array(
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8
)


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
        if kind.name not in _DECODERS:
            from gguf import quants

            return quants.dequantize(raw, _rare_type(kind))
        form = GRIDS[kind.name]
        blocks = blocks_of(kind, raw, form)
        if form.grid is Grid.E2M1:
            return dequantize(as_levels(blocks), LEVELS.bits)
        return dequantize(blocks, form.bits)


def blocks_of(kind: TensorType, raw: np.ndarray, grid: BlockFormat) -> Blocks:
    """Returns rows uint8 [n, bytes] on a grid of `GRIDS` or `CUT_GRIDS`.

    Constants are in units of the weights.
    """
    blocks = _DECODERS[kind.name](raw.reshape(-1, kind.block_bytes))
    if not grid.grid.has_supers:
        blocks = blocks.without_supers()
    return blocks.changed(lambda array: array.reshape(len(raw), -1))


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


def _fields(packed: np.ndarray, bits: int, run: int) -> Any:
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


def _plain(form: BlockFormat, blocks: np.ndarray) -> Blocks:
    """Decodes a scale, an offset or none, the fifth bits of all weights or none, four bits each."""
    codes = _fields(blocks[:, -16:], 4, 16)
    if form.bits == 5:
        codes |= np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little") << 4
    offsets = _halves(blocks, 2) if form.grid is Grid.MINIMUM else None
    return Blocks(codes, _halves(blocks, 0), offsets)


def _q8_0(blocks: np.ndarray) -> Blocks:
    return Blocks(blocks[:, 2:] ^ np.uint8(128), _halves(blocks, 0))


def _q2_k(blocks: np.ndarray) -> Blocks:
    numbers = blocks[:, :16].view(np.int8)
    codes = _fields(blocks[:, 16:80], 2, 32)
    return Blocks(codes, _halves(blocks, 80), -_halves(blocks, 82), numbers & 15, numbers >> 4 & 15)


def _q3_k(blocks: np.ndarray) -> Blocks:
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    numbers = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return Blocks(codes, _halves(blocks, 108), sub_scales=_signed(numbers))


def _scales_and_offsets(blocks: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns scale and offset of blocks, then those of eight groups, six bits each."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return _halves(blocks, 0), -_halves(blocks, 2), scales, offsets


def _q4_k(blocks: np.ndarray) -> Blocks:
    return Blocks(_fields(blocks[:, 16:], 4, 32), *_scales_and_offsets(blocks))


def _q5_k(blocks: np.ndarray) -> Blocks:
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return Blocks(codes, *_scales_and_offsets(blocks))


def _q6_k(blocks: np.ndarray) -> Blocks:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return Blocks(codes, _halves(blocks, 208), sub_scales=blocks[:, 192:208].view(np.int8))


def _iq4_nl(blocks: np.ndarray) -> Blocks:
    return Blocks(_UNEVEN_CODES[_fields(blocks[:, 2:], 4, 16)], _halves(blocks, 0))


def _iq4_xs(blocks: np.ndarray) -> Blocks:
    numbers = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    # Sub-blocks of 32 with signed numbers are two of 16.
    numbers = np.repeat(_signed(numbers), 2, axis=1)
    codes = _UNEVEN_CODES[_fields(blocks[:, 8:], 4, 16)]
    return Blocks(codes, _halves(blocks, 0), sub_scales=numbers)


def _mxfp4(blocks: np.ndarray) -> Blocks:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - E2M1_BIAS)
    return Blocks(_fields(blocks[:, 1:], 4, 16), scales)


def _signed(numbers: np.ndarray) -> np.ndarray:
    """Returns six bits as int8 around their middle."""
    return numbers.view(np.int8) - np.int8(32)


_DECODERS: Mapping[str, Callable[[np.ndarray], Blocks]] = {
    **{name: partial(_plain, GRIDS[name]) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")},
    "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
