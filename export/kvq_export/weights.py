"""Symmetric block quantisation of weight rows.

Owns the search for each block's scale. Knows no file, no graph and no layout of bytes: codes leave
here one per byte.

A row of K weights is cut into blocks (the last one padded with zeros); a block keeps one scale and
unsigned codes: `weight = scale * (code - 2**(bits - 1))`. The scale may be negative: the weight of
the largest magnitude takes the longer side of the code range.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

# Candidate code magnitudes of a block's largest weight. Below the range's end the whole block is
# stretched less than it could be; above it the largest weight is clipped.
_CANDIDATES = {
    4: np.linspace(6.0, 9.0, 14, dtype=np.float32),
    8: np.linspace(115.0, 130.0, 9, dtype=np.float32),
}
_REFITS = {4: 2, 8: 1}
# Weights per pass: the few float32 arrays of a pass stay in a core's own cache.
_PASS_WEIGHTS = 1 << 17


def quantize(rows: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of `rows`, float32 [N, K].

    Returns codes uint8 [N, ceil(K/block) * block] and scales float32 [N, ceil(K/block)].
    """
    num_rows, columns = rows.shape
    blocks = -(-columns // block)
    codes = np.empty((num_rows, blocks * block), np.uint8)
    scales = np.empty((num_rows, blocks), np.float32)
    step = max(1, _PASS_WEIGHTS // (blocks * block))
    for start in range(0, num_rows, step):
        part = rows[start : start + step]
        if columns % block:
            part = np.pad(part, ((0, 0), (0, blocks * block - columns)))
        best, levels = _search(np.ascontiguousarray(part.reshape(-1, block).T), bits)
        scales[start : start + step] = best.reshape(-1, blocks)
        levels += np.float32(1 << (bits - 1))
        codes[start : start + step] = levels.astype(np.uint8).T.reshape(-1, blocks * block)
    return codes, scales


def quantize_chunks(
    chunks: Iterable[np.ndarray], bits: int, block: int, threads: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`quantize` of each chunk, in order, on `threads` threads; at most `threads` + 1 in flight."""
    pending: deque[Future[tuple[np.ndarray, np.ndarray]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvq-quantize")
    try:
        for chunk in chunks:
            pending.append(pool.submit(quantize, chunk, bits, block))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _search(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale [n] and signed levels (float32 [block, n]) of `blocks`, float32 [block, n].

    For fixed levels q the best scale is (x.q)/(q.q) and removes (x.q)^2/(q.q) of the squared
    error, so a candidate is judged by that gain alone and every scale kept is already refitted.
    """
    top, bottom = blocks.max(axis=0), blocks.min(axis=0)
    extreme = np.where(top > -bottom, top, bottom)
    # A block this small is stored as zeros: the squares below would underflow.
    alive = np.abs(extreme) > np.float32(1e-18)
    unit = np.divide(-1, extreme, out=np.zeros_like(extreme), where=alive)
    levels = np.empty_like(blocks)
    best_gain = np.zeros_like(extreme)
    best_scale = np.zeros_like(extreme)
    for magnitude in _CANDIDATES[bits]:
        scale, gain = _round(blocks, unit * magnitude, levels, bits)
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, scale, where=better)
    for _ in range(_REFITS[bits]):
        inverse = np.divide(1, best_scale, out=np.zeros_like(extreme), where=best_scale != 0)
        best_scale, _ = _round(blocks, inverse, levels, bits)
    return best_scale, levels


def _round(
    blocks: np.ndarray, inverse: np.ndarray, levels: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds `blocks * inverse` into `levels`; returns the least-squares scale and its gain."""
    half = 1 << (bits - 1)
    np.multiply(blocks, inverse, out=levels)
    np.rint(levels, out=levels)
    np.clip(levels, -half, half - 1, out=levels)
    cross = np.einsum("bn,bn->n", blocks, levels)
    square = np.einsum("bn,bn->n", levels, levels)
    scale = np.divide(cross, square, out=np.zeros_like(cross), where=square > 0)
    return scale, cross * scale
