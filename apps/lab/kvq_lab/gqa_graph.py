"""The graph of a bundle of stock operators, with ONNX Runtime's attention in place of ours.

Every `kvq::Attention` becomes a `com.microsoft::GroupQueryAttention` over past and present
tensors; everything else, and the bytes of the weights, are the bundle's. Knows no session.

Inputs besides the bundle's: `seqlens_k` int32 [B] (all tokens - 1), `total_sequence_length`
int32 (all tokens), `cos.{rope}` and `sin.{rope}` [S, rotary_dim / 2], `past_key_values.{layer}.key`
and `.value` [B, H_kv, S, D]; outputs `present.{layer}.key` and `.value`, meant to be bound to the
same memory. Tables, and `input_weights`, are of the activations' type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from kvq_apps.bench.attention_graph import drop_unused_inputs
from kvq_models.config import ModelConfig

# Symmetric int8 codes of keys and values in a range of +-6.35; only the speed is of interest.
INT8_SCALE = 0.05

# How keys and values are cached, by the name of the setting.
KV_TYPES: Mapping[str, type[np.generic]] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "int8": np.int8,
}


def gqa_model(
    model: ir.Model, config: ModelConfig, *, kv: str = "fp32", half: bool = False, batch: int = 1
) -> bytes:
    """`model`, which is changed, serialised; weights stay in the bundle's file, by relative path.

    `kv` is one of `KV_TYPES`; with `half` activations are float16, and what comes out float32. More
    than one sequence, `batch`, is for attention alone: their rows follow each other.
    """
    if half:
        _halve(model.graph)
    rewriter = _Rewriter(graph=model.graph, config=config, kv=kv, half=half, batch=batch)
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


def _halve(graph: ir.Graph) -> None:
    """Makes every float32 of the graph a float16; its outputs are cast back."""
    whole, half = ir.DataType.FLOAT, ir.DataType.FLOAT16
    nodes, results = list(graph), list(graph.outputs)
    for value in [value for node in nodes for value in node.outputs if value.dtype == whole]:
        value.dtype = half
    for value in [value for value in graph.inputs if value.dtype == whole]:
        value.dtype = half
    for value in [value for value in graph.initializers.values() if value.dtype == whole]:
        # A cast of a constant is computed once, when the session is opened.
        cast = ir.node("Cast", [value], {"to": half})
        value.replace_all_uses_with(cast.outputs[0])
        cast.replace_input_with(0, value)
        graph.insert_before(nodes[0], cast)
    for place, value in enumerate(results):
        cast = ir.node("Cast", [value], {"to": whole})
        graph.append(cast)
        cast.outputs[0].name, value.name = value.name, f"{value.name}.half"
        cast.outputs[0].dtype, cast.outputs[0].shape = whole, value.shape
        graph.outputs[place] = cast.outputs[0]


@dataclass(kw_only=True)
class _Rewriter:
    graph: ir.Graph
    config: ModelConfig
    kv: str
    half: bool
    batch: int
    values: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])

    def add_inputs(self) -> None:
        config = self.config
        activations = ir.DataType.FLOAT16 if self.half else ir.DataType.FLOAT
        self._input("seqlens_k", ir.DataType.INT32, [self.batch])
        self._input("total_sequence_length", ir.DataType.INT32, [])
        for index, rope in enumerate(config.ropes):
            for table in ("cos", "sin"):
                self._input(f"{table}.{index}", activations, ["S", len(rope.inv_freq)])
        for layer in range(config.num_layers):
            for name in past_names(layer):
                self._input(name, self._cache_dtype, self._cache_shape)

    def replace(self, layer: int, node: ir.Node) -> None:
        """Puts the nodes of one layer's attention where `node` is."""
        path = node.name.rsplit("/", 1)[0] if node.name else f"layers.{layer}"
        q, k, v = self._qkv(node, path)
        rope = self.config.layers[layer].attention.rope
        past = [self.values[name] for name in past_names(layer)]
        scales = [self._scale()] * 2 if self.kv == "int8" else []
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
        rows = self._integers(-1, self.config.num_heads * self.config.head_dim)
        [flat] = self._before(node, f"{path}/flat/Reshape", [out, rows], 1)
        node.outputs[0].replace_all_uses_with(flat)
        self.graph.remove(node, safe=True)

    def _qkv(self, node: ir.Node, path: str) -> tuple[ir.Value | None, ...]:
        """Inputs query, key and value [B, T, width]; packed in the first where that is possible."""
        packed = node.inputs[0]
        config = self.config
        if config.layers[0].attention.qk_norm != "heads":
            return self._by_sequence(node, f"{path}/qkv", packed, config.qkv_width), None, None
        kv_width = config.num_kv_heads * config.head_dim
        sizes = self._integers(config.qkv_width - 2 * kv_width, kv_width, kv_width)
        q, k, v = self._before(node, f"{path}/Split", [packed, sizes], 3, axis=-1)
        q = self._normed_heads(node, f"{path}/q_norm", q, node.inputs[5], config.num_heads)
        k = self._normed_heads(node, f"{path}/k_norm", k, node.inputs[6], config.num_kv_heads)
        return q, k, self._by_sequence(node, f"{path}/v", v, kv_width)

    def _by_sequence(self, node: ir.Node, path: str, x: ir.Value | None, width: int) -> ir.Value:
        """[..., width] as [B, T, width]."""
        shape = self._integers(self.batch, -1, width)
        return self._before(node, f"{path}/Reshape", [x, shape], 1)[0]

    def _normed_heads(
        self, node: ir.Node, path: str, x: ir.Value, weight: ir.Value | None, heads: int
    ) -> ir.Value:
        """RMS norm of every head: [B * T, heads * D] -> [B, T, heads * D]."""
        per_head = self._integers(-1, self.config.head_dim)
        epsilon = float(self.config.norm_eps)
        [x] = self._before(node, f"{path}/heads/Reshape", [x, per_head], 1)
        [x] = self._before(
            node, f"{path}/SimplifiedLayerNormalization", [x, weight], 1,
            axis=-1, epsilon=epsilon, stash_type=1,
        )  # fmt: skip
        return self._by_sequence(node, f"{path}/rows", x, heads * self.config.head_dim)

    def _attributes(self, layer: int) -> dict[str, Any]:
        attention = self.config.attention(layer)
        attributes: dict[str, Any] = {
            "num_heads": attention.num_heads,
            "kv_num_heads": attention.num_kv_heads,
            "scale": float(attention.scale),
            "do_rotary": 1,
        }
        if self.kv == "int8":
            attributes |= dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR")
            attributes["kv_cache_bit_width"] = 8
        return attributes

    @property
    def _cache_dtype(self) -> ir.DataType:
        return ir.DataType.from_numpy(np.dtype(KV_TYPES[self.kv]))

    @property
    def _cache_shape(self) -> list[int | str]:
        return [self.batch, self.config.num_kv_heads, "S", self.config.head_dim]

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
