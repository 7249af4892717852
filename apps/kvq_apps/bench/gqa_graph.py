"""The graph of a bundle of stock operators, with ONNX Runtime's attention in place of ours.

Every `kvq::Attention` becomes a `com.microsoft::GroupQueryAttention` over past and present
tensors; everything else, and the bytes of the weights, are the bundle's. Knows no session.

Inputs besides the bundle's: `seqlens_k` int32 [1] (all tokens - 1), `total_sequence_length`
int32 (all tokens), `cos.{rope}` and `sin.{rope}` float32 [S, rotary_dim / 2],
`past_key_values.{layer}.key` and `.value` [1, H_kv, S, D]; outputs `present.{layer}.key` and
`.value`, meant to be bound to the same memory.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from kvq_models.config import ModelConfig
from kvq_runtime.bundle import Bundle

# Where external initializers of a model given as bytes are looked for.
WEIGHT_FOLDER = "session.model_external_initializers_file_folder_path"

# Symmetric int8 codes of keys and values in a range of +-6.35; only the speed is of interest.
INT8_SCALE = 0.05


def gqa_model(bundle: Bundle, *, int8: bool) -> bytes:
    """The serialised model; its weights lie in the bundle's data file, by relative path."""
    model = ir.load(bundle.model_path)
    rewriter = _Rewriter(graph=model.graph, config=bundle.config, int8=int8)
    rewriter.add_inputs()
    attention = [node for node in model.graph if node.domain == "kvq"]
    for layer, node in enumerate(attention):
        rewriter.replace(layer, node)
    RemoveUnusedNodesPass()(model)
    drop_unused_inputs(model.graph)
    del model.opset_imports["kvq"]
    return ir.to_proto(model).SerializeToString()


def past_names(layer: int) -> tuple[str, str]:
    """Inputs that hold a layer's keys and values."""
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    """Outputs for a layer's keys and values."""
    return f"present.{layer}.key", f"present.{layer}.value"


@dataclass(kw_only=True)
class _Rewriter:
    graph: ir.Graph
    config: ModelConfig
    int8: bool
    values: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])

    def add_inputs(self) -> None:
        config = self.config
        self._input("seqlens_k", ir.DataType.INT32, [1])
        self._input("total_sequence_length", ir.DataType.INT32, [])
        for index, rope in enumerate(config.ropes):
            for table in ("cos", "sin"):
                self._input(f"{table}.{index}", ir.DataType.FLOAT, ["S", len(rope.inv_freq)])
        for layer in range(config.num_layers):
            for name in past_names(layer):
                self._input(name, self._cache_dtype, self._cache_shape)

    def replace(self, layer: int, node: ir.Node) -> None:
        """Puts the nodes of one layer's attention where `node` is."""
        path = node.name.rsplit("/", 1)[0] if node.name else f"layers.{layer}"
        q, k, v = self._qkv(node, path)
        rope = self.config.layers[layer].rope
        past = [self.values[name] for name in past_names(layer)]
        scales = [self._scale()] * 2 if self.int8 else []
        out, key, value = self._before(
            node,
            f"{path}/GroupQueryAttention",
            [
                q, k, v, *past, self.values["seqlens_k"], self.values["total_sequence_length"],
                self.values[f"cos.{rope}"], self.values[f"sin.{rope}"], None, None, None, *scales,
            ],
            3,
            domain="com.microsoft",
            **self._attributes(layer),
        )  # fmt: skip
        for present, name in zip((key, value), present_names(layer), strict=True):
            present.name = name
            present.dtype, present.shape = self._cache_dtype, ir.Shape(self._cache_shape)
            self.graph.outputs.append(present)
        [flat] = self._before(node, f"{path}/flat/Squeeze", [out, self._integers(0)], 1)
        node.outputs[0].replace_all_uses_with(flat)
        self.graph.remove(node, safe=True)

    def _qkv(self, node: ir.Node, path: str) -> tuple[ir.Value | None, ...]:
        """Inputs query, key and value [1, T, width]; packed in the first where that is possible."""
        packed = node.inputs[0]
        config = self.config
        if not config.qk_norm:
            [query] = self._before(node, f"{path}/Unsqueeze", [packed, self._integers(0)], 1)
            return query, None, None
        kv_width = config.num_kv_heads * config.head_dim
        sizes = self._integers(config.qkv_width - 2 * kv_width, kv_width, kv_width)
        q, k, v = self._before(node, f"{path}/Split", [packed, sizes], 3, axis=-1)
        q = self._normed_heads(node, f"{path}/q_norm", q, node.inputs[5], config.num_heads)
        k = self._normed_heads(node, f"{path}/k_norm", k, node.inputs[6], config.num_kv_heads)
        [v] = self._before(node, f"{path}/v/Unsqueeze", [v, self._integers(0)], 1)
        return q, k, v

    def _normed_heads(
        self, node: ir.Node, path: str, x: ir.Value, weight: ir.Value | None, heads: int
    ) -> ir.Value:
        """RMS norm of every head: [T, heads * D] -> [1, T, heads * D]."""
        per_head = self._integers(-1, self.config.head_dim)
        rows = self._integers(1, -1, heads * self.config.head_dim)
        epsilon = float(self.config.norm_eps)
        [x] = self._before(node, f"{path}/heads/Reshape", [x, per_head], 1)
        [x] = self._before(
            node, f"{path}/SimplifiedLayerNormalization", [x, weight], 1,
            axis=-1, epsilon=epsilon, stash_type=1,
        )  # fmt: skip
        return self._before(node, f"{path}/rows/Reshape", [x, rows], 1)[0]

    def _attributes(self, layer: int) -> dict[str, Any]:
        attention = self.config.attention(layer)
        attributes: dict[str, Any] = {
            "num_heads": attention.num_heads,
            "kv_num_heads": attention.num_kv_heads,
            "scale": float(attention.scale),
            "do_rotary": 1,
        }
        if self.int8:
            attributes |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR")
            attributes["kv_cache_bit_width"] = 8
        return attributes

    @property
    def _cache_dtype(self) -> ir.DataType:
        return ir.DataType.INT8 if self.int8 else ir.DataType.FLOAT

    @property
    def _cache_shape(self) -> list[int | str]:
        return [1, self.config.num_kv_heads, "S", self.config.head_dim]

    def _input(self, name: str, dtype: ir.DataType, shape: list[int | str]) -> None:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        self.values[name] = value

    def _integers(self, *numbers: int) -> ir.Value:
        name = f"gqa.integers.{'.'.join(map(str, numbers))}"
        return self._constant(name, np.array(numbers, np.int64))

    def _scale(self) -> ir.Value:
        return self._constant("gqa.scale", np.array([INT8_SCALE], np.float32))

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self.values:
            tensor = ir.Tensor(array, name=name)
            self.values[name] = ir.Value(
                name=name,
                shape=tensor.shape,
                type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )
            self.graph.register_initializer(self.values[name])
        return self.values[name]

    def _before(
        self,
        node: ir.Node,
        name: str,
        inputs: list[ir.Value | None],
        count: int,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Adds a node before `node`; the last part of its name is the operator."""
        added = ir.node(
            name.rsplit("/", 1)[1], inputs, attributes, domain=domain, num_outputs=count, name=name
        )
        for index, value in enumerate(added.outputs):
            value.name = f"{name}_output_{index}"
        self.graph.insert_before(node, added)
        return list(added.outputs)


def drop_unused_inputs(graph: ir.Graph) -> None:
    """Takes away what no node reads any more."""
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)
