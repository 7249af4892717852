"""The olmo2 family: norms only after both halves of a layer, and over all queries and all keys."""

from collections.abc import Mapping

from kvq_models.decoder import DECODER_KEYS, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default

OLMO_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    **LAYER_WEIGHTS,
    "post_attn_norm": ("post_attention_layernorm.weight",),
    "post_mlp_norm": ("post_feedforward_layernorm.weight",),
}
OLMO_KEYS = {
    **DECODER_KEYS,
    "rms_norm_eps": Default(float, 1e-5),
    "attention_bias": Default(bool, False),
}
TURN_ENDS = ("<|endoftext|>", "<|im_end|>")


FAMILY = Family(
    model_type="olmo2",
    keys=OLMO_KEYS,
    build=lambda values: decoder_config(
        values, attention={"qk_norm": "rows"}, layer={"norms": "after"}
    ),
    layer_weights=OLMO_WEIGHTS,
    turn_ends=TURN_ENDS,
)
