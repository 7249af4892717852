"""KV-AdaQuant, "Quantize What Counts" (2502.15075): weight norms give every layer its own widths.

The paper's allocator takes an error of s^2 4^-b for b bits of the keys or values of a layer, s the
Frobenius norm of the weights that make them, and raises from the least width whatever cuts most
error per bit. Widths only fall here, so the same greedy runs from the top: lower the side of the
layer that adds least error per bit. Pages of a layer go oldest first inside a rung, and when all is
at 2 bits the oldest pages are evicted. Norms are those of the weights as stored; where they are not
known there is a prior: keys as if their norm were 2^`KEY_BITS` times the values' (the paper's
measured ratios are 2^1.0 to 2^2.6), the first and last two layers 2^`EDGE_BITS` times the others'.

The divergence that narrowing one layer causes, measured on 128 tokens, was tried in the place of
norms: on SmolLM2-135M, 8 windows of 2048 tokens of code, it was 1.4 and 1.6 times the default
policy's at 1/4 and 1/8 of the bytes, no better than lowering all layers alike.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.formats import GRANULES
from kvq.policies import Evidence, Relief
from kvq.policies.ladder import EVICTED, descend
from kvq.policies.spend import held_pages

KEY_BITS = 2
EDGE_BITS = 4
EDGE_LAYERS = 2

Losses = NDArray[np.float64]  # [L, 2, widths]: side 0 are the keys

WIDTHS = (8, 4, 2)

# What a layer falls through: (side, width) with values before keys; side 0 are the keys.
RUNGS = ((1, 4), (1, 2), (0, 4), (0, 2))


@dataclass(frozen=True, kw_only=True)
class KvAdaQuant:
    """One ladder of (layer, side, width) rungs; pages of a layer go oldest first inside one."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        places, rungs = _ladder(_rates(_by_norms(evidence)))
        layers = held_pages(evidence)[:, 0]
        return descend(evidence, rungs[layers], places[layers], bytes_short, columns_short)


def _by_norms(evidence: Evidence) -> Losses:
    """Squared norms times 4^-bits."""
    if evidence.weight_norms is not None:
        squares = np.square(evidence.weight_norms())
    else:
        layers = np.arange(len(evidence.widths))
        edge = np.minimum(layers, layers[::-1]) < EDGE_LAYERS
        squares = 4.0 ** (EDGE_BITS * edge[:, None] + KEY_BITS * np.array([1, 0]))
    return squares[..., None] / np.power(4.0, WIDTHS)


def _rates(losses: Losses) -> Losses:
    """What each rung adds per bit [L, 2, 2]; none can be reached before the one above it."""
    granules = np.array([GRANULES[bits] for bits in WIDTHS])
    growth = np.diff(np.maximum.accumulate(losses, axis=2), axis=2)
    return np.maximum.accumulate(growth / -np.diff(granules), axis=2)


def _ladder(rates: Losses) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Places [L, 5] of each layer's rungs in the order all are taken in, and widths [L, 5, 2].

    The last rung of every layer, eviction, comes after all others and at the same place.
    """
    rates = rates[:, ::-1].reshape(len(rates), len(RUNGS))
    order = np.lexsort((np.broadcast_to(np.arange(len(RUNGS)), rates.shape).ravel(), rates.ravel()))
    places = np.empty(rates.size, np.intp)
    places[order] = np.arange(rates.size)
    places = places.reshape(rates.shape)
    ceilings = np.full((len(RUNGS), 2), WIDTHS[0], np.int32)
    for rung, (side, bits) in enumerate(RUNGS):
        ceilings[rung, side] = bits
    turn = np.argsort(places, axis=1)
    last = np.full((len(rates), 1), rates.size)
    gone = np.full((len(rates), 1, 2), EVICTED, np.int32)
    places = np.concatenate([np.take_along_axis(places, turn, axis=1), last], axis=1)
    return places, np.concatenate([ceilings[turn], gone], axis=1)
