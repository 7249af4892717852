"""The exaone4 family (EXAONE 4.0): olmo2 with a norm on every query and key head.

In the 32B model three layers of four see a window, and the fourth does not rotate. In the 1.2B
model all layers see everything and rotate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq.errors import UnsupportedModelError
from kvq_models.config import ModelConfig
from kvq_models.decoder import DECODER_KEYS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, Required
from kvq_models.olmo2 import OLMO_WEIGHTS
from kvq_models.rope import NO_ROTATION
from kvq_models.windows import typed_layers, window_types

_KINDS = {"L": "sliding_attention", "G": "full_attention"}
_STILL = 1


def _build(values: Mapping[str, Any]) -> ModelConfig:
    window = values["sliding_window"]
    layers = typed_layers(values, values["layer_types"] or _types(values))
    return decoder_config(
        values,
        attention={"qk_norm": "heads"},
        layer={"norms": "after"},
        attention_by_layer=[
            fields if fields or window is None else {"rope": _STILL} for fields in layers
        ],
        more_ropes=(NO_ROTATION,),
    )


def _types(values: Mapping[str, Any]) -> Sequence[str]:
    """Returns the kind of each layer if config.json does not name it.

    A pattern is a number, each so many layers one sees everything, or letters that repeat, and then
    the last layer sees everything. Raises UnsupportedModelError for other letters.
    """
    count, pattern = values["num_hidden_layers"], values["sliding_window_pattern"]
    if values["sliding_window"] is None:
        return [_KINDS["G"]] * count
    if not isinstance(pattern, str):
        return window_types(values, pattern)
    if not pattern or set(pattern) - set(_KINDS):
        raise UnsupportedModelError(
            f"sliding_window_pattern = {pattern!r} is not supported for exaone4; "
            "supported: a number, or letters L and G"
        )
    repeated = [_KINDS[pattern[layer % len(pattern)]] for layer in range(count)]
    return [*repeated[:-1], _KINDS["G"]]


FAMILY = Family(
    model_type="exaone4",
    keys={
        **DECODER_KEYS,
        "num_key_value_heads": Required(),
        "rms_norm_eps": Default(float, 1e-5),
        # null means no windows, and a missing key means some.
        "sliding_window": Required(int, nullable=True),
        "sliding_window_pattern": Default(object, 4),
        "layer_types": Default(list),
    },
    build=_build,
    layer_weights=OLMO_WEIGHTS,
    turn_ends=("[|endofturn|]",),
)
