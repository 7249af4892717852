"""The gemma2 family: gemma with a norm after each half of a layer, soft caps and windows.

Every second layer, from the first on, sees a sliding window.
"""

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
from kvq_models.windows import typed_layers, window_types

FAMILY = Family(
    model_type="gemma2",
    keys={
        **SANDWICH_KEYS,
        # Their defaults would be 50 and 30, and null means none.
        "attn_logit_softcapping": Required(float, nullable=True),
        "final_logit_softcapping": Required(float, nullable=True),
    },
    build=lambda values: decoder_config(
        values,
        attention={
            "scale": query_scale(values),
            "softcap": values["attn_logit_softcapping"] or 0.0,
        },
        dense={"activation": "gelu_tanh"},
        layer={"norms": "both"},
        attention_by_layer=typed_layers(values, window_types(values, 2)),
        final_softcap=values["final_logit_softcapping"] or 0.0,
        embedding_scale=embedding_scale(values),
        norm_offset=1.0,
    ),
    layer_weights=SANDWICH_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=TURN_ENDS,
)
