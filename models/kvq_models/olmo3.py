"""The olmo3 family: olmo2 with windows in three layers of four, whose rotation is not scaled."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import decoder_config, plain_rope
from kvq_models.family import Family
from kvq_models.keys import Default
from kvq_models.olmo2 import OLMO_KEYS, OLMO_WEIGHTS, TURN_ENDS
from kvq_models.windows import rope_parameters, typed_layers, window_types

_SLIDING = 1


def _build(values: Mapping[str, Any]) -> ModelConfig:
    whole, sliding = rope_parameters(values)
    return decoder_config(
        values,
        rope=whole,
        more_ropes=(plain_rope(values, sliding),),
        attention={"qk_norm": "rows"},
        layer={"norms": "after"},
        attention_by_layer=typed_layers(values, window_types(values, 4), sliding_rope=_SLIDING),
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
