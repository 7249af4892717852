"""Places each tensor in `model.onnx.data`: names, dtypes, shapes and offsets.

Everything follows from the canonical shapes and the weight format, so the size of a bundle is known
before the first weight is read. Knows no weight values and no graph.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvq.errors import UnsupportedModelError
from kvq.reference.linear import PANEL_ROWS, PanelFormat
from kvq_export.config import WeightFormat
from kvq_models.config import Experts, ModelConfig, RopeConfig
from kvq_models.family import WeightSource

ALIGNMENT = 64

Dtype = Literal["uint8", "float32"]
ITEM_BYTES: Mapping[Dtype, int] = {"uint8": 1, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Describes an initializer of the graph and its place in the data file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Returns its bytes, without the padding after it."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Says what lies where in the data file.

    `tensors` are keyed by initializer name. `names` are the canonical ones in file order: those of
    `matrices` are quantised, the others plain float32. A quantised weight X is one tensor
    `X.panels`.
    """

    format: WeightFormat
    tensors: Mapping[str, StoredTensor]
    matrices: Mapping[str, PanelFormat]
    names: tuple[str, ...]
    num_bytes: int


def plan_layout(
    config: ModelConfig, sources: Mapping[str, WeightSource], weights: WeightFormat
) -> Layout:
    """Places every canonical weight of `sources`, in their order, then the rotary tables.

    Raises `UnsupportedModelError` for experts that a graph of this kind does not compute.
    """
    _check_experts(config)
    tensors: dict[str, StoredTensor] = {}
    matrices: dict[str, PanelFormat] = {}
    end = 0

    def place(name: str, dtype: Dtype, shape: tuple[int, ...]) -> None:
        nonlocal end
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        tensors[name] = StoredTensor(name=name, dtype=dtype, shape=shape, offset=offset)
        end = offset + tensors[name].num_bytes

    for name, source in sources.items():
        if not source.quantised:
            place(name, "float32", source.shape)
            continue
        matrix = PanelFormat.of(weights.format_of(name, source.shape[-1]), source.shape)
        matrices[name] = matrix
        place(f"{name}.panels", "uint8", (matrix.panels, matrix.panel_bytes))
    for index, rope in enumerate(config.ropes):
        place(f"rope.{index}.inv_freq", "float32", rope_table(rope).shape)
    return Layout(
        format=weights,
        tensors=tensors,
        matrices=matrices,
        names=tuple(sources),
        num_bytes=end,
    )


def _check_experts(config: ModelConfig) -> None:
    for layer in config.layers:
        if not isinstance(layer.feed, Experts):
            continue
        if config.hidden_size % PANEL_ROWS or 2 * layer.feed.width % PANEL_ROWS:
            raise UnsupportedModelError(
                f"experts of {layer.feed.width} columns over {config.hidden_size} are not "
                f"supported; supported are multiples of {PANEL_ROWS // 2} and {PANEL_ROWS}"
            )


def rope_table(rope: RopeConfig) -> np.ndarray:
    """Returns a rotary table; two sets of frequencies are two rows, short then long."""
    both = [rope.inv_freq, rope.long_inv_freq]
    return np.array(rope.inv_freq if rope.long_inv_freq is None else both, np.float32)
