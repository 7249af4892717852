"""The phi family: attention beside an MLP without a gate, and biases everywhere."""

from kvq_models.decoder import DECODER_KEYS, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family
from kvq_models.keys import Default, MustEqual

_READ = {name: key for name, key in DECODER_KEYS.items() if name != "rms_norm_eps"}

FAMILY = Family(
    model_type="phi",
    keys={
        **_READ,
        "hidden_act": MustEqual("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_eps": Default(float, 1e-5),
        "partial_rotary_factor": Default(float, 0.5),
        "qk_layernorm": MustEqual(False),
    },
    build=lambda values: decoder_config(
        values,
        partial_rotation=True,
        attention={"qkv_bias": True, "output_bias": True},
        dense={"activation": "gelu_tanh", "gated": False, "bias": True},
        layer={"parallel": True},
        norm="layer",
        norm_eps=values["layer_norm_eps"],
        head_bias=True,
    ),
    layer_weights={
        **LAYER_WEIGHTS,
        "attn_norm_bias": ("input_layernorm.bias",),
        "o": ("self_attn.dense.weight",),
        "o_bias": ("self_attn.dense.bias",),
        "up": ("mlp.fc1.weight",),
        "up_bias": ("mlp.fc1.bias",),
        "down": ("mlp.fc2.weight",),
        "down_bias": ("mlp.fc2.bias",),
    },
    final_norm="model.final_layernorm",
)
