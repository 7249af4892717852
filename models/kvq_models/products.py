"""The products with weights that a model is made of, in the order of the forward pass.

Derived from the list of layers: graphs are written by it and checked against it. Knows no width
of a weight and no node.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvq_models.config import Activation, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One matrix, `rows` x `columns`, of the canonical name `weight`; `layer` None: the head.

    What enters it is normalised by `norm`; or it is activation(first half) * other half by `gate`,
    activation(x) by `activation`. What comes out is normalised by `after`. Where a pass wants the
    layer's keys and values alone, the last `kept` rows are computed.
    """

    weight: str
    place: str
    rows: int
    columns: int
    layer: int | None
    norm: str | None = None
    gate: Activation | None = None
    activation: Activation | None = None
    bias: str | None = None
    kept: int = 0
    after: str | None = None

    @property
    def first_kept(self) -> int:
        """The first of the rows that are `kept`."""
        return self.rows - self.kept

    @property
    def name(self) -> str:
        """What a layer calls it: qkv, o, gate_up, down."""
        return self.weight.rpartition(".")[2]


def layer_products(config: ModelConfig, index: int) -> tuple[Product, Product, Product, Product]:
    """Those of one layer: queries, keys, values; attention's output; gate and up, or up; down."""
    layer, hidden, name = config.layers[index], config.hidden_size, f"layers.{index}"
    mixer, feed = layer.mixer, layer.feed
    before, after = layer.norms != "after", layer.norms != "before"
    up = "gate_up" if feed.gated else "up"
    return (
        Product(
            weight=f"{name}.qkv",
            bias=f"{name}.qkv_bias" if mixer.qkv_bias else None,
            place="attn/qkv",
            rows=mixer.qkv_width,
            columns=hidden,
            layer=index,
            kept=2 * mixer.kv_width,
            norm=f"{name}.attn_norm" if before else None,
        ),
        Product(
            weight=f"{name}.o",
            bias=f"{name}.o_bias" if mixer.output_bias else None,
            place="attn/o",
            rows=hidden,
            columns=mixer.width,
            layer=index,
            after=f"{name}.post_attn_norm" if after else None,
        ),
        Product(
            weight=f"{name}.{up}",
            bias=f"{name}.{up}_bias" if feed.bias else None,
            place=f"mlp/{up}",
            rows=2 * feed.width if feed.gated else feed.width,
            columns=hidden,
            layer=index,
            norm=f"{name}.mlp_norm" if before else None,
        ),
        Product(
            weight=f"{name}.down",
            bias=f"{name}.down_bias" if feed.bias else None,
            place="mlp/down",
            rows=hidden,
            columns=feed.width,
            layer=index,
            gate=feed.activation if feed.gated else None,
            activation=None if feed.gated else feed.activation,
            after=f"{name}.post_mlp_norm" if after else None,
        ),
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
    )


def products(config: ModelConfig) -> Iterator[Product]:
    """All of a model, the head last."""
    for layer in range(config.num_layers):
        yield from layer_products(config, layer)
    yield head_product(config)
