"""The mistral family: llama with one sliding window for all layers."""

from kvq_models.decoder import DECODER_KEYS, FIM_STARCODER, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family, FimNames
from kvq_models.keys import Required

FIM_TOKENS = (FimNames("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), FIM_STARCODER)
TURN_ENDS = ("</s>", "<|im_end|>")


FAMILY = Family(
    model_type="mistral",
    keys={
        **DECODER_KEYS,
        "num_key_value_heads": Required(),
        "sliding_window": Required(int, nullable=True),
    },
    build=lambda values: decoder_config(
        values, attention={"window_tokens": values["sliding_window"] or 0}
    ),
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=FIM_TOKENS,
    turn_ends=TURN_ENDS,
)
