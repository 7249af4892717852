"""The ministral3 family (also Devstral 2): mistral whose queries grow with their position."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, LAYER_WEIGHTS, decoder_config, rope_settings
from kvq_models.family import Family
from kvq_models.keys import Default, checked
from kvq_models.mistral import FIM_TOKENS, TURN_ENDS

# Used where config.json holds no rope_parameters.
_PARAMETERS = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GROWTH = "llama_4_scaling_beta"


def _build(values: Mapping[str, Any]) -> ModelConfig:
    rope = values["rope_parameters"] or values["rope_scaling"] or _PARAMETERS
    # max_position_embeddings repeats a key outside of them.
    parameters = {
        name: value
        for name, value in rope.items()
        if name not in (_GROWTH, "max_position_embeddings")
    }
    growth = 0.0 if rope.get(_GROWTH) is None else checked(_GROWTH, rope[_GROWTH], float)
    return decoder_config(
        values,
        rope=parameters,
        attention={
            "window_tokens": values["sliding_window"] or 0,
            "growth": growth,
            "growth_tokens": rope_settings(values, parameters=parameters).trained_context,
        },
    )


FAMILY = Family(
    model_type="ministral3",
    keys={
        **DECODER_KEYS,
        "head_dim": Default(int, 128),
        "rms_norm_eps": Default(float, 1e-5),
        "rope_theta": Default(float, 1e6),
        "sliding_window": Default(int),
    },
    build=_build,
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=FIM_TOKENS,
    turn_ends=TURN_ENDS,
)
