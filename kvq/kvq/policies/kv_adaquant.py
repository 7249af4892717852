"""The policy `kv-adaquant`: weight norms give every layer its own widths."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.formats import GRANULES
from kvq.policies import FEWEST_BITS, Evidence, Relief
from kvq.policies.ladder import EVICTED, descend
from kvq.policies.spend import present_pages

# Without weight norms, the norm of keys counts as 2^KEY_BITS times that of values.
KEY_BITS = 2
# Without weight norms, the first and the last EDGE_LAYERS layers count 2^EDGE_BITS times as much.
EDGE_BITS = 4
EDGE_LAYERS = 2

Losses = NDArray[np.float64]  # [L, 2, widths]: side 0 are the keys

WIDTHS = (8, 4, 2)

# The steps of a layer as (side, width), values before keys; side 0 are the keys.
RUNGS = ((1, 4), (1, 2), (0, 4), (0, 2))


@dataclass(frozen=True, kw_only=True)
class KvAdaQuant:
    """Lowers the keys or values of the layer where this adds the least error per bit.

    KV-AdaQuant, "Quantize What Counts" (arXiv 2502.15075), assumes an error of s^2 4^-b for b bits
    of the keys or values of a layer, where s is the Frobenius norm of the weights that make them.
    It starts at the smallest width and raises whatever removes the most error per bit. Widths only
    fall here, so the same greedy search runs from the top. Inside a step the oldest pages of a
    layer go first. When all pages are at 2 bits the oldest pages are evicted.

    Norms are those of the stored weights. Without them keys count as if their norm were
    2^`KEY_BITS` times that of values (the paper measures ratios of 2^1.0 to 2^2.6), and the first
    and last two layers count 2^`EDGE_BITS` times as much as the others.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    fewest_bits: ClassVar[tuple[int, int]] = FEWEST_BITS

    def free_space(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        places, rungs = _ladder(_rates(_losses(evidence)))
        layers = present_pages(evidence)[:, 0]
        return descend(evidence, rungs[layers], places[layers], bytes_short, columns_short)


def _losses(evidence: Evidence) -> Losses:
    """Returns the error of each layer and side at each width: squared norms times 4^-bits."""
    if evidence.weight_norms is not None:
        squares = np.square(evidence.weight_norms())
    else:
        layers = np.arange(len(evidence.widths))
        edge = np.minimum(layers, layers[::-1]) < EDGE_LAYERS
        squares = 4.0 ** (EDGE_BITS * edge[:, None] + KEY_BITS * np.array([1, 0]))
    return squares[..., None] / np.power(4.0, WIDTHS)


def _rates(losses: Losses) -> Losses:
    """Returns the error that each step adds per bit, [L, 2, 2]; a side falls step by step."""
    granules = np.array([GRANULES[bits] for bits in WIDTHS])
    growth = np.diff(np.maximum.accumulate(losses, axis=2), axis=2)
    return np.maximum.accumulate(growth / -np.diff(granules), axis=2)


def _ladder(rates: Losses) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Returns places [L, 5] of each layer's steps in the common order, and widths [L, 5, 2].

    The last step of every layer, eviction, comes after all others and has the same place
    everywhere.
    """
    rates = rates[:, ::-1].reshape(len(rates), len(RUNGS))
    order = np.lexsort((np.broadcast_to(np.arange(len(RUNGS)), rates.shape).ravel(), rates.ravel()))
    places = np.empty(rates.size, np.intp)
    places[order] = np.arange(rates.size)
    places = places.reshape(rates.shape)
    ceilings = np.full((len(RUNGS), 2), WIDTHS[0], np.int32)
    for rung, (side, bits) in enumerate(RUNGS):
        ceilings[rung, side] = bits
    layer_order = np.argsort(places, axis=1)
    last = np.full((len(rates), 1), rates.size)
    evicted = np.full((len(rates), 1, 2), EVICTED, np.int32)
    places = np.concatenate([np.take_along_axis(places, layer_order, axis=1), last], axis=1)
    return places, np.concatenate([ceilings[layer_order], evicted], axis=1)
