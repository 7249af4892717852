"""The smollm3 family: llama with layers whose queries and keys are not rotated."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import CheckpointError
from kvq_models.config import ModelConfig, RopeConfig
from kvq_models.decoder import (
    DECODER_KEYS,
    LAYER_WEIGHTS,
    ROPE_SCALINGS,
    context_length,
    decoder_config,
    rope_settings,
)
from kvq_models.family import Family
from kvq_models.keys import Default, Required
from kvq_models.rope import build_rope
from kvq_models.windows import typed_layers

# One pair of channels that turns by nothing: the table of layers without rotation.
_STILL = RopeConfig(inv_freq=(0.0,))


def _build(values: Mapping[str, Any]) -> ModelConfig:
    count, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
    turned = values["no_rope_layers"]
    if turned is None:
        if interval < 1:
            raise CheckpointError(f"config.json has no_rope_layer_interval = {interval}")
        turned = [int((layer + 1) % interval != 0) for layer in range(count)]
    if any(value not in (0, 1) for value in turned):
        raise CheckpointError("config.json has a no_rope_layers that holds more than 0 and 1")
    window = values["sliding_window"] if values["use_sliding_window"] else None
    types = values["layer_types"] or [
        "full_attention" if window is None or has_rope else "sliding_attention"
        for has_rope in turned
    ]
    settings = rope_settings(values)
    windows = typed_layers("smollm3", types, window)
    return decoder_config(
        "smollm3",
        values,
        own=[
            {**own, "rope": 0 if has_rope else 1}
            for own, has_rope in zip(windows, turned[: len(windows)], strict=True)
        ],
        ropes=(build_rope("smollm3", settings, ROPE_SCALINGS), _STILL),
        context_length=context_length(settings),
    )


FAMILY = Family(
    model_type="smollm3",
    keys={
        **DECODER_KEYS,
        "num_key_value_heads": Required(),
        "rope_theta": Default(float, 2_000_000.0),
        "tie_word_embeddings": Default(bool, True),
        "no_rope_layers": Default(list),
        "no_rope_layer_interval": Default(int, 4),
        "use_sliding_window": Default(bool, False),
        "sliding_window": Default(int),
        "layer_types": Default(list),
        "attention_bias": Default(bool, False),
        "mlp_bias": Default(bool, False),
        # Its files have it, and its code never reads it.
        "max_window_layers": Default(int),
    },
    build=_build,
    layer_weights=LAYER_WEIGHTS,
    turn_ends=("<|im_end|>",),
)
