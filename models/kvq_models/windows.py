"""Reads which layers have a sliding window and how they rotate, from keys that families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvq.errors import UnsupportedModelError
from kvq_models.keys import Default, Key

WINDOW_KEYS: Mapping[str, Key] = {
    "use_sliding_window": Default(bool, False),
    "sliding_window": Default(int),
    "max_window_layers": Default(int, 28),
    "layer_types": Default(list),
}


def typed_layers(
    model_type: str,
    layer_types: Sequence[str],
    window_tokens: int | None,
    *,
    sliding_rope: int = 0,
) -> tuple[Mapping[str, int], ...]:
    """Returns the fields of each layer's attention, by layer_types.

    Sliding layers use the rotary table `sliding_rope`. Raises UnsupportedModelError for another
    type, or for a sliding layer if no window is set.
    """
    layers: list[Mapping[str, int]] = []
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer type {layer_type!r} is not supported for {model_type}; "
                "supported: full_attention, sliding_attention"
            )
        if layer_type == "full_attention":
            layers.append({})
        elif window_tokens is None or window_tokens < 1:
            raise UnsupportedModelError(
                f"a sliding_attention layer of {model_type} needs sliding_window, "
                f"which is {window_tokens}"
            )
        else:
            layers.append({"window_tokens": window_tokens, "rope": sliding_rope})
    return tuple(layers)


def qwen_layers(model_type: str, values: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
    """Returns the fields of each layer's attention in Qwen models.

    Without use_sliding_window there are no windows; with it, layers from max_window_layers on have
    one. layer_types, if present, names the kind of each layer instead.
    """
    window = values["sliding_window"] if values["use_sliding_window"] else None
    types = values["layer_types"] or [
        "full_attention"
        if window is None or layer < values["max_window_layers"]
        else "sliding_attention"
        for layer in range(values["num_hidden_layers"])
    ]
    return typed_layers(model_type, types, window)


def rope_parameters(
    model_type: str,
    values: Mapping[str, Any],
    *,
    sliding: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rope parameters of layers that see everything and of sliding ones.

    The file has one dict for each, or a rope_scaling for the first. `sliding` has the values of the
    second if the file has none. Raises UnsupportedModelError for a third kind of layer.
    """
    nested: dict[str, Any] = values["rope_parameters"] or {}
    unknown = set(nested) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModelError(
            f"rope_parameters of {model_type} holds {', '.join(sorted(unknown))}; "
            "supported: full_attention, sliding_attention"
        )
    return (
        {**(nested.get("full_attention") or {}), **(values["rope_scaling"] or {})},
        {**(sliding or {}), **(nested.get("sliding_attention") or {})},
    )
