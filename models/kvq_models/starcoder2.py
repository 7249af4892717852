"""The starcoder2 family: norms with a mean and biases, an MLP without a gate, biases, a window."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, FIM_STARCODER, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, MustEqual


def _build(values: Mapping[str, Any]) -> ModelConfig:
    bias, window = values["use_bias"], values["sliding_window"]
    return decoder_config(
        values,
        attention={"qkv_bias": bias, "output_bias": bias, "window_tokens": window or 0},
        dense={"activation": "gelu_tanh", "gated": False, "bias": bias},
        norm="layer",
        norm_eps=values["norm_epsilon"],
    )


_READ = {name: key for name, key in DECODER_KEYS.items() if name != "rms_norm_eps"}

FAMILY = Family(
    model_type="starcoder2",
    keys={
        **_READ,
        "hidden_act": MustEqual("gelu_pytorch_tanh"),
        "norm_epsilon": Default(float, 1e-5),
        "use_bias": Default(bool, True),
        "sliding_window": Default(int),
        "tie_word_embeddings": Default(bool, True),
    },
    build=_build,
    layer_weights={
        **LAYER_WEIGHTS,
        "attn_norm_bias": ("input_layernorm.bias",),
        "mlp_norm_bias": ("post_attention_layernorm.bias",),
        "up": ("mlp.c_fc.weight",),
        "up_bias": ("mlp.c_fc.bias",),
        "down": ("mlp.c_proj.weight",),
        "down_bias": ("mlp.c_proj.bias",),
    },
    fim_tokens=(FIM_STARCODER,),
)
