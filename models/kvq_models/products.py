"""The products with weights that a model is made of, in the order of the forward pass.

Derived from the list of layers: graphs are written by it and checked against it. Knows no width
of a weight and no node.
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

# What a draft head shares with its model, by the first part of the canonical name.
_SHARED = ("embed", "head", "head_bias", "rope")


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix, `rows` x `columns`, of the canonical name `weight`; `layer` None: of none.

    Of experts it is `count` such matrices, one behind the other; a router's is kept as it is
    (`exact`), for a token that goes to another expert is answered otherwise; so are a delta net's
    gates, whose errors add up from token to token. What enters a product
    is normalised by `norm`; or it is what `gate` makes of both halves, or activation(x) by
    `activation`. What comes out is normalised by `after`. Where a pass wants the layer's keys
    and values alone, the last `kept` rows are computed.
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
        """Whether it is the output head."""
        return self.weight == "head"

    @property
    def first_kept(self) -> int:
        """The first of the rows that are `kept`."""
        return self.rows - self.kept

    @property
    def name(self) -> str:
        """What a layer calls it: qkv, o, gate_up, down, router, experts_gate_up, experts_down.

        Of an MLP that experts share shared_gate_up, shared_down and shared_gate.
        Of a convolution in_proj and out_proj; of a delta net also gates between these, as attention
        has head_gate; and of per-layer embeddings per_layer_gate and per_layer_up.
        """
        return self.weight.rpartition(".")[2]


def layer_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Those of one layer: the mixer's two, then the feed's, then those of its own embedding."""
    return (
        *mixer_products(config, index),
        *feed_products(config, index),
        *per_layer_products(config, index),
    )


def mixer_products(config: ModelConfig, index: int) -> tuple[Product, ...]:
    """Queries, keys and values, attention's output; or what enters another mixer and leaves it.

    Between these two a delta net has that of its gates, and attention that of its heads'.
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
    """Gate and up, or up, then down; of experts, behind an MLP beside them, `expert_products`.

    Of an MLP that they share these two and that of its gate.
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
    """The router of a layer, then gate and up, and down, of all of its experts.

    Beside an MLP the router and the experts read the stream each through a norm of its own.
    """
    layer, hidden, name = config.layers[index], config.hidden_size, f"layers.{index}"
    feed = layer.feed
    assert isinstance(feed, Experts)
    norm = None if layer.norms == "after" else f"{name}.mlp_norm"
    after = None if layer.norms == "before" else f"{name}.post_mlp_norm"
    own = None
    if feed.beside is not None:
        norm, own, after = f"{name}.router_norm", f"{name}.moe_norm", f"{name}.post_moe_norm"
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
            place="mlp/experts" if own else "mlp",
            rows=2 * feed.width,
            columns=hidden,
            layer=index,
            norm=own,
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
    """The gate of a layer's own embedding and what makes it a part of the stream, if it has one."""
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
    """What makes the other half of all layers' own embeddings of the embedded tokens."""
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
    """The output head, which may share the embedding's matrix."""
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
    """What makes the stream of a draft head of embeddings and states side by side."""
    if not config.joins:
        return None
    hidden = config.hidden_size
    return Product(weight="join", place="join", rows=hidden, columns=2 * hidden, layer=None)


def draft_name(name: str) -> str:
    """What a draft head's weight is called beside those of its model; some are the model's own."""
    return name if name.partition(".")[0] in _SHARED else f"draft.{name}"


def is_drafts(name: str) -> bool:
    """Whether a weight of a bundle is its draft head's alone."""
    return name.startswith("draft.")


def draft_products(config: ModelConfig) -> Iterator[Product]:
    """Those of a draft head that are not the model's own too; none where there is none."""
    for product in () if config.drafting is None else products(config.drafting):
        if not product.is_head:
            yield replace(product, weight=draft_name(product.weight))


def products(config: ModelConfig) -> Iterator[Product]:
    """All of a model, the head last; those of its draft head are apart."""
    if (own := join_product(config)) is not None:
        yield own
    if (own := per_layer_model_product(config)) is not None:
        yield own
    for layer in range(config.num_layers):
        yield from layer_products(config, layer)
    yield head_product(config)
