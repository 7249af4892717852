"""The phi3 family (Phi-3, Phi-4-mini): fused projections, partial rotation, two rotary tables."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, MustEqual

_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}


def _build(values: Mapping[str, Any]) -> ModelConfig:
    renamed = {key: _renamed(values[key]) for key in ("rope_scaling", "rope_parameters")}
    return decoder_config(
        {**values, **renamed},
        rope_kinds=("default", "longrope"),
        partial_rotation=True,
        attention={"window_tokens": values["sliding_window"] or 0},
    )


def _renamed(rope: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns rope settings with "su" and "yarn" renamed to longrope, as early files call it."""
    if rope is None:
        return None
    kind = rope.get("rope_type", rope.get("type"))
    return {**rope, "rope_type": _OLD_NAMES.get(kind, kind)} if kind else dict(rope)


FAMILY = Family(
    model_type="phi3",
    keys={
        **DECODER_KEYS,
        "rms_norm_eps": Default(float, 1e-5),
        "partial_rotary_factor": Default(float),
        "sliding_window": Default(int),
        "interpolate_factor": MustEqual(1),
        "full_attn_mod": MustEqual(1),
        "lm_head_bias": MustEqual(False),
        "attention_bias": MustEqual(False),
        "mlp_bias": MustEqual(False),
    },
    build=_build,
    layer_weights={
        **LAYER_WEIGHTS,
        "qkv": ("self_attn.qkv_proj.weight",),
        "gate_up": ("mlp.gate_up_proj.weight",),
    },
    turn_ends=("<|end|>", "<|endoftext|>"),
)
