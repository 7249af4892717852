"""The smollm3 family: llama with some layers whose queries and keys do not rotate."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import CheckpointError
from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, Required
from kvq_models.rope import NO_ROTATION
from kvq_models.windows import sliding_window, typed_layers


def _build(values: Mapping[str, Any]) -> ModelConfig:
    count, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
    rotates = values["no_rope_layers"]
    if rotates is None:
        if interval < 1:
            raise CheckpointError(f"config.json has no_rope_layer_interval = {interval}")
        rotates = [int((layer + 1) % interval != 0) for layer in range(count)]
    if any(value not in (0, 1) for value in rotates):
        raise CheckpointError("config.json has a no_rope_layers that holds more than 0 and 1")
    unbounded = sliding_window(values) is None
    types = values["layer_types"] or [
        "full_attention" if unbounded or has_rope else "sliding_attention" for has_rope in rotates
    ]
    windows = typed_layers(values, types)
    return decoder_config(
        values,
        attention_by_layer=[
            {**fields, "rope": 0 if has_rope else 1}
            for fields, has_rope in zip(windows, rotates[: len(windows)], strict=True)
        ],
        more_ropes=(NO_ROTATION,),
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
        # Its files have this key, and its code never reads it.
        "max_window_layers": Default(int),
    },
    build=_build,
    layer_weights=LAYER_WEIGHTS,
    turn_ends=("<|im_end|>",),
)
