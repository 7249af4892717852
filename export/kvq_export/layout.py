"""Where each tensor lies in `model.onnx.data`: names, dtypes, shapes and offsets, nothing else.

Everything follows from the canonical shapes and the weight format, so the size of a bundle is
known before the first weight is read. Knows no weight values and no graph.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvq.errors import UnsupportedModelError
from kvq.reference_linear import PANEL_ROWS, PanelFormat
from kvq_export.config import WeightFormat
from kvq_models.config import Experts, ModelConfig, RopeConfig
from kvq_models.family import WeightSource

ALIGNMENT = 64
# Matrices of which rows are gathered.
TABLES = ("embed", "per_layer_embed")

Dtype = Literal["uint8", "float32"]
ITEM_BYTES: Mapping[Dtype, int] = {"uint8": 1, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One initializer of the graph and its place in the data file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes it takes, without the padding after it."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The data file: what lies where.

    `tensors` are keyed by initializer name. `names` are the canonical ones in file order: those of
    `matrices` are quantised, the others plain float32. A quantised weight X is one tensor
    `X.panels`; for MatMulNBits it is `X.codes` and `X.scales`, and a tied head is a second pair
    over the bytes of the embedding.
    """

    format: WeightFormat
    tensors: Mapping[str, StoredTensor]
    matrices: Mapping[str, PanelFormat]
    names: tuple[str, ...]
    num_bytes: int


@dataclass(kw_only=True, slots=True)
class _Cursor:
    tensors: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    end: int = 0

    def place(self, name: str, dtype: Dtype, shape: tuple[int, ...]) -> None:
        offset = -(-self.end // ALIGNMENT) * ALIGNMENT
        tensor = StoredTensor(name=name, dtype=dtype, shape=shape, offset=offset)
        self.tensors[name] = tensor
        self.end = offset + tensor.num_bytes


def plan_layout(
    config: ModelConfig, sources: Mapping[str, WeightSource], weights: WeightFormat
) -> Layout:
    """Places every canonical weight of `sources`, in their order, then the rotary tables.

    Raises `UnsupportedModelError` for experts that a graph of this kind does not compute.
    """
    _check_experts(config, weights)
    cursor = _Cursor()
    matrices: dict[str, PanelFormat] = {}
    for name, source in sources.items():
        if not source.quantised:
            cursor.place(name, "float32", source.shape)
            continue
        matrix = PanelFormat.of(weights.format_of(name), source.shape)
        matrices[name] = matrix
        if weights.linear == "kvq":
            cursor.place(f"{name}.panels", "uint8", (matrix.panels, matrix.panel_bytes))
        else:
            cursor.place(f"{name}.codes", "uint8", _codes_shape(name, matrix))
            cursor.place(f"{name}.scales", "float32", (matrix.rows, matrix.blocks))
    for index, rope in enumerate(config.ropes):
        cursor.place(f"rope.{index}.inv_freq", "float32", _rope_shape(rope))
    tensors = dict(cursor.tensors)
    if config.tied_head and weights.linear == "ort":
        tensors |= _tied_head(tensors, matrices["embed"])
    return Layout(
        format=weights,
        tensors=tensors,
        matrices=matrices,
        names=tuple(sources),
        num_bytes=cursor.end,
    )


def _check_experts(config: ModelConfig, weights: WeightFormat) -> None:
    for layer in config.layers:
        if not isinstance(layer.feed, Experts):
            continue
        if weights.linear != "kvq":
            raise UnsupportedModelError(
                f"--linear {weights.linear} computes no experts, which a {config.model_type} model "
                "has; leave it out"
            )
        if config.hidden_size % PANEL_ROWS or 2 * layer.feed.width % PANEL_ROWS:
            raise UnsupportedModelError(
                f"experts of {layer.feed.width} columns over {config.hidden_size} are not "
                f"supported; supported are multiples of {PANEL_ROWS // 2} and {PANEL_ROWS}"
            )


def _codes_shape(name: str, matrix: PanelFormat) -> tuple[int, ...]:
    """A gather reads flat rows, MatMulNBits rows of blocks; the bytes are the same."""
    block_bytes = matrix.block * matrix.bits // 8
    if name in TABLES:
        return matrix.rows, matrix.blocks * block_bytes
    return matrix.rows, matrix.blocks, block_bytes


def _tied_head(tensors: Mapping[str, StoredTensor], embed: PanelFormat) -> dict[str, StoredTensor]:
    codes, scales = tensors["embed.codes"], tensors["embed.scales"]
    shape = _codes_shape("head", embed)
    return {
        "head.codes": StoredTensor(
            name="head.codes", dtype="uint8", shape=shape, offset=codes.offset
        ),
        "head.scales": StoredTensor(
            name="head.scales", dtype="float32", shape=scales.shape, offset=scales.offset
        ),
    }


def _rope_shape(rope: RopeConfig) -> tuple[int, ...]:
    """Two rows, short then long, for a model with two sets of frequencies."""
    half = len(rope.inv_freq)
    return (half,) if rope.long_inv_freq is None else (2, half)
