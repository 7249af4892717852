"""The gpt_oss family: experts with clamped gates, attention sinks, alternating windows, biases.

Experts are stored across: a column of the checkpoint's tensors is a row here. Even columns are
those of the gate, odd ones those of up.
"""

from collections.abc import Mapping
from typing import Any

from kvq.errors import CheckpointError
from kvq_models.config import Experts, ModelConfig
from kvq_models.decoder import DECODER_KEYS, LAYER_WEIGHTS, decoder_config
from kvq_models.family import Family, View
from kvq_models.keys import Default, MustEqual, Required
from kvq_models.mixtures import EXPERT_KEYS, EXPERT_WEIGHTS, mixture
from kvq_models.windows import typed_layers, window_types

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_EXPERT = "mlp.experts.{expert}"


def _build(values: Mapping[str, Any]) -> ModelConfig:
    if values["experts_per_token"] not in (None, values["num_experts_per_tok"]):
        raise CheckpointError(
            f"config.json has experts_per_token = {values['experts_per_token']} and "
            f"num_experts_per_tok = {values['num_experts_per_tok']}, which are the same number"
        )
    rope = None if values["rope_parameters"] or values["rope_scaling"] else _ROPE
    experts = mixture(
        values,
        width=values["intermediate_size"],
        count=128,
        normalised=True,
        activation="clamped_swiglu",
        router_bias=True,
        bias=True,
    )
    return decoder_config(
        {**values, "rope_parameters": rope or values["rope_parameters"]},
        attention={"sinks": True},
        attention_by_layer=typed_layers(values, window_types(values, 2)),
        feeds=dict.fromkeys(range(values["num_hidden_layers"]), experts),
        windows_apart=True,
    )


def _views(config: ModelConfig) -> Mapping[str, View]:
    views: dict[str, View] = {}
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.feed, Experts)
        width = layer.feed.width
        halves = {"gate": range(0, 2 * width, 2), "up": range(1, 2 * width, 2)}
        for expert in range(layer.feed.count):
            prefix = f"model.layers.{index}.{_EXPERT.format(expert=expert)}"
            for half, rows in halves.items():
                views[f"{prefix}.{half}_proj.weight"] = View(
                    f"{prefix}.gate_up_proj", rows, across=True
                )
                views[f"{prefix}.{half}_proj.bias"] = View(f"{prefix}.gate_up_proj_bias", rows)
            down = View(f"{prefix}.down_proj", range(config.hidden_size), across=True)
            views[f"{prefix}.down_proj.weight"] = down
    return views


FAMILY = Family(
    model_type="gpt_oss",
    keys={
        **DECODER_KEYS,
        **EXPERT_KEYS,
        "num_experts_per_tok": Default(int, 4),
        "experts_per_token": Default(int),
        "norm_topk_prob": MustEqual(True),
        "num_key_value_heads": Required(),
        "head_dim": Default(int, 64),
        "rms_norm_eps": Default(float, 1e-5),
        "rope_theta": Default(float, 150_000.0),
        "attention_bias": Default(bool, True),
        "sliding_window": Default(int, 128),
        "layer_types": Default(list),
        "swiglu_alpha": MustEqual(1.702),
        "swiglu_limit": MustEqual(7.0, 7),
        # rope_scaling has the same number.
        "initial_context_length": Default(int),
    },
    build=_build,
    layer_weights={
        **LAYER_WEIGHTS,
        **EXPERT_WEIGHTS,
        "sink_logits": ("self_attn.sinks",),
        "router": ("mlp.router.weight",),
        "router_bias": ("mlp.router.bias",),
        "experts_gate_up_bias": (f"{_EXPERT}.gate_proj.bias", f"{_EXPERT}.up_proj.bias"),
        "experts_down_bias": (f"{_EXPERT}.down_proj_bias",),
    },
    turn_ends=("<|return|>", "<|call|>"),
    views=_views,
)
