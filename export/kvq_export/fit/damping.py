"""Chooses how far the moments of a text are trusted, for each matrix.

Moments of few tokens have more directions than the tokens took, and what is fitted to them learns
the text by heart: rounding with feedback then errs more on other texts than plain rounding. Damping
draws moments to their diagonal, which trusts no two channels to go together. How much is best
depends on the matrix's width, on the tokens and on what they have in common. So several are tried:
moments of some tokens make the candidate, and those of tokens that were kept apart judge it. The
squared error of products is tr(D H D^T), with D the change of the rows and H the moments, so no
inputs are needed. A factor is what costs, so rounding and compensating share each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvq.reference.linear import BlockFormat, dequantize
from kvq_export.fit.gptq import Moments, factor, quantize_with, solve
from kvq_export.write.weights import quantize

# Shares of the diagonal that are tried, in steps of about three. From one to the next the error
# changes by a few hundredths near the best.
DAMPINGS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Share of a text's tokens that are kept apart.
HELD_OUT = 0.25
# Rows that dampings are tried on: a factor costs more than these.
_ROWS = 256


class Trial(NamedTuple):
    """Holds a damping and what it costs on tokens that were kept apart.

    `rounding` is the squared error that rounding adds to products, `compensating` the change of
    what products lack: less than nothing where it helps.
    """

    damping: float
    rounding: float
    compensating: float


class Dampings(NamedTuple):
    """Holds the damping of a matrix's rounding and of its compensation.

    None stands for plain rounding, and for rows that stay as they are.
    """

    rounding: float | None
    compensating: float | None


def near_dampings(before: Dampings | None) -> Sequence[float]:
    """Returns those of `DAMPINGS` that are at most a step from what a layer took; all of none."""
    places = [DAMPINGS.index(damping) for damping in before or () if damping is not None]
    near = [
        damping
        for place, damping in enumerate(DAMPINGS)
        if any(abs(place - chosen) <= 1 for chosen in places)
    ]
    return near or DAMPINGS


def try_damping(
    rows: np.ndarray, fitted: Moments, held_out: Moments, form: BlockFormat, damping: float
) -> Trial:
    """Tries a damping of `fitted` on some of `rows` float32 [N, K]; `held_out` judges it."""
    picked, columns = _picked(rows), rows.shape[1]
    some = rows[picked]
    lower = factor(fitted.inputs, form.activation_block, damping)
    rounded = dequantize(quantize_with(some, lower, form), form.bits)[:, :columns]
    rounding, compensating = _cost(rounded - some, held_out), 0.0
    lack, unseen_lack = (moments.lack(rows, picked) for moments in (fitted, held_out))
    if lack is not None and unseen_lack is not None:
        change = solve(lower[:columns, :columns], lack.copy())
        compensating = _cost(change, held_out) - 2 * float(np.vdot(unseen_lack, change))
    return Trial(damping, rounding, compensating)


def choose(
    rows: np.ndarray, held_out: Moments, form: BlockFormat, trials: Sequence[Trial]
) -> Dampings:
    """Returns the dampings that err least among `trials` of `rows`, and less than none does."""
    some = rows[_picked(rows)]
    plain = dequantize(quantize(some, form), form.bits)[:, : rows.shape[1]]
    rounding = min(trials, key=lambda trial: trial.rounding)
    compensating = min(trials, key=lambda trial: trial.compensating)
    return Dampings(
        rounding.damping if rounding.rounding < _cost(plain - some, held_out) else None,
        compensating.damping if compensating.compensating < 0 else None,
    )


def _picked(rows: np.ndarray) -> slice:
    """Returns which rows are tried: some from all over the matrix."""
    return slice(None, None, -(-len(rows) // _ROWS))


def _cost(change: np.ndarray, moments: Moments) -> float:
    """Returns the squared error of products that a `change` [n, K] of the rows makes."""
    return float(np.vdot(change @ moments.inputs, change))
