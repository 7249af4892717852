"""Keys, weight names and experts that families with mixtures of experts share."""

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
    # Only for training.
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
    """Returns views of each expert's matrices in the two tensors of all experts of a layer.

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
            prefix = f"{below}.mlp.experts.{expert}"
            views[f"{prefix}.gate_proj.weight"] = View(f"{prefix}.gate_up_proj", gate)
            views[f"{prefix}.up_proj.weight"] = View(f"{prefix}.gate_up_proj", up)
            views[f"{prefix}.down_proj.weight"] = View(
                f"{prefix}.down_proj", range(config.hidden_size)
            )
    return views


def mixture(
    values: Mapping[str, Any],
    *,
    width: int,
    count: int,
    normalised: bool | None = None,
    **fields: Any,
) -> Experts:
    """Returns the experts that `values` describe; `count` is used if the file has no number.

    `fields` are other fields of `Experts`. Raises CheckpointError if the file has two different
    numbers.
    """
    counts = {values[name] for name in ("num_experts", "num_local_experts")} - {None}
    if len(counts) > 1:
        raise CheckpointError(
            f"config.json has num_experts = {values['num_experts']} and num_local_experts = "
            f"{values['num_local_experts']}, which are the same number; download it again"
        )
    return Experts(
        count=next(iter(counts), count),
        chosen=values["num_experts_per_tok"],
        width=width,
        normalised=values["norm_topk_prob"] if normalised is None else normalised,
        **fields,
    )
