"""The products with weights that a model consists of, in the order of the forward pass.

They follow from the list of layers. Graphs are written by them and checked against them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvq_models.config import Activation, DeltaNet, Dense, Experts, Gating, ModelConfig, ShortConv

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
    layer, hidden, make = config.layers[index], config.hidden_size, _maker(config, index)
    mixer = layer.mixer
    norm = None if layer.norms == "after" else "attn_norm"
    after = None if layer.norms == "before" else "post_attn_norm"
    if isinstance(mixer, DeltaNet):
        shape = mixer.shape(1)
        return (
            make("in_proj", "delta/in", shape.conv_width + shape.value_width, norm=norm),
            make("gates", "delta/gates", 2 * mixer.value_heads, norm=norm, exact=True),
            make("out_proj", "delta/out", hidden, shape.value_width, after=after),
        )
    if isinstance(mixer, ShortConv):
        return (
            make("in_proj", "conv/in", 3 * hidden, norm=norm),
            make("out_proj", "conv/out", hidden, after=after),
        )
    qkv = make(
        "qkv",
        "attn/qkv",
        mixer.projected_width,
        norm=norm,
        bias=mixer.qkv_bias,
        kept=2 * mixer.kv_width,
    )
    output = make("o", "attn/o", hidden, mixer.width, after=after, bias=mixer.output_bias)
    if not mixer.head_gate:
        return qkv, output
    return qkv, make("head_gate", "attn/head_gate", mixer.heads, norm=norm, exact=True), output


def feed_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Returns the products of a layer's feed.

    An MLP has gate and up, or up, and then down. Before `expert_products` come those of the MLP
    beside or shared by the experts; a shared one also has its gate.
    """
    layer, make = config.layers[index], _maker(config, index)
    norm = None if layer.norms == "after" else "attn_norm" if layer.parallel else "mlp_norm"
    after = None if layer.norms == "before" else "post_mlp_norm"
    feed = layer.feed
    if isinstance(feed, Dense):
        return _dense_products(config, make, feed, norm, after)
    dense: tuple[Product, ...] = ()
    if feed.shared is not None:
        gate = make("shared_gate", "mlp/shared/gate", 1, norm=norm, exact=True)
        dense = (*_dense_products(config, make, feed.shared, norm, None, "shared"), gate)
    elif feed.beside is not None:
        dense = _dense_products(config, make, feed.beside, norm, "post_dense_norm")
    return (*dense, *expert_products(config, index))


def expert_products(config: ModelConfig, index: int) -> tuple[Product, Product, Product]:
    """Returns the router of a layer, then gate and up, and down, of all of its experts.

    Beside an MLP the router and the experts each read the stream through a norm of their own.
    """
    layer, make = config.layers[index], _maker(config, index)
    feed = layer.feed
    assert isinstance(feed, Experts)
    norm = None if layer.norms == "after" else "mlp_norm"
    after = None if layer.norms == "before" else "post_mlp_norm"
    place, experts_norm = "mlp", None
    if feed.beside is not None:
        place = "mlp/experts"
        norm, experts_norm, after = "router_norm", "moe_norm", "post_moe_norm"
    experts = {"bias": feed.bias, "count": feed.count}
    return (
        make("router", "mlp/router", feed.count, norm=norm, bias=feed.router_bias, exact=True),
        make("experts_gate_up", place, 2 * feed.width, norm=experts_norm, **experts),
        make(
            "experts_down",
            "mlp",
            config.hidden_size,
            feed.width,
            gate=feed.activation,
            after=after,
            **experts,
        ),
    )


def _dense_products(
    config: ModelConfig,
    make: Callable[..., Product],
    feed: Dense,
    norm: str | None,
    after: str | None,
    part: str = "",
) -> tuple[Product, Product]:
    name, place = (f"{part}_", f"mlp/{part}") if part else ("", "mlp")
    up = "gate_up" if feed.gated else "up"
    width = 2 * feed.width if feed.gated else feed.width
    return (
        make(f"{name}{up}", f"{place}/{up}", width, norm=norm, bias=feed.bias),
        make(
            f"{name}down",
            f"{place}/down",
            config.hidden_size,
            feed.width,
            gate=feed.activation if feed.gated else None,
            activation=None if feed.gated else feed.activation,
            after=after,
            bias=feed.bias,
        ),
    )


def per_layer_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Returns the two products of a layer's per-layer embedding, if it has one."""
    if config.per_layer is None:
        return ()
    make, width, hidden = _maker(config, index), config.per_layer.width, config.hidden_size
    return (
        make("per_layer_gate", "per_layer/gate", width),
        make("per_layer_up", "per_layer/up", hidden, width, after="post_per_layer_norm"),
    )


def _maker(config: ModelConfig, index: int) -> Callable[..., Product]:
    """Returns a function that makes a product of a layer from the names inside this layer."""
    layer = f"layers.{index}."

    def make(
        weight: str,
        place: str,
        rows: int,
        columns: int = config.hidden_size,
        *,
        norm: str | None = None,
        after: str | None = None,
        bias: bool = False,
        **more: Any,
    ) -> Product:
        return Product(
            weight=layer + weight,
            place=place,
            rows=rows,
            columns=columns,
            layer=index,
            norm=None if norm is None else layer + norm,
            after=None if after is None else layer + after,
            bias=f"{layer}{weight}_bias" if bias else None,
            **more,
        )

    return make


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
