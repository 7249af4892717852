"""The products with weights that a model consists of, in the order of the forward pass.

They follow from the list of layers. Graphs are written by them and checked against them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvq_models.config import (
    Activation,
    Attention,
    DeltaNet,
    Dense,
    Experts,
    Gating,
    Layer,
    ModelConfig,
)

# Weights that a draft head shares with its model, by the first part of the canonical name.
_SHARED = ("embed", "head", "head_bias", "rope")


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Describes one matrix of `rows` x `columns` with the canonical name `weight`.

    Args:
        weight: Canonical name.
        place: Path of the product in a graph.
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        layer: Its layer, or None.
        norm: Canonical name of the norm of its input.
        gate: How the two halves of its input are combined.
        activation: The activation of its input.
        bias: Canonical name of its bias.
        kept: In passes that need only the layer's keys and values, this many last rows are
            computed.
        after: Canonical name of the norm of its output.
        count: Number of such matrices, one after the other, for experts.
        exact: Whether it is not quantised. A router is exact, since another expert would mean
            another answer, and so are a delta net's gates, whose errors add up from token to token.
    """

    weight: str
    place: str
    rows: int
    columns: int
    layer: int | None
    norm: str | None = None
    gate: Gating | None = None
    activation: Activation | None = None
    bias: str | None = None
    kept: int = 0
    after: str | None = None
    count: int = 1
    exact: bool = False

    @property
    def is_head(self) -> bool:
        """Returns whether it is the output head."""
        return self.weight == "head"

    @property
    def first_kept(self) -> int:
        """Returns the first of the rows that are `kept`."""
        return self.rows - self.kept

    @property
    def name(self) -> str:
        """Returns its name in the layer.

        It is qkv, o, gate_up, up, down, router, experts_gate_up or experts_down; shared_gate_up,
        shared_down or shared_gate for an MLP that experts share; in_proj or out_proj for a
        convolution or a delta net, which also has gates; head_gate for attention; per_layer_gate or
        per_layer_up for per-layer embeddings.
        """
        return self.weight.rpartition(".")[2]


def layer_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Returns the products of one layer: of its mixer, its feed and its per-layer embedding."""
    return (
        *mixer_products(config, index),
        *feed_products(config, index),
        *per_layer_products(config, index),
    )


def mixer_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Returns the products of a layer's mixer, from its input to its output.

    Attention has qkv, perhaps head_gate, and o; a convolution has two products, and a delta net has
    its gates between them.
    """
    layer, name = config.layers[index], f"layers.{index}"
    mixer = layer.mixer
    if isinstance(mixer, DeltaNet):
        return _delta_products(config, layer, mixer, index)
    if not isinstance(mixer, Attention):
        return _conv_products(config, layer, index)
    return (
        Product(
            weight=f"{name}.qkv",
            bias=f"{name}.qkv_bias" if mixer.qkv_bias else None,
            place="attn/qkv",
            rows=mixer.projected_width,
            columns=config.hidden_size,
            layer=index,
            kept=2 * mixer.kv_width,
            norm=None if layer.norms == "after" else f"{name}.attn_norm",
        ),
        *(() if not mixer.head_gate else (_head_gate(config, mixer, index),)),
        Product(
            weight=f"{name}.o",
            bias=f"{name}.o_bias" if mixer.output_bias else None,
            place="attn/o",
            rows=config.hidden_size,
            columns=mixer.width,
            layer=index,
            after=None if layer.norms == "before" else f"{name}.post_attn_norm",
        ),
    )


def _head_gate(config: ModelConfig, mixer: Attention, index: int) -> Product:
    after = config.layers[index].norms == "after"
    return Product(
        weight=f"layers.{index}.head_gate",
        place="attn/head_gate",
        rows=mixer.heads,
        columns=config.hidden_size,
        layer=index,
        norm=None if after else f"layers.{index}.attn_norm",
        exact=True,
    )


def _conv_products(config: ModelConfig, layer: Layer, index: int) -> tuple[Product, Product]:
    name, hidden = f"layers.{index}", config.hidden_size
    return (
        Product(
            weight=f"{name}.in_proj",
            place="conv/in",
            rows=3 * hidden,
            columns=hidden,
            layer=index,
            norm=None if layer.norms == "after" else f"{name}.attn_norm",
        ),
        Product(
            weight=f"{name}.out_proj",
            place="conv/out",
            rows=hidden,
            columns=hidden,
            layer=index,
            after=None if layer.norms == "before" else f"{name}.post_attn_norm",
        ),
    )


def _delta_products(
    config: ModelConfig, layer: Layer, mixer: DeltaNet, index: int
) -> tuple[Product, ...]:
    name, hidden, shape = f"layers.{index}", config.hidden_size, mixer.shape(1)
    norm = None if layer.norms == "after" else f"{name}.attn_norm"
    return (
        Product(
            weight=f"{name}.in_proj",
            place="delta/in",
            rows=shape.conv_width + shape.value_width,
            columns=hidden,
            layer=index,
            norm=norm,
        ),
        Product(
            weight=f"{name}.gates",
            place="delta/gates",
            rows=2 * mixer.value_heads,
            columns=hidden,
            layer=index,
            norm=norm,
            exact=True,
        ),
        Product(
            weight=f"{name}.out_proj",
            place="delta/out",
            rows=hidden,
            columns=shape.value_width,
            layer=index,
            after=None if layer.norms == "before" else f"{name}.post_attn_norm",
        ),
    )


def feed_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Returns the products of a layer's feed.

    An MLP has gate and up, or up, and then down. Before `expert_products` come those of the MLP
    beside or shared by the experts; a shared one also has its gate.
    """
    layer, name = config.layers[index], f"layers.{index}"
    before = "attn_norm" if layer.parallel else "mlp_norm"
    norm = None if layer.norms == "after" else f"{name}.{before}"
    after = None if layer.norms == "before" else f"{name}.post_mlp_norm"
    feed = layer.feed
    if isinstance(feed, Dense):
        return _dense_products(config, index, feed, norm, after)
    if feed.shared is not None:
        return (
            *_shared_products(config, index, feed.shared, norm),
            *expert_products(config, index),
        )
    beside = feed.beside
    dense = (
        ()
        if beside is None
        else _dense_products(config, index, beside, norm, f"{name}.post_dense_norm")
    )
    return (*dense, *expert_products(config, index))


def expert_products(config: ModelConfig, index: int) -> tuple[Product, Product, Product]:
    """Returns the router of a layer, then gate and up, and down, of all of its experts.

    Beside an MLP the router and the experts each read the stream through a norm of their own.
    """
    layer, hidden, name = config.layers[index], config.hidden_size, f"layers.{index}"
    feed = layer.feed
    assert isinstance(feed, Experts)
    norm = None if layer.norms == "after" else f"{name}.mlp_norm"
    after = None if layer.norms == "before" else f"{name}.post_mlp_norm"
    experts_norm = None
    if feed.beside is not None:
        norm, experts_norm, after = (
            f"{name}.router_norm",
            f"{name}.moe_norm",
            f"{name}.post_moe_norm",
        )
    return (
        Product(
            weight=f"{name}.router",
            place="mlp/router",
            rows=feed.count,
            columns=hidden,
            layer=index,
            norm=norm,
            bias=f"{name}.router_bias" if feed.router_bias else None,
            exact=True,
        ),
        Product(
            weight=f"{name}.experts_gate_up",
            bias=f"{name}.experts_gate_up_bias" if feed.bias else None,
            place="mlp/experts" if experts_norm else "mlp",
            rows=2 * feed.width,
            columns=hidden,
            layer=index,
            norm=experts_norm,
            count=feed.count,
        ),
        Product(
            weight=f"{name}.experts_down",
            bias=f"{name}.experts_down_bias" if feed.bias else None,
            place="mlp",
            rows=hidden,
            columns=feed.width,
            layer=index,
            gate=feed.activation,
            after=after,
            count=feed.count,
        ),
    )


def _shared_products(
    config: ModelConfig, index: int, feed: Dense, norm: str | None
) -> tuple[Product, ...]:
    gate = Product(
        weight=f"layers.{index}.shared_gate",
        place="mlp/shared/gate",
        rows=1,
        columns=config.hidden_size,
        layer=index,
        norm=norm,
        exact=True,
    )
    return (*_dense_products(config, index, feed, norm, None, shared=True), gate)


def _dense_products(
    config: ModelConfig,
    index: int,
    feed: Dense,
    norm: str | None,
    after: str | None,
    *,
    shared: bool = False,
) -> tuple[Product, Product]:
    hidden, layer = config.hidden_size, f"layers.{index}."
    name, place = (f"{layer}shared_", "mlp/shared") if shared else (layer, "mlp")
    up = "gate_up" if feed.gated else "up"
    return (
        Product(
            weight=f"{name}{up}",
            bias=f"{name}{up}_bias" if feed.bias else None,
            place=f"{place}/{up}",
            rows=2 * feed.width if feed.gated else feed.width,
            columns=hidden,
            layer=index,
            norm=norm,
        ),
        Product(
            weight=f"{name}down",
            bias=f"{name}down_bias" if feed.bias else None,
            place=f"{place}/down",
            rows=hidden,
            columns=feed.width,
            layer=index,
            gate=feed.activation if feed.gated else None,
            activation=None if feed.gated else feed.activation,
            after=after,
        ),
    )


def per_layer_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Returns the two products of a layer's per-layer embedding, if it has one."""
    if config.per_layer is None:
        return ()
    name, width = f"layers.{index}", config.per_layer.width
    return (
        Product(
            weight=f"{name}.per_layer_gate",
            place="per_layer/gate",
            rows=width,
            columns=config.hidden_size,
            layer=index,
        ),
        Product(
            weight=f"{name}.per_layer_up",
            place="per_layer/up",
            rows=config.hidden_size,
            columns=width,
            layer=index,
            after=f"{name}.post_per_layer_norm",
        ),
    )


def per_layer_model_product(config: ModelConfig) -> Product | None:
    """Returns the product of the embedded tokens that is one half of all per-layer embeddings."""
    if config.per_layer is None:
        return None
    return Product(
        weight="per_layer_model",
        place="per_layer/model",
        rows=config.num_layers * config.per_layer.width,
        columns=config.hidden_size,
        layer=None,
    )


def head_product(config: ModelConfig) -> Product:
    """Returns the output head, which may share the embedding's matrix."""
    return Product(
        weight="head",
        place="head",
        rows=config.vocab_size,
        columns=config.hidden_size,
        layer=None,
        norm="final_norm",
        bias="head_bias" if config.head_bias else None,
    )


def join_product(config: ModelConfig) -> Product | None:
    """Returns the product that joins embeddings and states into the stream of a draft head."""
    if not config.joins:
        return None
    hidden = config.hidden_size
    return Product(weight="join", place="join", rows=hidden, columns=2 * hidden, layer=None)


def draft_name(name: str) -> str:
    """Returns the name of a draft head's weight beside those of its model; some are shared."""
    return name if name.partition(".")[0] in _SHARED else f"draft.{name}"


def is_drafts(name: str) -> bool:
    """Returns whether a weight of a bundle belongs to its draft head alone."""
    return name.startswith("draft.")


def draft_products(config: ModelConfig) -> Iterator[Product]:
    """Yields the products of a draft head that are not also the model's."""
    for product in () if config.drafting is None else products(config.drafting):
        if not product.is_head:
            yield replace(product, weight=draft_name(product.weight))


def products(config: ModelConfig) -> Iterator[Product]:
    """Yields all products of a model, the head last, without those of its draft head."""
    if (product := join_product(config)) is not None:
        yield product
    if (product := per_layer_model_product(config)) is not None:
        yield product
    for layer in range(config.num_layers):
        yield from layer_products(config, layer)
    yield head_product(config)
