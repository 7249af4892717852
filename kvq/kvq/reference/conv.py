"""Defines what a short convolution computes, in numpy; native code has the same numbers.

The row that enters a layer is [B | C | x]. The layer multiplies B and x, sums this product over the
row and the rows before it, channel by channel, and multiplies the sum by C. A cache therefore keeps
the product B * x of every row that a later row may need.
"""

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]


def products(bcx: Float) -> Float:
    """Returns B * x [T, width] of rows [B | C | x] float32 [T, 3 width]."""
    b, _, x = np.split(bcx, 3, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the cache refuses what is not finite
        return b * x


def short_conv(bcx: Float, weight: Float, seen: Float) -> Float:
    """Computes C * sum over k of weight[:, k] * seen[:, k], from the newest on, [T, width].

    bcx float32 [T, 3 width]; weight [width, taps]; seen [T, taps, width]: of every row the products
    of those before it, oldest first, and its own.
    """
    total: Float = seen[:, -1] * weight[:, -1]
    for k in range(weight.shape[1] - 2, -1, -1):
        total += seen[:, k] * weight[:, k]
    gate: Float = np.split(bcx, 3, axis=1)[1]
    return gate * total


def seen_rows(rows: Float, taps: int) -> Float:
    """Returns what each row of a text [n, width] sees, oldest first: [n, taps, width], a view."""
    padded = np.concatenate([np.zeros((taps - 1, rows.shape[1]), np.float32), rows])
    return np.lib.stride_tricks.sliding_window_view(padded, taps, axis=0).transpose(0, 2, 1)
