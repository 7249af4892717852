"""Reads which layers have a sliding window and how they rotate, from keys that families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvq.errors import UnsupportedModelError
from kvq_models.decoder import layer_kinds
from kvq_models.keys import Default, Key

_FULL, _SLIDING = "full_attention", "sliding_attention"
WINDOW_KEYS: Mapping[str, Key] = {
    "use_sliding_window": Default(bool, False),
    "sliding_window": Default(int),
    "max_window_layers": Default(int, 28),
    "layer_types": Default(list),
}


def window_types(values: Mapping[str, Any], period: int) -> Sequence[str]:
    """Returns layer_types; without them only every layer number `period` sees everything."""
    return values["layer_types"] or [
        _SLIDING if (layer + 1) % period else _FULL for layer in range(values["num_hidden_layers"])
    ]


def typed_layers(
    values: Mapping[str, Any], layer_types: Sequence[str], *, sliding_rope: int = 0
) -> tuple[Mapping[str, int], ...]:
    """Returns the fields of each layer's attention, by layer_types.

    Sliding layers use the rotary table `sliding_rope`. Raises UnsupportedModelError for another
    type, or for a sliding layer if no window is set.
    """
    window = sliding_window(values)
    kinds = layer_kinds(values, layer_types, _FULL, _SLIDING)
    if _SLIDING in kinds and (window is None or window < 1):
        raise UnsupportedModelError(
            f"a sliding_attention layer of {values['model_type']} needs sliding_window, "
            f"which is {window}"
        )
    sliding = {"window_tokens": window or 0, "rope": sliding_rope}
    return tuple(sliding if kind == _SLIDING else {} for kind in kinds)


def sliding_window(values: Mapping[str, Any]) -> int | None:
    """Returns the tokens of a window, or None if use_sliding_window says that there is none."""
    return values["sliding_window"] if values.get("use_sliding_window", True) else None


def qwen_layers(values: Mapping[str, Any]) -> tuple[Mapping[str, int], ...]:
    """Returns the fields of each layer's attention in Qwen models.

    Without use_sliding_window there are no windows; with it, layers from max_window_layers on have
    one. layer_types, if present, names the kind of each layer instead.
    """
    unbounded = sliding_window(values) is None
    types = values["layer_types"] or [
        _FULL if unbounded or layer < values["max_window_layers"] else _SLIDING
        for layer in range(values["num_hidden_layers"])
    ]
    return typed_layers(values, types)


def rope_parameters(
    values: Mapping[str, Any], *, sliding: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rope parameters of layers that see everything and of sliding ones.

    The file has one dict for each, or a rope_scaling for the first. `sliding` has the values of the
    second if the file has none. Raises UnsupportedModelError for a third kind of layer.
    """
    nested: dict[str, Any] = values["rope_parameters"] or {}
    unknown = set(nested) - {_FULL, _SLIDING}
    if unknown:
        raise UnsupportedModelError(
            f"rope_parameters of {values['model_type']} holds {', '.join(sorted(unknown))}; "
            "supported: full_attention, sliding_attention"
        )
    return (
        {**(nested.get(_FULL) or {}), **(values["rope_scaling"] or {})},
        {**(sliding or {}), **(nested.get(_SLIDING) or {})},
    )
