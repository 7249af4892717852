"""The mixtral family (arXiv 2401.04088): mistral with two of eight experts for each token."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, Required
from kvq_models.mixtures import EXPERT_KEYS, mixture


def _build(values: Mapping[str, Any]) -> ModelConfig:
    experts = mixture(values, width=values["intermediate_size"], count=8, normalised=True)
    return decoder_config(
        values,
        attention={"window_tokens": values["sliding_window"] or 0},
        feeds=dict.fromkeys(range(values["num_hidden_layers"]), experts),
    )


FAMILY = Family(
    model_type="mixtral",
    keys={
        **DECODER_KEYS,
        **EXPERT_KEYS,
        "num_experts_per_tok": Default(int, 2),
        "num_key_value_heads": Required(),
        "rms_norm_eps": Default(float, 1e-5),
        "rope_theta": Default(float, 1e6),
        "sliding_window": Default(int),
    },
    build=_build,
    layer_weights={
        **LAYER_WEIGHTS,
        "router": ("block_sparse_moe.gate.weight",),
        "experts_gate_up": (
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        "experts_down": ("block_sparse_moe.experts.{expert}.w2.weight",),
    },
    turn_ends=("</s>", "<|im_end|>"),
)
