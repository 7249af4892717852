"""Runs a checkpoint with weights of 8 bits, for an export to be compared with.

Every matrix is rounded as `kvq export --wbits 8` rounds it, and multiplied as the bundle would.
Nothing is written, a few rows of a matrix are in memory, and only the likeliest tokens of the
answers are kept.
"""

from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvq.reference.linear import WIDTHS, BlockFormat, PanelFormat, dequantize, in_weights
from kvq_export.config import BLOCK
from kvq_export.fit.native_products import KernelMatrix
from kvq_export.fit.quality import Original
from kvq_export.fit.substitutes import Rows, SegmentedAttention, Stack, SubstituteMatrix
from kvq_export.write.weights import quantize
from kvq_export.write.writer import stored_blocks
from kvq_models.family import is_stack
from kvq_models.reference import forward

_FORM = BlockFormat(bits=max(WIDTHS), block=BLOCK)


def likeliest_tokens(original: Original, texts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the likeliest token after each of `texts` int64 [S, T], int64 [S, T]."""
    run = _ForwardPass(original)
    positions = np.tile(np.arange(texts.shape[1], dtype=np.int64), len(texts))
    forward(original.config, run.weight, texts.ravel(), positions, SegmentedAttention(len(texts)))
    return run.likeliest.reshape(texts.shape)


class _ForwardPass:
    """Gives the weights of one forward pass; `likeliest` int64 [T] is there when it is over."""

    def __init__(self, original: Original) -> None:
        self._original = original
        self.likeliest: NDArray[np.int64] = np.empty(0, np.int64)

    def weight(self, name: str) -> np.ndarray:
        source = self._original.sources[name]
        if not source.quantised:
            return self._original.checkpoint.read(source)
        if is_stack(name):
            return cast(np.ndarray, Stack(partial(self._grouped, name)))
        if name == "head":
            return cast(np.ndarray, SubstituteMatrix(partial(self._answer, name)))
        if name.endswith("embed"):
            return cast(np.ndarray, Rows(partial(self._rows, name), partial(self._answer, name)))
        return cast(np.ndarray, SubstituteMatrix(partial(self._product, name)))

    def _product(self, name: str, x: np.ndarray) -> np.ndarray:
        chunks = self._original.checkpoint.chunks(self._original.sources[name])
        return np.concatenate([_multiply(x, rows) for rows in chunks], axis=1)

    def _grouped(self, name: str, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return self._original.grouped(name, x, counts, _multiply)

    def _rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        rows = self._original.checkpoint.read_rows(self._original.sources[name], ids)
        stored = in_weights(stored_blocks(quantize(rows, _FORM)))
        return dequantize(stored, _FORM.bits)[:, : rows.shape[1]]

    def _answer(self, name: str, x: np.ndarray) -> np.ndarray:
        """Finds the likeliest token of each row: all logits at once would be too many.

        Soft caps of logits keep their order, so they are left out.
        """
        original = self._original
        bias = np.zeros(original.config.vocab_size, np.float32)
        if original.config.head_bias:
            bias = original.checkpoint.read(original.sources["head_bias"])
        best = np.full(len(x), -np.inf, np.float32)
        self.likeliest = np.zeros(len(x), np.int64)
        first = 0
        for chunk in original.checkpoint.chunks(original.sources[name]):
            logits = _multiply(x, chunk) + bias[first : first + len(chunk)]
            places = logits.argmax(axis=1)
            tops = logits[np.arange(len(x)), places]
            self.likeliest = np.where(tops > best, first + places, self.likeliest)
            best = np.maximum(best, tops)
            first += len(chunk)
        return np.zeros((0, 1), np.float32)


def _multiply(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return KernelMatrix(quantize(rows, _FORM), PanelFormat.of(_FORM, rows.shape)).multiply(x)
