"""The qwen3 family: llama with a norm on every query and key head before rotation."""

from kvq_models.decoder import DECODER_KEYS, FIM_QWEN, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, Required
from kvq_models.windows import WINDOW_KEYS, qwen_layers

FAMILY = Family(
    model_type="qwen3",
    keys={
        **DECODER_KEYS,
        **WINDOW_KEYS,
        "num_key_value_heads": Required(),
        "head_dim": Default(int, 128),
        "attention_bias": Default(bool, False),
    },
    build=lambda values: decoder_config(
        values, attention={"qk_norm": "heads"}, attention_by_layer=qwen_layers(values)
    ),
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=("<|im_end|>",),
)
