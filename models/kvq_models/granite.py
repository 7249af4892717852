"""The granite family (Granite 3): llama with four multipliers."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import CheckpointError
from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, FIM_STARCODER, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default


def _build(values: Mapping[str, Any]) -> ModelConfig:
    if values["logits_scaling"] == 0:
        raise CheckpointError("config.json has logits_scaling = 0; logits are divided by it")
    return decoder_config(
        values,
        attention={"scale": values["attention_multiplier"]},
        layer={"scale": values["residual_multiplier"]},
        embedding_scale=values["embedding_multiplier"],
        logits_scale=1 / values["logits_scaling"],
    )


FAMILY = Family(
    model_type="granite",
    keys={
        **DECODER_KEYS,
        "attention_bias": Default(bool, False),
        "mlp_bias": Default(bool, False),
        "embedding_multiplier": Default(float, 1.0),
        "attention_multiplier": Default(float, 1.0),
        "residual_multiplier": Default(float, 1.0),
        "logits_scaling": Default(float, 1.0),
    },
    build=_build,
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=(FIM_STARCODER,),
    turn_ends=("<|end_of_text|>",),
)
