"""The lfm3 family (LFM3 1.7B): convolutions, heads with a gate each, windows in some layers.

Norms stand around both halves of a layer. In layers that see everything half of the pairs of a head
rotate, at the speeds that a whole table would have there.
"""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig, ShortConv
from kvq_models.decoder import decoder_config, plain_rope
from kvq_models.family import Family
from kvq_models.keys import Default
from kvq_models.lfm2 import CONVOLVING_KEYS, CONVOLVING_WEIGHTS, FINAL_NORM
from kvq_models.windows import rope_parameters, typed_layers

_CONV = "conv"
_PERIOD = 4
_GLOBAL = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
_LOCAL = 1


def _build(values: Mapping[str, Any]) -> ModelConfig:
    types = values["layer_types"] or [_kind(i) for i in range(values["num_hidden_layers"])]
    attending = ["full_attention" if kind == _CONV else kind for kind in types]
    whole, local = rope_parameters(values, sliding={"rope_theta": 10_000.0})
    tied = values["tie_embedding"]
    return decoder_config(
        {**values, "tie_word_embeddings": values["tie_word_embeddings"] if tied is None else tied},
        attention={"qk_norm": "heads", "head_gate": values["use_attention_gate"]},
        mixers={
            layer: ShortConv(taps=values["conv_L_cache"])
            for layer, kind in enumerate(types)
            if kind == _CONV
        },
        attention_by_layer=typed_layers(values, attending, sliding_rope=_LOCAL),
        rope=whole or _GLOBAL,
        rope_kinds=("proportional", "default"),
        more_ropes=(plain_rope(values, local),),
        partial_rotation=True,
        layer={"norms": "both" if values["use_sandwich_norm"] else "before"},
        norm_eps=values["norm_eps"],
        windows_apart=True,
    )


def _kind(layer: int) -> str:
    """Returns the kind of a layer if config.json does not name it."""
    if layer % _PERIOD == 2:
        return "full_attention"
    return "sliding_attention" if layer and layer % _PERIOD == 0 else _CONV


FAMILY = Family(
    model_type="lfm3",
    keys={
        **CONVOLVING_KEYS,
        "head_dim": Default(int, 128),
        "conv_L_cache": Default(int, 7),
        "sliding_window": Default(int, 256),
        "use_sandwich_norm": Default(bool, True),
        "use_attention_gate": Default(bool, True),
        "attention_bias": Default(bool, False),
    },
    build=_build,
    layer_weights={
        **CONVOLVING_WEIGHTS,
        "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "head_gate": ("self_attn.gate_proj.weight",),
        "o": ("self_attn.o_proj.weight",),
        "o_bias": ("self_attn.o_proj.bias",),
        "post_attn_norm": ("post_operator_norm.weight",),
        "post_mlp_norm": ("post_ffn_norm.weight",),
    },
    turn_ends=("<|im_end|>",),
    final_norm=FINAL_NORM,
)
