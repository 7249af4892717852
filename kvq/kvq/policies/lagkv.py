"""The policy `lagkv`: tokens that differ from those after them stay; no attention is needed."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvq.policies import Constants, Evidence, Floats
from kvq.policies.estimates import middle
from kvq.policies.scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class LagKV(Scorer):
    """Evicts the pages that are most like the page after them.

    LagKV (arXiv 2504.04704) cuts the cache into blocks, normalises each channel of a block's keys
    by its smallest and largest value in the next block, and scores a token by the spread over
    channels. It does the same for values, turns both into shares by a softmax, adds them, and keeps
    the best tokens of every block. Here the page is both block and unit, so the pages of a head
    compete with each other. The spread of keys is estimated from the page's channels: how their
    middles differ, and the range around each middle. Values are stored per token, so a token's
    range over the channels is measured by the next page's whole range. The newest page has no next
    one and goes last.

    Args:
        demote: See `Scorer`; default 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def importance(self, evidence: Evidence) -> NDArray[np.floating]:
        present = evidence.widths[..., 0] > 0
        following = _next_present(present)
        scored = present & (following < present.shape[-1])
        following = np.minimum(following, max(present.shape[-1] - 1, 0))

        def spreads(layer: int) -> NDArray[np.floating]:
            constants, lag = evidence.constants(layer), following[layer]
            return np.stack([_key_spread(constants, lag), _value_spread(constants, lag)])

        keys, values = evidence.stack_layers(spreads).swapaxes(0, 1)
        return (_softmax(keys, scored) + _softmax(values, scored)) / 2

    def protected(self, evidence: Evidence) -> NDArray[np.bool_]:
        present = evidence.widths[..., 0] > 0
        return present & (_next_present(present) == present.shape[-1])


def _next_present(present: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Returns [L, Hk, C]: the column of the head's next page that is left, C if there is none."""
    columns = present.shape[-1]
    indices = np.where(present, np.arange(columns, dtype=np.intp), np.intp(columns))
    first = np.minimum.accumulate(indices[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([first[..., 1:], np.full_like(indices[..., :1], columns)], axis=-1)


def _key_spread(constants: Constants, following: NDArray[np.intp]) -> Floats:
    """Returns [Hk, C]: the deviation over channels of keys, by the next page's range."""
    smallest, span = constants.key_min, constants.key_range
    lag_min = np.take_along_axis(smallest, following[..., None], axis=1)
    lag_span = np.take_along_axis(span, following[..., None], axis=1)
    centres = _share(middle(smallest, span) - lag_min, lag_span)
    return np.sqrt(centres.var(axis=-1) + np.square(_share(span, lag_span)).mean(axis=-1) / 12)


def _value_spread(constants: Constants, following: NDArray[np.intp]) -> Floats:
    """Returns [Hk, C]: the mean deviation over channels of values, by the next page's range."""
    smallest, span = constants.value_min, constants.value_range
    whole = (smallest + span).max(axis=-1) - smallest.min(axis=-1)
    return _share(span.mean(axis=-1), np.take_along_axis(whole, following, axis=1)) / np.sqrt(12)


def _share(part: Floats, whole: Floats) -> Floats:
    """Returns part / whole, and 0 where the whole is 0."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _softmax(scores: Floats, scored: NDArray[np.bool_]) -> Floats:
    """Returns the softmax over the scored pages of each head, 0 for the others."""
    raised = scored * np.exp(scores - scores.max(axis=-1, keepdims=True, initial=0))
    return _share(raised, raised.sum(axis=-1, keepdims=True))
