"""The policy `qaq`: error bounds give keys and values their bits."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.policies import FEWEST_BITS, Evidence, Relief
from kvq.policies.ladder import EVICTED, descend
from kvq.policies.spend import present_pages

# The 90 % quantile of the standard normal distribution.
NORMAL_QUANTILE_90 = 1.2815515655446004

Targets = NDArray[
    np.float64
]  # [L, Hk, C, widths]: ln of the smallest t for which a width is enough


@dataclass(frozen=True, kw_only=True)
class Qaq:
    """Lowers the keys and values of every page as far as one common error target allows.

    QAQ (arXiv 2403.04643) tolerates an error sigma_X of the attention output and sigma_S of an
    attention weight. With T tokens, and S_t the largest attention that token t got in a window of
    queries:

        value   sigma <= sigma_X / (sqrt(T) S_t)
        key     sigma^2 <= ln(T^3 / (T - 1) sigma_S^2 + 1) / |q|^2, the upper 10 % quantile of |q|^2
        bits    ceil(log2(range / (2 sqrt(3) sigma)))

    Here the unit is the page. Both tolerances follow from one target t: sigma_X is t times the
    value deviation of the head, and sigma_S = t / sqrt(T) moves the output as much. A larger t
    needs fewer bits, so every page and width has a smallest t for which the width is enough. Pages
    step down in the order of these values, which gives the result of a bisection for the t that
    fits the bytes. A page whose values need no bits at all is evicted.

    S_t is the largest weight that a query in the window gave one token of the page (`peak_weight`),
    so one wanted token keeps its page. The quantile treats |q|^2, a sum over channels, as normal.
    The range of a page is a root mean square: over channels weighted by query energy for keys, over
    tokens for values. Outliers are not stored apart, since ranges are per channel.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "samples"})
    fewest_bits: ClassVar[tuple[int, int]] = FEWEST_BITS

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        layers, heads, columns = present_pages(evidence)[:, :3].T
        targets = [key_targets(evidence, (6, 4, 2)), value_targets(evidence, (6, 4, 2, 0))]
        sufficient = np.concatenate(targets, axis=-1)[layers, heads, columns]
        keys, values = ([(k, 8) for k in (6, 4, 2)], [(8, v) for v in (6, 4, 2)])
        rungs = np.array([*keys, *values, EVICTED], np.int32)
        order = np.argsort(sufficient, axis=1, kind="stable")
        sufficient = np.take_along_axis(sufficient, order, axis=1)
        return descend(evidence, rungs[order], sufficient, bytes_short, columns_short)


def key_targets(evidence: Evidence, widths: tuple[int, ...]) -> Targets:
    """Returns the smallest target for which each width is enough for the keys of each page."""
    assert evidence.attention is not None
    tokens = max(evidence.tokens, 2)
    square = evidence.attention.query_square.astype(np.float64)
    energy = square.sum(axis=-1)
    # The variance of q_d^2 for a normal q_d of this mean and mean square.
    spread = 2 * np.maximum(square**2 - evidence.attention.query_mean.astype(np.float64) ** 4, 0)
    quantile = energy + NORMAL_QUANTILE_90 * np.sqrt(spread.sum(axis=-1))
    weights = (square / np.where(energy > 0, energy, 1)[..., None]).astype(np.float32)
    ranges = evidence.stack_layers(
        lambda layer: np.einsum(
            "hcd,hd->hc", np.square(evidence.constants(layer).key_range), weights[layer]
        )
    )
    exact = quantile[..., None] * ranges / 12
    noise = exact[..., None] / 4.0 ** np.array(widths)  # sigma^2 |q|^2
    with np.errstate(divide="ignore"):
        return (np.log((tokens - 1) / tokens**2) + noise + np.log(-np.expm1(-noise))) / 2


def value_targets(evidence: Evidence, widths: tuple[int, ...]) -> Targets:
    """Returns the smallest target for which each width is enough for the values of each page."""
    assert evidence.attention is not None
    share = evidence.attention.peak_weight.astype(np.float64)
    square = evidence.stack_layers(
        lambda layer: np.square(evidence.constants(layer).value_range).mean(-1, dtype=np.float64)
    )
    pages = (evidence.widths[..., 0] > 0).sum(axis=-1, keepdims=True)
    mean = square.sum(axis=-1, keepdims=True) / np.maximum(pages, 1)
    ratio = np.sqrt(square / np.where(mean > 0, mean, 1))
    with np.errstate(divide="ignore"):
        exact = np.log(np.sqrt(evidence.tokens) * share * ratio)
    return exact[..., None] - np.array(widths) * np.log(2)
