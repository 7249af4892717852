"""Experts as gpt-oss stores them: MXFP4, blocks of 32 numbers of 4 bits that share a power of two.

Owns the layout of X_blocks, uint8 [experts, rows, blocks, 16], two numbers to a byte and the lower
bits first, and X_scales, uint8 [experts, rows, blocks], exponents that 127 is taken off. A number
is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (e2m1 of the OCP microscaling formats). Twice
that is whole and at most 12, so that codes of 5 bits hold every weight as it is.

Of float scales a bundle keeps powers of two from 2**-31 to 2**8; a block with a smaller one, none
of whose numbers is worth anything beside others, becomes zeros.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference_linear import BlockFormat, Blocks, Grid
from kvq_export.checkpoint import Checkpoint, Tensor, TensorEntry, read_bytes

BLOCK = 32
_BIAS, _NOT_A_NUMBER = 127, 255
_LEAST_EXPONENT = _BIAS - 31
_GRID = BlockFormat(bits=5, block=BLOCK, grid=Grid.SYMMETRIC)
# By the four bits: twice what they stand for, as codes around the middle one.
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
CODES = (16 + np.concatenate([_DOUBLED, -_DOUBLED])).astype(np.uint8)
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Matrix:
    """One expert's matrix [rows, columns], in two tensors.

    It stands for a tensor that transformers has with both axes turned.
    """

    name: str
    blocks: TensorEntry
    scales: TensorEntry
    dtype: str = "mxfp4"
    grid: BlockFormat = _GRID

    def __str__(self) -> str:
        return f"tensor {self.name!r} of {self.file.name}"

    @property
    def file(self) -> Path:
        """See `Tensor.file`."""
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Tensor.shape`."""
        return self.scales.shape[0], BLOCK * self.scales.shape[1]

    @property
    def exact(self) -> bool:
        """See `Tensor.exact`."""
        return bool((self._exponents(0, self.shape[0]) >= _LEAST_EXPONENT).all())

    def check(self) -> None:
        """See `Tensor.check`; types and shapes were checked before."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `Tensor.read`."""
        codes, scales, _ = self.read_blocks(start, stop)
        values = codes.astype(np.float32).reshape(*scales.shape, BLOCK) - np.float32(16)
        return (values * scales[..., None]).reshape(codes.shape)

    def read_blocks(self, start: int, stop: int) -> Blocks:
        """See `Tensor.read_blocks`; a scale is that of twice the numbers."""
        row_bytes = self.shape[1] // 2
        raw = _rows(self.blocks, start, stop, row_bytes)
        codes = np.stack([CODES[raw & 15], CODES[raw >> 4]], axis=2)
        exponents = self._exponents(start, stop)
        scales = np.ldexp(np.float32(0.5), exponents.astype(np.int32) - _BIAS)
        scales[exponents == _NOT_A_NUMBER] = np.nan
        return Blocks(codes.reshape(stop - start, -1), scales.astype(np.float32))

    def _exponents(self, start: int, stop: int) -> np.ndarray:
        return _rows(self.scales, start, stop, self.scales.shape[1])


def _rows(entry: TensorEntry, start: int, stop: int, row_bytes: int) -> np.ndarray:
    first, count = entry.start + start * row_bytes, (stop - start) * row_bytes
    return read_bytes(entry.file, first, count, str(entry)).reshape(stop - start, row_bytes)


def unpacked_experts(opened: Checkpoint) -> Checkpoint:
    """The checkpoint with one tensor X for X_blocks and X_scales of each expert.

    Raises `CheckpointError` for tensors that are missing or do not belong together.
    """
    tensors: dict[str, Tensor] = {}
    for name, blocks in opened.tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in opened.tensors:
            continue
        if not name.endswith(_BLOCKS):
            tensors[name] = blocks
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = opened.tensors.get(stem + _SCALES)
        if not isinstance(blocks, TensorEntry) or not isinstance(scales, TensorEntry):
            raise CheckpointError(
                f"tensor '{stem}{_SCALES}' is missing, without which blocks of MXFP4 stand for no "
                "weights; download the checkpoint again"
            )
        whole = {blocks.dtype, scales.dtype} == {"U8"}
        if not whole or len(scales.shape) != 2 or blocks.shape != (*scales.shape, BLOCK // 2):
            raise CheckpointError(
                f"{blocks} {blocks.dtype} {list(blocks.shape)} and {scales} {scales.dtype} "
                f"{list(scales.shape)} make no matrix of MXFP4; download the checkpoint again"
            )
        tensors[stem] = Mxfp4Matrix(name=stem, blocks=blocks, scales=scales)
    return replace(opened, tensors=tensors)
