"""What stands in for matrices and for attention where a checkpoint is run over texts in numpy.

`kvq_models.reference.forward` asks for weights by name and multiplies by them. What it gets here
computes products by a function, so that a matrix need not be in memory, or not be itself.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvq.config import AttentionParams
from kvq.reference_delta import DeltaWeights
from kvq_models.reference import PlainAttention

Multiply = Callable[[np.ndarray], np.ndarray]
"""Inputs float32 [T, K] -> their products with a matrix [N, K], float32 [T, N]."""
MultiplyGroups = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Rows and how many are of each expert -> their products with its matrix."""


class Product:
    """Stands in for a matrix: only `x @ matrix.T` is possible."""

    # Makes `array @ self` call `__rmatmul__` here instead of treating self as a scalar.
    __array_ufunc__ = None

    def __init__(self, multiply: Multiply) -> None:
        self._multiply = multiply

    @property
    def T(self) -> "Product":  # noqa: N802  numpy's name
        return self

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        return self._multiply(x)


class Rows(Product):
    """Stands in for the embedding: rows by index, and as a tied head products."""

    def __init__(self, read: Callable[[np.ndarray], np.ndarray], multiply: Multiply) -> None:
        super().__init__(multiply)
        self._read = read

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        return self._read(ids)


def no_logits(x: np.ndarray) -> np.ndarray:
    """Of a head that no row is asked of."""
    return np.zeros((len(x), 1), np.float32)


class Stack:
    """Stands in for the matrices of all experts of a layer: only `grouped` of them is possible."""

    def __init__(self, multiply: MultiplyGroups) -> None:
        self._multiply = multiply

    def grouped(self, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """As `kvq_models.reference.grouped`."""
        return self._multiply(x, counts)


class SegmentedAttention:
    """Exact attention within each of `count` segments of equal length, in the order of the layers.

    And convolutions and delta nets within each.

    Of each class of layers what the newest one saw is kept, for those that read its keys.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._newest: dict[int, list[PlainAttention]] = {}

    def convolve(self, layer: int, bcx: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """See `kvq_models.reference.Memory`."""
        parts = np.split(bcx, self._count)
        return np.concatenate([PlainAttention().convolve(layer, one, weight) for one in parts])

    def recur(
        self, layer: int, rows: np.ndarray, gates: np.ndarray, weights: DeltaWeights
    ) -> np.ndarray:
        """See `kvq_models.reference.Memory`."""
        parts = zip(np.split(rows, self._count), np.split(gates, self._count), strict=True)
        return np.concatenate([PlainAttention().recur(layer, *own, weights) for own in parts])

    def attend(
        self,
        params: AttentionParams,
        qkv: np.ndarray,
        positions: np.ndarray,
        *given: Any,
        shared: bool = False,
        **named: Any,
    ) -> np.ndarray:
        """See `kvq_models.reference.Memory`."""
        parts = zip(np.split(qkv, self._count), np.split(positions, self._count), strict=True)
        if not shared:
            self._newest[params.cache] = [PlainAttention() for _ in range(self._count)]
        return np.concatenate(
            [
                own.attend(params, part, at, *given, shared=shared, **named)
                for own, (part, at) in zip(self._newest[params.cache], parts, strict=True)
            ]
        )
