"""What families whose layers feed tokens to experts share: keys, weight names, the experts.

Knows no particular family.
"""

from collections.abc import Mapping
from typing import Any

from kvq.errors import CheckpointError
from kvq_models.config import Experts, ModelConfig
from kvq_models.family import DRAFT_HEAD, View, draft_layer
from kvq_models.keys import Default, Key

# `num_local_experts` is what transformers saves, whatever a family calls it.
EXPERT_KEYS: Mapping[str, Key] = {
    "num_experts": Default(int),
    "num_local_experts": Default(int),
    "num_experts_per_tok": Default(int, 8),
    "norm_topk_prob": Default(bool, False),
    # Of training alone.
    "router_aux_loss_coef": Default(float),
    "router_jitter_noise": Default(float),
    "output_router_logits": Default(bool),
}
EXPERT_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "router": ("mlp.gate.weight",),
    "experts_gate_up": (
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
    ),
    "experts_down": ("mlp.experts.{expert}.down_proj.weight",),
}


def stacked_experts(config: ModelConfig) -> Mapping[str, View]:
    """Each expert's matrices as parts of two tensors, which hold those of all experts of a layer.

    In `gate_up_proj` the rows of an expert's gate come before those of its `up_proj`. A draft head
    may have two such tensors whether the model's own layers do or not.
    """
    layers = {f"model.layers.{index}": layer for index, layer in enumerate(config.layers)}
    drafting = draft_layer(config)
    if drafting is not None:
        layers[f"{DRAFT_HEAD}.layers.0"] = drafting
    views: dict[str, View] = {}
    for below, layer in layers.items():
        feed = layer.feed
        if not isinstance(feed, Experts):
            continue
        gate, up = range(feed.width), range(feed.width, 2 * feed.width)
        for expert in range(feed.count):
            own = f"{below}.mlp.experts.{expert}"
            views[f"{own}.gate_proj.weight"] = View(f"{own}.gate_up_proj", gate)
            views[f"{own}.up_proj.weight"] = View(f"{own}.gate_up_proj", up)
            views[f"{own}.down_proj.weight"] = View(f"{own}.down_proj", range(config.hidden_size))
    return views


def mixture(
    values: Mapping[str, Any],
    *,
    width: int,
    count: int,
    normalised: bool | None = None,
    **fields: Any,
) -> Experts:
    """The experts that `values` describe; `count` where the file says nothing.

    `fields` are others of `Experts`.

    Raises CheckpointError where it says two numbers.
    """
    said = {values[name] for name in ("num_experts", "num_local_experts")} - {None}
    if len(said) > 1:
        raise CheckpointError(
            f"config.json has num_experts = {values['num_experts']} and num_local_experts = "
            f"{values['num_local_experts']}, which are the same number; download it again"
        )
    return Experts(
        count=next(iter(said), count),
        chosen=values["num_experts_per_tok"],
        width=width,
        normalised=values["norm_topk_prob"] if normalised is None else normalised,
        **fields,
    )
