"""Reads tensors that hold several weights as one tensor of each.

A family says which rows or columns are which weight's (`kvq_models.family.View`); nothing here
knows one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference.linear import Blocks
from kvq_export.read.checkpoint import Checkpoint, Tensor
from kvq_export.read.mxfp4 import Mxfp4Matrix
from kvq_models.family import View


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorView(Tensor):
    """Reads some rows of a tensor in their order or, `across`, some columns as rows."""

    tensor: Tensor
    rows: range
    across: bool

    def __str__(self) -> str:
        return f"{self.name!r} in {self.tensor}"

    def check(self) -> None:
        self.tensor.check()

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = self.rows[start:stop]
        if self.across:
            return np.ascontiguousarray(
                _whole(self.tensor)[:, rows.start : rows.stop : rows.step].T
            )
        if not rows:
            return np.zeros((0, *self.shape[1:]), np.float32)
        return self.tensor.read(rows.start, rows[-1] + 1)[:: rows.step]

    def read_blocks(self, start: int, stop: int) -> Blocks:
        rows = self.rows[start:stop]
        blocks = self.tensor.read_blocks(rows.start, rows[-1] + 1)
        return blocks.picked(slice(None, None, rows.step))


@lru_cache(maxsize=1)
def _whole(tensor: Tensor) -> np.ndarray:
    """Reads a tensor whose columns are asked for chunk after chunk."""
    return tensor.read(0, tensor.shape[0])


def apply_views(checkpoint: Checkpoint, views: Mapping[str, View]) -> Checkpoint:
    """Returns the checkpoint with every tensor that `views` are of replaced by these.

    A tensor that is not there leaves its views out. Raises `CheckpointError` for one of another
    size than its views together.
    """
    tensors, counts = dict(checkpoint.tensors), Counter[tuple[str, bool]]()
    for name, view in views.items():
        tensor = checkpoint.tensors.get(view.tensor)
        if tensor is None:
            continue
        across = view.across and not isinstance(tensor, Mxfp4Matrix)
        tensors.pop(view.tensor, None)
        tensors[name] = TensorView(
            name=name,
            file=tensor.file,
            dtype=tensor.dtype,
            shape=(len(view.rows), *(tensor.shape[:-1] if across else tensor.shape[1:])),
            # Blocks lie along rows.
            grid=None if across else tensor.grid,
            tensor=tensor,
            rows=view.rows,
            across=across,
        )
        counts[view.tensor, across] += len(view.rows)
    for (name, across), count in counts.items():
        tensor = checkpoint.tensors[name]
        rank, axis = (2, 1) if across else (len(tensor.shape), 0)
        if len(tensor.shape) != rank or tensor.shape[axis : axis + 1] != (count,):
            raise CheckpointError(
                f"wrong shape: {tensor} {list(tensor.shape)}; {checkpoint.described_by} asks for "
                f"{count} {'columns' if across else 'rows'}"
            )
    return replace(checkpoint, tensors=tensors)
