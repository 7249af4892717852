"""The olmo3 family: olmo2 with windows in three layers of four, whose rotation is not scaled."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import ROPE_SCALINGS, context_length, decoder_config, rope_settings
from kvq_models.family import Family
from kvq_models.keys import Default
from kvq_models.olmo2 import OLMO_KEYS, OLMO_WEIGHTS, TURN_ENDS
from kvq_models.rope import build_rope
from kvq_models.windows import rope_parameters, typed_layers

_SLIDING = 1


def _build(values: Mapping[str, Any]) -> ModelConfig:
    types = values["layer_types"] or [
        "sliding_attention" if (layer + 1) % 4 else "full_attention"
        for layer in range(values["num_hidden_layers"])
    ]
    whole, sliding = rope_parameters("olmo3", values)
    settings = rope_settings(values, parameters=whole)
    return decoder_config(
        "olmo3",
        values,
        ropes=(
            build_rope("olmo3", settings, ROPE_SCALINGS),
            build_rope("olmo3", rope_settings(values, parameters=sliding), ("default",)),
        ),
        context_length=context_length(settings),
        attention={"qk_norm": "rows"},
        norms="after",
        attention_by_layer=typed_layers(
            "olmo3", types, values["sliding_window"], sliding_rope=_SLIDING
        ),
    )


FAMILY = Family(
    model_type="olmo3",
    keys={
        **OLMO_KEYS,
        "rope_theta": Default(float, 500_000.0),
        "sliding_window": Default(int, 4096),
        "layer_types": Default(list),
    },
    build=_build,
    layer_weights=OLMO_WEIGHTS,
    turn_ends=TURN_ENDS,
)
