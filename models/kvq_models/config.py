"""The one description of a model that every other component reads.

Owns `ModelConfig` and its parts: shapes, per-layer attention settings, rotary tables and the
constants of the arithmetic. Knows nothing about the file a model came from or the names its
weights had there (see `family`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np

from kvq.config import AttentionParams, CacheShape
from kvq.errors import ModelError

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """One rotary table: the first 2 * len(inv_freq) dimensions of a head rotate, i with i + half.

    `inv_freq` holds float32 values (radians per position); cos and sin are multiplied by
    `factor`. A model trained with two tables also has `long_inv_freq`, used for a whole session
    when its context exceeds `original_context` tokens.
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    original_context: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """What differs between layers: the window (0 = all tokens), the index into the ropes."""

    window_tokens: int = 0
    rope: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything the arithmetic of a decoder-only model depends on, apart from its weights.

    `attention_scale` multiplies q.k; a soft cap c > 0 turns a value x into c * tanh(x / c) (0 =
    none); the embedding row is multiplied by `embedding_scale`; norm weights are stored as w -
    `norm_offset`. `sandwich_norms` adds a norm after attention and after the MLP, before each
    residual sum. The biases say which linear layers have one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: Activation
    tied_head: bool
    context_length: int
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    qk_norm: bool = False
    sandwich_norms: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be a model. Raises ModelError."""
        self._check_numbers()
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads "
                "evenly; num_attention_heads must be a multiple of num_key_value_heads"
            )
        if len(self.layers) != self.num_layers:
            raise ModelError(
                f"{len(self.layers)} layers are described, num_hidden_layers is {self.num_layers}"
            )
        for layer in self.layers:
            _check_count("a layer's window_tokens", layer.window_tokens, least=0)
            _check_count("a layer's rope", layer.rope, least=0, most=len(self.ropes) - 1)
        for rope in self.ropes:
            if not rope.inv_freq or 2 * len(rope.inv_freq) > self.head_dim:
                raise ModelError(
                    f"a rotary table turns {2 * len(rope.inv_freq)} of {self.head_dim} dimensions"
                )
            for value in (rope.factor, *rope.inv_freq, *(rope.long_inv_freq or ())):
                _check_real("a number of a rotary table", value)
            if rope.long_inv_freq is not None:
                _check_count("a table's original_context", rope.original_context, least=1)
                if len(rope.long_inv_freq) != len(rope.inv_freq):
                    raise ModelError("the long rotary table is not as long as the short one")

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            _check_count(name, getattr(self, name), least=1)
        for name in _REAL:
            _check_real(name, getattr(self, name))
        if self.activation not in get_args(Activation):
            raise ModelError(f"the activation {self.activation!r} is none of {Activation}")
        for token in (*self.eos_token_ids, 0 if self.bos_token_id is None else self.bos_token_id):
            _check_count("a token id", token, least=0)

    @property
    def qkv_width(self) -> int:
        """Columns of the packed row: query heads, then key heads, then value heads."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def cache_shape(self) -> CacheShape:
        """The shape a key-value cache for this model has."""
        return CacheShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def has_long_rope(self) -> bool:
        """True when a session must choose between two rotary tables, see `needs_long_rope`."""
        return any(rope.long_inv_freq is not None for rope in self.ropes)

    def needs_long_rope(self, context_tokens: int) -> bool:
        """True when a session of up to `context_tokens` tokens uses the long rotary table."""
        return any(
            rope.long_inv_freq is not None
            and rope.original_context is not None
            and context_tokens > rope.original_context
            for rope in self.ropes
        )

    def attention(self, layer: int) -> AttentionParams:
        """The constants of one layer's attention."""
        return AttentionParams(
            layer=layer,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
            window_tokens=self.layers[layer].window_tokens,
            rope_factor=self.ropes[self.layers[layer].rope].factor,
            norm_eps=self.norm_eps,
        )

    def inv_freq(self, layer: int, *, long_rope: bool = False) -> np.ndarray:
        """The layer's rotary table, float32 [rotary_dim / 2]; the long one if asked for."""
        rope = self.ropes[self.layers[layer].rope]
        values = (
            rope.inv_freq if not long_rope or rope.long_inv_freq is None else rope.long_inv_freq
        )
        return np.asarray(values, dtype=np.float32)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for a manifest; `from_json` gives back an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Rebuild a config from `to_json`'s dict (also after a trip through JSON text).

        Raises ModelError when a key is missing, unknown or of the wrong kind.
        """
        values = dict(data)
        try:
            values["ropes"] = tuple(_rope_from_json(rope) for rope in values["ropes"])
            values["layers"] = tuple(LayerConfig(**layer) for layer in values["layers"])
            values["eos_token_ids"] = tuple(values.get("eos_token_ids", ()))
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ModelError(f"this is not a model configuration: {error}") from error


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "context_length",
)


_REAL = (
    "norm_eps",
    "attention_scale",
    "attention_softcap",
    "final_softcap",
    "embedding_scale",
    "norm_offset",
)
# What native code counts with.
_MOST = (1 << 31) - 1


def _check_real(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ModelError(f"{name} is {value!r}; it must be a finite number")


def _check_count(name: str, value: Any, *, least: int, most: int = _MOST) -> None:
    """Raises ModelError unless `value` is a whole number from `least` to `most`."""
    if type(value) is not int or value < least:
        raise ModelError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    if value > most:
        raise ModelError(f"{name} is {value}; it must be at most {most}")


def _rope_from_json(data: Mapping[str, Any]) -> RopeConfig:
    values = dict(data)
    values["inv_freq"] = tuple(data["inv_freq"])
    if data.get("long_inv_freq") is not None:
        values["long_inv_freq"] = tuple(data["long_inv_freq"])
    return RopeConfig(**values)
