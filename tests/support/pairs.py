"""A native and a numpy cache given the same calls, for the tests that compare them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from caches import open_cache
from kvq.class_cache import ClassCache
from kvq.config import PAGE_WIDTHS, AttentionParams, CacheShape, KvPlan

Float = NDArray[np.float32]

UNROTATED: Float = np.zeros(0, np.float32)
# The mask of a page that is seen whole.
ALL = (1 << 64) - 1
WIDTHS = [(k_bits, v_bits) for k_bits in PAGE_WIDTHS for v_bits in PAGE_WIDTHS]
BOTH = pytest.mark.parametrize("use_native", [True, False], ids=["native", "numpy"])


def adversarial(tokens: int, dim: int) -> dict[str, Float]:
    """Pages float32 [tokens, dim] that have broken quantisers before."""
    rng = np.random.default_rng(100 * dim + tokens)
    noise = rng.standard_normal((tokens, dim)).astype(np.float32)
    constant, loud = noise.copy(), noise.copy()
    constant[:, ::3] = rng.standard_normal(len(range(0, dim, 3))).astype(np.float16)
    loud[:, dim // 2] *= 50
    return {
        "noise": noise,
        "constant channels": constant,
        "constant tokens": np.repeat(noise[:, :1].astype(np.float16), dim, 1).astype(np.float32),
        "loud channel": loud,
        "far from zero": noise - 100,
        "huge": (65504 * np.tanh(noise)).astype(np.float32),
        "denormal": noise * np.float32(1e-7),
        "float denormal": noise * np.float32(1e-41),
        "zeros of both signs": np.copysign(np.float32(0), noise),
        "not negative": np.maximum(noise, 0),
        "not positive": np.minimum(noise, 0),
        "ties": rng.integers(-4, 5, (tokens, dim)).astype(np.float32),
    }


def some_feedback(rng: np.random.Generator, *shape: int) -> Float:
    """By which keys are carried, float32 [*shape, D, D] where D is the last of `shape`."""
    return np.triu(0.3 * rng.standard_normal((*shape, shape[-1])), 1).astype(np.float32)


def frequencies(pairs: int) -> Float:
    """RoPE frequencies of `pairs` rotated pairs, as most models have them."""
    return (10000.0 ** (-np.arange(pairs) / max(pairs, 1))).astype(np.float32)


def attention(shape: CacheShape, layer: int = 0, **changes: float) -> AttentionParams:
    """The plain attention of a layer, with some attributes changed."""
    values = {"scale": shape.head_dim**-0.5} | changes
    return AttentionParams(
        layer=layer,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        **values,  # type: ignore[arg-type]
    )


def random_heads(
    rng: np.random.Generator, shape: CacheShape, tokens: int
) -> tuple[Float, Float, Float]:
    """Zero-mean q [T, H, D], k and v [T, Hk, D]."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = (rng.standard_normal((tokens, n, shape.head_dim), np.float32) for n in heads)
    return q, k, v


def structured_heads(
    rng: np.random.Generator, shape: CacheShape, tokens: int, seed: int = 7
) -> tuple[Float, Float, Float]:
    """Heads as trained models make them: channels with means, one of them 50 times as loud.

    The means come from `seed`, so that calls with one seed continue one sequence.
    """
    q, k, v = random_heads(rng, shape, tokens)
    fixed = np.random.default_rng(seed)
    means = fixed.standard_normal((2, shape.num_kv_heads, shape.head_dim)).astype(np.float32)
    k = 0.5 * k + 3 * means[0]
    k[:, :, 5] = 2.5
    k[:, :, 11] *= 50
    q[:, :, 11] *= np.float32(0.02)
    v = 0.5 * v + means[1]
    return q, k, v


def sharp_heads(
    rng: np.random.Generator, shape: CacheShape, tokens: int
) -> tuple[Float, Float, Float]:
    """One loud channel per 32 in q: its codes are exact. Constant rows of values, exact too.

    They lie 255 steps of 1/64 apart at most, of which every page has both ends: its mids are exact.

    Only channels below 32 of the first 64 are loud, so that with 32 rotated pairs a rotated query
    still has one per 32. Every logit counts, and every value is told from every other.
    """
    q, k, v = random_heads(rng, shape, tokens)
    loud = np.zeros(shape.head_dim, bool)
    loud[int(rng.integers(32))] = True
    loud[64::32] = True
    q[:, :, ~loud] = 0
    v[:] = rng.integers(0, 256, (*v.shape[:2], 1)) / 64 - 2
    v[::32], v[1::32] = -2, 255 / 64 - 2
    return 4 * q, k, v


def flat_heads(
    rng: np.random.Generator, shape: CacheShape, tokens: int
) -> tuple[Float, Float, Float]:
    """Keys of zero: equal weights. Values of one range per token: equal folded weights, exact."""
    q, k, v = random_heads(rng, shape, tokens)
    v = np.clip(v, -1, 1)
    v[:, :, 7], v[:, :, 3] = 1, -1
    return q, 0 * k, v


def pack_heads(q: Float, k: Float, v: Float) -> Float:
    """Packed rows [T, (H + 2 Hk) * D] of the heads."""
    heads = np.concatenate([q, k, v], axis=1)
    return heads.reshape(len(heads), heads.shape[1] * heads.shape[2])


def packed_rows(shape: CacheShape, rng: np.random.Generator, tokens: int) -> list[Float]:
    """Packed random rows of every layer."""
    return [pack_heads(*random_heads(rng, shape, tokens)) for _ in range(shape.num_layers)]


def attend_alike(
    caches: Sequence[ClassCache], rng: np.random.Generator, count: int, at: int | None = None
) -> None:
    """So many random tokens for all these caches, in which they give the same to the bit."""
    shape, start = caches[0].shape, caches[0].tokens if at is None else at
    rows, positions = packed_rows(shape, rng, count), start + np.arange(count)
    outs: list[list[Float]] = []
    for cache in caches:
        cache.begin(count, at=at)
        layers = enumerate(rows)
        outs.append(
            [cache.attend(attention(shape, i), x, positions, frequencies(16)) for i, x in layers]
        )
        cache.commit(count)
    for outputs in outs[1:]:
        np.testing.assert_array_equal(outs[0], outputs)


def forward(
    cache: ClassCache,
    layers: Sequence[AttentionParams],
    qkv: Sequence[Float],
    positions: NDArray[np.int64],
    inv_freq: Float = UNROTATED,
    *,
    parents: Sequence[int] | None = None,
    view: str = "full",
) -> list[Float]:
    """`begin` and every layer's `attend`; the caller commits or rewinds."""
    cache.begin(len(positions), parents, view=view)
    return [
        cache.attend(params, rows, positions, inv_freq)
        for params, rows in zip(layers, qkv, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two caches; `demote`, `shift`, `mask` and `trim` go to both."""

    native: ClassCache
    numpy: ClassCache

    @classmethod
    def open(
        cls, shape: CacheShape, plan: KvPlan, budget_bytes: int, context_tokens: int, **options
    ):
        """Both caches on equal arenas."""
        arguments = (shape, plan, budget_bytes, context_tokens)
        return cls(
            open_cache(*arguments, **options), open_cache(*arguments, native=False, **options)
        )

    def __iter__(self):
        return iter((self.native, self.numpy))

    def fill(
        self,
        layers: Sequence[AttentionParams],
        qkv: Sequence[Float],
        inv_freq: Float = UNROTATED,
        *,
        chunk_tokens: int = 64,
    ) -> None:
        """Commits rows in chunks at the next positions."""
        for start in range(0, len(qkv[0]), chunk_tokens):
            part = [rows[start : start + chunk_tokens] for rows in qkv]
            positions = np.arange(len(part[0])) + self.native.tokens
            for cache in self:
                forward(cache, layers, part, positions, inv_freq)
                cache.commit(len(positions))

    def demote(self, actions: Sequence[Sequence[int]]) -> None:
        for cache in self:
            cache.demote(np.array(actions, np.int32).reshape(-1, 5))

    def shift(self, column: int, delta: int) -> None:
        for cache in self:
            cache.shift(column, delta)

    def mask(self, column: int, mask: int) -> None:
        for cache in self:
            cache.mask(column, mask)

    def trim(self, tokens: int) -> None:
        for cache in self:
            cache.trim(tokens)

    def close(self) -> None:
        for cache in self:
            cache.close()


def relative_rms(got: Float, want: Float) -> float:
    """Root mean square of the error over that of the values."""
    error = got.astype(np.float64) - want
    return float(
        np.sqrt(np.mean(error**2) / max(np.mean(np.square(want, dtype=np.float64)), 1e-30))
    )


def relative_max(got: Float, want: Float) -> float:
    """Largest error over the largest value."""
    error = np.abs(got.astype(np.float64) - want).max()
    return float(error / max(float(np.abs(want).max()), 1e-30))


# A cache small enough to fill in every test.
SMALL = CacheShape(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
LAYERS = [attention(SMALL, layer) for layer in range(SMALL.num_layers)]


def numbered_rows(rng: np.random.Generator, count: int) -> list[Float]:
    """Random rows of each layer of `SMALL`."""
    return [pack_heads(*random_heads(rng, SMALL, count)) for _ in range(SMALL.num_layers)]


def filled_cache(use_native: bool, tokens: int = 300, **options: int) -> ClassCache:
    """A cache of `SMALL` that holds so many tokens."""
    plan = KvPlan(k_bits=8, v_bits=4)
    cache = open_cache(SMALL, plan, 1 << 20, 1000, native=use_native, **options)
    rng = np.random.default_rng(2)
    for start in range(0, tokens, 100):
        count = min(100, tokens - start)
        forward(cache, LAYERS, numbered_rows(rng, count), np.arange(start, start + count))
        cache.commit(count)
    return cache


def step(cache: ClassCache, count: int = 1) -> list[Float]:
    """One more forward pass that must work."""
    rows = numbered_rows(np.random.default_rng(3), count)
    outputs = forward(cache, LAYERS, rows, np.arange(count) + cache.tokens)
    cache.commit(count)
    return outputs
