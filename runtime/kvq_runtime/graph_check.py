"""Whether a bundle's graph computes the model its manifest describes. Reads only what that takes.

The graph is read by hand, as protobuf's wire format (onnx.proto names the fields): importing a
library for it takes longer than opening the model.
"""

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import BundleError
from kvq.reference_experts import SCORINGS
from kvq.reference_linear import ACTIVATIONS, BlockFormat
from kvq_models.config import Attention, DeltaNet, Experts, ModelConfig
from kvq_models.products import Product, expert_products, products

# Fields of onnx.proto's messages.
_GRAPH = 7
_NODES, _OUTPUTS = 1, 12
_NODE_NAME, _OPERATOR, _ATTRIBUTES = 3, 4, 5
_ATTRIBUTE_NAME, _FLOAT, _INTEGER = 1, 2, 3
_VALUE_TYPE, _TENSOR_TYPE, _SHAPE, _DIMENSION, _SIZE = 2, 1, 2, 1, 1

_FLOAT_ATTRIBUTES = ("scale", "softcap", "rope_factor", "norm_eps")
_ORT_ACTIVATIONS = {"silu": "QuickGelu", "gelu_tanh": "Gelu"}

Fields = Mapping[int, list[Any]]
Formats = Callable[[str], BlockFormat]
Node = tuple[str, Mapping[str, Any]]  # operator and numeric attributes


def check_graph(path: Path, config: ModelConfig, *, linear: str, format_of: Formats) -> None:
    """Raises `BundleError` where the graph at `path` is not that of `config`.

    Compared are every attention node, the shape and blocks of every linear layer, the activation,
    and the width of the logits. `linear` is that of the manifest's weights, `format_of` tells how
    a matrix is stored by its canonical name.
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
    found = {name: (operator, attributes) for name, operator, attributes in nodes}
    own = linear == "kvq"
    wanted = _mixer_nodes(config) | (
        _own_nodes(config, format_of) if own else _matmul_nodes(config, format_of)
    )
    wrong = [name for name, one in wanted.items() if not _agrees(one, found.get(name))]
    if wrong:
        raise _refused(path, wrong[0])
    # Our own products compute a gate's by themselves.
    apart = {layer.feed.activation for layer in config.layers if not (own and layer.feed.gated)}
    apart |= set() if config.per_layer is None else {config.per_layer.activation}
    activations = {operator for _, operator, _ in nodes} & set(_ORT_ACTIVATIONS.values())
    if activations != {_ORT_ACTIVATIONS[activation] for activation in apart}:
        raise _refused(path, "the activation")
    mixers = sum(
        operator.endswith(("Attention", "ShortConv", "DeltaNet")) for _, operator, _ in nodes
    )
    if mixers != config.num_layers:
        raise _refused(path, "the number of layers")
    if widths != [config.vocab_size, *[config.hidden_size] * config.has_states]:
        raise _refused(path, "the shape of the logits")


def _refused(path: Path, what: str) -> BundleError:
    return BundleError(
        f"{path} does not compute the model that kvq.json describes: {what} differs; "
        "export the model again"
    )


def _mixer_nodes(config: ModelConfig) -> dict[str, Node]:
    """Operator and attributes of what decides which tokens a layer looks at, by name.

    And of what enters a draft head, and of the states that it reads.
    """
    nodes: dict[str, Node] = {}
    if config.joins:
        nodes["/model/join/Concat"] = ("Concat", {"axis": -1})
    if config.has_states:
        kind = "SimplifiedLayerNormalization" if config.norm == "rms" else "LayerNormalization"
        nodes[f"/model/states/{kind}"] = (kind, {"epsilon": float(config.norm_eps)})
    for layer, own in enumerate(config.layers):
        path, mixer = f"/model/layers.{layer}", own.mixer
        if own.scaled:
            nodes[f"{path}/Mul"] = ("Mul", {})
        if isinstance(mixer, DeltaNet):
            nodes[f"{path}/delta/gates/Gemm"] = ("Gemm", {"transB": 1})
            facts = delta_attributes(config, layer, mixer)
            nodes[f"{path}/delta/DeltaNet"] = ("DeltaNet", facts)
        elif isinstance(mixer, Attention):
            nodes |= _nodes_of_attention(config, layer, mixer)
        else:
            nodes[f"{path}/conv/ShortConv"] = ("ShortConv", {"layer": config.mixer_place(layer)})
    return nodes


def _nodes_of_attention(config: ModelConfig, layer: int, mixer: Attention) -> dict[str, Node]:
    path, own = f"/model/layers.{layer}/attn", config.layers[layer]
    kind = "Attention" if own.owns_keys else "SharedAttention"
    nodes: dict[str, Node] = {f"{path}/{kind}": (kind, attention_attributes(config, layer))}
    if mixer.output_gate:
        nodes[f"{path}/gate/Mul"] = ("Mul", {})
    if mixer.head_gate:
        nodes[f"{path}/head_gate/Gemm"] = ("Gemm", {"transB": 1})
        nodes[f"{path}/head_gate/Mul"] = ("Mul", {})
    if mixer.growth:
        nodes[f"{path}/growth/Mul"] = ("Mul", {})
    if mixer.value_norm and own.owns_keys:
        nodes[f"{path}/v_norm/Concat"] = ("Concat", {})
    return nodes


def delta_attributes(config: ModelConfig, layer: int, mixer: DeltaNet) -> dict[str, Any]:
    """What a layer's node of a delta net says."""
    place, eps = config.mixer_place(layer), float(config.norm_eps)
    return {"layer": place, "key_heads": mixer.key_heads, "norm_eps": eps}


def cache_inputs(classes: int) -> tuple[str, ...]:
    """What a graph calls the handles of the caches of so many classes of layers."""
    return ("cache", *(f"cache.{index}" for index in range(1, classes)))


def attention_attributes(config: ModelConfig, layer: int) -> dict[str, Any]:
    """What a layer's node of attention says; which class its cache is of, its input says."""
    attributes = asdict(config.attention(layer))
    del attributes["cache"]
    # An integral value read from JSON must not turn a float attribute into an integer.
    return attributes | {name: float(attributes[name]) for name in _FLOAT_ATTRIBUTES}


def node_path(product: Product) -> str:
    """What the name of a product's node begins with."""
    inside = "" if product.layer is None else f"layers.{product.layer}/"
    return f"/model/{inside}{product.place}"


def linear_attributes(config: ModelConfig, product: Product) -> dict[str, Any]:
    """What a node of `kvq::Linear` says beside the shape and format of its matrix."""
    return {
        "activation": 0 if product.gate is None else ACTIVATIONS.index(product.gate),
        "norm_eps": float(config.norm_eps),
        "layer": product.layer or 0,
        "first_kept": product.first_kept,
    }


def experts_attributes(
    config: ModelConfig, feed: Sequence[Product], format_of: Formats
) -> dict[str, Any]:
    """What a node of `kvq::Experts` says, of the products of its layer's router and experts."""
    _, gate_up, down = feed
    assert down.layer is not None
    assert down.gate is not None
    experts = config.layers[down.layer].feed
    assert isinstance(experts, Experts)
    # Graphs of earlier versions say nothing of it.
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
    """Routers and experts, by name."""
    nodes: dict[str, Node] = {}
    for layer, own in enumerate(config.layers):
        if isinstance(own.feed, Experts):
            feed = expert_products(config, layer)
            nodes[f"{node_path(feed[0])}/Gemm"] = ("Gemm", {"transB": 1})
            facts = experts_attributes(config, feed, format_of)
            nodes[f"{node_path(feed[-1])}/Experts"] = ("Experts", facts)
            if own.feed.shared is not None:
                nodes[f"/model/layers.{layer}/mlp/shared/gate/Mul"] = ("Mul", {})
    return nodes


def _own_nodes(config: ModelConfig, format_of: Formats) -> dict[str, Node]:
    """The products of a graph of `kvq::Linear`, which also holds norms and activation."""
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


def _matmul_nodes(config: ModelConfig, format_of: Formats) -> dict[str, Node]:
    """Those of a graph of ONNX Runtime's MatMulNBits."""
    nodes: dict[str, Node] = {}
    for product in products(config):
        if product.exact:
            continue
        form = format_of(product.weight)
        facts = {"K": product.columns, "N": product.rows}
        facts |= {"bits": form.bits, "block_size": form.block}
        nodes[f"{node_path(product)}/MatMulNBits"] = ("MatMulNBits", facts)
    return nodes


def _agrees(wanted: Node, found: Node | None) -> bool:
    if found is None or found[0] != wanted[0]:
        return False
    return all(
        name in found[1] and np.float32(found[1][name]) == np.float32(value)
        if isinstance(value, float)
        else found[1].get(name) == value
        for name, value in wanted[1].items()
    )


def _node(content: bytes) -> tuple[str, str, dict[str, Any]]:
    """Name, operator and numeric attributes of a node."""
    fields = _message(content)
    attributes: dict[str, Any] = {}
    for attribute in map(_message, fields[_ATTRIBUTES]):
        numbers = attribute[_INTEGER] or attribute[_FLOAT]
        attributes[_text(attribute, _ATTRIBUTE_NAME)] = numbers[-1] if numbers else None
    return _text(fields, _NODE_NAME), _text(fields, _OPERATOR), attributes


def _text(fields: Fields, number: int) -> str:
    return b"".join(fields[number][-1:]).decode()


def _last_dimension(content: bytes) -> int | None:
    """The last size of a declared value, None when it is open."""
    fields = _message(content)
    for number in (_VALUE_TYPE, _TENSOR_TYPE, _SHAPE):
        fields = _message(fields[number][-1])
    sizes = _message(fields[_DIMENSION][-1])[_SIZE]
    return sizes[-1] if sizes else None


def _message(content: bytes) -> Fields:
    """The values of a message by field number: integers, floats, bytes."""
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    for number, value in _fields(content):
        fields[number].append(value)
    return fields


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        match key & 7:
            case 0:
                value, at = _varint(content, at)
                yield key >> 3, value - (1 << 64) if value >> 63 else value
            case 1:
                yield key >> 3, content[at : at + 8]
                at += 8
            case 2:
                size, at = _varint(content, at)
                if at + size > len(content):
                    raise ValueError("a field is cut off")
                yield key >> 3, content[at : at + size]
                at += size
            case 5:
                yield key >> 3, struct.unpack_from("<f", content, at)[0]
                at += 4
            case kind:
                raise ValueError(f"a field of kind {kind}")


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
