"""The families gemma4_text and gemma4_unified_text: heads of two sizes, keys that others read.

Layers with a window have heads of head_dim. Layers that see everything have heads of their own
size, of which a quarter of the pairs rotates. Queries, keys and values are normalised, and after
each layer the stream is multiplied by a learned number. Small models of the first family add an
embedding per layer to it. In its other models, and in the second family, keys may also be the
values. One model of the first family has experts beside the MLP.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.config import Dense, Experts, Feed, ModelConfig, PerLayer
from kvq_models.decoder import decoder_config, plain_rope
from kvq_models.family import Family
from kvq_models.gemma import GEMMA_KEYS, SANDWICH_WEIGHTS, embedding_scale
from kvq_models.keys import Default, MustEqual, checked
from kvq_models.windows import rope_parameters, typed_layers, window_types

# The table of layers that see everything, unless the file has another.
_GLOBAL = {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
_LOCAL = 1
_FULL = "full_attention"
_PERIOD = 6
_EXPERT_WIDTH = "moe_intermediate_size"


def _build(values: Mapping[str, Any]) -> ModelConfig:
    types = _types(values)
    attention = _layers(values, types)
    wide = values["use_double_wide_mlp"]
    readers = {layer for layer, fields in enumerate(attention) if "kv_from" in fields}
    whole, local = rope_parameters(values, sliding={"rope_theta": 10_000.0})
    local_dim = next(
        (fields["head_dim"] for fields in attention if "window_tokens" in fields),
        values["head_dim"],
    )
    return decoder_config(
        {**values, "head_dim": attention[-1]["head_dim"]},
        rope=whole or _GLOBAL,
        rope_kinds=("proportional", "default"),
        more_ropes=(plain_rope({**values, "head_dim": local_dim}, local),),
        partial_rotation=True,
        attention={"scale": 1.0, "qk_norm": "heads", "value_norm": True},
        feeds={
            layer: _feed(values, doubled=wide and layer in readers) for layer in range(len(types))
        },
        layer={"norms": "both", "scaled": True},
        attention_by_layer=attention,
        per_layer=_per_layer(values),
        final_softcap=values["final_logit_softcapping"],
        embedding_scale=embedding_scale(values),
    )


def _feed(values: Mapping[str, Any], *, doubled: bool) -> Feed:
    """Returns the MLP of a layer, `doubled` in width or not; one model has experts beside it."""
    width = values["intermediate_size"]
    dense = Dense(width=2 * width if doubled else width, activation="gelu_tanh")
    if not values["enable_moe_block"]:
        return dense
    sizes = {name: values[name] for name in ("num_experts", "top_k_experts", _EXPERT_WIDTH)}
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise CheckpointError(
            f"config.json of a {values['model_type']} with experts has no {missing[0]}"
        )
    return Experts(
        count=sizes["num_experts"],
        chosen=sizes["top_k_experts"],
        width=sizes[_EXPERT_WIDTH],
        normalised=True,
        activation="gelu_tanh",
        beside=dense,
    )


def _types(values: Mapping[str, Any]) -> list[str]:
    """Returns the kind of every layer; the last always sees everything."""
    return [*window_types(values, _PERIOD)[:-1], _FULL]


def _layers(values: Mapping[str, Any], types: list[str]) -> tuple[Mapping[str, Any], ...]:
    """Returns the fields of each layer's attention."""
    layers = list[Mapping[str, Any]]()
    plain = typed_layers(values, types, sliding_rope=_LOCAL)
    shared = values["num_kv_shared_layers"]
    if not 0 <= shared < max(1, len(types)):
        raise CheckpointError(
            f"config.json has num_kv_shared_layers = {shared} of {len(types)} layers"
        )
    owners = types[: len(types) - shared]
    for layer, kind in enumerate(types):
        fields = dict(plain[layer]) | _heads(values, layer, kind)
        if layer >= len(owners):
            if kind not in owners:
                raise CheckpointError(
                    f"config.json has layer {layer} share the keys of a {kind} layer, and none "
                    "before it has any"
                )
            fields["kv_from"] = max(i for i, other in enumerate(owners) if other == kind)
        layers.append(fields)
    return tuple(layers)


def _heads(values: Mapping[str, Any], layer: int, kind: str) -> dict[str, Any]:
    """Returns the sizes of a layer's heads, from the entry of the layer or of its kind."""
    overrides = checked("per_layer_config", values["per_layer_config"].get(str(layer), {}), dict)
    known = {"head_dim", "num_key_value_heads"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise UnsupportedModelError(
            f"per_layer_config of {values['model_type']} holds {', '.join(unknown)}; "
            f"supported: {', '.join(sorted(known))}"
        )
    full, keys_alone = kind == _FULL, values["attention_k_eq_v"]
    by_kind = {
        "head_dim": values["global_head_dim"] if full else values["head_dim"],
        "num_key_value_heads": values["num_key_value_heads"],
    }
    if full and keys_alone and values["num_global_key_value_heads"] is not None:
        by_kind["num_key_value_heads"] = values["num_global_key_value_heads"]
    sizes = by_kind | overrides
    return {
        "head_dim": checked("head_dim of a layer", sizes["head_dim"], int),
        "kv_heads": checked("num_key_value_heads of a layer", sizes["num_key_value_heads"], int),
        "values": "keys" if full and keys_alone else "own",
    }


def _per_layer(values: Mapping[str, Any]) -> PerLayer | None:
    width = values["hidden_size_per_layer_input"]
    return PerLayer(rows=values["vocab_size_per_layer_input"], width=width) if width else None


FAMILY = Family(
    model_type="gemma4_text",
    keys={
        **GEMMA_KEYS,
        "hidden_activation": MustEqual("gelu_pytorch_tanh"),
        "attention_bias": MustEqual(False),
        # "vision" is for images alone: text is read causally.
        "use_bidirectional_attention": MustEqual(None, "vision", False),
        "rope_scaling": Default(dict),
        "sliding_window": Default(int, 512),
        "layer_types": Default(list),
        "global_head_dim": Default(int, 512),
        "num_global_key_value_heads": Default(int),
        "per_layer_config": Default(dict, {}),
        "attention_k_eq_v": Default(bool, False),
        "num_kv_shared_layers": Default(int, 0),
        "use_double_wide_mlp": Default(bool, False),
        "hidden_size_per_layer_input": Default(int, 256),
        "vocab_size_per_layer_input": Default(int, 262_144),
        "final_logit_softcapping": Default(float, 0.0),
        "enable_moe_block": Default(bool, False),
        # Without enable_moe_block these mean nothing.
        "num_experts": Default(int),
        "top_k_experts": Default(int),
        "moe_intermediate_size": Default(int),
    },
    build=_build,
    layer_weights={
        **SANDWICH_WEIGHTS,
        "per_layer_gate": ("per_layer_input_gate.weight",),
        "per_layer_up": ("per_layer_projection.weight",),
        "post_per_layer_norm": ("post_per_layer_input_norm.weight",),
        "scalar": ("layer_scalar",),
        "router_norm": ("router.scale",),
        "router": ("router.proj.weight",),
        "expert_factors": ("router.per_expert_scale",),
        "moe_norm": ("pre_feedforward_layernorm_2.weight",),
        "experts_gate_up": ("experts.{expert}.gate_up_proj",),
        "experts_down": ("experts.{expert}.down_proj",),
        "post_dense_norm": ("post_feedforward_layernorm_1.weight",),
        "post_moe_norm": ("post_feedforward_layernorm_2.weight",),
    },
    turn_ends=("<turn|>",),
)
# Without per-layer embeddings and experts.
UNIFIED = dataclasses.replace(
    FAMILY,
    model_type="gemma4_unified_text",
    keys={
        **FAMILY.keys,
        "sliding_window": Default(int, 1024),
        "hidden_size_per_layer_input": MustEqual(0, None),
        "vocab_size_per_layer_input": MustEqual(None),
        "enable_moe_block": MustEqual(False),
    },
)
