"""The gemma3_text family: scaled embeddings, norms stored as w - 1, two kinds of layers.

Five layers of six see a sliding window and rotate with the local base; the sixth sees everything
and rotates with the global base, which alone may be scaled.
"""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import FIM_QWEN, decoder_config, plain_rope
from kvq_models.family import Family
from kvq_models.gemma import (
    SANDWICH_KEYS,
    SANDWICH_WEIGHTS,
    TURN_ENDS,
    embedding_scale,
    query_scale,
)
from kvq_models.keys import Default
from kvq_models.windows import rope_parameters, typed_layers, window_types

_LOCAL = 1


def _build(values: Mapping[str, Any]) -> ModelConfig:
    whole, local = rope_parameters(values, sliding={"rope_theta": values["rope_local_base_freq"]})
    types = window_types(values, values["sliding_window_pattern"])
    return decoder_config(
        values,
        rope=whole,
        rope_kinds=("default", "linear"),
        more_ropes=(plain_rope(values, local),),
        attention={
            "scale": query_scale(values),
            "softcap": values["attn_logit_softcapping"],
            "qk_norm": "heads",
        },
        dense={"activation": "gelu_tanh"},
        layer={"norms": "both"},
        attention_by_layer=typed_layers(values, types, sliding_rope=_LOCAL),
        final_softcap=values["final_logit_softcapping"],
        embedding_scale=embedding_scale(values),
        norm_offset=1.0,
    )


FAMILY = Family(
    model_type="gemma3_text",
    keys={
        **SANDWICH_KEYS,
        "rope_theta": Default(float, 1_000_000.0),
        "rope_local_base_freq": Default(float, 10_000.0),
        "sliding_window_pattern": Default(int, 6),
        "attn_logit_softcapping": Default(float, 0.0),
        "final_logit_softcapping": Default(float, 0.0),
    },
    build=_build,
    layer_weights=SANDWICH_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=TURN_ENDS,
)
