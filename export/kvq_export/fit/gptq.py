"""Rounds with error feedback: later columns make up for the rounding errors of earlier ones.

GPTQ (Frantar et al., arXiv 2210.17323) rounds a matrix W to Q column by column so that products
with its inputs X change least: sum |(W - Q) X|^2, which is |(W - Q) L|^2 for the Cholesky factor L
of the inputs' second moments. Here columns are taken from the last to the first, which needs L
alone and no inverse: Babai's nearest plane (arXiv 2507.18553), the same numbers as GPTQ's in the
opposite order of columns. Departures from GPTQ: a block's grid is fitted when its turn comes, to
what would be best without rounding, each column weighed by what an error there costs; and columns
keep their order.

What was rounded before a matrix has changed its inputs; `compensate` makes up for that.

Owns the arithmetic on one matrix; knows no model, and not where moments come from.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvq.errors import CheckpointError
from kvq.reference.linear import BlockFormat, Blocks
from kvq_export.fit.native_products import Map
from kvq_export.write.weights import (
    BlockConstants,
    Supers,
    codes_of,
    empty_blocks,
    fit,
    fit_supers,
    set_constants,
    set_supers,
)

# Share of the diagonal's mean that damping counts each channel larger by: one that the text hardly
# used is not free.
LEAST_CHANNEL = 0.01
# Rows rounded in one go. Steps are many and short: neither threads nor fewer rows are faster.
_ROWS = 2048
# Columns factored in one go.
_PANEL = 256
# Parts of a matrix's rows that are solved for at a time.
_SOLVED_PARTS = 2


class Moments(NamedTuple):
    """Holds sums over the inputs x of a matrix W [N, K]; those of two texts can be added.

    `inputs` float32 [K, K] is the sum of x x^T. `drift` float32 [N or K, K] is the sum of
    W (unrounded - x) x^T, what products lack; where W is taller than wide, of that without W. It is
    None where no inputs were compared.
    """

    inputs: np.ndarray
    drift: np.ndarray | None = None

    def add(self, other: "Moments") -> None:
        """Adds the sums of `other` to these, in place."""
        np.add(self.inputs, other.inputs, out=self.inputs)
        if self.drift is not None and other.drift is not None:
            np.add(self.drift, other.drift, out=self.drift)

    def lack(self, rows: np.ndarray, picked: slice = slice(None)) -> np.ndarray | None:
        """Returns what products with the `picked` of all `rows` [N, K] lack, float32 [n, K]."""
        if self.drift is None or not self.drift.any():
            return None
        tall = len(rows) > rows.shape[1]
        return rows[picked] @ self.drift if tall else self.drift[picked]


def factor(moments: np.ndarray, block: int, damping: float, each: Map = map) -> np.ndarray:
    """Returns the lower Cholesky factor float32 [K', K'] of damped `moments` [K, K].

    K' is K rounded up to whole blocks. `moments` is the sum of x x^T over inputs x; `damping` is
    the share of their diagonal that is added to it. `each` may run parts of it in threads.
    """
    columns, lower = len(moments), _root(moments, damping, each)
    spare = -columns % block
    if not spare:
        return lower
    padded = np.eye(columns + spare, dtype=np.float32)
    padded[:columns, :columns] = lower
    return padded


def input_moments(lack: np.ndarray, inputs: np.ndarray) -> Moments:
    """Sums the moments of `inputs` float32 [T, K] of a matrix [N, K].

    `lack` is what the matrix times the unrounded inputs has more than times these, float32 [T, N].
    Where the matrix is taller than wide, it is that of the inputs alone, [T, K].
    """
    return Moments(inputs.T @ inputs, lack.T @ inputs)


def compensate(
    rows: np.ndarray, moments: Moments, lower: np.ndarray, each: Map = map
) -> np.ndarray:
    """Returns rows float32 [N, K] whose products with the inputs are most like the unrounded ones.

    This is W (X X'^T) (X' X'^T)^-1 of GPTAQ (Li et al., arXiv 2504.02692), with damping that draws
    it to W; GPTAQ finds it column by column. `lower` is the factor of the damped moments;
    `each` may run parts of it in threads.
    """
    columns, lack = rows.shape[1], moments.lack(rows)
    if lack is None:
        return rows
    change, triangle = lack.copy(), lower[:columns, :columns]

    def solve_some(part: slice) -> None:
        solve(triangle, change[part])

    step = -(-len(rows) // _SOLVED_PARTS)
    for _ in each(solve_some, [slice(at, at + step) for at in range(0, len(rows), step)]):
        pass
    return rows + change


def solve(lower: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Solves x L L^T = `rows` for x [N, K], with L = `lower` [K, K]; `rows` is overwritten."""
    panels = _panels(lower)
    inverses = [np.linalg.inv(lower[panel, panel]) for panel in panels]
    for panel, inverse in zip(panels, inverses, strict=True):
        known = slice(panel.start)
        rows[:, panel] = (rows[:, panel] - rows[:, known] @ lower[panel, known].T) @ inverse.T
    for panel, inverse in zip(reversed(panels), reversed(inverses), strict=True):
        known = slice(panel.stop, None)
        rows[:, panel] = (rows[:, panel] - rows[:, known] @ lower[known, panel]) @ inverse
    return rows


def _root(moments: np.ndarray, damping: float, each: Map) -> np.ndarray:
    """Returns the lower Cholesky factor float32 [K, K] of damped `moments`.

    The share `damping` of the diagonal is added to it, and ten times that as often as rounding
    leaves no factor. Raises `CheckpointError` for moments that are not finite.
    """
    diagonal = np.diag(moments)
    mean = float(diagonal.mean())
    if not np.isfinite(mean):
        raise CheckpointError(
            "what this model computes of the calibration text is no number, or too large for "
            "float32; compare the checkpoint's files with their source, or give another text"
        )
    channels = np.maximum(diagonal, 0) + np.float32(max(LEAST_CHANNEL * mean, 1e-12))
    while True:
        damped = moments.astype(np.float32)
        damped[np.diag_indices(len(damped))] += np.float32(damping) * channels
        try:
            return _cholesky(damped, each)
        except np.linalg.LinAlgError:
            damping *= 10


def _cholesky(a: np.ndarray, each: Map) -> np.ndarray:
    """Overwrites `a` with its Cholesky factor and returns it; twice as fast as numpy's own.

    Right-looking, a panel of columns at a time, so that nearly all of it is products of matrices;
    what is above the diagonal is neither read nor computed. Raises `LinAlgError`.
    """
    for panel in _panels(a):
        rest = slice(panel.stop, None)
        a[panel, panel] = np.linalg.cholesky(a[panel, panel])
        a[rest, panel] = a[rest, panel] @ np.linalg.inv(a[panel, panel]).T
        a[panel, rest] = 0
        update = partial(_update, a, panel)
        for _ in each(update, _panels(a, panel.stop)):
            pass
    return a


def _update(a: np.ndarray, panel: slice, later: slice) -> None:
    """Takes what a factor's finished `panel` of columns explains off a `later` one."""
    below = slice(later.start, None)
    a[below, later] -= a[below, panel] @ a[later, panel].T


def _panels(a: np.ndarray, start: int = 0) -> list[slice]:
    """Returns the panels of the columns from `start` on."""
    return [slice(at, min(at + _PANEL, len(a))) for at in range(start, len(a), _PANEL)]


def quantize_with(rows: np.ndarray, lower: np.ndarray, form: BlockFormat) -> Blocks:
    """Rounds `rows` float32 [N, K] for inputs whose moments have the factor `lower` [K', K'].

    Returns blocks as `weights.quantize` does, with scales as they will be stored.
    """
    wide = form.activation_block
    out = empty_blocks(len(rows), len(lower), form)
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        columns = np.zeros((len(lower), len(rows[part])), np.float32)
        columns[: rows.shape[1]] = rows[part].T
        errors = np.zeros_like(columns)
        for index in reversed(range(len(lower) // wide)):
            place = slice(index * wide, (index + 1) * wide)
            after = slice(place.stop, None)
            carried = lower[after, place].T @ errors[after]
            section = _round_section(columns[place], carried, lower[place, place], form)
            errors[place] = section.errors
            out.codes[part, place] = section.codes.T
            set_supers(out, part, index, section.supers)
            for block, constants in enumerate(section.constants, index * wide // form.block):
                set_constants(out, part, block, constants)
    return out


class _Section(NamedTuple):
    """Holds a rounded super-block, or block: codes and errors [wide, n], and the constants."""

    codes: np.ndarray
    errors: np.ndarray
    supers: Supers | None
    constants: list[BlockConstants]


def _round_section(
    columns: np.ndarray, carried: np.ndarray, corner: np.ndarray, form: BlockFormat
) -> _Section:
    """Rounds columns [wide, n], the last block of them first.

    `carried` [wide, n] is the error of the columns after them, times the factor; it is overwritten.
    `corner` is the factor's part on the diagonal.
    """
    supers = None
    if form.grid.has_supers:
        supers = fit_supers(_unrounded(columns, carried, corner), form)
    codes, errors = np.empty(columns.shape, np.uint8), np.empty_like(columns)
    constants: list[BlockConstants] = []
    for first in reversed(range(0, len(columns), form.block)):
        block = slice(first, first + form.block)
        small = corner[block, block]
        best = _unrounded(columns[block], carried[block], small)
        fitted = fit(best, form, np.diag(small) ** 2, supers)
        constants.insert(0, fitted.with_stored_scales() if supers is None else fitted)
        codes[block], errors[block] = _round_block(
            columns[block], carried[block], small, constants[0], form.bits
        )
        carried[:first] += corner[block, :first].T @ errors[block]
    return _Section(codes, errors, supers, constants)


def _unrounded(columns: np.ndarray, carried: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """Returns what would be best for columns [m, n] if they were not rounded, float32."""
    inverse: Any = np.linalg.inv(corner)
    return columns + inverse.T @ carried


def _round_block(
    columns: np.ndarray,
    carried: np.ndarray,
    corner: np.ndarray,
    constants: BlockConstants,
    bits: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes uint8 and errors float32, [block, n], of a block of columns [block, n].

    `carried` [block, n] is the error of the columns after it, times the factor; it is overwritten.
    `corner` is the factor's part on the diagonal.
    """
    codes, errors = np.empty(columns.shape, np.uint8), np.empty_like(columns)
    for j in reversed(range(len(columns))):
        codes[j] = codes_of(columns[j] + carried[j] / corner[j, j], constants, bits)
        errors[j] = columns[j] - (codes[j] - constants.middles) * constants.scales
        carried[:j] += corner[j, :j, None] * errors[j]
    return codes, errors
