"""Which matrices of a checkpoint lose most when they are rounded to 4 bits.

Owns the measure: the error of a matrix's products on the quality report's text, relative to the
products themselves. A matrix that is named here is worth its bytes at 8 bits, see
`WeightFormat.sensitive`.
"""

from collections import defaultdict

import numpy as np

from kvq.errors import UsageError
from kvq.reference_linear import dequantize
from kvq_export.config import WeightFormat
from kvq_export.quality import Original
from kvq_export.weights import quantize


def most_sensitive(original: Original, ids: np.ndarray, weights: WeightFormat) -> tuple[str, ...]:
    """Canonical names of the `weights.sensitive` matrices that lose most, in the model's order.

    `ids` int64 [T] is the text. Raises `UsageError` where the model has fewer matrices.
    """
    losses = relative_losses(original, ids, weights)
    if weights.sensitive > len(losses):
        raise UsageError(
            f"--sensitive {weights.sensitive} is not possible: the layers of this model have "
            f"{len(losses)} matrices; --wbits 8 keeps all of them at 8 bits"
        )
    chosen = set(sorted(losses, key=lambda name: -losses[name])[: weights.sensitive])
    return tuple(name for name in losses if name in chosen)


def relative_losses(original: Original, ids: np.ndarray, weights: WeightFormat) -> dict[str, float]:
    """The squared error of each matrix's products over their squares, by canonical name."""
    errors, squares = defaultdict[str, float](float), defaultdict[str, float](float)

    def watch(name: str, x: np.ndarray, rows: np.ndarray) -> None:
        if name in ("embed", "head"):
            return
        rounded = dequantize(quantize(rows, weights.at(weights.bits)), weights.bits)
        rounded = rounded[:, : rows.shape[1]]
        errors[name] += float(np.square(x @ (rounded - rows).T).sum(dtype=np.float64))
        squares[name] += float(np.square(x @ rows.T).sum(dtype=np.float64))

    original.logits(ids, watch=watch)
    return {name: errors[name] / max(squares[name], 1e-30) for name in errors}
