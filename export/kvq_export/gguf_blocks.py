"""The bytes of a tensor in a GGUF file: plain floats, or ggml's Q8_0, Q4_0 and MXFP4 blocks.

Owns the layouts and the fall back for rows that are not whole blocks. The codes and scales of the
first two come from `weights.quantize`, as a bundle's do; only the scales are rounded, to float16.
Those of the third are a checkpoint's own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from kvq.errors import CheckpointError, argument
from kvq.reference_linear import BlockFormat, Blocks, Grid
from kvq_export.weights import quantize_chunks, stored_exponents

BLOCK = 32
# What MXFP4 holds as it is.
MXFP4 = BlockFormat(bits=4, block=BLOCK, grid=Grid.E2M1)

Kind = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "mxfp4"]
_BITS: dict[Kind, int] = {"q8_0": 8, "q4_0": 4}
_FLOATS = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKind:
    """How the rows of a tensor are stored."""

    kind: Kind

    @classmethod
    def fitting(cls, kind: Kind, columns: int) -> "StoredKind":
        """`kind`, or f16 where `columns` are not whole blocks, as llama.cpp falls back."""
        return cls(kind="f16" if kind in _BITS and columns % BLOCK else kind)

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row."""
        if self.kind == "mxfp4":
            return columns // BLOCK * (1 + BLOCK // 2)
        if self.kind in _BITS:
            return columns // BLOCK * (2 + BLOCK * _BITS[self.kind] // 8)
        return columns * np.dtype(_FLOATS[self.kind]).itemsize

    def encode(self, chunks: Iterable[np.ndarray], threads: int) -> Iterator[np.ndarray]:
        """Float32 row chunks as arrays whose bytes are the file's."""
        if self.kind in _BITS:
            bits = _BITS[self.kind]
            for blocks in quantize_chunks(chunks, BlockFormat(bits=bits, block=BLOCK), threads):
                yield pack_blocks(blocks.codes, blocks.scales, bits)
        else:
            yield from (self._as_floats(chunk) for chunk in chunks)

    def _as_floats(self, chunk: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            values = chunk.astype(_FLOATS[self.kind])
        if self.kind == "f16" and not np.isfinite(values).all():
            raise _too_large(f"a weight of {np.abs(chunk).max():.3g}")
        return values


def _too_large(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} does not fit float16; export with {argument('gguf_type', 'bf16')} or "
        f"{argument('format', 'onnx')}"
    )


def pack_blocks(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Blocks of float16 scale and codes, uint8 [rows, bytes], of codes and scales of a bundle.

    `codes` uint8 [rows, columns], one per byte, and `scales` float32 [rows, blocks], as
    `weights.quantize` gives them for any block of 32 or more. Raises `CheckpointError` for a scale
    beyond float16.
    """
    per_block = codes.shape[1] // BLOCK // scales.shape[1]
    largest = np.abs(scales).max(initial=0)
    with np.errstate(over="ignore"):
        scales = np.repeat(scales, per_block, axis=1).astype(np.float16)
    if not np.isfinite(scales).all():
        raise _too_large(f"a block's scale of {largest:.3g}")
    codes = codes.reshape(*scales.shape, BLOCK)
    # Q8_0 is signed, we add 128.
    codes = _pairs(codes) if bits == 4 else codes ^ np.uint8(128)
    blocks = np.concatenate([scales[..., None].view(np.uint8), codes], axis=-1)
    return blocks.reshape(len(scales), -1)


def pack_e2m1(blocks: Blocks) -> np.ndarray:
    """Blocks of an exponent and codes, uint8 [rows, bytes], of the codes that a checkpoint has.

    Raises `CheckpointError` for scales that are no power of two, or too large.
    """
    exponents = stored_exponents(blocks.scales)
    codes = _pairs(blocks.codes.reshape(*exponents.shape, BLOCK))
    return np.concatenate([exponents[..., None], codes], axis=-1).reshape(len(exponents), -1)


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits, two to a byte: element i of a block with i + 16."""
    half = BLOCK // 2
    return codes[..., :half] | codes[..., half:] << 4
