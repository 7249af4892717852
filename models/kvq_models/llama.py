"""The llama family: split projections, optional biases. Many models call themselves llama."""

from kvq_models.decoder import (
    DECODER_KEYS,
    FIM_CODE_LLAMA,
    FIM_DEEPSEEK,
    FIM_QWEN,
    FIM_STARCODER,
    LAYER_WEIGHTS,
    decoder_config,
)
from kvq_models.family import Family
from kvq_models.keys import Default

FAMILY = Family(
    model_type="llama",
    keys={
        **DECODER_KEYS,
        "attention_bias": Default(bool, False),
        "mlp_bias": Default(bool, False),
    },
    build=decoder_config,
    layer_weights=LAYER_WEIGHTS,
    fim_tokens=(FIM_CODE_LLAMA, FIM_DEEPSEEK, FIM_STARCODER, FIM_QWEN),
    turn_ends=("<|eot_id|>", "<|eom_id|>", "<|im_end|>"),
)
