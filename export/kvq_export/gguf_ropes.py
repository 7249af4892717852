"""Rotary tables as the keys and tensors of GGUF files that llama.cpp makes them of again."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from kvq_export.gguf_architectures import Architecture
from kvq_models.config import ModelConfig, RopeConfig
from kvq_models.rope import RopeSettings

# Any base serves where tensors of factors describe a table: they are relative to it.
NEUTRAL_BASE = 10_000.0
# llama.cpp's defaults, which no key of these architectures changes.
YARN_FAST, YARN_SLOW = 32.0, 1.0
# What llama.cpp's converter divides the frequency of a pair by that does not turn.
STILL_FACTOR = 1e30

Scaling = Literal["none", "linear", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufRope:
    """A rotary table as keys: `base ** (-2i / n)`, scaled; `tensors` hold float32 factors [n / 2].

    `attention_factor` multiplies what the scaling itself does to cos and sin. `rounded`: llama.cpp
    makes of these keys a table that is a little different, see `Architecture.whole_ramp`.
    """

    base: float
    dimensions: int
    scaling: Scaling = "none"
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float = 1.0
    base_windowed: float | None = None
    rounded: bool = False
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])


def gguf_rope(
    config: ModelConfig, architecture: Architecture, settings: RopeSettings | None
) -> GgufRope | None:
    """Every layer's table, or None where no keys describe it."""
    rope = _whole_rope(config, architecture, settings)
    return None if rope is None else _with_windows(config, architecture, rope)


def _whole_rope(
    config: ModelConfig, architecture: Architecture, settings: RopeSettings | None
) -> GgufRope | None:
    """The first table, of layers that see everything."""
    rope = config.ropes[0]
    dimensions = 2 * len(rope.inv_freq)
    if rope.long_inv_freq is not None:
        if not architecture.rope_tensors:
            return None
        return GgufRope(
            base=NEUTRAL_BASE,
            dimensions=dimensions,
            scaling="longrope",
            original_context=rope.original_context,
            attention_factor=rope.factor,
            tensors={
                "rope_factors_short.weight": _factors(rope.inv_freq),
                "rope_factors_long.weight": _factors(rope.long_inv_freq),
            },
        )
    plain = None if architecture.always_factors else _plain(rope)
    if plain is not None:
        base, factor = plain
        return GgufRope(
            base=base,
            dimensions=dimensions,
            scaling="none" if factor == 1 else "linear",
            factor=factor,
            attention_factor=rope.factor,
        )
    if architecture.rope_tensors:
        return GgufRope(
            base=NEUTRAL_BASE,
            dimensions=dimensions,
            attention_factor=rope.factor,
            tensors={"rope_freqs.weight": _factors(rope.inv_freq)},
        )
    yarn = _yarn_of(config) if settings is None else _yarn_said(settings)
    return None if yarn is None else _yarn(rope, architecture, yarn)


def _with_windows(
    config: ModelConfig, architecture: Architecture, rope: GgufRope
) -> GgufRope | None:
    """Adds the base of windowed layers, where these have a plain table of their own."""
    for local in config.ropes[1:]:
        if not any(local.inv_freq):
            continue
        plain = _plain(local)
        if plain is None or (plain[1], local.factor, rope.base_windowed) != (1, 1, None):
            return None
        if architecture.windowed_base:
            rope = replace(rope, base_windowed=plain[0])
        elif not math.isclose(plain[0], rope.base, rel_tol=1e-6):
            return None
    return rope


def _plain(rope: RopeConfig) -> tuple[float, float] | None:
    """(base, factor) of a table `base ** (-i / n) / factor`, or None where it is another one."""
    table = np.asarray(rope.inv_freq, np.float64)
    if not table.all():
        return None
    pairs, factor = len(table), float(1 / table[0])
    if pairs == 1:
        return NEUTRAL_BASE, factor
    base = float((table[-1] * factor) ** (-pairs / (pairs - 1)))
    base = float(round(base)) if abs(base - round(base)) < 1e-3 * base else base
    close = np.allclose(table, _powers(base, pairs) / factor, rtol=1e-5, atol=0)
    return (base, factor) if close else None


def _powers(base: float, pairs: int) -> np.ndarray:
    return base ** (-np.arange(pairs) / pairs)


def _factors(table: tuple[float, ...]) -> np.ndarray:
    """What llama.cpp divides the frequencies of `NEUTRAL_BASE` by to get the model's."""
    found = np.asarray(table, np.float64)
    still = found == 0
    factors = _powers(NEUTRAL_BASE, len(found)) / np.where(still, 1, found)
    return np.where(still, STILL_FACTOR, factors).astype(np.float32)


class _Yarn(NamedTuple):
    """What a YaRN table (arXiv:2309.00071) is made of."""

    base: float
    factor: float
    context: int


def _yarn_said(settings: RopeSettings) -> _Yarn | None:
    if settings.kind != "yarn":
        return None
    context = settings.trained_context
    factor = settings.number("factor", settings.max_positions / context)
    return _Yarn(settings.number("rope_theta"), factor, context)


def _yarn_of(config: ModelConfig) -> _Yarn | None:
    """Read off a table whose first two pairs are as fast as ever and whose last is slowed down."""
    table = np.asarray(config.ropes[0].inv_freq, np.float64)
    if len(table) < 2 or not table.all():
        return None
    base = float(round((table[0] / table[1]) ** len(table)))
    if base < 2:
        return None
    factor = round(float(_powers(base, len(table))[-1] / table[-1]), 3)
    return _Yarn(base, factor, round(config.context_length / factor)) if factor > 1 else None


def _yarn(rope: RopeConfig, architecture: Architecture, yarn: _Yarn) -> GgufRope | None:
    """The keys of a YaRN table, if llama.cpp makes this very table of them.

    Or one that differs in its `whole_ramp` alone, where the architecture always has that.
    """
    base, factor, context = yarn
    pairs = len(rope.inv_freq)

    def pair(rotations: float) -> float:
        return pairs * math.log(context / (rotations * 2 * math.pi)) / math.log(base)

    def is_table(low: float, high: float) -> bool:
        """Whether the table is that whose pairs are slowed down from `low` to `high`."""
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        kept = 1 - np.clip((np.arange(pairs) - low) / max(0.001, high - low), 0, 1)
        table = _powers(base, pairs) * (kept + (1 - kept) / factor)
        return np.allclose(table, rope.inv_freq, rtol=1e-4, atol=0)

    first, last = pair(YARN_FAST), pair(YARN_SLOW)
    whole = is_table(math.floor(first), math.ceil(last))
    if not whole and not (architecture.whole_ramp and is_table(first, last)):
        return None
    return GgufRope(
        base=base,
        dimensions=2 * pairs,
        scaling="yarn",
        factor=factor,
        original_context=context,
        attention_factor=rope.factor / (0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
        rounded=not whole,
    )
