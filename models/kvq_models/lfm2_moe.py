"""The lfm2_moe family (LFM2 8B-A1B and 24B-A2B): lfm2 with experts in all layers but the first.

The sigmoids of the router are the shares; each expert has a bias that only counts in the choice.
"""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.family import Family
from kvq_models.keys import Default
from kvq_models.lfm2 import CONVOLVING_KEYS, CONVOLVING_WEIGHTS, FINAL_NORM, convolving_config
from kvq_models.mixtures import EXPERT_KEYS, mixture


def _build(values: Mapping[str, Any]) -> ModelConfig:
    experts = mixture(
        values,
        width=values["moe_intermediate_size"],
        count=32,
        scoring="sigmoid",
        choice_bias=values["use_expert_bias"],
        scale=values["routed_scaling_factor"],
    )
    sparse = range(values["num_dense_layers"], values["num_hidden_layers"])
    return convolving_config(values, feeds=dict.fromkeys(sparse, experts))


FAMILY = Family(
    model_type="lfm2_moe",
    keys={
        **CONVOLVING_KEYS,
        **EXPERT_KEYS,
        "moe_intermediate_size": Default(int, 1792),
        "num_experts_per_tok": Default(int, 4),
        "norm_topk_prob": Default(bool, True),
        "num_dense_layers": Default(int, 2),
        "use_expert_bias": Default(bool, True),
        "routed_scaling_factor": Default(float, 1.0),
    },
    build=_build,
    layer_weights={
        **CONVOLVING_WEIGHTS,
        "router": ("feed_forward.gate.weight",),
        "choice_bias": ("feed_forward.expert_bias",),
        "experts_gate_up": (
            "feed_forward.experts.{expert}.w1.weight",
            "feed_forward.experts.{expert}.w3.weight",
        ),
        "experts_down": ("feed_forward.experts.{expert}.w2.weight",),
    },
    turn_ends=("<|im_end|>",),
    final_norm=FINAL_NORM,
)
