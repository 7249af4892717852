"""The olmoe family (arXiv 2409.02060): norms over all queries and keys, and 8 of 64 experts."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import MustEqual
from kvq_models.mixtures import EXPERT_KEYS, EXPERT_WEIGHTS, mixture
from kvq_models.olmo2 import OLMO_KEYS, TURN_ENDS


def _build(values: Mapping[str, Any]) -> ModelConfig:
    experts = mixture(values, width=values["intermediate_size"], count=64)
    return decoder_config(
        values,
        attention={"qk_norm": "rows"},
        feeds=dict.fromkeys(range(values["num_hidden_layers"]), experts),
    )


FAMILY = Family(
    model_type="olmoe",
    keys={**OLMO_KEYS, **EXPERT_KEYS, "clip_qkv": MustEqual(None)},
    build=_build,
    layer_weights={**LAYER_WEIGHTS, **EXPERT_WEIGHTS},
    turn_ends=TURN_ENDS,
)
