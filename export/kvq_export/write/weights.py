"""Quantises weight rows in blocks.

Owns the search for each block's scale and offset. Knows no file, no graph and no layout of bytes:
codes leave here one per byte. `kvq.reference.linear` says what codes, scales and offsets mean.

A symmetric scale may be negative: the weight of the largest magnitude takes the longer side of the
code range. A zero point lies within the range of codes, so that zero is near a code. Sub-blocks of
a super-block are fitted as blocks with a zero point, and then get the nearest whole numbers.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import product
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvq.errors import CheckpointError, argument
from kvq.reference.linear import (
    E2M1_BIAS,
    E2M1_TOP,
    PANEL_ROWS,
    SCALE_UNIT,
    ZERO_PARTS,
    BlockFormat,
    Blocks,
    Grid,
    zero_points,
)

Rows = tuple[Any, ...]
"""Holds arrays of the same rows; None stands for one that is not there."""

# Candidate code magnitudes of a block's largest weight, as shares of half the range of codes. Below
# the range's end the whole block is stretched less than it could be; above it the largest weight is
# clipped.
_SHARES = {
    4: np.linspace(0.75, 1.125, 14, dtype=np.float32),
    8: np.linspace(115 / 128, 130 / 128, 9, dtype=np.float32),
}
# Shares of a block's range that the codes of a grid with a zero point span at first. 1 is among
# them, so that weights which are on such a grid stay as they are.
_SPANS = {
    3: np.linspace(0.6, 1.0, 9, dtype=np.float32),
    4: np.linspace(0.7, 1.0, 7, dtype=np.float32),
    5: np.linspace(0.8, 1.0, 5, dtype=np.float32),
    6: np.linspace(0.88, 1.0, 4, dtype=np.float32),
    8: np.ones(1, np.float32),
}
_REFITS = {3: 2, 4: 2, 5: 2, 6: 1, 8: 1}
# Weights per pass: the few float32 arrays of a pass stay in a core's own cache.
_PASS_WEIGHTS = 1 << 17
# The largest number of a sub-block of 32 columns.
TOP_NUMBER = 63
# What is added to the number of a scale, in turn.
_NUMBER_CHANGES = (0, -1, 1)


class Supers(NamedTuple):
    """Holds what the numbers of n super-blocks' sub-blocks multiply, float32 [n], as stored."""

    scales: np.ndarray
    offsets: np.ndarray


class BlockConstants(NamedTuple):
    """Holds what codes mean in n blocks: `scales * (code - middles)`, float32 [n].

    `stored` are the two constants that `Blocks` keeps of a block: its scale and its zero point, or
    none, or the two whole numbers of a sub-block.
    """

    scales: np.ndarray
    middles: np.ndarray
    stored: tuple[np.ndarray, np.ndarray | None]

    def with_stored_scales(self) -> "BlockConstants":
        """Returns those of blocks, not of sub-blocks, with scales as they will be stored."""
        scales = stored_scales(self.scales)
        return BlockConstants(scales, self.middles, (scales, self.stored[1]))


def quantize(rows: np.ndarray, form: BlockFormat, importance: np.ndarray | None = None) -> Blocks:
    """Rounds `rows`, float32 [N, K], each block by itself; constants are in weights' units.

    Squared errors of a column are weighed by its `importance` [K], or all alike. Codes are uint8
    [N, K'], K' being K rounded up to whole blocks, or super-blocks.
    """
    out = empty_blocks(len(rows), rows.shape[1], form)
    wide, places = form.activation_block, out.scales.shape[1]
    weights = None if importance is None else by_block(importance[None], wide)
    # Blocks that are fitted together are weighed alike: all of a row, or one of each.
    joint = places if weights is None else 1
    step = max(1, _PASS_WEIGHTS // (joint * wide))
    for place, start in product(range(0, places, joint), range(0, len(rows), step)):
        part, across = slice(start, start + step), slice(place * wide, (place + joint) * wide)
        columns = by_block(rows[part, across], wide)
        supers = fit_supers(columns, form)
        codes = np.empty(columns.shape, np.uint8)
        for first in range(0, wide, form.block):
            block = slice(first, first + form.block)
            weight = None if weights is None else weights[block, place]
            constants = fit(columns[block], form, weight, supers)
            codes[block] = codes_of(columns[block], constants, form.bits)
            blocks = slice(
                (across.start + first) // form.block, across.stop // form.block, wide // form.block
            )
            set_constants(out, part, blocks, constants)
        out.codes[part, across] = codes.T.reshape(-1, joint * wide)
        set_supers(out, part, slice(place, place + joint), supers)
    return out


def empty_blocks(rows: int, columns: int, form: BlockFormat) -> Blocks:
    """Returns room for the codes and constants of a matrix [rows, columns]."""
    supers = -(-columns // form.activation_block)
    padded = supers * form.activation_block
    codes, scales = np.empty((rows, padded), np.uint8), np.empty((rows, supers), np.float32)
    if form.grid.has_supers:
        numbers = np.empty((2, rows, padded // form.block), np.uint8)
        return Blocks(codes, scales, np.empty_like(scales), *numbers)
    has_zeros = form.grid is Grid.ZERO_POINT
    return Blocks(codes, scales, np.empty(scales.shape, np.uint8) if has_zeros else None)


def set_constants(out: Blocks, rows: slice, blocks: int | slice, constants: BlockConstants) -> None:
    """Stores the `constants` of some blocks of some `rows`."""
    sides = out[1:3] if out.sub_scales is None else out[3:5]
    for side, stored in zip(sides, constants.stored, strict=True):
        if side is not None and stored is not None:
            side[rows, blocks] = stored.reshape(side[rows, blocks].shape)


def set_supers(out: Blocks, rows: slice, places: int | slice, supers: Supers | None) -> None:
    """Stores the constants of some super-blocks of some `rows`, where there are any."""
    for side, constants in zip(out[1:3], supers or (), strict=False):
        assert side is not None
        side[rows, places] = constants.reshape(side[rows, places].shape)


def quantize_chunks(
    chunks: Iterable[tuple[np.ndarray, np.ndarray | None]], form: BlockFormat, threads: int
) -> Iterator[Blocks]:
    """Yields `quantize` of each chunk of rows with its importance, or None, in order.

    At most `threads` + 1 chunks are in flight.
    """
    pending: deque[Future[Blocks]] = deque()
    pool = quantizers(threads)
    try:
        for rows, importance in chunks:
            pending.append(pool.submit(quantize, rows, form, importance))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


@cache
def quantizers(threads: int) -> ThreadPoolExecutor:
    """Returns the threads that quantise, all of them running.

    An export asks for them at its beginning: CPython waits for ever for a thread that has no memory
    to begin with.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvq-quantize")
    all_run = Barrier(threads)
    for begun in [pool.submit(all_run.wait) for _ in range(threads)]:
        begun.result()
    return pool


def by_block(rows: np.ndarray, block: int) -> np.ndarray:
    """Turns rows float32 [N, K] into blocks [block, N * ceil(K / block)], zero-padded."""
    spare = -rows.shape[1] % block
    if spare:
        rows = np.pad(rows, ((0, 0), (0, spare)))
    return np.ascontiguousarray(rows.reshape(-1, block).T)


def fit(
    blocks: np.ndarray,
    form: BlockFormat,
    importance: np.ndarray | None = None,
    supers: Supers | None = None,
) -> BlockConstants:
    """Returns what makes the squared errors of `blocks` [block, n] least.

    Each is weighed by its place's `importance` [block], or alike without any. The format's grid is
    symmetric, has a zero point, or has super-blocks, `supers`, with sub-blocks of 32 columns.
    """
    assert form.grid in (Grid.SYMMETRIC, Grid.ZERO_POINT) or supers is not None, (
        f"{form} is of weights that were quantised before"
    )
    weight = _weights(importance, len(blocks))
    if supers is not None:
        return _with_numbers(blocks, form.bits, weight, supers)
    if form.grid is Grid.SYMMETRIC:
        scales = _symmetric(blocks, form.bits, weight)
        return BlockConstants(scales, np.full_like(scales, 1 << (form.bits - 1)), (scales, None))
    scales, zeros = _with_zero(blocks, form.bits, weight)
    return BlockConstants(scales, zero_points(zeros, form.bits), (scales, zeros))


def fit_supers(columns: np.ndarray, form: BlockFormat) -> Supers | None:
    """Returns what the numbers of super-blocks `columns` [256, n] multiply; None of other grids.

    The largest number is that of a sub-block whose whole range its codes span. Hardly any scale
    that `fit` finds is larger, and few are much smaller.
    """
    if not form.grid.has_supers:
        return None
    blocks = columns.reshape(-1, form.block, columns.shape[1])
    low, high = np.minimum(blocks.min(axis=1), 0), np.maximum(blocks.max(axis=1), 0)
    scales = (high - low).max(axis=0) / ((1 << form.bits) - 1)
    scales, offsets = (stored_scales(top / TOP_NUMBER) for top in (scales, -low.min(axis=0)))
    return Supers(scales, -offsets)


def codes_of(values: np.ndarray, constants: BlockConstants, bits: int) -> np.ndarray:
    """Returns the nearest codes, uint8, of values [..., n] of n blocks."""
    places = values * _divided(np.float32(1), constants.scales)
    places += constants.middles
    np.rint(places, out=places)
    return np.clip(places, 0, (1 << bits) - 1, out=places).astype(np.uint8)


def _weights(importance: np.ndarray | None, count: int) -> np.ndarray:
    """Returns weights of `count` places, float32 [count, 1], the largest 1."""
    if importance is None or not importance.any():
        importance = np.ones(count, np.float32)
    return (importance / max(float(importance.max()), 1e-30)).astype(np.float32)[:, None]


def _divided(numbers: np.ndarray | np.float32, by: np.ndarray) -> np.ndarray:
    """Divides, with 0 where `by` is 0."""
    return np.divide(numbers, by, out=np.zeros_like(by), where=by != 0)


def whole_panels(chunks: Iterable[Rows]) -> Iterator[Rows]:
    """Yields the same rows of the arrays of each chunk, cut where panels end."""
    rest: Rows | None = None
    for chunk in chunks:
        rows = chunk if rest is None else join_rows((rest, chunk))
        whole = len(rows[0]) // PANEL_ROWS * PANEL_ROWS
        if whole:
            yield _part(rows, slice(whole))
        rest = _part(rows, slice(whole, None)) if whole < len(rows[0]) else None
    if rest is not None:
        yield rest


def join_rows(chunks: Iterable[Rows]) -> Rows:
    """Joins the rows of all chunks."""
    arrays = zip(*chunks, strict=True)
    return tuple(None if pieces[0] is None else np.concatenate(pieces) for pieces in arrays)


def _part(arrays: Rows, rows: slice) -> Rows:
    return tuple(None if array is None else array[rows] for array in arrays)


def stored_scales(scales: np.ndarray) -> np.ndarray:
    """Returns scales, float32, that `half_scales` keeps."""
    return half_scales(scales).astype(np.float32) * SCALE_UNIT


def half_scales(scales: np.ndarray) -> np.ndarray:
    """Returns scales as a panel stores them, float16. Raises `CheckpointError` beyond its range."""
    with np.errstate(over="ignore"):
        halves = (scales / SCALE_UNIT).astype(np.float16)
    if not np.isfinite(halves).all():
        raise CheckpointError(
            f"a block of weights needs a scale of {np.abs(scales).max():.4g}, and "
            f"{np.finfo(np.float16).max * SCALE_UNIT:.4g} is the largest that can be stored; "
            f"scales are smaller at more {argument('bits')}"
        )
    return halves


def stored_exponents(scales: np.ndarray) -> np.ndarray:
    """Returns e2m1 scales, float32 in units of the weights, as a panel stores them: uint8.

    Raises `CheckpointError` for one that is no power of two, or too large.
    """
    parts, powers = np.frexp(scales)
    exponents = powers - 1 + E2M1_BIAS
    if not ((parts == 0.5) & (exponents >= 0) & (exponents <= E2M1_TOP)).all():
        raise CheckpointError(
            f"scales of blocks in MXFP4, here {scales.min():.4g} to {scales.max():.4g}, are powers "
            f"of two up to {2.0 ** (E2M1_TOP - E2M1_BIAS):.4g}; export with {argument('bits')} 8"
        )
    return exponents.astype(np.uint8)


def _symmetric(blocks: np.ndarray, bits: int, weight: np.ndarray) -> np.ndarray:
    """Returns the best scale of each block on a symmetric grid.

    For fixed levels q the best scale is (x.q)/(q.q), and it removes (x.q)^2/(q.q) of the error. So
    a candidate is judged by that gain alone, and every scale that is kept is already refitted.
    """
    top: NDArray[np.float32] = blocks.max(axis=0)
    bottom: NDArray[np.float32] = blocks.min(axis=0)
    extreme = np.where(top > -bottom, top, bottom)
    # A block this small is stored as zeros: the squares below would underflow.
    alive = np.abs(extreme) > np.float32(1e-18)
    unit = np.divide(-1, extreme, out=np.zeros_like(extreme), where=alive)
    levels = np.empty_like(blocks)
    best_gain = np.zeros_like(extreme)
    best_scale = np.zeros_like(extreme)
    for share in _SHARES[4 if bits < 8 else 8]:
        scale, gain = _regressed(blocks, unit * share * (1 << (bits - 1)), levels, bits, weight)
        better = gain > best_gain
        np.copyto(best_gain, gain, where=better)
        np.copyto(best_scale, scale, where=better)
    for _ in range(_REFITS[bits] - 1):
        inverse = np.divide(1, best_scale, out=np.zeros_like(extreme), where=best_scale != 0)
        best_scale, _ = _regressed(blocks, inverse, levels, bits, weight)
    return best_scale


def _regressed(
    blocks: np.ndarray, inverse: np.ndarray, levels: np.ndarray, bits: int, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scale that fits the levels of `blocks * inverse` best, and its gain."""
    half = 1 << (bits - 1)
    np.multiply(blocks, inverse, out=levels)
    np.rint(levels, out=levels)
    np.clip(levels, -half, half - 1, out=levels)
    cross = np.einsum("bn,bn,b->n", blocks, levels, weight[:, 0])
    square = np.einsum("bn,bn,b->n", levels, levels, weight[:, 0])
    scale = np.divide(cross, square, out=np.zeros_like(cross), where=square > 0)
    return scale, cross * scale


def _with_zero(blocks: np.ndarray, bits: int, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scale and zero point by regression of weights on codes, from several spans."""
    low, high = np.minimum(blocks.min(axis=0), 0), np.maximum(blocks.max(axis=0), 0)
    alive = high - low > np.float32(1e-18)
    total = weight.sum()
    centred = blocks - (weight * blocks).sum(axis=0) / total
    mean = (weight * blocks).sum(axis=0) / total
    best = np.full(blocks.shape[1], np.inf, np.float32)
    best_scale = np.zeros_like(best)
    best_zero = np.zeros(len(best), np.uint8)
    for span in _SPANS[bits]:
        scale = np.where(alive, (high - low) * span / ((1 << bits) - 1), 1).astype(np.float32)
        zero = _offsets(-low * span / scale, bits)
        for _ in range(_REFITS[bits]):
            codes = _rounded(blocks, scale, zero_points(zero, bits), bits)
            middle = (weight * codes).sum(axis=0) / total
            codes -= middle
            spread = (weight * codes * codes).sum(axis=0)
            cross = (weight * codes * centred).sum(axis=0)
            fits = (spread > 0) & (cross > 0) & alive
            scale = np.where(fits, np.divide(cross, spread, where=fits, out=scale.copy()), scale)
            zero = _offsets(middle - mean / scale, bits)
        codes = _rounded(blocks, scale, zero_points(zero, bits), bits)
        errors = (codes - zero_points(zero, bits)) * scale - blocks
        error = (weight * errors * errors).sum(axis=0)
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(best_scale, scale, where=better)
        np.copyto(best_zero, zero, where=better)
    best_scale[~alive] = 0
    return best_scale, best_zero


def _with_numbers(
    blocks: np.ndarray, bits: int, weight: np.ndarray, supers: Supers
) -> BlockConstants:
    """Returns the best whole numbers of sub-blocks [32, n] of `supers`.

    Numbers near the scale of a zero point's grid are tried, each with the offset that suits it.
    """
    scales, zeros = _with_zero(blocks, bits, weight)
    minima = scales * zero_points(zeros, bits)
    nearest = np.rint(_divided(scales, supers.scales))
    least = np.full(blocks.shape[1], np.inf, np.float32)
    best = [np.zeros_like(scales) for _ in range(4)]
    for change in _NUMBER_CHANGES:
        number = np.clip(nearest + np.float32(change), 1, TOP_NUMBER)
        scale = number * supers.scales
        codes = _rounded(blocks, scale, _divided(minima, scale), bits)
        # The mean of what the codes give too much.
        excess = (weight * (scale * codes - blocks)).sum(axis=0) / weight.sum()
        offset = np.clip(np.rint(_divided(excess, -supers.offsets)), 0, TOP_NUMBER)
        middle = _divided(offset * -supers.offsets, scale)
        errors = (_rounded(blocks, scale, middle, bits) - middle) * scale - blocks
        error = (weight * errors * errors).sum(axis=0)
        better = error < least
        np.copyto(least, error, where=better)
        for kept, tried in zip(best, (scale, middle, number, offset), strict=True):
            np.copyto(kept, tried, where=better)
    first, second = (numbers.astype(np.uint8) for numbers in best[2:])
    return BlockConstants(best[0], best[1], (first, second))


def _rounded(blocks: np.ndarray, scale: np.ndarray, middle: np.ndarray, bits: int) -> np.ndarray:
    codes = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    codes += middle
    np.rint(codes, out=codes)
    return np.clip(codes, 0, (1 << bits) - 1, out=codes)


def _offsets(zero: np.ndarray, bits: int) -> np.ndarray:
    return np.clip(np.rint(zero * (ZERO_PARTS / (1 << bits))), 0, ZERO_PARTS - 1).astype(np.uint8)
