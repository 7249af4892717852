"""Stored matrices and rows of activations, for the tests of products."""

import numpy as np
from numpy.typing import NDArray

from kvq import reference_linear as reference
from kvq.reference_linear import WIDTHS, BlockFormat, Blocks, Bytes, Float, Grid, PanelFormat


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
    scales = random.standard_normal((form.rows, form.blocks)).astype(np.float16)
    scales[::7, 0], scales[::5, -1] = 0, np.float16(3e-6)
    blocks = Blocks(codes, scales, _offsets(form, random))
    return blocks, reference.pack(form, blocks)


# Every width and grid that a matrix can have.
KINDS = [
    (bits, grid) for bits in WIDTHS for grid in Grid if BlockFormat(bits=bits, grid=grid).possible
]


def _offsets(form: PanelFormat, random: np.random.Generator) -> NDArray[np.generic] | None:
    size = (form.rows, form.blocks)
    if form.grid is Grid.ZERO_POINT:
        return random.integers(0, 256, size).astype(np.uint8)
    if form.grid is Grid.MINIMUM:
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


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Squared, and of the whole."""
    return float(np.square(found - expected).sum() / np.square(expected).sum())
