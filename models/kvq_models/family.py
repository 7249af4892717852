"""What a family is: its config keys, its weight names, its control tokens.

Owns `Family`, the parts most families share, and the canonical weights every consumer asks for.
Knows no particular family; each lives in its own file and enters through `registry.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.errors import CheckpointError
from kvq_models.config import ModelConfig
from kvq_models.keys import Key, read_keys
from kvq_models.products import layer_products

MOST_LAYERS = 4096


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
    """A canonical weight of this shape: the rows of `parts`, plus `offset`, times `scale`."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    offset: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model_type: how its config.json reads and what its weights are called.

    `build` turns checked key values into a config; `layer_weights` maps the canonical name of a
    layer's weight to checkpoint names below `model.layers.{i}.`. `fim_tokens` lists the
    fill-in-the-middle conventions of its checkpoints, `turn_ends` the tokens that end a chat turn;
    a tokenizer is searched for both.
    """

    model_type: str
    keys: Mapping[str, Key]
    build: Callable[[Mapping[str, Any]], ModelConfig]
    layer_weights: Mapping[str, tuple[str, ...]]
    fim_tokens: tuple[FimNames, ...] = ()
    turn_ends: tuple[str, ...] = ()

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
        for layer in range(config.num_layers):
            for name, shape in layer_shapes(config, layer).items():
                sources[f"layers.{layer}.{name}"] = WeightSource(
                    parts=tuple(
                        f"model.layers.{layer}.{part}" for part in self.layer_weights[name]
                    ),
                    shape=shape,
                    offset=config.norm_offset if name.endswith("_norm") else 0.0,
                    scale=config.layers[layer].scale if name in _last(config, layer) else 1.0,
                )
        sources["final_norm"] = WeightSource(
            parts=("model.norm.weight",),
            shape=(config.hidden_size,),
            offset=config.norm_offset,
            scale=config.logits_scale,
        )
        if config.norm == "layer":
            sources["final_norm_bias"] = WeightSource(
                parts=("model.norm.bias",), shape=(config.hidden_size,)
            )
        if not config.tied_head:
            sources["head"] = _embedding_source(config, "lm_head.weight")
        return sources


def _embedding_source(config: ModelConfig, name: str) -> WeightSource:
    return WeightSource(parts=(name,), shape=(config.vocab_size, config.hidden_size))


def _last(config: ModelConfig, index: int) -> tuple[str, ...]:
    """What the output of each half of a layer is linear in, by canonical name."""
    if config.layers[index].norms == "before":
        return ("o", "o_bias", "down", "down_bias")
    return ("post_attn_norm", "post_mlp_norm")


def _norm_shapes(config: ModelConfig, norm: str | None, size: int) -> dict[str, tuple[int, ...]]:
    """Those of the weights of a norm that may be there."""
    if norm is None:
        return {}
    return {norm: (size,)} | ({f"{norm}_bias": (size,)} if config.norm == "layer" else {})


def layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Shape of each canonical weight of one layer; a linear layer's is [out, in]."""
    mixer = config.layers[index].mixer
    shapes: dict[str, tuple[int, ...]] = {}
    for product in layer_products(config, index):
        shapes |= _norm_shapes(config, product.norm, product.columns)
        shapes[product.weight] = (product.rows, product.columns)
        if product.bias is not None:
            shapes[product.bias] = (product.rows,)
        if product.name == "qkv" and mixer.qk_norm == "heads":
            shapes |= {"q_norm": (mixer.head_dim,), "k_norm": (mixer.head_dim,)}
        if product.name == "qkv" and mixer.qk_norm == "rows":
            shapes |= {"q_norm": (mixer.width,), "k_norm": (mixer.kv_width,)}
        shapes |= _norm_shapes(config, product.after, product.rows)
    return {name.rpartition(".")[2]: shape for name, shape in shapes.items()}
