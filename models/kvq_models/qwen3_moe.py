"""The qwen3_moe family: qwen3 with a few of many experts for each token, in most layers."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, FIM_QWEN, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, MustEqual, Required
from kvq_models.mixtures import EXPERT_KEYS, EXPERT_WEIGHTS, mixture


def _build(values: Mapping[str, Any]) -> ModelConfig:
    experts = mixture(values, width=values["moe_intermediate_size"], count=128)
    dense, step = values["mlp_only_layers"], values["decoder_sparse_step"]
    return decoder_config(
        values,
        attention={"qk_norm": "heads"},
        feeds={
            layer: experts
            for layer in range(values["num_hidden_layers"])
            if layer not in dense and (layer + 1) % step == 0
        },
    )


FAMILY = Family(
    model_type="qwen3_moe",
    keys={
        **DECODER_KEYS,
        **EXPERT_KEYS,
        "num_key_value_heads": Required(),
        "attention_bias": Default(bool, False),
        "moe_intermediate_size": Default(int, 768),
        "mlp_only_layers": Default(list, []),
        "decoder_sparse_step": Default(int, 1),
        "use_sliding_window": MustEqual(False),
        # Without use_sliding_window these mean nothing.
        "sliding_window": Default(int),
        "max_window_layers": Default(int),
    },
    build=_build,
    layer_weights={**LAYER_WEIGHTS, **EXPERT_WEIGHTS},
    fim_tokens=(FIM_QWEN,),
    turn_ends=("<|im_end|>",),
)
