"""Reads experts as gpt-oss stores them: MXFP4, blocks of 32 numbers that share a power of two.

Owns the layout of X_blocks, uint8 [experts, rows, blocks, 16], two numbers of 4 bits to a byte and
the lower bits first, and X_scales, uint8 [experts, rows, blocks], exponents that 127 is taken off.
A number is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (e2m1 of the OCP microscaling formats).
A bundle keeps both as they are (`Grid.E2M1`).
"""

from dataclasses import dataclass, replace

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference.linear import (
    E2M1_BIAS,
    BlockFormat,
    Blocks,
    Grid,
    dequantize,
    in_weights,
)
from kvq_export.read.checkpoint import Checkpoint, Tensor, TensorEntry

BLOCK = 32
_NOT_A_NUMBER = 255
_GRID = BlockFormat(bits=4, block=BLOCK, grid=Grid.E2M1)
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Matrix(Tensor):
    """Reads one expert's matrix [rows, columns] from two tensors.

    It stands for a tensor that transformers has with both axes turned.
    """

    blocks: TensorEntry
    scales: TensorEntry

    def read(self, start: int, stop: int) -> np.ndarray:
        exponents = self._exponents(start, stop)
        values = dequantize(in_weights(Blocks(self._codes(start, stop), exponents)), _GRID.bits)
        values.reshape(*exponents.shape, BLOCK)[exponents == _NOT_A_NUMBER] = np.nan
        return values

    def read_blocks(self, start: int, stop: int) -> Blocks:
        """Returns blocks as `Tensor.read_blocks` does; a scale is that of twice the numbers."""
        exponents = self._exponents(start, stop)
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - E2M1_BIAS)
        scales[exponents == _NOT_A_NUMBER] = np.nan
        return Blocks(self._codes(start, stop), scales)

    def _codes(self, start: int, stop: int) -> np.ndarray:
        raw = self.blocks.raw(start, stop)
        return np.stack([raw & 15, raw >> 4], axis=1).reshape(stop - start, -1)

    def _exponents(self, start: int, stop: int) -> np.ndarray:
        return self.scales.raw(start, stop).reshape(stop - start, -1)


def unpack_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with one tensor X for X_blocks and X_scales of each expert.

    Raises `CheckpointError` for tensors that are missing or do not belong together.
    """
    tensors: dict[str, Tensor] = {}
    for name, blocks in checkpoint.tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in checkpoint.tensors:
            continue
        if not name.endswith(_BLOCKS):
            tensors[name] = blocks
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = checkpoint.tensors.get(stem + _SCALES)
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
        tensors[stem] = Mxfp4Matrix(
            name=stem,
            file=blocks.file,
            dtype="mxfp4",
            shape=(scales.shape[0], BLOCK * scales.shape[1]),
            grid=_GRID,
            blocks=blocks,
            scales=scales,
        )
    return replace(checkpoint, tensors=tensors)
