"""KV-AdaQuant, "Quantize What Counts" (2502.15075): every layer its own widths, keys above values.

The paper gives keys more bits because ||W_K|| > ||W_V||, and its allocator raises the tensor whose
weight norm promises the largest cut of error per bit. Weight norms say nothing of models that
normalise queries and keys, so damage is what calibration measured: the divergence when one layer's
keys (values) are read at 8, 4 and 2 bits. Widths only fall here, so the same greedy runs from the
top: lower the side of the layer that loses least per byte. A layer's keys never have fewer bits
than its values by this policy's doing. When all is at 2 bits the oldest pages are evicted.

Uncalibrated models get a prior: an error at b bits costs 4^-b, keys are worth `KEY_BITS` more bits
than values (the paper's measured ratios imply 1.0 to 2.6), the first and last two layers
`EDGE_BITS` more than the others.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_WIDTHS
from kvq.formats import GRANULES
from kvq.policies import Evidence, Relief
from kvq.policies.ladder import EVICTED, descend
from kvq.policies.spend import held_pages

KEY_BITS = 2
EDGE_BITS = 4
EDGE_LAYERS = 2

# What a layer falls through: (side, width) with values before keys; side 0 are the keys.
RUNGS = ((1, 4), (1, 2), (0, 4), (0, 2))


@dataclass(frozen=True, kw_only=True)
class KvAdaQuant:
    """One ladder of (layer, side, width) rungs; pages of a layer go oldest first inside one."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def relieve(self, evidence: Evidence, bytes_short: int, columns_short: int) -> Relief:
        places, rungs = _ladder(_losses(evidence))
        layers = held_pages(evidence)[:, 0]
        return descend(evidence, rungs[layers], places[layers], bytes_short, columns_short)


def _losses(evidence: Evidence) -> NDArray[np.float64]:
    """Nats lost by reading a layer's keys (0) or values (1) at 8, 4 and 2 bits, [L, 2, 3]."""
    if evidence.sensitivity is not None:
        measured = evidence.sensitivity
        return np.stack([measured.key_bits_nats, measured.value_bits_nats], axis=1)
    layers = np.arange(len(evidence.widths))
    edge = np.minimum(layers, layers[::-1]) < EDGE_LAYERS
    weight = EDGE_BITS * edge[:, None] + KEY_BITS * np.array([1, 0])
    return np.power(4.0, weight[..., None] - np.array(PAGE_WIDTHS)).astype(np.float64)


def _ladder(losses: NDArray[np.float64]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Places [L, 5] of each layer's rungs in the order all are taken in, and widths [L, 5, 2].

    The last rung of every layer, eviction, comes after all others and at the same place.
    """
    granules = np.array([GRANULES[bits] for bits in PAGE_WIDTHS])
    growth = np.diff(np.maximum.accumulate(losses, axis=2), axis=2)
    # A rung cannot be reached before the one above it, nor a key's before the value's.
    rates = np.maximum.accumulate(growth / -np.diff(granules), axis=2)
    rates[:, 0] = np.maximum(rates[:, 0], rates[:, 1])
    rates = rates[:, ::-1].reshape(len(losses), len(RUNGS))
    order = np.lexsort((np.broadcast_to(np.arange(len(RUNGS)), rates.shape).ravel(), rates.ravel()))
    places = np.empty(rates.size, np.intp)
    places[order] = np.arange(rates.size)
    places = places.reshape(rates.shape)
    ceilings = np.full((len(RUNGS), 2), PAGE_WIDTHS[0], np.int32)
    for rung, (side, bits) in enumerate(RUNGS):
        ceilings[rung, side] = bits
    turn = np.argsort(places, axis=1)
    last = np.full((len(losses), 1), rates.size)
    gone = np.full((len(losses), 1, 2), EVICTED, np.int32)
    places = np.concatenate([np.take_along_axis(places, turn, axis=1), last], axis=1)
    return places, np.concatenate([ceilings[turn], gone], axis=1)
