"""Multiplies many rows by a matrix with kvq's kernels, several times as fast as in float32.

It is for reading a text through a checkpoint. Inputs are rounded to 8 bits, as they are when the
bundle runs.
"""

from collections.abc import Callable, Iterable

import numpy as np

from kvq import native_linear
from kvq.reference.linear import BlockFormat, Blocks, PanelFormat, pack
from kvq_export.config import BLOCK
from kvq_export.write.weights import stored_scales
from kvq_export.write.writer import stored_blocks

# Rows of inputs in one call: their results stay in a core's cache.
_ROWS = 256
_FORM = BlockFormat(bits=8, block=BLOCK)

Map = Callable[[Callable[[slice], None], Iterable[slice]], Iterable[None]]
"""Calls a function with each of some slices, as `map` does, perhaps in several threads."""


class KernelMatrix:
    """Holds a stored matrix [N, K], to multiply by."""

    def __init__(self, blocks: Blocks, form: PanelFormat) -> None:
        self._form = form
        self._panels = pack(form, stored_blocks(blocks, form.grid))

    @classmethod
    def of(cls, rows: np.ndarray) -> "KernelMatrix":
        """Rounds `rows` float32 [N, K] to 8 bits by the largest weight of each block."""
        spare = -rows.shape[1] % _FORM.block
        columns = np.pad(rows, ((0, 0), (0, spare))).reshape(len(rows), -1, _FORM.block)
        scales = stored_scales(np.abs(columns).max(axis=2) / 127)
        steps = np.where(scales > 0, scales, 1)
        levels = np.clip(np.rint(columns / steps[:, :, None]), -128, 127)
        codes = (levels + 128).astype(np.uint8).reshape(len(rows), -1)
        return cls(Blocks(codes, scales), PanelFormat.of(_FORM, rows.shape))

    def multiply(self, x: np.ndarray, each: Map = map) -> np.ndarray:
        """Returns products float32 [T, N] with `x` float32 [T, K], some rows at a time."""
        out = np.empty((len(x), self._form.rows), np.float32)

        def some(rows: slice) -> None:
            out[rows] = native_linear.linear(self._form, self._panels, x[rows])

        for _ in each(some, [slice(at, at + _ROWS) for at in range(0, len(x), _ROWS)]):
            pass
        return out
