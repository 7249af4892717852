"""What most families share: config keys, weight names, fill-in-the-middle names, the config.

A family file starts from these and states only how it differs. Knows no particular family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.config import Attention, Dense, Feed, Layer, Mixer, ModelConfig, Norms
from kvq_models.family import FimNames
from kvq_models.keys import Default, Key, MustEqual, Required
from kvq_models.rope import RopeSettings, build_rope, merge_spellings

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
    prefix="<|fim_prefix|>",
    suffix="<|fim_suffix|>",
    middle="<|fim_middle|>",
    pad="<|fim_pad|>",
    repo="<|repo_name|>",
    file="<|file_sep|>",
)
FIM_STARCODER = FimNames(
    prefix="<fim_prefix>",
    suffix="<fim_suffix>",
    middle="<fim_middle>",
    pad="<fim_pad>",
    repo="<repo_name>",
    file="<file_sep>",
)
FIM_CODE_LLAMA = FimNames(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>")
FIM_DEEPSEEK = FimNames(
    prefix="<｜fim▁begin｜>",
    suffix="<｜fim▁hole｜>",
    middle="<｜fim▁end｜>",
)


def layer_kinds(
    model_type: str, values: Mapping[str, Any], types: Sequence[str], *possible: str
) -> Sequence[str]:
    """The kind of every layer, one of `possible` each. Raises `CheckpointError` for others."""
    count = values["num_hidden_layers"]
    if len(types) != count:
        raise CheckpointError(f"{len(types)} layers are described, num_hidden_layers is {count}")
    wrong = next((kind for kind in types if kind not in possible), None)
    if wrong is not None:
        raise UnsupportedModelError(
            f"layer type {wrong!r} is not supported for {model_type}; "
            f"supported: {', '.join(possible)}"
        )
    return types


def decoder_config(
    model_type: str,
    values: Mapping[str, Any],
    *,
    rope_kinds: Sequence[str] = ROPE_SCALINGS,
    partial_rotation: bool = False,
    mixer: Mapping[str, Any] = _NOTHING,
    feed: Mapping[str, Any] = _NOTHING,
    norms: Norms = "before",
    scale: float = 1.0,
    parallel: bool = False,
    scaled: bool = False,
    own: Sequence[Mapping[str, Any]] | None = None,
    mixers: Mapping[int, Mixer] = MappingProxyType({}),
    feeds: Mapping[int, Feed] = MappingProxyType({}),
    **overrides: Any,
) -> ModelConfig:
    """The config of a family built from `DECODER_KEYS`; `overrides` replace its fields.

    `norms`, `scale`, `parallel` and `scaled` are fields of every layer, `mixer` and `feed` those of
    its `Attention` and `Dense`, `own` those of the `Attention` of each layer that differ; layers of
    `mixers` and `feeds` have those in place of the `Attention` and the `Dense`. Without them: one
    rotary table for all layers, no windows, scale 1 / sqrt(head_dim), SiLU, and biases where the
    family reads attention_bias or mlp_bias and the file has it so.
    """
    head_dim = head_dim_of(values)
    shared: dict[str, Any] = {
        "heads": values["num_attention_heads"],
        "kv_heads": values["num_key_value_heads"] or values["num_attention_heads"],
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "qkv_bias": values.get("attention_bias", False),
        "output_bias": values.get("attention_bias", False),
    } | dict(mixer)
    count = values["num_hidden_layers"]
    each = (_NOTHING,) * count if own is None else own
    if len(each) != count:
        raise CheckpointError(f"{len(each)} layers are described, num_hidden_layers is {count}")
    inner = {"width": values["intermediate_size"], "bias": values.get("mlp_bias", False)}
    dense = Dense(**(inner | dict(feed)))
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": values["vocab_size"],
        "hidden_size": values["hidden_size"],
        "norm_eps": values.get("rms_norm_eps"),
        "tied_head": values["tie_word_embeddings"],
        "context_length": values["max_position_embeddings"],
        "layers": tuple(
            Layer(
                mixer=mixers.get(index) or Attention(**(shared | dict(one))),
                feed=feeds.get(index, dense),
                norms=norms,
                scale=scale,
                parallel=parallel,
                scaled=scaled,
            )
            for index, one in enumerate(each)
        ),
        "bos_token_id": values["bos_token_id"],
        "eos_token_ids": token_ids(values["eos_token_id"]),
    }
    if "ropes" not in overrides:
        settings = rope_settings(values)
        if settings.rotary_dim != head_dim and not partial_rotation:
            raise UnsupportedModelError(
                f"partial_rotary_factor = {settings.number('partial_rotary_factor')} is not "
                f"supported for {model_type}; supported: 1.0"
            )
        fields["ropes"] = (build_rope(model_type, settings, rope_kinds),)
        fields["context_length"] = context_length(settings)
    return ModelConfig(**(fields | overrides))


def head_dim_of(values: Mapping[str, Any]) -> int:
    """head_dim, or hidden_size / num_attention_heads when absent. Raises CheckpointError."""
    hidden, heads, head_dim = (
        values[name] for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if head_dim is None:
        if heads < 1 or hidden % heads:
            raise CheckpointError(
                f"hidden_size {hidden} is not a multiple of {heads} attention heads"
            )
        head_dim = hidden // heads
    # Its rotary table takes memory before any of the weights is looked for.
    if not 1 <= head_dim <= MOST_HEAD_DIM:
        raise CheckpointError(
            f"config.json gives a head {head_dim} dimensions; 1 to {MOST_HEAD_DIM} are possible"
        )
    return head_dim


def rope_settings(
    values: Mapping[str, Any], *, parameters: Mapping[str, Any] | None = None
) -> RopeSettings:
    """The rope keys of `values` in one spelling; `parameters`, if given, replaces both dicts."""
    merged = merge_spellings(
        parameters if parameters is not None else values["rope_parameters"],
        None if parameters is not None else values["rope_scaling"],
        values["rope_theta"],
    )
    if values["partial_rotary_factor"] is not None:
        merged.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    return RopeSettings(
        parameters=merged,
        head_dim=head_dim_of(values),
        max_positions=values["max_position_embeddings"],
        original_context=values["original_max_position_embeddings"],
    )


def context_length(settings: RopeSettings) -> int:
    """Positions the model serves; yarn stretches them even where the file keeps the old limit."""
    if settings.kind != "yarn":
        return settings.max_positions
    stretched = int(settings.trained_context * settings.number("factor", 1.0))
    return max(settings.max_positions, stretched)


def token_ids(value: object) -> tuple[int, ...]:
    """eos_token_id as ids: a number, a list of numbers or nothing. Raises CheckpointError."""
    if value is None:
        return ()
    ids: list[int] = []
    for item in cast(list[object], value) if isinstance(value, list) else [value]:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise CheckpointError(f"eos_token_id = {value!r} is no token id and no list of them")
        ids.append(item)
    return tuple(dict.fromkeys(ids))
