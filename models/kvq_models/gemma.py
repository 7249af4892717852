"""The gemma family (Gemma, CodeGemma): scaled embeddings, norms stored as w - 1, a gate by GELU.

Its later generations start from what is here.
"""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.decoder import DECODER_KEYS, FIM_QWEN, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, Key, MustEqual, Required

GEMMA_KEYS: Mapping[str, Key] = {
    **DECODER_KEYS,
    "num_key_value_heads": Required(),
    "head_dim": Default(int, 256),
    "hidden_act": MustEqual(None, "gelu_pytorch_tanh"),
    "hidden_activation": MustEqual(None, "gelu_pytorch_tanh"),
    "tie_word_embeddings": Default(bool, True),
    "use_bidirectional_attention": MustEqual(False, None),
    "attention_bias": Default(bool, False),
    "dtype": Default(str),
    "torch_dtype": Default(str),
}
# For the later generations, which also have a norm after each half of a layer, and windows.
SANDWICH_KEYS: Mapping[str, Key] = {
    **GEMMA_KEYS,
    "hidden_activation": MustEqual("gelu_pytorch_tanh"),
    "sliding_window": Default(int, 4096),
    "layer_types": Default(list),
    "query_pre_attn_scalar": Default(float, 256.0),
}
SANDWICH_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    **LAYER_WEIGHTS,
    "post_attn_norm": ("post_attention_layernorm.weight",),
    "mlp_norm": ("pre_feedforward_layernorm.weight",),
    "post_mlp_norm": ("post_feedforward_layernorm.weight",),
}
TURN_ENDS = ("<end_of_turn>",)
_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    None: np.float32,
}


def embedding_scale(values: Mapping[str, Any]) -> float:
    """Returns sqrt(hidden_size), rounded to the type of the model's training, as its code does."""
    name = values["dtype"] or values["torch_dtype"]
    if name not in _DTYPES:
        raise UnsupportedModelError(
            f"dtype {name!r} is not supported for {values['model_type']}; "
            "supported: bfloat16, float16, float32"
        )
    return float(np.float32(math.sqrt(values["hidden_size"])).astype(_DTYPES[name]))


def query_scale(values: Mapping[str, Any]) -> float:
    """Returns the factor of q.k, 1 / sqrt(query_pre_attn_scalar). Raises CheckpointError."""
    scalar = values["query_pre_attn_scalar"]
    if scalar <= 0:
        raise CheckpointError(
            f"config.json has query_pre_attn_scalar = {scalar}; it must be positive"
        )
    return scalar**-0.5


FAMILY = Family(
    model_type="gemma",
    # The first files have "gelu" and mean its tanh form, as all others do.
    keys={**GEMMA_KEYS, "hidden_act": MustEqual("gelu_pytorch_tanh", "gelu", None)},
    build=lambda values: decoder_config(
        values,
        dense={"activation": "gelu_tanh"},
        embedding_scale=embedding_scale(values),
        norm_offset=1.0,
    ),
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=TURN_ENDS,
)
