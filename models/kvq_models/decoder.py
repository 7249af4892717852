"""Keys, weight names, fill-in-the-middle names and the config that most families share.

A family file starts from these and adds only its differences.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.config import Attention, Dense, Feed, Layer, Mixer, ModelConfig, RopeConfig
from kvq_models.family import FimNames
from kvq_models.keys import Default, Key, MustEqual, Required
from kvq_models.rope import RopeSettings, build_rope

logger = logging.getLogger(__name__)

MOST_HEAD_DIM = 1 << 16
ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")

LAYER_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}

DECODER_KEYS: Mapping[str, Key] = {
    "vocab_size": Required(),
    "hidden_size": Required(),
    "intermediate_size": Required(),
    "num_hidden_layers": Required(),
    "num_attention_heads": Required(),
    "num_key_value_heads": Default(int),
    "head_dim": Default(int),
    "hidden_act": MustEqual("silu", "swish"),
    "max_position_embeddings": Required(),
    "original_max_position_embeddings": Default(int),
    "rms_norm_eps": Default(float, 1e-6),
    "tie_word_embeddings": Default(bool, False),
    "rope_theta": Default(float, 10_000.0),
    "rope_scaling": Default(dict),
    "rope_parameters": Default(dict),
    "partial_rotary_factor": MustEqual(None, 1.0, 1),
    "rope_interleaved": MustEqual(False),
    "bos_token_id": Default(int),
    "eos_token_id": Default(object),
    "quantization_config": MustEqual(None),
    "is_encoder_decoder": MustEqual(False),
    "add_cross_attention": MustEqual(False),
}

_NOTHING: Mapping[str, Any] = MappingProxyType({})

FIM_QWEN = FimNames(
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>",
    repo="<|repo_name|>", file="<|file_sep|>",
)  # fmt: skip
FIM_STARCODER = FimNames(
    "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>",
    repo="<repo_name>", file="<file_sep>",
)  # fmt: skip
FIM_CODE_LLAMA = FimNames("▁<PRE>", "▁<SUF>", "▁<MID>")
FIM_DEEPSEEK = FimNames("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def layer_kinds(values: Mapping[str, Any], types: Sequence[str], *possible: str) -> Sequence[str]:
    """Returns the kind of every layer, one of `possible`. Raises `CheckpointError` for others."""
    count = values["num_hidden_layers"]
    if len(types) != count:
        raise CheckpointError(f"{len(types)} layers are described, num_hidden_layers is {count}")
    wrong = next((kind for kind in types if kind not in possible), None)
    if wrong is not None:
        raise UnsupportedModelError(
            f"layer type {wrong!r} is not supported for {values['model_type']}; "
            f"supported: {', '.join(possible)}"
        )
    return types


def decoder_config(
    values: Mapping[str, Any],
    *,
    rope: Mapping[str, Any] | None = None,
    rope_kinds: Sequence[str] = ROPE_SCALINGS,
    more_ropes: Sequence[RopeConfig] = (),
    partial_rotation: bool = False,
    attention: Mapping[str, Any] = _NOTHING,
    dense: Mapping[str, Any] = _NOTHING,
    layer: Mapping[str, Any] = _NOTHING,
    attention_by_layer: Sequence[Mapping[str, Any]] | None = None,
    mixers: Mapping[int, Mixer] = MappingProxyType({}),
    feeds: Mapping[int, Feed] = MappingProxyType({}),
    **overrides: Any,
) -> ModelConfig:
    """Returns the config of a family whose keys are based on `DECODER_KEYS`.

    By default there is one rotary table for all layers, no windows, scale 1 / sqrt(head_dim), SiLU,
    and biases if the family reads attention_bias or mlp_bias and the file sets it.

    Args:
        values: The checked values of its keys, and its `model_type`.
        rope: Parameters of the first rotary table, if not those of the file.
        rope_kinds: Kinds of scaling that this table may have.
        more_ropes: The other rotary tables.
        partial_rotation: Whether a part of a head's dimensions may rotate.
        attention: Fields of the `Attention` of all layers.
        dense: Fields of the `Dense` of all layers.
        layer: Other fields of all layers, such as `norms`.
        attention_by_layer: For each layer, fields of its `Attention` that differ.
        mixers: Other mixers than `Attention`, by layer.
        feeds: Other feeds than the `Dense`, by layer.
        **overrides: Fields of `ModelConfig`.
    """
    head_dim = head_dim_of(values)
    all_layers: dict[str, Any] = {
        "heads": values["num_attention_heads"],
        "kv_heads": values["num_key_value_heads"] or values["num_attention_heads"],
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "qkv_bias": values.get("attention_bias", False),
        "output_bias": values.get("attention_bias", False),
    } | dict(attention)
    count = values["num_hidden_layers"]
    by_layer = (_NOTHING,) * count if attention_by_layer is None else attention_by_layer
    if len(by_layer) != count:
        raise CheckpointError(f"{len(by_layer)} layers are described, num_hidden_layers is {count}")
    dense_fields = {"width": values["intermediate_size"], "bias": values.get("mlp_bias", False)}
    dense_feed = Dense(**(dense_fields | dict(dense)))
    settings = rope_settings(values, parameters=rope)
    if settings.rotary_dim != head_dim and not partial_rotation:
        raise UnsupportedModelError(
            f"partial_rotary_factor = {settings.number('partial_rotary_factor')} is not "
            f"supported for {values['model_type']}; supported: 1.0"
        )
    fields: dict[str, Any] = {
        "model_type": values["model_type"],
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "norm_eps": values.get("rms_norm_eps"),
        "tied_head": values["tie_word_embeddings"],
        "context_length": context_length(settings),
        "ropes": (build_rope(values["model_type"], settings, rope_kinds), *more_ropes),
        "layers": tuple(
            Layer(
                mixer=mixers.get(index) or Attention(**(all_layers | dict(layer_fields))),
                feed=feeds.get(index, dense_feed),
                **layer,
            )
            for index, layer_fields in enumerate(by_layer)
        ),
        "bos_token_id": next(iter(token_ids(values, "bos_token_id")), None),
        "eos_token_ids": token_ids(values, "eos_token_id"),
    }
    return ModelConfig(**(fields | overrides))


def head_dim_of(values: Mapping[str, Any]) -> int:
    """Returns head_dim, or hidden_size / num_attention_heads without it. Raises CheckpointError."""
    hidden, heads, head_dim = (
        values[name] for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise CheckpointError(
                f"hidden_size {hidden} is not a multiple of {heads} attention heads"
            )
        head_dim = hidden // heads
    # The rotary table takes memory before any weight is looked for.
    if not 1 <= head_dim <= MOST_HEAD_DIM:
        raise CheckpointError(
            f"config.json gives a head {head_dim} dimensions; 1 to {MOST_HEAD_DIM} are possible"
        )
    return head_dim


def rope_settings(
    values: Mapping[str, Any], *, parameters: Mapping[str, Any] | None = None
) -> RopeSettings:
    """Returns the rope keys of `values` in one spelling; `parameters` replaces both dicts.

    The new spelling is rope_parameters. The old one is rope_scaling, which may have `type` for
    rope_type, and wins.
    """
    if parameters is None:
        parameters = values["rope_scaling"] or values["rope_parameters"]
    merged: dict[str, Any] = dict(parameters or {})
    merged["rope_type"] = merged.get("rope_type") or merged.get("type") or "default"
    merged.pop("type", None)
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = values["rope_theta"]
    if values["partial_rotary_factor"] is not None:
        merged.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    return RopeSettings(
        parameters=merged,
        head_dim=head_dim_of(values),
        max_positions=values["max_position_embeddings"],
        original_context=values["original_max_position_embeddings"],
    )


def plain_rope(values: Mapping[str, Any], parameters: Mapping[str, Any]) -> RopeConfig:
    """Returns the rotary table of `parameters`, which may have no scaling."""
    settings = rope_settings(values, parameters=parameters)
    return build_rope(values["model_type"], settings, ("default",))


def context_length(settings: RopeSettings) -> int:
    """Returns the positions that the model serves.

    Yarn stretches them, even if the file has the old limit.
    """
    if settings.kind != "yarn":
        return settings.max_positions
    stretched = int(settings.trained_context * settings.number("factor", 1.0))
    return max(settings.max_positions, stretched)


def token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Returns the ids that a key names: a number, a list of numbers or nothing.

    One that no token of `vocab_size` has, such as -1, counts as absent and is logged.

    Raises:
        CheckpointError: it is something else.
    """
    value, vocab_size = values.get(key), values["vocab_size"]
    items = cast(list[object], value) if isinstance(value, list) else [value]
    ids: list[int] = []
    for item in items:
        if item is None:
            continue
        if not isinstance(item, int) or isinstance(item, bool):
            raise CheckpointError(f"{key} = {value!r} is no token id and no list of them")
        if 0 <= item < vocab_size:
            ids.append(item)
        else:
            logger.warning(
                "%s names token %d, and the model has %d: it counts as absent",
                key,
                item,
                vocab_size,
            )
    return tuple(dict.fromkeys(ids))
