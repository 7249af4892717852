"""Stored matrices and rows of activations, for the tests of products."""

from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvq.reference import linear as reference
from kvq.reference.linear import (
    BLOCKS,
    CODE_BITS,
    BlockFormat,
    Blocks,
    Bytes,
    Float,
    Grid,
    PanelFormat,
)


def matrix(form: PanelFormat, seed: int = 0) -> tuple[Blocks, Bytes]:
    """Rows as stored, and their panels; scales of both signs, some zero, some subnormal."""
    random = np.random.default_rng(seed)
    half = 1 << (form.bits - 1)
    codes = np.full((form.rows, form.blocks * form.block), half, np.uint8)
    codes[:, : form.columns] = random.integers(0, 2 * half, (form.rows, form.columns))
    if form.grid is Grid.E2M1:
        exponents = random.integers(120, 126, (form.rows, form.blocks)).astype(np.uint8)
        # What is far smaller decides ties of a fused addition, which the reference does not see.
        exponents[::5, -1] = 110
        return Blocks(codes, exponents), reference.pack(form, Blocks(codes, exponents))
    scales = random.standard_normal((form.rows, form.supers)).astype(np.float16)
    scales[::7, 0], scales[::5, -1] = 0, np.float16(3e-6)
    blocks = Blocks(codes, scales, _offsets(form, random))
    if form.grid.has_supers:
        size = (form.rows, form.blocks)
        low, high, kind = (0, 64, np.uint8) if form.block == 32 else (-128, 128, np.int8)
        numbers = [random.integers(low, high, size).astype(kind) for _ in range(2)]
        blocks = Blocks(*blocks[:3], *numbers[: 2 if form.grid.has_minimum else 1])
    return blocks, reference.pack(form, blocks)


# Every format that a matrix can have, and those of blocks of 64 where there are such.
FORMATS = [
    form
    for bits, block, grid in product(CODE_BITS, (16, *BLOCKS), Grid)
    if (form := BlockFormat(bits=bits, block=block, grid=grid)).possible
]
KINDS = [
    form
    for form in FORMATS
    if form.block == (32 if form.grid is Grid.E2M1 else 64) or form.grid.has_supers
]


def _offsets(form: PanelFormat, random: np.random.Generator) -> NDArray[np.generic] | None:
    size = (form.rows, form.supers)
    if form.grid is Grid.ZERO_POINT:
        return random.integers(0, 256, size).astype(np.uint8)
    if form.grid.has_minimum:
        return (random.standard_normal(size) * (1 << form.bits)).astype(np.float16)
    return None


def activations(rows: int, columns: int, seed: int = 1) -> Float:
    """Rows of all sizes, with an outlier, a tiny block and zeros among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, columns)).astype(np.float32)
    x *= np.float32(10.0) ** random.integers(-3, 4, (rows, 1)).astype(np.float32)
    x[:, columns // 2] *= 30
    x[rows // 2, : columns // 3] = np.float32(1e-38)
    x[-1, : columns // 2] = 0
    return x


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Squared, and of the whole."""
    return float(np.square(actual - expected).sum() / np.square(expected).sum())
