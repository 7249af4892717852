"""The qwen3_5 family (Qwen 3.5 0.8B to 27B as text models): delta nets, every fourth layer attends.

Its attention has a gate for each channel of the output, and a quarter of the channels rotate. The
weights of all norms except that of a delta net's heads are stored as w - 1. Checkpoints have a
draft head (`mtp`).
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvq.errors import CheckpointError
from kvq_models.config import DeltaNet, Feed, ModelConfig
from kvq_models.decoder import DECODER_KEYS, FIM_QWEN, LAYER_WEIGHTS, decoder_config, layer_kinds
from kvq_models.family import Family
from kvq_models.keys import Default, Key, MustEqual, Required

_FULL, _LINEAR = "full_attention", "linear_attention"
# Keys for images only: in a text all three parts of a position are the same number.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_TURNING = 0.25
NO_FEEDS: Mapping[int, Feed] = MappingProxyType({})


def hybrid_config(values: Mapping[str, Any], feeds: Mapping[int, Feed] = NO_FEEDS) -> ModelConfig:
    """Returns the config of delta nets beside gated attention; `feeds` are by layer."""
    net = DeltaNet(
        taps=values["linear_conv_kernel_dim"],
        key_heads=values["linear_num_key_heads"],
        value_heads=values["linear_num_value_heads"],
        key_dim=values["linear_key_head_dim"],
        value_dim=values["linear_value_head_dim"],
    )
    return decoder_config(
        {
            **values,
            "rope_parameters": _rope(values["rope_parameters"]),
            "rope_scaling": _rope(values["rope_scaling"]),
        },
        partial_rotation=True,
        attention={"qk_norm": "heads", "output_gate": True},
        mixers={layer: net for layer, kind in enumerate(_types(values)) if kind == _LINEAR},
        feeds=feeds,
        norm_offset=1.0,
    )


def _types(values: Mapping[str, Any]) -> Sequence[str]:
    """Returns the kind of every layer, from either of two spellings."""
    count, interval = values["num_hidden_layers"], values["full_attention_interval"]
    if interval < 1:
        raise CheckpointError(f"config.json has full_attention_interval = {interval}")
    types = values["layer_types"] or [
        _LINEAR if (layer + 1) % interval else _FULL for layer in range(count)
    ]
    return layer_kinds(values, types, _FULL, _LINEAR)


def _rope(parameters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns rope parameters without those for images only."""
    if parameters is None:
        return None
    return {name: value for name, value in parameters.items() if name not in _OF_IMAGES}


HYBRID_KEYS: Mapping[str, Key] = {
    **DECODER_KEYS,
    "num_key_value_heads": Required(),
    "head_dim": Default(int, 256),
    "attention_bias": Default(bool, False),
    "partial_rotary_factor": Default(float, _TURNING),
    "layer_types": Default(list),
    "full_attention_interval": Default(int, 4),
    "linear_conv_kernel_dim": Default(int, 4),
    "linear_key_head_dim": Default(int, 128),
    "linear_value_head_dim": Default(int, 128),
    "linear_num_key_heads": Default(int, 16),
    "linear_num_value_heads": Default(int, 32),
    "attn_output_gate": MustEqual(True),
    # For the draft head, and for how other programs compute.
    "mtp_num_hidden_layers": Default(int),
    "mtp_use_dedicated_embeddings": MustEqual(False),
    "mamba_ssm_dtype": MustEqual("float32", None),
}
HYBRID_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    **LAYER_WEIGHTS,
    "in_proj": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    "gates": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    "conv": ("linear_attn.conv1d.weight",),
    "decay": ("linear_attn.A_log",),
    "dt_bias": ("linear_attn.dt_bias",),
    "head_scale": ("linear_attn.norm.weight",),
    "out_proj": ("linear_attn.out_proj.weight",),
}
FAMILY = Family(
    model_type="qwen3_5_text",
    keys=HYBRID_KEYS,
    build=hybrid_config,
    layer_weights=HYBRID_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=("<|im_end|>",),
    draft_head=True,
)
