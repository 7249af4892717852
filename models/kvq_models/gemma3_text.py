"""The gemma3_text family: scaled embeddings, norms stored as w - 1, two kinds of layers.

Five layers of six see a sliding window and rotate with the local base; the sixth sees everything
and rotates with the global base, which alone may be scaled.
"""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.config import ModelConfig, RopeConfig
from kvq_models.decoder import DECODER_KEYS, FIM_QWEN, LAYER_WEIGHTS, decoder_config, rope_settings
from kvq_models.family import Family
from kvq_models.keys import Default, MustEqual, Required
from kvq_models.rope import build_rope
from kvq_models.windows import typed_layers

_GLOBAL, _LOCAL = 0, 1
_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    None: np.float32,
}


def _build(values: Mapping[str, Any]) -> ModelConfig:
    pattern = values["sliding_window_pattern"]
    types = values["layer_types"] or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(values["num_hidden_layers"])
    ]
    return decoder_config(
        "gemma3_text",
        values,
        ropes=_ropes(values),
        layers=typed_layers("gemma3_text", types, values["sliding_window"], sliding_rope=_LOCAL),
        activation="gelu_tanh",
        attention_scale=_positive(values, "query_pre_attn_scalar") ** -0.5,
        attention_softcap=values["attn_logit_softcapping"],
        final_softcap=values["final_logit_softcapping"],
        embedding_scale=_embedding_scale(values),
        norm_offset=1.0,
        qk_norm=True,
        sandwich_norms=True,
        qkv_bias=values["attention_bias"],
        output_bias=values["attention_bias"],
    )


def _ropes(values: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """The global and the local table, in the order of _GLOBAL and _LOCAL."""
    nested: dict[str, Any] = values["rope_parameters"] or {}
    unknown = set(nested) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"rope_parameters of gemma3_text holds {', '.join(sorted(unknown))}; "
            "supported: full_attention, sliding_attention"
        )
    whole: dict[str, Any] = {
        **(nested.get("full_attention") or {}),
        **(values["rope_scaling"] or {}),
    }
    local: dict[str, Any] = {
        "rope_theta": values["rope_local_base_freq"],
        **(nested.get("sliding_attention") or {}),
    }
    return (
        build_rope("gemma3_text", rope_settings(values, parameters=whole), ("default", "linear")),
        build_rope("gemma3_text", rope_settings(values, parameters=local), ("default",)),
    )


def _embedding_scale(values: Mapping[str, Any]) -> float:
    """sqrt(hidden_size) rounded to the type the model was trained in, as its code rounds it."""
    name = values["dtype"] or values["torch_dtype"]
    if name not in _DTYPES:
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported for gemma3_text; "
            "supported: bfloat16, float16, float32"
        )
    return float(np.float32(math.sqrt(values["hidden_size"])).astype(_DTYPES[name]))


def _positive(values: Mapping[str, Any], key: str) -> float:
    if values[key] <= 0:
        raise CheckpointError(f"config.json has {key} = {values[key]}; it must be positive")
    return values[key]


FAMILY = Family(
    model_type="gemma3_text",
    keys={
        **DECODER_KEYS,
        "num_key_value_heads": Required(),
        "head_dim": Default(int, 256),
        "hidden_act": MustEqual(None, "gelu_pytorch_tanh"),
        "hidden_activation": MustEqual("gelu_pytorch_tanh"),
        "tie_word_embeddings": Default(bool, True),
        "rope_theta": Default(float, 1_000_000.0),
        "rope_local_base_freq": Default(float, 10_000.0),
        "sliding_window": Default(int, 4096),
        "sliding_window_pattern": Default(int, 6),
        "layer_types": Default(list),
        "query_pre_attn_scalar": Default(float, 256.0),
        "attn_logit_softcapping": Default(float, 0.0),
        "final_logit_softcapping": Default(float, 0.0),
        "use_bidirectional_attention": MustEqual(False, None),
        "attention_bias": Default(bool, False),
        "dtype": Default(str),
        "torch_dtype": Default(str),
    },
    build=_build,
    layer_weights={
        **LAYER_WEIGHTS,
        "post_attn_norm": ("post_attention_layernorm.weight",),
        "mlp_norm": ("pre_feedforward_layernorm.weight",),
        "post_mlp_norm": ("post_feedforward_layernorm.weight",),
    },
    fim_tokens=(FIM_QWEN,),
    turn_ends=("<end_of_turn>",),
)
