"""The gemma2 family: gemma with a norm after each half of a layer, soft caps and windows.

Every second layer, from the first on, sees a sliding window.
"""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import FIM_QWEN, decoder_config
from kvq_models.family import Family
from kvq_models.gemma import (
    SANDWICH_KEYS,
    SANDWICH_WEIGHTS,
    TURN_ENDS,
    embedding_scale,
    query_scale,
)
from kvq_models.keys import Required
from kvq_models.windows import typed_layers


def _build(values: Mapping[str, Any]) -> ModelConfig:
    types = values["layer_types"] or [
        "full_attention" if layer % 2 else "sliding_attention"
        for layer in range(values["num_hidden_layers"])
    ]
    return decoder_config(
        "gemma2",
        values,
        attention={
            "scale": query_scale(values),
            "softcap": values["attn_logit_softcapping"] or 0.0,
        },
        dense={"activation": "gelu_tanh"},
        norms="both",
        attention_by_layer=typed_layers("gemma2", types, values["sliding_window"]),
        final_softcap=values["final_logit_softcapping"] or 0.0,
        embedding_scale=embedding_scale("gemma2", values),
        norm_offset=1.0,
    )


FAMILY = Family(
    model_type="gemma2",
    keys={
        **SANDWICH_KEYS,
        # Their defaults would be 50 and 30, and null means none.
        "attn_logit_softcapping": Required(float, nullable=True),
        "final_logit_softcapping": Required(float, nullable=True),
    },
    build=_build,
    layer_weights=SANDWICH_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=TURN_ENDS,
)
