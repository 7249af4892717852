"""Tensors that hold several weights, as one tensor of each.

Which rows or columns are which weight's, a family says (`kvq_models.family.View`); knows none.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference_linear import BlockFormat, Blocks
from kvq_export.checkpoint import Checkpoint, Tensor
from kvq_export.mxfp4 import Mxfp4Matrix
from kvq_models.family import View


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorView:
    """Some rows of a tensor in their order, or, `across`, some columns as rows."""

    name: str
    tensor: Tensor
    rows: range
    across: bool

    def __str__(self) -> str:
        return f"{self.name!r} in {self.tensor}"

    @property
    def file(self) -> Path:
        """See `Tensor.file`."""
        return self.tensor.file

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Tensor.shape`."""
        _, *rest = self.tensor.shape[::-1] if self.across else self.tensor.shape
        return len(self.rows), *rest

    @property
    def dtype(self) -> str:
        """See `Tensor.dtype`."""
        return self.tensor.dtype

    @property
    def grid(self) -> BlockFormat | None:
        """See `Tensor.grid`; blocks lie along rows."""
        return None if self.across else self.tensor.grid

    @property
    def exact(self) -> bool:
        """See `Tensor.exact`."""
        return self.tensor.exact

    def check(self) -> None:
        """See `Tensor.check`."""
        self.tensor.check()

    def read(self, start: int, stop: int) -> np.ndarray:
        """See `Tensor.read`."""
        rows = self.rows[start:stop]
        if self.across:
            return np.ascontiguousarray(
                _whole(self.tensor)[:, rows.start : rows.stop : rows.step].T
            )
        return self.tensor.read(rows.start, rows[-1] + 1)[:: rows.step] if rows else self._none()

    def read_blocks(self, start: int, stop: int) -> Blocks:
        """See `Tensor.read_blocks`."""
        rows = self.rows[start:stop]
        blocks = self.tensor.read_blocks(rows.start, rows[-1] + 1)
        return blocks.picked(slice(None, None, rows.step))

    def _none(self) -> np.ndarray:
        return np.zeros((0, *self.shape[1:]), np.float32)


@lru_cache(maxsize=1)
def _whole(tensor: Tensor) -> np.ndarray:
    """A tensor whose columns are asked for chunk after chunk."""
    return tensor.read(0, tensor.shape[0])


def viewed(opened: Checkpoint, views: Mapping[str, View]) -> Checkpoint:
    """The checkpoint with every tensor that `views` are of replaced by these.

    A tensor that is not there leaves its views out. Raises `CheckpointError` for one of another
    size than its views together.
    """
    tensors, counts = dict(opened.tensors), Counter[tuple[str, bool]]()
    for name, view in views.items():
        tensor = opened.tensors.get(view.tensor)
        if tensor is None:
            continue
        across = view.across and not isinstance(tensor, Mxfp4Matrix)
        tensors.pop(view.tensor, None)
        tensors[name] = TensorView(name=name, tensor=tensor, rows=view.rows, across=across)
        counts[view.tensor, across] += len(view.rows)
    for (name, across), count in counts.items():
        tensor = opened.tensors[name]
        rank, axis = (2, 1) if across else (len(tensor.shape), 0)
        if len(tensor.shape) != rank or tensor.shape[axis : axis + 1] != (count,):
            raise CheckpointError(
                f"wrong shape: {tensor} {list(tensor.shape)}; {opened.described_by} asks for "
                f"{count} {'columns' if across else 'rows'}"
            )
    return replace(opened, tensors=tensors)
