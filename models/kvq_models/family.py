"""What a family is: its config keys, its weight names, its control tokens.

Owns `Family`, the parts most families share, and the canonical weights every consumer asks for.
Knows no particular family; each lives in its own file and enters through `registry.FAMILIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.errors import CheckpointError
from kvq_models.config import Attention, DeltaNet, Experts, Layer, ModelConfig, ShortConv
from kvq_models.keys import Key, read_keys
from kvq_models.products import draft_name, join_product, layer_products

MOST_LAYERS = 4096
# What the names of a draft head's tensors begin with.
DRAFT_HEAD = "mtp"


@dataclass(frozen=True, kw_only=True, slots=True)
class FimNames:
    """One fill-in-the-middle convention; `repo` and `file` head a repository and a file in it."""

    prefix: str
    suffix: str
    middle: str
    pad: str | None = None
    repo: str | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """A canonical weight of this shape: the rows of `parts`, plus `offset`, times `scale`.

    A matrix may be quantised, unless it is `exact`. The tensor `factors`, if there is one, has a
    number for each part, by which its rows are multiplied too.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    offset: float = 0.0
    scale: float = 1.0
    exact: bool = False
    factors: str | None = None

    @property
    def quantised(self) -> bool:
        """Whether a bundle keeps codes of it; all else is float32 there."""
        return len(self.shape) > 1 and not self.exact


@dataclass(frozen=True, slots=True)
class View:
    """A part of a checkpoint's `tensor`: some of its rows, or, `across`, of its columns as rows.

    All views of a tensor together are all of it.
    """

    tensor: str
    rows: range
    across: bool = False


def draft_layer(config: ModelConfig) -> Layer | None:
    """What the one layer of a draft head is like: the model's first that has keys of its own."""
    return next((layer for layer in config.layers if layer.owns_keys), None)


def no_views(config: ModelConfig) -> Mapping[str, View]:
    """Those of a family of whose tensors each is one weight, or some of its rows."""
    del config
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model_type: how its config.json reads and what its weights are called.

    `build` turns checked key values into a config; `layer_weights` maps the canonical name of a
    layer's weight to checkpoint names below `model.layers.{i}.`, with `{expert}` where each expert
    has one, and `{key_head}` where each head of keys does. `views` has those of these names that
    are parts of tensors. `fim_tokens` lists the
    fill-in-the-middle conventions of its checkpoints, `turn_ends` the tokens that end a chat turn;
    a tokenizer is searched for both. `final_norm` is the norm before the head; the names of a draft
    head's tensors begin with `DRAFT_HEAD`; `draft_head`: it is one that is computed here.
    """

    model_type: str
    keys: Mapping[str, Key]
    build: Callable[[Mapping[str, Any]], ModelConfig]
    layer_weights: Mapping[str, tuple[str, ...]]
    fim_tokens: tuple[FimNames, ...] = ()
    turn_ends: tuple[str, ...] = ()
    final_norm: str = "model.norm"
    views: Callable[[ModelConfig], Mapping[str, View]] = no_views
    draft_head: bool = False

    def config(self, config_json: Mapping[str, Any]) -> ModelConfig:
        """The model a checkpoint's config.json describes.

        Raises UnsupportedModelError for keys or values this family does not compute,
        CheckpointError for missing or malformed ones.
        """
        try:
            values = read_keys(self.model_type, self.keys, config_json)
            # Each layer takes memory here, before any of its weights is looked for.
            if values["num_hidden_layers"] > MOST_LAYERS:
                raise CheckpointError(
                    f"config.json has num_hidden_layers = {values['num_hidden_layers']}; at most "
                    f"{MOST_LAYERS} are possible"
                )
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                return self.build(values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"config.json describes no {self.model_type} model: {error}; download it again"
            ) from error

    def weights(self, config: ModelConfig) -> dict[str, WeightSource]:
        """Every canonical weight of the model, in the order of the forward pass."""
        sources = {"embed": _embedding_source(config, "model.embed_tokens.weight")}
        sources |= self._per_layer_sources(config)
        for layer in range(config.num_layers):
            sources |= self._layer_sources(config, layer, "model.layers")
        sources["final_norm"] = WeightSource(
            parts=(f"{self.final_norm}.weight",),
            shape=(config.hidden_size,),
            offset=config.norm_offset,
            scale=config.logits_scale,
        )
        if config.norm == "layer":
            sources["final_norm_bias"] = WeightSource(
                parts=(f"{self.final_norm}.bias",), shape=(config.hidden_size,)
            )
        if not config.tied_head:
            sources["head"] = _embedding_source(config, "lm_head.weight")
        if config.head_bias:
            sources["head_bias"] = WeightSource(parts=("lm_head.bias",), shape=(config.vocab_size,))
        return sources

    def _layer_sources(
        self, config: ModelConfig, layer: int, below: str
    ) -> dict[str, WeightSource]:
        """Those of one layer, whose tensors' names begin with `below` and its number."""
        exact = {product.name for product in layer_products(config, layer) if product.exact}
        exact.add("conv")
        return {
            f"layers.{layer}.{name}": WeightSource(
                parts=tuple(f"{below}.{layer}.{part}" for part in self._parts(config, layer, name)),
                shape=shape,
                offset=config.norm_offset if name.endswith("_norm") else 0.0,
                scale=_scale(config, layer, name),
                exact=name in exact,
                factors=self._factors(layer, name),
            )
            for name, shape in layer_shapes(config, layer).items()
        }

    def with_draft_head(self, config: ModelConfig, tensors: Collection[str]) -> ModelConfig:
        """The config with the draft head that a checkpoint of these tensors has, if it has one.

        One that `why_no_draft_head` speaks of is left out.
        """
        if f"{DRAFT_HEAD}.fc.weight" not in tensors or self.why_no_draft_head(tensors):
            return config
        return dataclasses.replace(config, draft_head=draft_layer(config))

    def why_no_draft_head(self, tensors: Collection[str]) -> str | None:
        """Why the draft head among these tensors is none that is computed here, or None."""
        if not any(name.startswith(f"{DRAFT_HEAD}.") for name in tensors):
            return None
        if not self.draft_head:
            return f"heads of {self.model_type} models are none that are computed"
        if any(name.startswith(f"{DRAFT_HEAD}.layers.1.") for name in tensors):
            # Each would be for one more token ahead; no published checkpoint has more than one.
            return "it has several layers, and heads of one are computed"
        return None

    def draft_weights(self, config: ModelConfig) -> dict[str, WeightSource]:
        """Every weight of the draft head that is not the model's own too, by `draft_name`."""
        drafting, own = config.drafting, DRAFT_HEAD
        if drafting is None:
            return {}
        hidden, offset = (config.hidden_size,), config.norm_offset
        sources = {
            name: WeightSource(parts=(f"{own}.{part}.weight",), shape=hidden, offset=offset)
            for name, part in (
                ("embed_norm", "pre_fc_norm_embedding"),
                ("state_norm", "pre_fc_norm_hidden"),
                ("final_norm", "norm"),
            )
        }
        join = join_product(drafting)
        assert join is not None
        sources["join"] = WeightSource(parts=(f"{own}.fc.weight",), shape=(join.rows, join.columns))
        sources |= self._layer_sources(drafting, 0, f"{own}.layers")
        return {draft_name(name): source for name, source in sources.items()}

    def spare(self, config: ModelConfig) -> frozenset[str]:
        """Tensors that a file may hold although nothing reads them.

        Those are the keys and values of layers that read others' instead.
        """
        names = (*self.layer_weights["qkv"][1:], *self.layer_weights.get("k_norm", ()))
        return frozenset(
            f"model.layers.{index}.{name}"
            for index, layer in enumerate(config.layers)
            if layer.attends and not layer.owns_keys
            for name in names
        )

    def _per_layer_sources(self, config: ModelConfig) -> dict[str, WeightSource]:
        """What all layers' own embeddings come from; the norm is that of each layer's part.

        The two halves are each worth 1 / sqrt(2), and the stream's has 1 / sqrt(hidden_size).
        """
        own = config.per_layer
        if own is None:
            return {}
        columns = config.num_layers * own.width
        return {
            "per_layer_embed": WeightSource(
                parts=("model.embed_tokens_per_layer.weight",), shape=(own.rows, columns)
            ),
            "per_layer_model": WeightSource(
                parts=("model.per_layer_model_projection.weight",),
                shape=(columns, config.hidden_size),
                scale=config.hidden_size**-0.5,
            ),
            "per_layer_norm": WeightSource(
                parts=("model.per_layer_projection_norm.weight",),
                shape=(own.width,),
                offset=config.norm_offset,
                scale=0.5**0.5,
            ),
        }

    def _factors(self, layer: int, name: str) -> str | None:
        """What the outputs of the experts of a layer are multiplied by, one by one."""
        own = self.layer_weights.get("expert_factors") if name == "experts_down" else None
        return None if own is None else f"model.layers.{layer}.{own[0]}"

    def _parts(self, config: ModelConfig, layer: int, name: str) -> tuple[str, ...]:
        """Those of a layer's weight; of experts one expert's after the other's."""
        parts, feed = self.layer_weights[name], config.layers[layer].feed
        mixer = config.layers[layer].mixer
        if name in ("qkv", "qkv_bias") and isinstance(mixer, Attention):
            if mixer.kv_from is not None:
                return parts[:1]
            if mixer.values == "keys":
                return (parts[0], parts[1], parts[1])
        if isinstance(mixer, DeltaNet) and "{key_head}" in parts[0]:
            heads = range(mixer.key_heads)
            return tuple(part.format(key_head=head) for part in parts for head in heads)
        if not (is_stack(name) and isinstance(feed, Experts)):
            return parts
        return tuple(part.format(expert=one) for one in range(feed.count) for part in parts)


def is_stack(name: str) -> bool:
    """Whether a weight's canonical name is of the matrices of all experts of a layer."""
    return name.rpartition(".")[2].startswith("experts_")


def _embedding_source(config: ModelConfig, name: str) -> WeightSource:
    return WeightSource(parts=(name,), shape=(config.vocab_size, config.hidden_size))


def _scale(config: ModelConfig, layer: int, name: str) -> float:
    """What a layer's weight is multiplied by; a router's own norm divides by sqrt(hidden)."""
    if name == "router_norm":
        return config.hidden_size**-0.5
    own, feed = config.layers[layer], config.layers[layer].feed
    scale = own.scale if name in _last(config, layer) else 1.0
    if isinstance(feed, Experts) and name in ("experts_down", "experts_down_bias"):
        return scale * feed.scale
    return scale


def _last(config: ModelConfig, index: int) -> tuple[str, ...]:
    """What the output of each half of a layer is linear in, by canonical name."""
    if config.layers[index].norms == "before":
        feeds = (f"{one}down{end}" for one in ("", "shared_", "experts_") for end in ("", "_bias"))
        return ("o", "o_bias", "out_proj", *feeds)
    return ("post_attn_norm", "post_mlp_norm")


def _norm_shapes(config: ModelConfig, norm: str | None, size: int) -> dict[str, tuple[int, ...]]:
    """Those of the weights of a norm that may be there."""
    if norm is None:
        return {}
    return {norm: (size,)} | ({f"{norm}_bias": (size,)} if config.norm == "layer" else {})


def _qk_norm_shapes(mixer: Attention) -> dict[str, tuple[int, ...]]:
    if mixer.qk_norm == "heads":
        keys = {} if mixer.kv_from is not None else {"k_norm": (mixer.head_dim,)}
        return {"q_norm": (mixer.head_dim,)} | keys
    if mixer.qk_norm == "rows":
        return {"q_norm": (mixer.width,), "k_norm": (mixer.kv_width,)}
    return {}


def layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Shape of each canonical weight of one layer; a linear layer's is [out, in].

    A convolution's is [channels, 1, taps], the newest row's last. A delta net's `head_scale` is of
    the norm of what its heads give.
    """
    mixer = config.layers[index].mixer
    shapes: dict[str, tuple[int, ...]] = {}
    for product in layer_products(config, index):
        shapes |= _norm_shapes(config, product.norm, product.columns)
        shapes[product.weight] = (product.count * product.rows, product.columns)
        if product.bias is not None:
            shapes[product.bias] = (product.count * product.rows,)
        if product.name == "qkv" and isinstance(mixer, Attention):
            shapes |= _qk_norm_shapes(mixer)
            shapes |= {"sink_logits": (mixer.heads,)} if mixer.sinks else {}
        if product.name == "in_proj" and isinstance(mixer, ShortConv):
            shapes["conv"] = (config.hidden_size, 1, mixer.taps)
        if product.name == "gates" and isinstance(mixer, DeltaNet):
            heads = (mixer.value_heads,)
            shapes |= {"conv": (mixer.shape(1).conv_width, 1, mixer.taps), "decay": heads}
            shapes |= {"dt_bias": heads, "head_scale": (mixer.value_dim,)}
        shapes |= _norm_shapes(config, product.after, product.rows)
    feed = config.layers[index].feed
    if isinstance(feed, Experts) and feed.choice_bias:
        shapes["choice_bias"] = (feed.count,)
    if isinstance(feed, Experts) and feed.beside is not None:
        shapes |= _norm_shapes(config, "post_mlp_norm", config.hidden_size)
    if config.layers[index].scaled:
        shapes["scalar"] = (1,)
    return {name.rpartition(".")[2]: shape for name, shape in shapes.items()}
