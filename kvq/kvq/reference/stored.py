"""Defines pages and attention over them in numpy.

Tests compare native code with this module. It favours being read over being quick and holds no
state: `numpy_cache.cache` of the tests builds a cache out of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, AttentionParams
from kvq.errors import CacheError
from kvq.formats import REACH, SAMPLED_PROBES

Float = NDArray[Any]  # float32
Half = NDArray[Any]  # float16
Bytes = NDArray[Any]  # uint8
KeyPart = tuple[Float, Callable[[Float], Float]]  # keys, and the turn that queries need for them

KEYS, VALUES = 0, 1
TINY = np.float32(1e-30)


# ---- codes -----------------------------------------------------------------------------------


def half_down(x: Float) -> Half:
    """Returns the largest float16 not above x."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        return np.where(half > x, np.nextafter(half, np.float16(-np.inf)), half)


def half_up(x: Float) -> Half:
    """Returns the smallest float16 not below x."""
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
        return np.where(half < x, np.nextafter(half, np.float16(np.inf)), half)


class QuantizedVector(NamedTuple):
    """Holds numbers [n] of a page as low + unit * code: float16 (low, unit), uint8 codes."""

    ends: Half
    codes: Bytes

    @classmethod
    def of(cls, x: Float, whole: Callable[[Float], Float]) -> "QuantizedVector":
        """Rounds x to codes by `whole`, `np.rint` or `np.ceil`.

        Raises `CacheError` beyond float16.
        """
        # No -0, or equal pages would have different bytes.
        least, most = x.min() + np.float32(0), x.max() + np.float32(0)
        low = half_down(least)
        unit = half_up((most - low.astype(np.float32)) / np.float32(255))
        if not np.isfinite([low, unit]).all():
            raise CacheError("a key or value is not finite in float16, so it cannot be cached")
        codes = (x - low.astype(np.float32)) / np.maximum(unit.astype(np.float32), TINY)
        return cls(
            np.array([low, unit], np.float16), np.minimum(whole(codes), 255).astype(np.uint8)
        )

    @property
    def values(self) -> Float:
        low, unit = self.ends.astype(np.float32)
        return low + unit * self.codes.astype(np.float32)


class PageGrid(NamedTuple):
    """Says where the codes of one side of a page stand: scales and mids of its n groups."""

    scales: QuantizedVector
    mids: QuantizedVector

    @property
    def scale(self) -> Float:
        return self.scales.values

    @property
    def mid(self) -> Float:
        return self.mids.values

    def stored(self) -> bytes:
        """Returns the bytes that `format.h` defines."""
        parts = (self.scales.ends, self.mids.ends, self.scales.codes, self.mids.codes)
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def load(cls, stored: bytes) -> "PageGrid":
        """Reads the bytes that `stored` returns."""
        ends = np.frombuffer(stored, np.float16, 4)
        scales, mids = np.frombuffer(stored, np.uint8)[8:].reshape(2, -1)
        return cls(QuantizedVector(ends[:2], scales), QuantizedVector(ends[2:], mids))


def encode(
    x: Float, axis: int, *, bits: int = 8, feedback: Float | None = None
) -> tuple[Bytes, PageGrid]:
    """Encodes one page's keys or values to 8-bit codes [64, D] and the grid they stand on.

    What lies along `axis` shares scale and mid: 0 for a group per channel, as keys have, 1 for one
    per token, as values have unless their form says otherwise. A mid is the middle of its group,
    rounded, and a scale, rounded up, reaches the group's ends in `REACH` steps: so far stand the
    outermost levels of a 4-bit read. Were the ends at codes 0 and 255 that read would shrink what
    is largest, and attention adds such errors up. `feedback`: as `carried` has it, for groups of
    channels that will be read at `bits`. Raises `CacheError` beyond float16's range.
    """
    low, high = x.min(axis=axis), x.max(axis=axis)
    if not np.isfinite(x).all():
        raise CacheError("a key or value is not finite in float16, so it cannot be cached")
    mids = QuantizedVector.of((low + high) * np.float32(0.5), np.rint)
    reach = np.maximum(high - mids.values, mids.values - low)
    grid = PageGrid(QuantizedVector.of(reach / np.float32(REACH), np.ceil), mids)
    if feedback is not None:
        x = carried(x, grid, bits, feedback)
    return codes_on(grid, x, axis), grid


def codes_on(grid: PageGrid, x: Float, axis: int) -> Bytes:
    """Returns the 8-bit codes [64, D] of x on a grid whose groups lie along `axis`."""
    return _codes(x, np.expand_dims(grid.scale, axis), np.expand_dims(grid.mid, axis))


def _codes(x: Float, scale: Float, mid: Float) -> Bytes:
    codes = (x - mid) / np.maximum(scale, TINY) + np.float32(127.5)
    return np.rint(np.clip(codes, 0, 255)).astype(np.uint8)


def carried(x: Float, grid: PageGrid, bits: int, feedback: Float) -> Float:
    """Moves keys [64, D] such that rounding errs where queries do not look.

    Channel by channel, what a read at `bits` errs in channel i, times feedback[i, j], is taken off
    every channel j behind it before that one is rounded: GPTQ's step for weights (arXiv
    2210.17323), with the second moments of a head's queries in place of its inputs'. So a product
    with a query errs less, in the same bytes. `feedback` [D, D] is 0 on and below its diagonal.
    """
    x, channels = x.copy(), zip(grid.scale, grid.mid, feedback, strict=True)
    for i, (scale, mid, weights) in enumerate(channels):
        error = x[:, i] - (mid + scale * _steps(_codes(x[:, i], scale, mid), bits))
        x[:, i + 1 :] -= error[:, None] * weights[i + 1 :]
    return x


def decode(codes: Bytes, grid: PageGrid, bits: int, axis: int) -> Float:
    """Returns what a read at `bits` sees of 8-bit codes: dropped bits read as their middle."""
    scale, mid = np.expand_dims(grid.scale, axis), np.expand_dims(grid.mid, axis)
    return mid + scale * _steps(codes, bits)


def _steps(codes: Bytes, bits: int) -> Float:
    """Returns where a read at `bits` sees 8-bit codes, in steps from the middle of their grid."""
    step = 1 << (8 - bits)
    return (codes // step).astype(np.float32) * step + np.float32((step - 1) / 2 - 127.5)


# ---- planes ----------------------------------------------------------------------------------


def _tile(codes: Bytes, side: int, parts: int) -> Bytes:
    """Orders codes [64, D] as `format.h` does: [..., 32-byte vector, parts]."""
    dim = codes.shape[1]
    if side == KEYS:
        return codes.reshape(8, 8, dim // (4 * parts), parts, 4).transpose(0, 2, 1, 4, 3)
    return codes.reshape(PAGE_TOKENS // (4 * parts), parts, 4, dim // 8, 8).transpose(3, 0, 4, 2, 1)


def nibble_plane(nibbles: Bytes, side: int) -> Bytes:
    """Packs nibbles [64, D] to the 32*D bytes of a hi4 or lo4 plane."""
    tiled = _tile(nibbles, side, 2)
    return (tiled[..., 0] | tiled[..., 1] << 4).reshape(-1)


def two_bit_plane(top: Bytes, side: int) -> Bytes:
    """Packs two-bit codes [64, D] to the 16*D bytes of their plane."""
    tiled = _tile(top, side, 4)
    return (tiled[..., 0] | tiled[..., 1] << 2 | tiled[..., 2] << 4 | tiled[..., 3] << 6).reshape(
        -1
    )


def planes(codes: Bytes, bits: int, side: int) -> Bytes:
    """Returns the bytes that store a page's side at `bits`: hi4 and lo4, or fewer of these bits."""
    if bits == 2:
        return two_bit_plane(codes >> 6, side)
    stored = [nibble_plane(codes >> 4, side)]
    if bits == 8:
        stored.append(nibble_plane(codes & 15, side))
    elif bits == 6:
        stored.append(two_bit_plane(codes >> 2 & 3, side))
    return np.concatenate(stored)


# ---- attention -------------------------------------------------------------------------------


def normalize(x: Float, weight: Float, eps: float) -> Float:
    """Computes RMSNorm over the last axis (arXiv 1910.07467)."""
    mean = np.mean(np.square(x.astype(np.float64)), axis=-1, keepdims=True).astype(np.float32)
    return x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight.astype(np.float32)


def rotate(x: Float, positions: NDArray[np.int64], inv_freq: Float, factor: float = 1.0) -> Float:
    """Applies RoPE (arXiv 2104.09864) to x [T, heads, D]: pairs (i, i + n), n = len(inv_freq)."""
    pairs = len(inv_freq)
    angle = positions.astype(np.float32)[:, None] * inv_freq[None, :]
    cos = (np.cos(angle) * np.float32(factor))[:, None, :]
    sin = (np.sin(angle) * np.float32(factor))[:, None, :]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = (first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :])
    return np.concatenate(turned, axis=-1)


def hadamard(x: Float) -> Float:
    """Computes the orthonormal Hadamard transform of x [..., D], its own inverse.

    It is of blocks of channels as long as the largest power of two that divides D: all of 64, 128
    or 256, 16 of 80, 32 of 96.
    """
    length = x.shape[-1] & -x.shape[-1]
    out, half = x.astype(np.float32), 1
    while half < length:
        pairs = out.reshape(-1, 2, half)
        out = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return out.reshape(x.shape) * (np.float32(1) / np.sqrt(np.float32(length)))


def split_heads(params: AttentionParams, qkv: Float) -> tuple[Float, Float, Float]:
    """Splits packed rows [T, (H + 2 Hk) * D] into q [T, H, D], k [T, Hk, D], v [T, Hk, D]."""
    heads = qkv.reshape(len(qkv), -1, params.head_dim)
    last = params.num_heads + params.num_kv_heads
    return heads[:, : params.num_heads], heads[:, params.num_heads : last], heads[:, last:]


def stored_rows(
    params: AttentionParams,
    k: Float,
    v: Float,
    positions: NDArray[np.int64],
    inv_freq: Float,
    k_norm: Float | None,
) -> tuple[Half, Half]:
    """Returns keys and values [T, Hk, D] as stored: keys normed and rotated, both float16.

    Raises `CacheError` beyond float16's range.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if k_norm is not None:
            k = normalize(k, k_norm, params.norm_eps)
        k = rotate(k, positions, inv_freq, params.rope_factor)
        keys, values = k.astype(np.float16), v.astype(np.float16)
    if not (np.isfinite(keys).all() and np.isfinite(values).all()):
        raise CacheError("a key or value is not finite in float16, so it cannot be cached")
    return keys, values


def ancestry(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Returns which rows of a branch each row sees [n, n]: its ancestors and itself.

    `parents`: the row each one follows, an earlier one, or -1.
    """
    sees = np.eye(len(parents), dtype=np.bool_)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees


def attention_weights(
    params: AttentionParams,
    logits: Float,
    seen: NDArray[np.bool_],
    sink_logit: float | None = None,
) -> Float:
    """Computes softmax weights float64 [T, n] of scaled logits over the keys that each query sees.

    A `sink_logit`, which no softcap holds, is of no key: it shares in the softmax and weighs on
    nothing, so that weights add up to less than 1.
    """
    logits = logits.astype(np.float64)
    if params.softcap > 0:
        logits = params.softcap * np.tanh(logits / params.softcap)
    top = np.max(np.where(seen, logits, -1e30), axis=1, keepdims=True, initial=-1e30)
    top = top if sink_logit is None else np.maximum(top, sink_logit)
    weights = np.where(seen, np.exp(np.minimum(logits - top, 0)), 0)
    total = weights.sum(axis=1, keepdims=True)
    total = total if sink_logit is None else total + np.exp(sink_logit - top)
    return weights / np.where(total > 0, total, 1)


# ---- reading less -----------------------------------------------------------------------------


def weighing(
    params: AttentionParams,
    logits: Float,
    seen: NDArray[np.bool_],
    pages: int,
    octaves: float,
    sink_logit: float | None = None,
) -> NDArray[np.bool_]:
    """Returns `seen` [T, n] without the keys of pages that weigh next to nothing for a query.

    These are among the first `pages` pages, which come before the floating-point keys. The best
    logit [T, n] of such a page is more than `octaves` powers of two below the best floating-point
    one, or a `sink_logit`. With 0 octaves no key is left out.
    """
    paged = pages * PAGE_TOKENS
    if octaves <= 0 or not pages:
        return seen
    if params.softcap > 0:
        logits = params.softcap * np.tanh(logits / params.softcap)
    logits = np.where(seen, logits, -1e30)
    least = np.max(logits[:, paged:], axis=1, initial=-1e30 if sink_logit is None else sink_logit)
    best = logits[:, :paged].reshape(len(logits), pages, PAGE_TOKENS).max(axis=2)
    weighs = best >= least[:, None] - octaves * np.log(2)
    return seen & np.pad(
        np.repeat(weighs, PAGE_TOKENS, axis=1),
        ((0, 0), (0, seen.shape[1] - paged)),
        constant_values=True,
    )


def page_bounds(q: Float, scale: Float, mid: Float) -> Float:
    """Computes scores [R, C] of pages for query rows [R, D] from their keys' constants [C, D].

    No key of a page has a larger product with the row.
    """
    half = np.float32(REACH + 0.5) * scale
    return q @ mid.T + np.abs(q) @ half.T


def chosen_pages(scores: Float, seen: NDArray[np.bool_], share: float) -> NDArray[np.bool_]:
    """Chooses the share of `seen` pages that one token's query heads, scores [R, C], read together.

    Each head's scores count against that of its best page; of equal pages the older is read.
    """
    if not seen.any():
        return seen
    best = np.where(seen, scores, -np.inf).max(axis=1, keepdims=True)
    worth = np.where(seen, (scores - best).max(axis=0), -np.inf)
    kept = max(1, int(np.ceil(share * seen.sum() - 1e-4)))
    chosen = np.zeros_like(seen)
    chosen[np.argsort(-worth, kind="stable")[:kept]] = True
    return chosen & seen


# ---- evidence --------------------------------------------------------------------------------

# A probe row that gives a page less of its attention counts in the page's mass alone.
OBSERVED_MASS = 1 / 4096
# History of a page's masses, whose codes are sixteenths of an octave below 1, code 255: each
# observation lowers the peak by `PEAK_STEP` codes and replaces `MEAN_SHARE` of the mean.
PEAK_STEP, MEAN_SHARE = 4, 0.2


def sampled_token(run: int) -> int:
    """Returns which of the 64 tokens from `run` * 64 on is a probe: splitmix64 of the run, odd."""
    mask = (1 << 64) - 1
    x = (run + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return run * PAGE_TOKENS + ((x ^ (x >> 31)) % PAGE_TOKENS | 1)


def sample_slot(run: int) -> int | None:
    """Returns which of `SAMPLED_PROBES` slots keeps a run's sampled token; None: it is no probe.

    Runs up to so many have a slot each. Whenever there are twice as many, every second sample goes,
    oldest first, as new ones come, now from every second run: after any number of runs each slot is
    taken and the samples span the text, all as far apart or half as far.
    """
    if run < SAMPLED_PROBES:
        return run
    stride = 1 << (run // SAMPLED_PROBES).bit_length()
    if run % stride:
        return None
    return sample_slot((2 * (run // stride - SAMPLED_PROBES // 2) + 1) * (stride // 2))


def page_errors(
    weights: Float, q: Float, outputs: Float, values: Float, key_steps: Float, value_steps: Float
) -> Float:
    """Computes squared changes of each probe row's output, float64 [R, 3].

    They are those if the page's keys were rounded to their 8-bit steps, if its values were, and if
    the page were gone.
    `weights` [R, 64] of the page's tokens, `q` [R, D] scaled to natural logits, `outputs` [R, D] of
    the whole attention, `values` [64, D] as read, `key_steps` [D], `value_steps` [64, 1] or
    [1, D]. Rounding to steps s adds noise of variance s^2 / 12; to first order a logit's error e at
    token t moves the output by S_t e (V_t - X), a value's by S_t e; without the page, X is
    renormalised exactly.
    """
    deviation = values[None].astype(np.float64) - outputs[:, None]
    logit_noise = np.square(q.astype(np.float64) * key_steps).sum(axis=1) / 12
    spread = (np.square(weights) * np.square(deviation).sum(axis=2)).sum(axis=1)
    steps = np.square(weights) @ np.broadcast_to(np.square(value_steps), values.shape).sum(axis=1)
    moved = np.square(np.einsum("rt,rtd->rd", weights, deviation)).sum(axis=1)
    # Where a page has nearly all the weight, the noise of what is left would look like loss.
    left = np.maximum(1 - weights.sum(axis=1), 1 / 16)
    return np.stack([logit_noise * spread, steps / 12, moved / left**2], axis=1)


def mass_code(mass: float) -> int:
    """Encodes a mass as one byte."""
    return int(np.rint(np.clip(255 + 16 * np.log2(max(mass, 1e-9)), 1, 255)))


def mass_of(code: int) -> float:
    """Returns the mass that a byte stands for; 0: never observed."""
    return 2.0 ** ((code - 255) / 16) if code else 0.0
