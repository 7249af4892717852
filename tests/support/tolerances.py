"""How far native attention may be from the reference, as data per pair of widths.

The kernels round a folded query to 7 bits per 32 channels and the folded weights of a page to 7
bits (15 bits where a page is read at 8 or 6), so narrow reads differ by what that rounding costs.
`rms` is the root mean square of the error over that of the output, `top` the largest error over the
largest output. Measured over head_dim 64 to 256, GQA ratios 1 to 7 and 300 tokens; the limits are
about twice what was seen.
"""

from dataclasses import dataclass

from kvq.config import PAGE_WIDTHS

PAIRS = tuple((k_bits, v_bits) for k_bits in PAGE_WIDTHS for v_bits in PAGE_WIDTHS)
FLOAT_PAIR = (16, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest relative errors that pass."""

    rms: float
    top: float


def _with_six(limits: dict[tuple[int, int], Tolerance]) -> dict[tuple[int, int], Tolerance]:
    """Queries and weights are rounded for 6 bits as they are for 8."""
    wide = {(k, v): limits[8 if k == 6 else k, 8 if v == 6 else v] for k, v in PAIRS}
    return limits | wide


# Zero-mean random heads: the output is a mean of noise, the worst case of a relative error.
RANDOM = _with_six(
    {
        (8, 8): Tolerance(rms=0.002, top=0.005),
        (8, 4): Tolerance(rms=0.022, top=0.06),
        (8, 2): Tolerance(rms=0.022, top=0.06),
        (4, 8): Tolerance(rms=0.011, top=0.035),
        (4, 4): Tolerance(rms=0.024, top=0.07),
        (4, 2): Tolerance(rms=0.024, top=0.06),
        (2, 8): Tolerance(rms=0.011, top=0.025),
        (2, 4): Tolerance(rms=0.024, top=0.06),
        (2, 2): Tolerance(rms=0.026, top=0.06),
        FLOAT_PAIR: Tolerance(rms=1e-5, top=3e-5),
    }
)

# Channel means, one channel 50 times as loud: logits of some tens, so that a rounded query shows.
STRUCTURED = _with_six(
    {
        (8, 8): Tolerance(rms=0.002, top=0.008),
        (8, 4): Tolerance(rms=0.014, top=0.04),
        (8, 2): Tolerance(rms=0.014, top=0.04),
        (4, 8): Tolerance(rms=0.04, top=0.12),
        (4, 4): Tolerance(rms=0.04, top=0.12),
        (4, 2): Tolerance(rms=0.04, top=0.2),
        (2, 8): Tolerance(rms=0.04, top=0.12),
        (2, 4): Tolerance(rms=0.04, top=0.14),
        (2, 2): Tolerance(rms=0.04, top=0.12),
        FLOAT_PAIR: Tolerance(rms=1e-5, top=3e-5),
    }
)

# Queries and weights that the kernels' rounding holds exactly: only float32 sums differ.
EXACT = Tolerance(rms=2e-6, top=1e-5)

# One instruction set against another: same integers, other float32 sums; now and then a sum on the
# edge of two codes rounds the other way.
BETWEEN_KERNELS = Tolerance(rms=0.001, top=0.005)

# Work divided over page ranges against undivided: another order of float32 sums.
BETWEEN_SPLITS = Tolerance(rms=2e-5, top=1e-4)

# Keys rotated or normalised by both sides: their float16 may differ in the last bit.
ROTATED = Tolerance(rms=2e-4, top=1e-3)

# Evidence, by the narrower side's bits: the largest error over the largest fact.
EVIDENCE = {8: 0.002, 6: 0.002, 4: 0.04, 2: 0.05}

# Masses of a page's history, coded in steps of a sixteenth of an octave.
HISTORY = 0.046

# Products, row by row: float32's rounding of sums of terms as large as the row's results.
PRODUCT = Tolerance(rms=1, top=2e-6)

# Products behind a norm or an activation: a value on the edge of two levels may round to either.
PREPARED = Tolerance(rms=1, top=2e-3)

# Traces of calls on tiny random heads: largest error over the largest value of the layer.
TRACE_ERROR = 0.05
