"""Builds the ONNX graph of a model with onnx-ir, from its config and the layout of its weights.

Owns the nodes and their names; knows no weight values. Everything is 2-D: hidden states are float32
[T, hidden], the rows of S sequences one after the other, and only attention tells them apart.

Inputs: `input_ids` int64 [T, K] and `input_weights` float32 [T, K] (row t of the embedding is
sum_k weight * E[id]), `position_ids` int64 [T], `cache` int64 [S] (handles of the native caches;
further classes of layers have `cache.1` and so on), `sequence_rows` int64 [S] (rows of each
sequence, T together), `logit_rows` int64 [R], and for a model with two sets of rotary frequencies
`rope_long` int64 [1].
Four inputs say how much of the weights a pass reads; where they are left out, it reads all:
`weights_view` int64 [1] (0 full, 1 the upper nibbles of 8-bit matrices), `exact_rows` int64 [1] (0:
every logit from whole weights; else the upper nibbles rank all tokens, and those that can be among
the best so many are exact), `layer_modes` int64 [layers] (0 full, 1 skip, 2 keys and values only)
and `head_rows` int64 [1] (0: the logits of all tokens; else of the first so many alone). Every
layer but the first has two more, `layers.N.map` uint8 [panels, bytes] and `layers.N.map_bias`
float32 [rows]: in mode 2 they make its keys and values, or where they are empty its own weights do.
Output: `logits` float32 [R, V]. After the mixer of the last layer only `logit_rows` are computed:
no later token needs the other rows.

A model that makes vectors of texts (`ModelConfig.states`), or has a draft head, has an input
`state_rows` int64 [N] and an output `states` float32 [N, hidden]: the stream after the final norm.
After the mixer of the last layer these rows are computed, and `logit_rows` says which of them give
logits. A draft head is a second graph with them, over weights of the same file. It has one more
input, `joined` float32 [T, hidden]: the states that its rows read.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from kvq.reference.linear import PanelFormat
from kvq_export.write.layout import Layout
from kvq_models.config import Activation, Attention, DeltaNet, Experts, ModelConfig, ShortConv
from kvq_models.products import (
    Product,
    draft_name,
    expert_products,
    feed_products,
    head_product,
    join_product,
    mixer_products,
    per_layer_model_product,
    per_layer_products,
)
from kvq_runtime.bundle.graph_check import (
    attention_attributes,
    cache_inputs,
    delta_attributes,
    experts_attributes,
    linear_attributes,
    node_path,
)
from kvq_runtime.bundle.manifest import DATA_FILE

OPSETS = {"": 21, "com.microsoft": 1, "kvq": 1}
IR_VERSION = 10

_DTYPES = {"uint8": ir.DataType.UINT8, "float32": ir.DataType.FLOAT}


def build_graph(config: ModelConfig, layout: Layout) -> ir.Model:
    """Builds the model, with initializers that refer into `model.onnx.data`.

    Also that of a draft head (`ModelConfig.drafting`), by the layout of its model.
    """
    builder = _Builder(config=config, layout=layout)
    hidden = builder.layers(builder.embedding())
    states = [builder.states(hidden)] if config.has_states else []
    logits = _declared(builder.logits(hidden), ["R", config.vocab_size])
    logits.name = "logits"
    graph = ir.Graph(
        builder.inputs,
        [logits, *states],
        nodes=builder.nodes,
        initializers=list(builder.initializers.values()),
        opset_imports=OPSETS,
        name=config.model_type,
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="kvq")


@dataclass(kw_only=True)
class _Builder:
    """Collects nodes in topological order; each method adds one piece and returns its output."""

    config: ModelConfig
    layout: Layout
    nodes: list[ir.Node] = field(default_factory=list[ir.Node])
    inputs: list[ir.Value] = field(default_factory=list[ir.Value])
    initializers: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])
    ropes: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    growths: dict[tuple[float, int], ir.Value] = field(
        default_factory=dict[tuple[float, int], ir.Value]
    )

    def __post_init__(self) -> None:
        integer, real = ir.DataType.INT64, ir.DataType.FLOAT
        self.ids = self._input("input_ids", integer, ["T", "K"])
        self.mix = self._input("input_weights", real, ["T", "K"])
        self.positions = self._input("position_ids", integer, ["T"])
        self.caches = [
            self._input(name, integer, ["S"])
            for name in cache_inputs(len(self.config.cache_classes))
        ]
        self.sequence_rows = self._input("sequence_rows", integer, ["S"])
        self.logit_rows = self._input("logit_rows", integer, ["R"])
        # Rows that are computed to the end.
        self.last_rows = self.logit_rows
        if self.config.has_states:
            self.last_rows = self._input("state_rows", integer, ["N"])
        if self.config.joins:
            self.joined = self._input("joined", real, ["T", self.config.hidden_size])
        if self.config.has_long_rope:
            self.rope_long = self._input("rope_long", integer, [1])
        self.weights_view = self._input("weights_view", integer, [1], optional=True)
        self.exact_rows = None
        if not self.config.head_bias:  # the upper nibbles rank without one
            self.exact_rows = self._input("exact_rows", integer, [1], optional=True)
        layers = self.config.num_layers
        self.layer_modes = self._input("layer_modes", integer, [layers], optional=True)
        self.head_rows = self._input("head_rows", integer, [1], optional=True)
        uniform = self.config.uniform  # only these predict keys and values
        self.maps = [self._map(layer) if uniform else () for layer in range(layers)]

    def embedding(self) -> ir.Value:
        """Turns ids and their weights into hidden states [T, hidden]."""
        mix = self.mix
        if self.config.embedding_scale != 1.0:
            mix = self._node("/model/embed/Mul", [mix, self._scalar(self.config.embedding_scale)])
        embedded = self._gathered("/model", "embed", mix)
        return self._joined(embedded) if self.config.joins else embedded

    def _joined(self, embedded: ir.Value) -> ir.Value:
        """Turns embeddings and states [T, hidden] into what enters a draft head's layer."""
        product = join_product(self.config)
        assert product is not None
        path = node_path(product)
        embedded = self._norm(f"{path}/embed_norm", embedded, "embed_norm")
        states = self._norm(f"{path}/state_norm", self.joined, "state_norm")
        return self._linear(product, self._node(f"{path}/Concat", [embedded, states], axis=-1))

    def states(self, hidden: ir.Value) -> ir.Value:
        """Adds the output `states`: the stream of the last rows after the final norm."""
        states = self._norm("/model/states", hidden, "final_norm")
        states.name = "states"
        return _declared(states, ["N", self.config.hidden_size])

    def layers(self, hidden: ir.Value) -> ir.Value:
        """Adds all layers: [T, hidden] -> [R, hidden], or [N, hidden] where states are an output.

        After the last layer that has keys of its own, only rows that give logits matter.
        """
        last, rows = self.config.first_reader - 1, self.last_rows
        layer_embeddings = self._per_layer_inputs(hidden)
        for layer in range(self.config.num_layers):
            path, layer_config = f"/model/layers.{layer}", self.config.layers[layer]
            *before, after = mixer_products(self.config, layer)
            layer_input, mixed = hidden, self._mix(layer, before, hidden)
            if layer == last:
                place = node_path(after).rpartition("/")[0]
                mixed = self._node(f"{place}/rows/Gather", [mixed, rows], axis=0)
                layer_input = hidden = self._node(f"{path}/rows/Gather", [hidden, rows], axis=0)
            hidden = self._branch(after, mixed, hidden)
            hidden = self._feed(layer, layer_input if layer_config.parallel else hidden, hidden)
            if layer_embeddings:
                embedded = layer_embeddings[layer]
                if layer >= last:
                    embedded = self._node(f"{path}/per_layer/Gather", [embedded, rows], axis=0)
                hidden = self._per_layer(layer, embedded, hidden)
            if layer_config.scaled:
                scalar = self._tensor(f"layers.{layer}.scalar")
                hidden = self._node(f"{path}/Mul", [hidden, scalar])
        return hidden

    def _gathered(self, path: str, name: str, mix: ir.Value) -> ir.Value:
        """Gathers rows of a table by the ids, as `mix` weighs them."""
        matrix = self.layout.matrices[name]
        inputs = [self.ids, mix, self._tensor(f"{name}.panels")]
        return self._kvq(f"{path}/Embed", inputs, ["T", matrix.columns], **asdict(matrix))

    def _per_layer_inputs(self, embedded: ir.Value) -> Sequence[ir.Value]:
        """Returns every layer's own embedding of the tokens, [T, P] each, where there are any."""
        per_layer, product = self.config.per_layer, per_layer_model_product(self.config)
        if per_layer is None or product is None:
            return ()
        path, layers = "/model/per_layer", self.config.num_layers
        projected = self._linear(product, embedded)
        width = per_layer.width
        each, all_layers = self._integers(-1, width), self._integers(-1, layers * width)
        projected = self._node(f"{path}/each/Reshape", [projected, each])
        projected = self._rms(path, projected, self._tensor("per_layer_norm"))
        projected = self._node(f"{path}/all/Reshape", [projected, all_layers])
        mix = self._node(f"{path}/mix/Mul", [self.mix, self._scalar((per_layer.width / 2) ** 0.5)])
        both = self._node(f"{path}/Add", [projected, self._gathered(path, "per_layer_embed", mix)])
        sizes = self._integers(*[per_layer.width] * layers)
        return self._nodes(f"{path}/Split", [both, sizes], layers, axis=-1)

    def _per_layer(self, layer: int, embedded: ir.Value, hidden: ir.Value) -> ir.Value:
        """Adds to hidden what a layer makes of its own embedding."""
        gate, up = per_layer_products(self.config, layer)
        assert self.config.per_layer is not None
        path = node_path(gate)
        x = self._activation(path, self.config.per_layer.activation, self._linear(gate, hidden))
        return self._branch(up, self._node(f"{path}/Mul", [x, embedded]), hidden)

    def logits(self, hidden: ir.Value) -> ir.Value:
        """Adds the final norm and the output head, with its soft cap where the model has one."""
        if self.config.has_states:
            hidden = self._node("/model/head/rows/Gather", [hidden, self.logit_rows], axis=0)
        logits = self._linear(head_product(self.config), hidden)
        if self.config.final_softcap > 0:
            cap = self._scalar(self.config.final_softcap)
            logits = self._node("/model/head/softcap/Div", [logits, cap])
            logits = self._node("/model/head/softcap/Tanh", [logits])
            logits = self._node("/model/head/softcap/Mul", [logits, cap])
        return logits

    def _mix(self, layer: int, before: Sequence[Product], hidden: ir.Value) -> ir.Value:
        """Applies a layer's mixer to the stream, through the products `before` it."""
        mixer, projected = self.config.layers[layer].mixer, self._linear(before[0], hidden)
        if isinstance(mixer, DeltaNet):
            return self._delta_net(layer, mixer, projected, self._float_product(before[1], hidden))
        if isinstance(mixer, ShortConv):
            return self._short_conv(layer, projected)
        if mixer.head_gate:
            gates = self._float_product(before[1], hidden)
            return self._gated_heads(layer, mixer, projected, gates)
        if not mixer.output_gate:
            return self._attention(layer, projected)
        return self._gated_attention(layer, mixer, projected)

    def _gated_heads(
        self, layer: int, mixer: Attention, qkv: ir.Value, gates: ir.Value
    ) -> ir.Value:
        """Multiplies the heads of attention by one number of a token each, [T, heads]."""
        path = f"/model/layers.{layer}/attn/head_gate"
        gates = self._node(f"{path}/Sigmoid", [gates])
        gates = self._node(f"{path}/each/Reshape", [gates, self._integers(-1, 1)])
        each, whole = self._integers(-1, mixer.head_dim), self._integers(-1, mixer.width)
        heads = self._node(f"{path}/heads/Reshape", [self._attention(layer, qkv), each])
        heads = self._node(f"{path}/Mul", [heads, gates])
        return self._node(f"{path}/Reshape", [heads, whole])

    def _float_product(self, product: Product, x: ir.Value) -> ir.Value:
        """Multiplies by weights that are not quantised."""
        path = node_path(product)
        x = x if product.norm is None else self._norm(f"{path}/norm", x, product.norm)
        bias = [] if product.bias is None else [self._tensor(product.bias)]
        return self._node(f"{path}/Gemm", [x, self._tensor(product.weight), *bias], transB=1)

    def _gated_attention(self, layer: int, mixer: Attention, projected: ir.Value) -> ir.Value:
        """Multiplies attention by the gates that follow each query."""
        path, heads = f"/model/layers.{layer}/attn/gate", self._integers(-1, 2 * mixer.head_dim)
        sizes = self._integers(2 * mixer.width, 2 * mixer.kv_width)
        both, rest = self._nodes(f"{path}/rows/Split", [projected, sizes], 2, axis=-1)
        both = self._node(f"{path}/heads/Reshape", [both, heads])
        each = self._integers(mixer.head_dim, mixer.head_dim)
        query, gate = self._nodes(f"{path}/heads/Split", [both, each], 2, axis=-1)
        whole = self._integers(-1, mixer.width)
        query = self._node(f"{path}/query/Reshape", [query, whole])
        gate = self._node(f"{path}/Reshape", [gate, whole])
        qkv = self._node(f"{path}/query/Concat", [query, rest], axis=-1)
        gate = self._node(f"{path}/Sigmoid", [gate])
        return self._node(f"{path}/Mul", [self._attention(layer, qkv), gate])

    def _attention(self, layer: int, qkv: ir.Value) -> ir.Value:
        path, weights = f"/model/layers.{layer}/attn", f"layers.{layer}"
        mixer = self.config.layers[layer].attention
        if mixer.qk_norm == "rows":
            qkv = self._normed_rows(path, weights, mixer, qkv)
        if mixer.growth:
            qkv = self._grown(path, mixer, qkv)
        shared = mixer.kv_from is not None
        if mixer.value_norm and not shared:
            qkv = self._normed_values(path, mixer, qkv)
        attributes = attention_attributes(self.config, layer)
        cache, freq = self.caches[self.config.place(layer)[0]], self._inv_freq(mixer.rope)
        norms = [self._tensor(f"{weights}.q_norm")] if mixer.qk_norm == "heads" else []
        inputs: list[ir.Value | None]
        if shared:
            inputs = [qkv, self.last_rows, cache, self.sequence_rows, freq, *norms]
        else:
            norms += [self._tensor(f"{weights}.k_norm")] if norms else []
            inputs = [qkv, self.positions, cache, self.sequence_rows, freq, *norms]
            if mixer.sinks:
                inputs += [None] * (2 - len(norms)) + [self._tensor(f"{weights}.sink_logits")]
        kind = "SharedAttention" if shared else "Attention"
        return self._kvq(f"{path}/{kind}", inputs, ["T", mixer.width], **attributes)

    def _short_conv(self, layer: int, bcx: ir.Value) -> ir.Value:
        """Convolves rows [B | C | x]; the caches of the first class hold the state."""
        inputs = [bcx, self._tensor(f"layers.{layer}.conv"), self.caches[0], self.sequence_rows]
        name, place = f"/model/layers.{layer}/conv/ShortConv", self.config.mixer_place(layer)
        return self._kvq(name, inputs, ["T", self.config.hidden_size], layer=place)

    def _delta_net(self, layer: int, mixer: DeltaNet, rows: ir.Value, gates: ir.Value) -> ir.Value:
        """Runs a delta net over rows [q | k | v | z]; caches of the first class hold the state."""
        names = ("conv", "decay", "dt_bias", "head_scale")
        weights = [self._tensor(f"layers.{layer}.{name}") for name in names]
        return self._kvq(
            f"/model/layers.{layer}/delta/DeltaNet",
            [rows, gates, *weights, self.caches[0], self.sequence_rows],
            ["T", mixer.shape(1).value_width],
            **delta_attributes(self.config, layer, mixer),
        )

    def _feed(self, layer: int, x: ir.Value, hidden: ir.Value) -> ir.Value:
        """Adds to hidden what the MLP of a layer makes of x, or its experts."""
        feed = self.config.layers[layer].feed
        if not isinstance(feed, Experts):
            up, down = feed_products(self.config, layer)
            return self._branch(down, self._linear(up, x), hidden)
        if feed.beside is None:
            out = self._experts(layer, x, hidden)
            return out if feed.shared is None else self._shared(layer, x, out)
        up, down, *_ = feed_products(self.config, layer)
        dense = self._branch(down, self._linear(up, x), None)
        name = f"layers.{layer}.post_mlp_norm"
        both = self._norm(_norm_path(name), self._experts(layer, x, dense), name)
        return self._node(f"{_norm_path(name)}/Add", [hidden, both])

    def _shared(self, layer: int, x: ir.Value, hidden: ir.Value) -> ir.Value:
        """Adds to hidden what the MLP that experts share makes of x, gated for each token."""
        up, down, gate, *_ = feed_products(self.config, layer)
        out = self._branch(down, self._linear(up, x), None)
        path = node_path(gate)
        factor = self._node(f"{path}/Sigmoid", [self._float_product(gate, x)])
        out = self._node(f"{path}/Mul", [out, factor])
        return self._node(f"{path}/Add", [hidden, out])

    def _experts(self, layer: int, x: ir.Value, hidden: ir.Value) -> ir.Value:
        """Adds to hidden what the experts of a layer make of x, by the shares of its router."""
        products = expert_products(self.config, layer)
        router, gate_up, down = products
        path, unnormed = node_path(router), x
        x = x if router.norm is None else self._norm(f"{path}/norm", x, router.norm)
        logits = self._float_product(replace(router, norm=None), x)
        if gate_up.norm is not None:
            x = self._norm(f"{node_path(gate_up)}/norm", unnormed, gate_up.norm)
        after, node_name = down.after, f"{node_path(down)}/Experts"
        inputs = [
            x,
            logits,
            self._tensor(f"{gate_up.weight}.panels"),
            self._tensor(f"{down.weight}.panels"),
            hidden if after is None else None,
            self.weights_view,
            self.layer_modes,
            *(None if bias is None else self._tensor(bias) for bias in (gate_up.bias, down.bias)),
        ]
        feed = self.config.layers[layer].feed
        if isinstance(feed, Experts) and feed.choice_bias:
            inputs.append(self._tensor(f"layers.{layer}.choice_bias"))
        attributes = experts_attributes(
            self.config, products, lambda name: self._format(name).format
        )
        out = self._kvq(node_name, inputs, [None, self.config.hidden_size], **attributes)
        if after is None:
            return out
        branch = self._norm(_norm_path(after), out, after)
        return self._node(f"{_norm_path(after)}/Add", [hidden, branch])

    def _normed_rows(self, path: str, weights: str, mixer: Attention, qkv: ir.Value) -> ir.Value:
        """Normalises queries and keys, each over all heads of a token."""
        sizes = self._integers(mixer.width, mixer.kv_width, mixer.kv_width)
        query, key, value = self._nodes(f"{path}/norms/Split", [qkv, sizes], 3, axis=-1)
        query = self._rms(f"{path}/q_norm", query, self._tensor(f"{weights}.q_norm"))
        key = self._rms(f"{path}/k_norm", key, self._tensor(f"{weights}.k_norm"))
        return self._node(f"{path}/norms/Concat", [query, key, value], axis=-1)

    def _normed_values(self, path: str, mixer: Attention, qkv: ir.Value) -> ir.Value:
        """Divides each head of values by its root mean square."""
        prefix = f"{path}/v_norm"
        sizes = self._integers(mixer.width + mixer.kv_width, mixer.kv_width)
        rest, value = self._nodes(f"{prefix}/Split", [qkv, sizes], 2, axis=-1)
        value = self._node(f"{prefix}/heads/Reshape", [value, self._integers(-1, mixer.head_dim)])
        ones = self._constant(f"ones.{mixer.head_dim}", np.ones(mixer.head_dim, np.float32))
        value = self._rms(prefix, value, ones)
        value = self._node(f"{prefix}/token/Reshape", [value, self._integers(-1, mixer.kv_width)])
        return self._node(f"{prefix}/Concat", [rest, value], axis=-1)

    def _grown(self, path: str, mixer: Attention, qkv: ir.Value) -> ir.Value:
        """Multiplies queries by a factor that grows with their position."""
        key = (mixer.growth, mixer.growth_tokens)
        if key not in self.growths:
            prefix = f"/model/growth.{len(self.growths)}"
            period = self._integers(mixer.growth_tokens)
            steps = self._node(f"{prefix}/Div", [self.positions, period])
            steps = self._node(f"{prefix}/Cast", [steps], to=ir.DataType.FLOAT)
            factor = self._node(f"{prefix}/first/Add", [steps, self._scalar(1.0)])
            factor = self._node(f"{prefix}/Log", [factor])
            factor = self._node(f"{prefix}/Mul", [factor, self._scalar(mixer.growth)])
            factor = self._node(f"{prefix}/last/Add", [factor, self._scalar(1.0)])
            self.growths[key] = self._node(f"{prefix}/Unsqueeze", [factor, self._integers(1)])
        sizes = self._integers(mixer.width, 2 * mixer.kv_width)
        query, rest = self._nodes(f"{path}/growth/Split", [qkv, sizes], 2, axis=-1)
        query = self._node(f"{path}/growth/Mul", [query, self.growths[key]])
        return self._node(f"{path}/growth/Concat", [query, rest], axis=-1)

    def _branch(self, product: Product, x: ir.Value, hidden: ir.Value | None) -> ir.Value:
        """Adds to hidden the last product of a branch, after a norm that some models have."""
        if product.after is None:
            return self._linear(product, x, hidden)
        path = _norm_path(product.after)
        branch = self._norm(path, self._linear(product, x), product.after)
        return branch if hidden is None else self._node(f"{path}/Add", [hidden, branch])

    def _linear(self, product: Product, x: ir.Value, residual: ir.Value | None = None) -> ir.Value:
        """Adds residual + bias + weight . input; that is x, its norm, or a gated activation.

        One node applies the view of the weights and its layer's mode itself.
        """
        path = node_path(product)
        if product.activation is not None:
            x = self._activation(path, product.activation, x)
        if product.norm is not None and self.config.norm != "rms":
            x = self._norm(f"{path}/norm", x, product.norm)
        is_head = product.is_head
        inputs = [
            x,
            self._tensor(f"{self._matrix(product)}.panels"),
            self._tensor(product.norm) if product.norm and self.config.norm == "rms" else None,
            None if product.bias is None else self._tensor(product.bias),
            residual,
            self.weights_view,
            self.exact_rows if is_head else None,
            None if product.layer is None else self.layer_modes,
            self.head_rows if is_head else None,
            *(() if product.layer is None or not product.kept else self.maps[product.layer]),
        ]
        matrix = self._format(self._matrix(product))
        return self._kvq(
            f"{path}/Linear",
            inputs,
            ["R" if is_head else None, matrix.rows],
            **asdict(matrix),
            **linear_attributes(self.config, product),
        )

    def _activation(self, path: str, activation: Activation, x: ir.Value) -> ir.Value:
        if activation == "silu":
            return self._node(f"{path}/QuickGelu", [x], domain="com.microsoft", alpha=1.0)
        return self._node(f"{path}/Gelu", [x], approximate="tanh")

    def _norm(self, path: str, x: ir.Value, weight: str) -> ir.Value:
        """Adds a norm of the model's kind."""
        if self.config.norm == "rms":
            return self._rms(path, x, self._tensor(weight))
        return self._node(
            f"{path}/LayerNormalization",
            [x, self._tensor(weight), self._tensor(f"{weight}_bias")],
            axis=-1,
            epsilon=float(self.config.norm_eps),
        )

    def _rms(self, path: str, x: ir.Value, weight: ir.Value) -> ir.Value:
        return self._node(
            f"{path}/SimplifiedLayerNormalization",
            [x, weight],
            axis=-1,
            epsilon=float(self.config.norm_eps),
            stash_type=1,
        )

    def _inv_freq(self, index: int) -> ir.Value:
        """Returns the rotary frequencies of rope `index`; of two sets the one `rope_long` picks."""
        frequencies = self._tensor(f"rope.{index}.inv_freq")
        if self.config.ropes[index].long_inv_freq is None:
            return frequencies
        if index not in self.ropes:
            path = f"/model/rope.{index}"
            row = self._node(f"{path}/Gather", [frequencies, self.rope_long], axis=0)
            self.ropes[index] = self._node(f"{path}/Squeeze", [row, self._integers(0)])
        return self.ropes[index]

    def _matrix(self, product: Product) -> str:
        """Returns the canonical name that a product's matrix is stored under."""
        return "embed" if product.is_head and self.config.tied_head else product.weight

    def _input(
        self, name: str, dtype: ir.DataType, shape: Sequence[int | str], *, optional: bool = False
    ) -> ir.Value:
        """Adds a graph input; where an optional one is left out, it is zeros, or empty."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        if optional:
            sizes = [size if isinstance(size, int) else 0 for size in shape]
            value.const_value = ir.Tensor(np.zeros(sizes, dtype.numpy()), name=name)
            self.initializers[name] = value
        self.inputs.append(value)
        return value

    def _map(self, layer: int) -> tuple[ir.Value, ...]:
        """Adds the inputs that other weights of a layer's keys and values come by."""
        if layer == 0:
            return ()
        name, real = f"layers.{layer}.map", ir.DataType.FLOAT
        return (
            self._input(name, ir.DataType.UINT8, ["map.0", "map.1"], optional=True),
            self._input(f"{name}_bias", real, ["map_bias.0"], optional=True),
        )

    def _layout_name(self, name: str) -> str:
        """Returns what the layout calls a weight of this graph."""
        return draft_name(name) if self.config.joins else name

    def _format(self, name: str) -> PanelFormat:
        return self.layout.matrices[self._layout_name(name)]

    def _tensor(self, name: str) -> ir.Value:
        """Returns the initializer `name`, which refers into the data file."""
        name = self._layout_name(name)
        if name not in self.initializers:
            tensor = self.layout.tensors[name]
            self.initializers[name] = _initializer(
                name,
                ir.ExternalTensor(
                    DATA_FILE,
                    tensor.offset,
                    tensor.num_bytes,
                    _DTYPES[tensor.dtype],
                    shape=ir.Shape(tensor.shape),
                    name=name,
                ),
            )
        return self.initializers[name]

    def _integers(self, *values: int) -> ir.Value:
        name = f"integers.{'.'.join(map(str, values))}"
        return self._constant(name, np.array(values, np.int64))

    def _scalar(self, value: float) -> ir.Value:
        name = f"scalar.{value:.9g}"
        return self._constant(name, np.array(value, np.float32))

    def _constant(self, name: str, value: np.ndarray) -> ir.Value:
        if name not in self.initializers:
            self.initializers[name] = _initializer(name, ir.Tensor(value, name=name))
        return self.initializers[name]

    def _kvq(
        self,
        name: str,
        inputs: Sequence[ir.Value | None],
        shape: Sequence[int | str | None],
        **attributes: Any,
    ) -> ir.Value:
        """Adds a node of ours; no shape inference knows it, so its output is declared."""
        inputs = list(inputs)
        while inputs[-1] is None:
            inputs.pop()
        return _declared(self._node(name, inputs, domain="kvq", **attributes), shape)

    def _node(self, name: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        return self._nodes(name, inputs, 1, **attributes)[0]

    def _nodes(
        self,
        name: str,
        inputs: Sequence[ir.Value | None],
        count: int,
        /,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Adds a node named after its path, whose last part is the operator."""
        node = ir.node(
            name.rsplit("/", 1)[1],
            inputs,
            attributes,
            domain=domain,
            num_outputs=count,
            name=name,
        )
        for index, value in enumerate(node.outputs):
            value.name = f"{name}_output_{index}"
        self.nodes.append(node)
        return node.outputs


def _norm_path(weight: str) -> str:
    """Returns what the nodes of the norm with this weight are called."""
    return f"/model/{'/'.join(weight.rsplit('.', 1))}"


def _declared(value: ir.Value, shape: Sequence[int | str | None]) -> ir.Value:
    value.dtype = ir.DataType.FLOAT
    value.shape = ir.Shape(shape)
    return value


def _initializer(name: str, tensor: ir.Tensor[Any] | ir.ExternalTensor) -> ir.Value:
    return ir.Value(
        name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
