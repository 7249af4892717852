"""The gemma3_text family: scaled embeddings, norms stored as w - 1, two kinds of layers.

Five layers of six see a sliding window and rotate with the local base; the sixth sees everything
and rotates with the global base, which alone may be scaled.
"""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig, RopeConfig
from kvq_models.decoder import FIM_QWEN, decoder_config, rope_settings
from kvq_models.family import Family
from kvq_models.gemma import (
    SANDWICH_KEYS,
    SANDWICH_WEIGHTS,
    TURN_ENDS,
    embedding_scale,
    query_scale,
)
from kvq_models.keys import Default
from kvq_models.rope import build_rope
from kvq_models.windows import rope_parameters, typed_layers

_GLOBAL, _LOCAL = 0, 1


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
        attention={
            "scale": query_scale(values),
            "softcap": values["attn_logit_softcapping"],
            "qk_norm": "heads",
        },
        dense={"activation": "gelu_tanh"},
        norms="both",
        attention_by_layer=typed_layers(
            "gemma3_text", types, values["sliding_window"], sliding_rope=_LOCAL
        ),
        final_softcap=values["final_logit_softcapping"],
        embedding_scale=embedding_scale("gemma3_text", values),
        norm_offset=1.0,
    )


def _ropes(values: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Returns the global and the local table, in the order of _GLOBAL and _LOCAL."""
    whole, local = rope_parameters(
        "gemma3_text", values, sliding={"rope_theta": values["rope_local_base_freq"]}
    )
    return (
        build_rope("gemma3_text", rope_settings(values, parameters=whole), ("default", "linear")),
        build_rope("gemma3_text", rope_settings(values, parameters=local), ("default",)),
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
