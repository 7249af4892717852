"""The lfm2 family (LFM2 350M to 2.6B, LFM2.5): short convolutions, and few layers that attend."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.config import ModelConfig, ShortConv
from kvq_models.decoder import DECODER_KEYS, decoder_config, layer_kinds
from kvq_models.family import Family
from kvq_models.keys import Default, Key, MustEqual, Required

_FULL, _CONV = "full_attention", "conv"
FINAL_NORM = "model.embedding_norm"


def convolving_config(values: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """Returns the config of convolutions beside attention; `fields` go to `decoder_config`."""
    tied = values["tie_embedding"]
    return decoder_config(
        {**values, "tie_word_embeddings": values["tie_word_embeddings"] if tied is None else tied},
        attention={"qk_norm": "heads"},
        mixers={
            layer: ShortConv(taps=values["conv_L_cache"])
            for layer, kind in enumerate(_types(values))
            if kind == _CONV
        },
        norm_eps=values["norm_eps"],
        **fields,
    )


def _types(values: Mapping[str, Any]) -> Sequence[str]:
    """Returns the kind of every layer, from either of two spellings."""
    count, attending = values["num_hidden_layers"], values["full_attn_idxs"]
    if values["layer_types"] is None and attending is not None:
        return [_FULL if layer in attending else _CONV for layer in range(count)]
    return layer_kinds(values, values["layer_types"] or [_FULL] * count, _FULL, _CONV)


def _feed_width(values: Mapping[str, Any]) -> int:
    """Returns the columns of the MLPs: two thirds of the written number, unless it is final."""
    written = values["block_ff_dim"]
    width = values["intermediate_size"] if written is None else written
    for name, twin in (
        ("block_dim", "hidden_size"), ("conv_dim", "hidden_size"), ("conv_dim_out", "hidden_size"),
        ("num_heads", "num_attention_heads"),
    ):  # fmt: skip
        if values[name] not in (None, values[twin]):
            raise UnsupportedModelError(
                f"{name} = {values[name]} of lfm2 is not supported beside {twin} = "
                f"{values[twin]}; they must be equal"
            )
    if width is None:
        raise CheckpointError("config.json lacks intermediate_size, which an lfm2 model needs")
    if not values["block_auto_adjust_ff_dim"]:
        return width
    multiple = values["block_multiple_of"]
    if multiple < 1:
        raise CheckpointError(f"config.json has block_multiple_of = {multiple}")
    adjusted = int(values["block_ffn_dim_multiplier"] * int(2 * width / 3))
    return -(-adjusted // multiple) * multiple


CONVOLVING_KEYS: Mapping[str, Key] = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "rms_norm_eps"},
    "num_key_value_heads": Required(),
    "norm_eps": Default(float, 1e-5),
    "rope_theta": Default(float, 1_000_000.0),
    "tie_word_embeddings": Default(bool, True),
    "tie_embedding": Default(bool),
    "conv_L_cache": Default(int, 3),
    "conv_bias": MustEqual(False),
    "layer_types": Default(list),
    "full_attn_idxs": Default(list),
    "use_pos_enc": MustEqual(True),
}
CONVOLVING_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("operator_norm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "q_norm": ("self_attn.q_layernorm.weight",),
    "k_norm": ("self_attn.k_layernorm.weight",),
    "o": ("self_attn.out_proj.weight",),
    "in_proj": ("conv.in_proj.weight",),
    "conv": ("conv.conv.weight",),
    "out_proj": ("conv.out_proj.weight",),
    "mlp_norm": ("ffn_norm.weight",),
    "gate_up": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "down": ("feed_forward.w2.weight",),
}
FAMILY = Family(
    model_type="lfm2",
    keys={
        **CONVOLVING_KEYS,
        "intermediate_size": Default(int),
        "block_ff_dim": Default(int),
        "block_auto_adjust_ff_dim": Default(bool, True),
        "block_ffn_dim_multiplier": Default(float, 1.0),
        "block_multiple_of": Default(int, 256),
        "block_use_swiglu": MustEqual(True),
        # Other keys have the same numbers.
        "block_dim": Default(int),
        "conv_dim": Default(int),
        "conv_dim_out": Default(int),
        "num_heads": Default(int),
        # No code reads these: how training began, and other spellings of norm_eps and rope_theta.
        "block_norm_eps": Default(float),
        "theta": Default(float),
        "block_mlp_init_scale": Default(float),
        "block_out_init_scale": Default(float),
        "block_use_xavier_init": Default(bool),
        "conv_use_xavier_init": Default(bool),
    },
    build=lambda values: convolving_config({**values, "intermediate_size": _feed_width(values)}),
    layer_weights=CONVOLVING_WEIGHTS,
    turn_ends=("<|im_end|>",),
    final_norm=FINAL_NORM,
)
