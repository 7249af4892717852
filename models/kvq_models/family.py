"""What a family is: its config keys, its weight names, its control tokens.

It has the class `Family`, and the canonical weights that all consumers ask for. Each family lives
in its own file and enters through `registry.FAMILIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.errors import CheckpointError, reason_of
from kvq_models.config import Attention, DeltaNet, Experts, Layer, ModelConfig, ShortConv
from kvq_models.keys import Key, read_keys
from kvq_models.products import draft_name, join_product, layer_products

MOST_LAYERS = 4096
# The prefix of the names of a draft head's tensors.
DRAFT_HEAD = "mtp"


@dataclass(frozen=True, slots=True)
class FimNames:
    """Holds the token names of one fill-in-the-middle convention.

    `repo` and `file` stand before a repository and before a file in it.
    """

    prefix: str
    suffix: str
    middle: str
    pad: str | None = None
    repo: str | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """Describes a canonical weight: the rows of `parts`, plus `offset`, times `scale`.

    A matrix may be quantised unless it is `exact`. The tensor `factors`, if there is one, has a
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
        """Returns whether a bundle stores codes of it; all other weights are float32 there."""
        return len(self.shape) > 1 and not self.exact


@dataclass(frozen=True, slots=True)
class View:
    """Describes a part of a checkpoint's `tensor`: some of its rows, or of its columns if `across`.

    All views of a tensor together are the whole tensor.
    """

    tensor: str
    rows: range
    across: bool = False


def draft_layer(config: ModelConfig) -> Layer | None:
    """Returns the layer that a draft head's is like: the model's first with keys of its own."""
    return next((layer for layer in config.layers if layer.owns_keys), None)


def no_views(config: ModelConfig) -> Mapping[str, View]:
    """Returns no views, for a family whose tensors are single weights, or rows of one."""
    del config
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Describes one model_type: how its config.json is read and how its weights are called.

    Args:
        model_type: The family's name in config.json.
        keys: The keys of config.json that it knows.
        build: Makes the config from the checked values of the keys, and the `model_type`.
        layer_weights: For each canonical name of a layer's weight, the checkpoint names below
            `model.layers.{i}.`, with `{expert}` if each expert has one, and `{key_head}` if each
            head of keys does.
        fim_tokens: Fill-in-the-middle conventions for which its tokenizers are searched.
        turn_ends: Tokens that end a chat turn, for which they are searched too.
        final_norm: Checkpoint name of the norm before the head.
        views: Returns those of the names in `layer_weights` that are parts of tensors.
        draft_head: Whether its draft heads can be computed here. The names of their tensors begin
            with `DRAFT_HEAD`.
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
        """Returns the model that a checkpoint's config.json describes.

        Raises UnsupportedModelError for keys or values that this family does not compute,
        CheckpointError for missing or malformed ones.
        """
        try:
            values = read_keys(self.model_type, self.keys, config_json)
            values["model_type"] = self.model_type
            # Each layer takes memory before any of its weights is looked for.
            if values["num_hidden_layers"] > MOST_LAYERS:
                raise CheckpointError(
                    f"config.json has num_hidden_layers = {values['num_hidden_layers']}; at most "
                    f"{MOST_LAYERS} are possible"
                )
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                return self.build(values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"config.json describes no {self.model_type} model: {reason_of(error)}; download "
                "it again"
            ) from error

    def weights(self, config: ModelConfig) -> dict[str, WeightSource]:
        """Returns all canonical weights of the model, in the order of the forward pass."""
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
        """Returns a layer's weights; the names of its tensors begin with `below` and its number."""
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
        """Returns the config with the draft head of a checkpoint with these tensors, if it has one.

        A draft head is left out if `why_no_draft_head` gives a reason.
        """
        if f"{DRAFT_HEAD}.fc.weight" not in tensors or self.why_no_draft_head(tensors):
            return config
        return dataclasses.replace(config, draft_head=draft_layer(config))

    def why_no_draft_head(self, tensors: Collection[str]) -> str | None:
        """Returns why the draft head among these tensors cannot be computed here, or None."""
        if not any(name.startswith(f"{DRAFT_HEAD}.") for name in tensors):
            return None
        if not self.draft_head:
            return f"heads of {self.model_type} models are none that are computed"
        if any(name.startswith(f"{DRAFT_HEAD}.layers.1.") for name in tensors):
            # Each layer would be for one more token; no published checkpoint has more than one.
            return "it has several layers, and heads of one are computed"
        return None

    def draft_weights(self, config: ModelConfig) -> dict[str, WeightSource]:
        """Returns the weights of the draft head that are not also the model's, by `draft_name`."""
        drafting, prefix = config.drafting, DRAFT_HEAD
        if drafting is None:
            return {}
        hidden, offset = (config.hidden_size,), config.norm_offset
        sources = {
            name: WeightSource(parts=(f"{prefix}.{part}.weight",), shape=hidden, offset=offset)
            for name, part in (
                ("embed_norm", "pre_fc_norm_embedding"),
                ("state_norm", "pre_fc_norm_hidden"),
                ("final_norm", "norm"),
            )
        }
        join = join_product(drafting)
        assert join is not None
        sources["join"] = WeightSource(
            parts=(f"{prefix}.fc.weight",), shape=(join.rows, join.columns)
        )
        sources |= self._layer_sources(drafting, 0, f"{prefix}.layers")
        return {draft_name(name): source for name, source in sources.items()}

    def spare(self, config: ModelConfig) -> frozenset[str]:
        """Returns tensors that a file may have although nothing reads them.

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
        """Returns the weights of the per-layer embeddings; the norm is that of each layer's part.

        Each half is worth 1 / sqrt(2), and the one of the stream also has 1 / sqrt(hidden_size).
        """
        per_layer = config.per_layer
        if per_layer is None:
            return {}
        columns = config.num_layers * per_layer.width
        return {
            "per_layer_embed": WeightSource(
                parts=("model.embed_tokens_per_layer.weight",), shape=(per_layer.rows, columns)
            ),
            "per_layer_model": WeightSource(
                parts=("model.per_layer_model_projection.weight",),
                shape=(columns, config.hidden_size),
                scale=config.hidden_size**-0.5,
            ),
            "per_layer_norm": WeightSource(
                parts=("model.per_layer_projection_norm.weight",),
                shape=(per_layer.width,),
                offset=config.norm_offset,
                scale=0.5**0.5,
            ),
        }

    def _factors(self, layer: int, name: str) -> str | None:
        """Returns the tensor of the factors of a layer's experts for the weight `name`, or None."""
        factors = self.layer_weights.get("expert_factors") if name == "experts_down" else None
        return None if factors is None else f"model.layers.{layer}.{factors[0]}"

    def _parts(self, config: ModelConfig, layer: int, name: str) -> tuple[str, ...]:
        """Returns the parts of a layer's weight, of experts one after the other."""
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
        return tuple(part.format(expert=expert) for expert in range(feed.count) for part in parts)


def is_stack(name: str) -> bool:
    """Returns whether a canonical name means the matrices of all experts of a layer."""
    return name.rpartition(".")[2].startswith("experts_")


def _embedding_source(config: ModelConfig, name: str) -> WeightSource:
    return WeightSource(parts=(name,), shape=(config.vocab_size, config.hidden_size))


def _scale(config: ModelConfig, layer: int, name: str) -> float:
    """Returns the factor of a layer's weight; a router's norm divides by sqrt(hidden_size)."""
    if name == "router_norm":
        return config.hidden_size**-0.5
    layer_config, feed = config.layers[layer], config.layers[layer].feed
    scale = layer_config.scale if name in _output_weights(config, layer) else 1.0
    if isinstance(feed, Experts) and name in ("experts_down", "experts_down_bias"):
        return scale * feed.scale
    return scale


def _output_weights(config: ModelConfig, index: int) -> tuple[str, ...]:
    """Returns the canonical names of the weights in which the output of a half layer is linear."""
    if config.layers[index].norms == "before":
        feeds = (
            f"{prefix}down{end}" for prefix in ("", "shared_", "experts_") for end in ("", "_bias")
        )
        return ("o", "o_bias", "out_proj", *feeds)
    return ("post_attn_norm", "post_mlp_norm")


def _norm_shapes(config: ModelConfig, norm: str | None, size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights of a norm, if it exists."""
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
    """Returns the shape of each canonical weight of one layer; a linear layer's is [out, in].

    That of a convolution is [channels, 1, taps], with the newest row last. `head_scale` of a delta
    net belongs to the norm of its heads' output.
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
