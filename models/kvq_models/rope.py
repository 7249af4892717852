"""Makes rotary tables from rope settings, in float32 step by step as transformers does.

It knows both spellings of the settings (`rope_theta` + `rope_scaling`, and `rope_parameters`) and
the arithmetic of each kind of scaling. Families name the kinds that they allow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq.errors import CheckpointError, UnsupportedModelError
from kvq_models.config import RopeConfig
from kvq_models.keys import checked

# The table of layers without rotation: one pair of channels that turns by nothing.
NO_ROTATION = RopeConfig(inv_freq=(0.0,))


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSettings:
    """Holds one set of rope keys, in the new spelling, before any arithmetic.

    `parameters` always has rope_type and rope_theta. `max_positions` is max_position_embeddings.
    `original_context` is the top-level original_max_position_embeddings, which wins over the nested
    one.
    """

    parameters: Mapping[str, Any]
    head_dim: int
    max_positions: int
    original_context: int | None = None

    @property
    def kind(self) -> str:
        return self.parameters["rope_type"]

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.number("partial_rotary_factor", 1.0))

    @property
    def trained_context(self) -> int:
        """Returns the positions on which the unscaled table was trained."""
        if self.original_context is not None:
            return self.original_context
        return int(self.number("original_max_position_embeddings", self.max_positions))

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the value of a key; without a default it is required. Raises CheckpointError."""
        value = self.parameters.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"the rope settings of kind {self.kind!r} lack {key}")
            return default
        number = checked(f"rope {key}", value, float)
        if number <= 0 and not key.startswith("mscale"):
            raise CheckpointError(f"rope {key} is {number}; it must be positive")
        return number

    def numbers(self, key: str, count: int) -> np.ndarray:
        """Returns a list of `count` numbers as float32. Raises CheckpointError."""
        values = checked(f"rope {key}", self.parameters.get(key), list)
        if len(values) != count:
            raise CheckpointError(
                f"rope {key} holds {len(values)} numbers; this model needs {count}"
            )
        return np.asarray([checked(f"rope {key}", value, float) for value in values], np.float32)


def build_rope(model_type: str, settings: RopeSettings, kinds: Sequence[str]) -> RopeConfig:
    """Returns the rotary table for `settings`.

    Raises UnsupportedModelError for a kind outside `kinds` or a key that the kind does not have,
    CheckpointError for a missing or malformed one.
    """
    kind = settings.kind
    if kind not in kinds:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported for {model_type}; "
            f"supported: {', '.join(kinds)}"
        )
    keys, build = _KINDS[kind]
    known = {*_COMMON_KEYS, *keys.split()}
    for key, value in settings.parameters.items():
        if key not in known and value is not None:
            raise UnsupportedModelError(
                f"rope key {key} = {value!r} is not supported with rope scaling {kind!r}; "
                f"supported: {', '.join(sorted(known))}"
            )
    if not 0 < settings.rotary_dim <= settings.head_dim or settings.rotary_dim % 2:
        raise UnsupportedModelError(
            f"rope turns {settings.rotary_dim} of {settings.head_dim} dimensions per head; "
            f"an even number from 2 to {settings.head_dim} is supported"
        )
    if settings.number("rope_theta") <= 1 or settings.trained_context < 2:
        raise CheckpointError(
            f"rope_theta {settings.number('rope_theta')} and a trained context of "
            f"{settings.trained_context} tokens are not possible; both must be above 1"
        )
    return build(settings)


def _powers(settings: RopeSettings) -> np.ndarray:
    """Returns theta ** (2i / rotary_dim), float32: exponent in float32, power rounded once."""
    dim = settings.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    theta = np.float64(np.float32(settings.number("rope_theta")))
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def _plain(settings: RopeSettings) -> np.ndarray:
    return np.float32(1.0) / _powers(settings)


def _as_config(inv_freq: np.ndarray, **extra: Any) -> RopeConfig:
    return RopeConfig(inv_freq=tuple(inv_freq.astype(np.float32).tolist()), **extra)


def _linear(settings: RopeSettings) -> RopeConfig:
    return _as_config(_plain(settings) / np.float32(settings.number("factor")))


def _llama3(settings: RopeSettings) -> RopeConfig:
    """Divides long wavelengths by the factor, keeps short ones, and blends those between."""
    inv_freq = _plain(settings)
    factor = np.float32(settings.number("factor"))
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    context = settings.trained_context
    if low >= high:
        raise CheckpointError(f"rope low_freq_factor {low} is not below high_freq_factor {high}")
    # PyTorch divides a number by a tensor as a product with the tensor's reciprocals.
    wavelength = np.float32(2 * math.pi) * (np.float32(1) / inv_freq)
    scaled = np.where(wavelength > np.float32(context / low), inv_freq / factor, inv_freq)
    turns = np.float32(context) * (np.float32(1) / wavelength)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelength >= np.float32(context / high)) & (wavelength <= np.float32(context / low))
    return _as_config(np.where(between, blended, scaled))


def _yarn(settings: RopeSettings) -> RopeConfig:
    """Interpolates slow dimensions, keeps fast ones, blends between; cos and sin get a factor."""
    dim, theta, context = (
        settings.rotary_dim,
        settings.number("rope_theta"),
        settings.trained_context,
    )
    factor = settings.number("factor", settings.max_positions / context)

    def dimension(rotations: float) -> float:
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low = dimension(settings.number("beta_fast", 32.0))
    high = dimension(settings.number("beta_slow", 1.0))
    truncate = settings.parameters.get("truncate")
    if truncate is None or truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # transformers' guard against a ramp of no width
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = 1 - np.clip(ramp, 0, 1)
    powers = _powers(settings)
    interpolated = np.float32(1.0) / (np.float32(factor) * powers)
    inv_freq = interpolated * (1 - kept) + (np.float32(1.0) / powers) * kept
    return _as_config(inv_freq, factor=_yarn_factor(settings, factor))


def _yarn_factor(settings: RopeSettings, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    ratio = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return settings.number("attention_factor", ratio)


def _longrope(settings: RopeSettings) -> RopeConfig:
    """Returns two tables, up to the trained context and beyond it, which share the factor."""
    context = settings.trained_context
    powers = _powers(settings)
    factor = settings.number("factor", settings.max_positions / context)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    short, long = (
        np.float32(1.0) / (settings.numbers(key, len(powers)) * powers)
        for key in ("short_factor", "long_factor")
    )
    return _as_config(
        short,
        factor=settings.number("attention_factor", magnitude),
        long_inv_freq=tuple(long.astype(np.float32).tolist()),
        original_context=context,
    )


def _proportional(settings: RopeSettings) -> RopeConfig:
    """Rotates a share of all pairs (i, i + half), at the speeds of a whole table."""
    half = settings.head_dim // 2
    turning = int(settings.number("partial_rotary_factor", 1.0) * half)
    whole = dataclasses.replace(
        settings, parameters={**settings.parameters, "partial_rotary_factor": 1.0}
    )
    inv_freq = _plain(whole) / np.float32(settings.number("factor", 1.0))
    return _as_config(np.where(np.arange(half) < turning, inv_freq, np.float32(0)))


_COMMON_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")
# The other keys of each kind of scaling, and what makes its table.
_CONTEXT = "original_max_position_embeddings"
_KINDS: Mapping[str, tuple[str, Callable[[RopeSettings], RopeConfig]]] = {
    "default": ("", lambda settings: _as_config(_plain(settings))),
    "proportional": ("factor", _proportional),
    "linear": (f"factor {_CONTEXT}", _linear),
    "llama3": (f"factor low_freq_factor high_freq_factor {_CONTEXT}", _llama3),
    "yarn": (
        "factor attention_factor beta_fast beta_slow mscale mscale_all_dim truncate finetuned "
        f"{_CONTEXT}",
        _yarn,
    ),
    "longrope": (f"factor attention_factor short_factor long_factor {_CONTEXT}", _longrope),
}
