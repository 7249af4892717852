"""LagKV (2504.04704): what differs most from the tokens that follow it stays; no attention needed.

The paper cuts the cache into blocks, normalises each channel of a block's keys by its smallest and
largest value in the next block, scores a token by the spread over channels, does the same for
values, turns both into shares by a softmax, adds them, and keeps the best tokens of every block.
Here the page is both block and unit, so pages of a head compete with each other. The spread of its
tokens' keys is estimated from the page's channels: middles that differ, and the room each channel
leaves around its middle. Values are stored per token, so a token's span over the channels is
measured by the next page's whole range. The newest page has no next one and goes last.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.policies import Constants, Evidence, Floats
from kvq.policies.estimates import middle
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class LagKV(Scorer):
    """Evicts the pages that the next page resembles most."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        held = evidence.widths[..., 0] > 0
        following = _next_held(held)
        scored = held & (following < held.shape[-1])
        following = np.minimum(following, max(held.shape[-1] - 1, 0))

        def spreads(layer: int) -> NDArray[np.floating]:
            constants, lag = evidence.constants(layer), following[layer]
            return np.stack([_key_spread(constants, lag), _value_spread(constants, lag)])

        keys, values = evidence.of_layers(spreads).swapaxes(0, 1)
        return (_softmax(keys, scored) + _softmax(values, scored)) / 2

    def spared(self, evidence: Evidence) -> NDArray[np.bool_]:
        held = evidence.widths[..., 0] > 0
        return held & (_next_held(held) == held.shape[-1])


def _next_held(held: NDArray[np.bool_]) -> NDArray[np.intp]:
    """[L, Hk, C]: the column of the next held page of the same head, C where there is none."""
    columns = held.shape[-1]
    own = np.where(held, np.arange(columns, dtype=np.intp), np.intp(columns))
    after = np.minimum.accumulate(own[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([after[..., 1:], np.full_like(own[..., :1], columns)], axis=-1)


def _key_spread(constants: Constants, following: NDArray[np.intp]) -> Floats:
    """Deviation over channels of a token's lag-relative key, [Hk, C]."""
    smallest, span = constants.key_min, constants.key_range
    lag_min = np.take_along_axis(smallest, following[..., None], axis=1)
    lag_span = np.take_along_axis(span, following[..., None], axis=1)
    centres = _share(middle(smallest, span) - lag_min, lag_span)
    return np.sqrt(centres.var(axis=-1) + np.square(_share(span, lag_span)).mean(axis=-1) / 12)


def _value_spread(constants: Constants, following: NDArray[np.intp]) -> Floats:
    """Mean over tokens of the deviation over channels of their lag-relative values, [Hk, C]."""
    smallest, span = constants.value_min, constants.value_range
    whole = (smallest + span).max(axis=-1) - smallest.min(axis=-1)
    return _share(span.mean(axis=-1), np.take_along_axis(whole, following, axis=1)) / np.sqrt(12)


def _share(part: Floats, whole: Floats) -> Floats:
    """The share of the whole, 0 where that is 0."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _softmax(scores: Floats, scored: NDArray[np.bool_]) -> Floats:
    """Shares of the scored pages of each head."""
    raised = scored * np.exp(scores - scores.max(axis=-1, keepdims=True, initial=0))
    return _share(raised, raised.sum(axis=-1, keepdims=True))
