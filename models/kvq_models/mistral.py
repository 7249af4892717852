"""The mistral family: llama with one sliding window for all layers."""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, FIM_STARCODER, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family, FimNames
from kvq_models.keys import Required

FIM_TOKENS = (FimNames(prefix="[PREFIX]", suffix="[SUFFIX]", middle="[MIDDLE]"), FIM_STARCODER)
TURN_ENDS = ("</s>", "<|im_end|>")


def _build(values: Mapping[str, Any]) -> ModelConfig:
    window = {"window_tokens": values["sliding_window"] or 0}
    return decoder_config("mistral", values, attention=window)


FAMILY = Family(
    model_type="mistral",
    keys={
        **DECODER_KEYS,
        "num_key_value_heads": Required(),
        "sliding_window": Required(int, nullable=True),
    },
    build=_build,
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=FIM_TOKENS,
    turn_ends=TURN_ENDS,
)
