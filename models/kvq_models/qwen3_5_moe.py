"""The families qwen3_5_moe and qwen3_next: delta nets beside gated attention, and many experts.

Every token also uses an MLP that all experts share. The second family (Qwen3-Next) stores the input
matrices of a delta net in two tensors, key head by key head, and may have dense layers. The draft
heads of both (`mtp`) have the same feeds as their models.
"""

from collections.abc import Mapping
from typing import Any

from kvq_models.config import DeltaNet, Dense, ModelConfig
from kvq_models.decoder import FIM_QWEN
from kvq_models.family import Family, View
from kvq_models.keys import Default, Key, MustEqual
from kvq_models.mixtures import EXPERT_KEYS, EXPERT_WEIGHTS, mixture, stacked_experts
from kvq_models.qwen3_5 import HYBRID_KEYS, HYBRID_WEIGHTS, hybrid_config

_KEYS: Mapping[str, Key] = {
    **HYBRID_KEYS,
    **EXPERT_KEYS,
    "moe_intermediate_size": Default(int, 512),
    "shared_expert_intermediate_size": Default(int, 512),
}
_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    **HYBRID_WEIGHTS,
    **EXPERT_WEIGHTS,
    "shared_gate_up": (
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ),
    "shared_down": ("mlp.shared_expert.down_proj.weight",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
}


def _mixed(values: Mapping[str, Any]) -> ModelConfig:
    experts = mixture(
        values, width=values["moe_intermediate_size"], count=256, shared=_shared(values)
    )
    layers = range(values["num_hidden_layers"])
    width = values["intermediate_size"] or values["moe_intermediate_size"]
    return hybrid_config({**values, "intermediate_size": width}, dict.fromkeys(layers, experts))


def _next(values: Mapping[str, Any]) -> ModelConfig:
    experts = mixture(
        values, width=values["moe_intermediate_size"], count=512, shared=_shared(values)
    )
    dense, step = values["mlp_only_layers"], values["decoder_sparse_step"]
    feeds = {
        layer: experts
        for layer in range(values["num_hidden_layers"])
        if layer not in dense and (layer + 1) % step == 0
    }
    return hybrid_config(values, feeds)


def _shared(values: Mapping[str, Any]) -> Dense:
    return Dense(width=values["shared_expert_intermediate_size"])


def _views(config: ModelConfig) -> Mapping[str, View]:
    """Returns the queries, keys, values and gates of each key head, and b and a of its values."""
    views = dict(stacked_experts(config))
    for index, layer in enumerate(config.layers):
        net = layer.mixer
        if not isinstance(net, DeltaNet):
            continue
        heads = net.value_heads // net.key_heads
        values = heads * net.value_dim
        for tensor, sizes in (
            ("qkvz", {"q": net.key_dim, "k": net.key_dim, "v": values, "z": values}),
            ("ba", {"b": heads, "a": heads}),
        ):
            name, start = f"model.layers.{index}.linear_attn.in_proj_{tensor}.weight", 0
            for head in range(net.key_heads):
                for part, size in sizes.items():
                    views[f"{name}.{head}.{part}"] = View(name, range(start, start + size))
                    start += size
    return views


def _by_key_head(tensor: str) -> tuple[str, ...]:
    name = f"linear_attn.in_proj_{tensor}.weight"
    return tuple(f"{name}.{{key_head}}.{part}" for part in tensor)


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    keys={
        **_KEYS,
        "intermediate_size": Default(int),
        "norm_topk_prob": MustEqual(True),
    },
    build=_mixed,
    layer_weights=_WEIGHTS,
    fim_tokens=(FIM_QWEN,),
    turn_ends=("<|im_end|>",),
    views=stacked_experts,
    draft_head=True,
)
NEXT = Family(
    model_type="qwen3_next",
    keys={
        **_KEYS,
        "num_experts_per_tok": Default(int, 10),
        "norm_topk_prob": Default(bool, True),
        "mlp_only_layers": Default(list, []),
        "decoder_sparse_step": Default(int, 1),
    },
    build=_next,
    layer_weights={**_WEIGHTS, "in_proj": _by_key_head("qkvz"), "gates": _by_key_head("ba")},
    fim_tokens=(FIM_QWEN,),
    turn_ends=("<|im_end|>",),
    views=_views,
    draft_head=True,
)
