"""The qwen2 family (Qwen2, Qwen2.5 and its coder models): llama with biases on q, k and v."""

from kvq_models.decoder import DECODER_KEYS, FIM_QWEN, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Required
from kvq_models.windows import WINDOW_KEYS, qwen_layers

FAMILY = Family(
    model_type="qwen2",
    keys={**DECODER_KEYS, **WINDOW_KEYS, "num_key_value_heads": Required()},
    build=lambda values: decoder_config(
        values, attention={"qkv_bias": True}, attention_by_layer=qwen_layers(values)
    ),
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=("<|im_end|>",),
)
