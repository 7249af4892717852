"""Checks that a bundle's graph computes the model that its manifest describes.

The graph is read by hand, as protobuf's wire format (onnx.proto names the fields): importing a
library for it takes longer than opening the model. Only what the check needs is read.
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import BundleError
from kvq.reference.experts import SCORINGS
from kvq.reference.linear import ACTIVATIONS, BlockFormat
from kvq_models.config import Attention, DeltaNet, Experts, ModelConfig
from kvq_models.products import Product, expert_products, products

# Fields of onnx.proto's messages.
_GRAPH = 7
_NODES, _OUTPUTS = 1, 12
_NODE_NAME, _OPERATOR, _ATTRIBUTES = 3, 4, 5
_ATTRIBUTE_NAME, _FLOAT, _INTEGER = 1, 2, 3
_VALUE_TYPE, _TENSOR_TYPE, _SHAPE, _DIMENSION, _SIZE = 2, 1, 2, 1, 1

_FLOAT_ATTRIBUTES = ("scale", "softcap", "rope_factor", "norm_eps")
_ACTIVATION_NODES = {"silu": "QuickGelu", "gelu_tanh": "Gelu"}

Fields = Mapping[int, list[Any]]
Formats = Callable[[str], BlockFormat]
Node = tuple[str, Mapping[str, Any]]  # operator and numeric attributes


def check_graph(path: Path, config: ModelConfig, *, format_of: Formats) -> None:
    """Raises `BundleError` where the graph at `path` is not that of `config`.

    It compares every attention node, the shape and blocks of every linear layer, the activation,
    and the width of the logits. `format_of` returns how a matrix is stored, by its canonical name.
    """
    try:
        (graph,) = _message(path.read_bytes())[_GRAPH]
        fields = _message(graph)
        nodes = [_node(content) for content in fields[_NODES]]
        widths = [_last_dimension(content) for content in fields[_OUTPUTS]]
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise BundleError(f"{path} is no graph; export the model again") from error
    actual = {name: (operator, attributes) for name, operator, attributes in nodes}
    expected = _mixer_nodes(config) | _product_nodes(config, format_of)
    wrong = [name for name, node in expected.items() if not _agrees(node, actual.get(name))]
    if wrong:
        raise _refused(path, wrong[0])
    # A product computes the activation of a gate by itself.
    separate = {layer.feed.activation for layer in config.layers if not layer.feed.gated}
    separate |= set() if config.per_layer is None else {config.per_layer.activation}
    activations = {operator for _, operator, _ in nodes} & set(_ACTIVATION_NODES.values())
    if activations != {_ACTIVATION_NODES[activation] for activation in separate}:
        raise _refused(path, "the activation")
    mixers = sum(
        operator.endswith(("Attention", "ShortConv", "DeltaNet")) for _, operator, _ in nodes
    )
    if mixers != config.num_layers:
        raise _refused(path, "the number of layers")
    if widths != [config.vocab_size, *[config.hidden_size] * config.has_states]:
        raise _refused(path, "the shape of the logits")


def _refused(path: Path, part: str) -> BundleError:
    return BundleError(
        f"{path} does not compute the model that kvq.json describes: {part} differs; "
        "export the model again"
    )


def _mixer_nodes(config: ModelConfig) -> dict[str, Node]:
    """Returns operator and attributes, by name, of the nodes that mix tokens.

    The nodes at a draft head's entry, and of the hidden states that it reads, are among them.
    """
    nodes: dict[str, Node] = {}
    if config.joins:
        nodes["/model/join/Concat"] = ("Concat", {"axis": -1})
    if config.has_states:
        kind = "SimplifiedLayerNormalization" if config.norm == "rms" else "LayerNormalization"
        nodes[f"/model/states/{kind}"] = (kind, {"epsilon": float(config.norm_eps)})
    for index, layer in enumerate(config.layers):
        path, mixer = f"/model/layers.{index}", layer.mixer
        if layer.scaled:
            nodes[f"{path}/Mul"] = ("Mul", {})
        if isinstance(mixer, DeltaNet):
            nodes[f"{path}/delta/gates/Gemm"] = ("Gemm", {"transB": 1})
            facts = delta_attributes(config, index, mixer)
            nodes[f"{path}/delta/DeltaNet"] = ("DeltaNet", facts)
        elif isinstance(mixer, Attention):
            nodes |= _nodes_of_attention(config, index, mixer)
        else:
            nodes[f"{path}/conv/ShortConv"] = ("ShortConv", {"layer": config.mixer_place(index)})
    return nodes


def _nodes_of_attention(config: ModelConfig, index: int, mixer: Attention) -> dict[str, Node]:
    path, layer = f"/model/layers.{index}/attn", config.layers[index]
    kind = "Attention" if layer.owns_keys else "SharedAttention"
    nodes: dict[str, Node] = {f"{path}/{kind}": (kind, attention_attributes(config, index))}
    if mixer.output_gate:
        nodes[f"{path}/gate/Mul"] = ("Mul", {})
    if mixer.head_gate:
        nodes[f"{path}/head_gate/Gemm"] = ("Gemm", {"transB": 1})
        nodes[f"{path}/head_gate/Mul"] = ("Mul", {})
    if mixer.growth:
        nodes[f"{path}/growth/Mul"] = ("Mul", {})
    if mixer.value_norm and layer.owns_keys:
        nodes[f"{path}/v_norm/Concat"] = ("Concat", {})
    return nodes


def delta_attributes(config: ModelConfig, layer: int, mixer: DeltaNet) -> dict[str, Any]:
    """Returns the attributes of a layer's node of a delta net."""
    place, eps = config.mixer_place(layer), float(config.norm_eps)
    return {"layer": place, "key_heads": mixer.key_heads, "norm_eps": eps}


def cache_inputs(classes: int) -> tuple[str, ...]:
    """Returns the graph's names of the cache handles of so many classes of layers."""
    return ("cache", *(f"cache.{index}" for index in range(1, classes)))


def attention_attributes(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Returns the attributes of a layer's node of attention.

    The class of its cache is not among them: the node's input says it.
    """
    attributes = asdict(config.attention(layer))
    del attributes["cache"]
    # An integral value read from JSON must not turn a float attribute into an integer.
    return attributes | {name: float(attributes[name]) for name in _FLOAT_ATTRIBUTES}


def node_path(product: Product) -> str:
    """Returns how the name of a product's node begins."""
    inside = "" if product.layer is None else f"layers.{product.layer}/"
    return f"/model/{inside}{product.place}"


def linear_attributes(config: ModelConfig, product: Product) -> dict[str, Any]:
    """Returns the attributes of a node of `kvq::Linear`, without shape and format of its matrix."""
    return {
        "activation": 0 if product.gate is None else ACTIVATIONS.index(product.gate),
        "norm_eps": float(config.norm_eps),
        "layer": product.layer or 0,
        "first_kept": product.first_kept,
    }


def experts_attributes(
    config: ModelConfig, feed: Sequence[Product], format_of: Formats
) -> dict[str, Any]:
    """Returns the attributes of a node of `kvq::Experts`, from its layer's router and experts."""
    _, gate_up, down = feed
    assert down.layer is not None
    assert down.gate is not None
    experts = config.layers[down.layer].feed
    assert isinstance(experts, Experts)
    # Graphs of earlier versions have no such attribute.
    scoring = SCORINGS.index(experts.scoring)
    return (
        ({"scoring": scoring} if scoring else {})
        | {
            "columns": gate_up.columns,
            "width": down.columns,
            "count": experts.count,
            "chosen": experts.chosen,
            "normalised": int(experts.normalised),
            "activation": ACTIVATIONS.index(down.gate),
            "layer": down.layer,
        }
        | {
            f"{product.name.removeprefix('experts_')}_{name}": int(value)
            for product in (gate_up, down)
            for name, value in asdict(format_of(product.weight)).items()
        }
    )


def _experts_nodes(config: ModelConfig, format_of: Formats) -> dict[str, Node]:
    """Returns the nodes of routers and experts, by name."""
    nodes: dict[str, Node] = {}
    for index, layer in enumerate(config.layers):
        if isinstance(layer.feed, Experts):
            feed = expert_products(config, index)
            nodes[f"{node_path(feed[0])}/Gemm"] = ("Gemm", {"transB": 1})
            facts = experts_attributes(config, feed, format_of)
            nodes[f"{node_path(feed[-1])}/Experts"] = ("Experts", facts)
            if layer.feed.shared is not None:
                nodes[f"/model/layers.{index}/mlp/shared/gate/Mul"] = ("Mul", {})
    return nodes


def _product_nodes(config: ModelConfig, format_of: Formats) -> dict[str, Node]:
    """Returns the nodes of products by name; `kvq::Linear` also holds its norm and activation."""
    size = {"rows": config.vocab_size, "columns": config.hidden_size}
    nodes: dict[str, Node] = {"/model/Embed": ("Embed", size | asdict(format_of("embed")))}
    if config.per_layer is not None:
        rows, columns = config.per_layer.rows, config.num_layers * config.per_layer.width
        facts = {"rows": rows, "columns": columns} | asdict(format_of("per_layer_embed"))
        nodes["/model/per_layer/Embed"] = ("Embed", facts)
    nodes |= _experts_nodes(config, format_of)
    for product in products(config):
        if product.exact or product.count > 1:
            continue
        facts = {"rows": product.rows, "columns": product.columns}
        facts |= asdict(format_of(product.weight)) | linear_attributes(config, product)
        nodes[f"{node_path(product)}/Linear"] = ("Linear", facts)
    return nodes


def _agrees(expected: Node, actual: Node | None) -> bool:
    if actual is None or actual[0] != expected[0]:
        return False
    return all(
        name in actual[1] and np.float32(actual[1][name]) == np.float32(value)
        if isinstance(value, float)
        else actual[1].get(name) == value
        for name, value in expected[1].items()
    )


def _node(content: bytes) -> tuple[str, str, dict[str, Any]]:
    """Returns name, operator and numeric attributes of a node."""
    fields = _message(content)
    attributes: dict[str, Any] = {}
    for attribute in map(_message, fields[_ATTRIBUTES]):
        numbers = attribute[_INTEGER] or attribute[_FLOAT]
        attributes[_text(attribute, _ATTRIBUTE_NAME)] = numbers[-1] if numbers else None
    return _text(fields, _NODE_NAME), _text(fields, _OPERATOR), attributes


def _text(fields: Fields, number: int) -> str:
    return b"".join(fields[number][-1:]).decode()


def _last_dimension(content: bytes) -> int | None:
    """Returns the last size of a declared value, None when it is open."""
    fields = _message(content)
    for number in (_VALUE_TYPE, _TENSOR_TYPE, _SHAPE):
        fields = _message(fields[number][-1])
    sizes = _message(fields[_DIMENSION][-1])[_SIZE]
    return sizes[-1] if sizes else None


def _message(content: bytes) -> Fields:
    """Returns the values of a message by field number: integers, floats, bytes."""
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(content):
        # Most numbers take one byte.
        key, at = (content[at], at + 1) if content[at] < 128 else _varint(content, at)
        match key & 7:
            case 0:
                number, at = _varint(content, at)
                fields[key >> 3].append(number - (1 << 64) if number >> 63 else number)
            case 1:
                fields[key >> 3].append(content[at : at + 8])
                at += 8
            case 2:
                size, at = (content[at], at + 1) if content[at] < 128 else _varint(content, at)
                if at + size > len(content):
                    raise ValueError("a field is cut off")
                fields[key >> 3].append(content[at : at + size])
                at += size
            case 5:
                fields[key >> 3].append(struct.unpack_from("<f", content, at)[0])
                at += 4
            case kind:
                raise ValueError(f"a field of kind {kind}")
    return fields


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & ((1 << 64) - 1), at
        if shift > 63:
            raise ValueError("a number is too long")
