"""Rounding with error feedback: what one column's rounding errs, later columns make up for.

GPTQ (Frantar et al., arXiv 2210.17323) rounds a matrix W to Q column by column so that products
with its inputs X change least: sum |(W - Q) X|^2, which is |(W - Q) L|^2 for the Cholesky factor L
of the inputs' second moments. Columns are taken from the last to the first here, which needs L
alone and no inverse: Babai's nearest plane (arXiv 2507.18553), the same numbers as GPTQ's in the
opposite order of columns. Departures: a block's grid is fitted when its turn comes, to what would
be best without rounding, each column weighed by what an error there costs; columns keep their
order (blocks by the size of their moments were worse).

What was rounded before a matrix has changed its inputs, which `matched` lets it make up for.

Owns the arithmetic on one matrix; knows no model, and not where moments come from.
"""

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference_linear import SCALE_UNIT, BlockFormat, Blocks, zero_points
from kvq_export.weights import codes_of, fit, half_scales

# Of the mean of the diagonal, added to it: directions that few tokens took are not trusted.
DAMPING = 0.01
# Likewise where a matrix is changed for what its inputs lost: with as little as `DAMPING` it learns
# the calibration text by heart (of SmolLM2 errors fell to a third there and rose elsewhere).
RIDGE = 1.0
# Rows rounded in one go. Steps are many and short, and threads took turns at them: two were slower
# than one at every number of rows (256 to 2048), and few rows slower than many.
_ROWS = 2048
# Columns factored in one go.
_PANEL = 512
# Tokens whose inputs are compared in one go.
_TOKENS = 512


def factor(moments: np.ndarray, block: int) -> np.ndarray:
    """Lower Cholesky factor float32 [K', K'] of damped `moments` [K, K], K' whole blocks.

    `moments` is the sum of x x^T over inputs x; what none of them used costs next to nothing.
    """
    columns, lower = len(moments), _root(moments, DAMPING)
    spare = -columns % block
    if not spare:
        return lower
    padded = np.eye(columns + spare, dtype=np.float32)
    padded[:columns, :columns] = lower
    return padded


def seen(rows: np.ndarray, exact: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of `inputs` float32 [T, K]: their sum of x x^T, and what products with `rows` [N, K] lack.

    `exact` [T, K] is what the inputs were before anything was rounded; lacking, float32
    [N or K, K], is the sum of W (exact - x) x^T, or where W is taller than wide, of that without W.
    Both can be summed over parts of a text.
    """
    tall = len(rows) > inputs.shape[1]
    starts = range(0, len(inputs), _TOKENS)
    drifts = ((exact[at : at + _TOKENS] - inputs[at : at + _TOKENS]).T for at in starts)
    lacking = np.concatenate([drift if tall else rows @ drift for drift in drifts], axis=1)
    return inputs.T @ inputs, lacking @ inputs


def matched(rows: np.ndarray, lacking: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Rows float32 [N, K] whose products with rounded inputs are most like those with exact ones.

    `moments` and `lacking` as `seen` has them. W (X X'^T) (X' X'^T)^-1 of GPTAQ (Li et al., arXiv
    2504.02692), with a ridge that draws it to W; there the same is found column by column.
    """
    if not lacking.any():
        return rows
    right = rows @ lacking if len(rows) > len(lacking[0]) else lacking
    return rows + _solved(_root(moments, RIDGE), right.copy())


def _solved(lower: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows x [N, K] with x L L^T = `rows`, which is used up, for a factor L = `lower` [K, K]."""
    panels = _panels(lower)
    turns = [np.linalg.inv(lower[own, own]) for own in panels]
    for own, turn in zip(panels, turns, strict=True):
        known = slice(own.start)
        rows[:, own] = (rows[:, own] - rows[:, known] @ lower[own, known].T) @ turn.T
    for own, turn in zip(reversed(panels), reversed(turns), strict=True):
        known = slice(own.stop, None)
        rows[:, own] = (rows[:, own] - rows[:, known] @ lower[known, own]) @ turn
    return rows


def _root(moments: np.ndarray, share: float) -> np.ndarray:
    """Lower Cholesky factor float32 [K, K] of `moments` with a share of their mean on the diagonal.

    Ten times that share, as often as rounding leaves no root. Raises `CheckpointError` for moments
    that are not finite.
    """
    mean = float(np.trace(moments)) / len(moments)
    if not np.isfinite(mean):
        raise CheckpointError(
            "what this model computes of the calibration text is no number, or too large for "
            "float32; compare the checkpoint's files with their source, or give another text"
        )
    while True:
        damped = moments.astype(np.float32)
        damped[np.diag_indices(len(damped))] += np.float32(max(mean * share, 1e-12))
        try:
            return _cholesky(damped)
        except np.linalg.LinAlgError:
            share *= 10


def _cholesky(a: np.ndarray) -> np.ndarray:
    """The factor of `a`, which is used up. Raises `LinAlgError`; twice as fast as numpy's own.

    Right-looking, a panel of columns at a time, so that nearly all of it is products of matrices;
    what is above the diagonal is neither read nor computed.
    """
    for own in _panels(a):
        rest = slice(own.stop, None)
        a[own, own] = np.linalg.cholesky(a[own, own])
        a[rest, own] = a[rest, own] @ np.linalg.inv(a[own, own]).T
        a[own, rest] = 0
        for later in _panels(a, own.stop):
            below = slice(later.start, None)
            a[below, later] -= a[below, own] @ a[later, own].T
    return a


def _panels(a: np.ndarray, start: int = 0) -> list[slice]:
    """Of the columns from `start` on."""
    return [slice(at, min(at + _PANEL, len(a))) for at in range(start, len(a), _PANEL)]


def quantize_with(rows: np.ndarray, lower: np.ndarray, form: BlockFormat) -> Blocks:
    """Codes of `rows` float32 [N, K] for inputs whose moments' factor is `lower` [K', K'].

    As `weights.quantize`, scales as they will be stored.
    """
    blocks = len(lower) // form.block
    codes = np.empty((len(rows), len(lower)), np.uint8)
    scales = np.empty((len(rows), blocks), np.float32)
    offsets = None if form.grid.offset_type is None else np.empty((len(rows), blocks), np.uint8)
    own = np.stack([lower[i : i + form.block, i : i + form.block] for i in _starts(lower, form)])
    turns = np.linalg.inv(own)

    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        columns = np.zeros((len(lower), len(rows[part])), np.float32)
        columns[: rows.shape[1]] = rows[part].T
        errors = np.zeros_like(columns)
        for index in reversed(range(blocks)):
            place = slice(index * form.block, (index + 1) * form.block)
            after = slice(place.stop, None)
            carried = lower[after, place].T @ errors[after]
            best = columns[place] + turns[index].T @ carried
            scale, zero = fit(best, form, np.diag(own[index]) ** 2)
            scale = half_scales(scale).astype(np.float32) * SCALE_UNIT
            found = _rounded(columns[place], carried, own[index], (scale, zero), form.bits)
            codes[part, place], errors[place] = found[0].T, found[1]
            scales[part, index] = scale
            if offsets is not None and zero is not None:
                offsets[part, index] = zero

    return Blocks(codes, scales, offsets)


def _starts(lower: np.ndarray, form: BlockFormat) -> range:
    return range(0, len(lower), form.block)


def _rounded(
    columns: np.ndarray,
    carried: np.ndarray,
    own: np.ndarray,
    grid: tuple[np.ndarray, np.ndarray | None],
    bits: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 and errors float32, [block, n], of a block of columns [block, n].

    `carried` [block, n] is what the columns after it err, times the factor; `own` the factor's part
    on the diagonal. It is used up.
    """
    scale, zero = grid
    middle = np.float32(1 << (bits - 1)) if zero is None else zero_points(zero, bits)
    codes, errors = np.empty(columns.shape, np.uint8), np.empty_like(columns)
    for j in reversed(range(len(columns))):
        codes[j] = codes_of(columns[j] + carried[j] / own[j, j], scale, zero, bits)
        errors[j] = columns[j] - (codes[j] - middle) * scale
        carried[:j] += own[j, :j, None] * errors[j]
    return codes, errors
