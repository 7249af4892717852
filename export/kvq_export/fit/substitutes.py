"""Substitutes for matrices and attention, to run a checkpoint over texts in numpy.

`kvq_models.reference.forward` asks for weights by name and multiplies by them. A substitute
computes products by a function, so that a matrix need not be in memory, or may be another one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvq.config import AttentionParams
from kvq.reference.delta import DeltaWeights
from kvq_models.reference import PlainAttention

Multiply = Callable[[np.ndarray], np.ndarray]
"""Multiplies inputs float32 [T, K] by a matrix [N, K]: float32 [T, N]."""
MultiplyGroups = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Multiplies rows by the matrices of experts, given how many rows are of each."""


class SubstituteMatrix:
    """Takes the place of a matrix: only `x @ matrix.T` is possible."""

    # Makes `array @ self` call `__rmatmul__` here instead of treating self as a scalar.
    __array_ufunc__ = None

    def __init__(self, multiply: Multiply) -> None:
        self._multiply = multiply

    @property
    def T(self) -> "SubstituteMatrix":  # noqa: N802  numpy's name
        return self

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        return self._multiply(x)


class Rows(SubstituteMatrix):
    """Takes the place of the embedding: rows by index, and as a tied head products."""

    def __init__(self, read: Callable[[np.ndarray], np.ndarray], multiply: Multiply) -> None:
        super().__init__(multiply)
        self._read = read

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        return self._read(ids)


def no_logits(x: np.ndarray) -> np.ndarray:
    """Returns no logits, for a head of which none are asked for."""
    return np.zeros((len(x), 1), np.float32)


class Stack:
    """Takes the place of the matrices of all experts of a layer: only `grouped` is possible."""

    def __init__(self, multiply: MultiplyGroups) -> None:
        self._multiply = multiply

    def grouped(self, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return self._multiply(x, counts)


class SegmentedAttention:
    """Computes attention within each of `count` segments of equal length, in the layers' order.

    And convolutions and delta nets. Of each class of layers the newest one's attention is
    remembered, for layers that read its keys.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._newest: dict[int, list[PlainAttention]] = {}

    def convolve(self, layer: int, bcx: np.ndarray, weight: np.ndarray) -> np.ndarray:
        parts = np.split(bcx, self._count)
        return np.concatenate([PlainAttention().convolve(layer, part, weight) for part in parts])

    def recur(
        self, layer: int, rows: np.ndarray, gates: np.ndarray, weights: DeltaWeights
    ) -> np.ndarray:
        parts = zip(np.split(rows, self._count), np.split(gates, self._count), strict=True)
        return np.concatenate([PlainAttention().recur(layer, *part, weights) for part in parts])

    def attend(
        self,
        params: AttentionParams,
        qkv: np.ndarray,
        positions: np.ndarray,
        *args: Any,
        shared: bool = False,
        **kwargs: Any,
    ) -> np.ndarray:
        parts = zip(np.split(qkv, self._count), np.split(positions, self._count), strict=True)
        if not shared:
            self._newest[params.cache] = [PlainAttention() for _ in range(self._count)]
        return np.concatenate(
            [
                attention.attend(params, part, at, *args, shared=shared, **kwargs)
                for attention, (part, at) in zip(self._newest[params.cache], parts, strict=True)
            ]
        )
