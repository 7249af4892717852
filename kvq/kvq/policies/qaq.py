"""QAQ (2403.04643): error bounds for keys and values decide their bits, separately.

The paper tolerates an error sigma_X of the attention output and sigma_S of an attention weight.
With T tokens and S_t the largest attention token t had in a window of queries:

    value   sigma <= sigma_X / (sqrt(T) S_t)
    key     sigma^2 <= ln(T^3 / (T - 1) sigma_S^2 + 1) / |q|^2, the upper 10 % quantile of |q|^2
    bits    ceil(log2(range / (2 sqrt(3) sigma)))

Here the unit is the page. Both tolerances follow from one target t: sigma_X is t times the head's
value deviation, and sigma_S = t / sqrt(T) moves the output as much. A larger t needs fewer bits,
so for every page and width there is a smallest t at which that width will do; pages step down in
the order of these, which is where a bisection for the t that fits the bytes would end. A page whose
values need no bits at all is evicted. S_t is the largest weight that a query in the window gave one
token of the page (`peak_weight`), so one sought token keeps its page; the quantile takes
|q|^2, a sum over channels, as normal; a page's range is a root mean square, over channels weighted
by query energy (keys) or over tokens (values). No outliers are kept apart: ranges per channel do
that work.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.policies import Evidence, Relief
from kvq.policies.ladder import EVICTED, descend
from kvq.policies.spend import held_pages

NORMAL_QUANTILE_90 = 1.2815515655446004

Targets = NDArray[np.float64]  # [L, Hk, C, widths]: ln of the smallest t at which a width will do


@dataclass(frozen=True, kw_only=True)
class Qaq:
    """Lowers every page's keys and values to what one common target of error asks for."""

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "samples"})

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        layers, heads, columns = held_pages(evidence)[:, :3].T
        targets = [key_targets(evidence, (6, 4, 2)), value_targets(evidence, (6, 4, 2, 0))]
        reached = np.concatenate(targets, axis=-1)[layers, heads, columns]
        keys, values = ([(k, 8) for k in (6, 4, 2)], [(8, v) for v in (6, 4, 2)])
        rungs = np.array([*keys, *values, EVICTED], np.int32)
        turn = np.argsort(reached, axis=1, kind="stable")
        reached = np.take_along_axis(reached, turn, axis=1)
        return descend(evidence, rungs[turn], reached, bytes_short, columns_short)


def key_targets(evidence: Evidence, widths: tuple[int, ...]) -> Targets:
    """Where each width becomes enough for a page's keys: T and their range decide."""
    assert evidence.attention is not None
    tokens = max(evidence.tokens, 2)
    square = evidence.attention.query_square.astype(np.float64)
    energy = square.sum(axis=-1)
    # The variance of q_d^2 for a normal q_d of this mean and mean square.
    spread = 2 * np.maximum(square**2 - evidence.attention.query_mean.astype(np.float64) ** 4, 0)
    quantile = energy + NORMAL_QUANTILE_90 * np.sqrt(spread.sum(axis=-1))
    weights = (square / np.where(energy > 0, energy, 1)[..., None]).astype(np.float32)
    ranges = evidence.of_layers(
        lambda layer: np.einsum(
            "hcd,hd->hc", np.square(evidence.constants(layer).key_range), weights[layer]
        )
    )
    exact = quantile[..., None] * ranges / 12
    noise = exact[..., None] / 4.0 ** np.array(widths)  # sigma^2 |q|^2
    with np.errstate(divide="ignore"):
        return (np.log((tokens - 1) / tokens**2) + noise + np.log(-np.expm1(-noise))) / 2


def value_targets(evidence: Evidence, widths: tuple[int, ...]) -> Targets:
    """Where each width becomes enough for a page's values: attention and their range decide."""
    assert evidence.attention is not None
    share = evidence.attention.peak_weight.astype(np.float64)
    square = evidence.of_layers(
        lambda layer: np.square(evidence.constants(layer).value_range).mean(-1, dtype=np.float64)
    )
    held = (evidence.widths[..., 0] > 0).sum(axis=-1, keepdims=True)
    usual = square.sum(axis=-1, keepdims=True) / np.maximum(held, 1)
    ratio = np.sqrt(square / np.where(usual > 0, usual, 1))
    with np.errstate(divide="ignore"):
        exact = np.log(np.sqrt(evidence.tokens) * share * ratio)
    return exact[..., None] - np.array(widths) * np.log(2)
