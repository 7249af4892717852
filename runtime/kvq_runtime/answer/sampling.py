"""From logits to a token: pure functions over numpy arrays.

The filters run in llama.cpp's order: logit bias, penalties, top-k, top-p, min-p, temperature. Top-p
and min-p therefore look at probabilities before the temperature.

An infilling goes on only while it is sure (`Sampling.infill_ends`). The rules are those of
llama.cpp's sampler `infill`, but tokens with a common beginning are not joined.

Without top-k every token of the vocabulary may survive. So many are not sorted: the survivors stay
in the order of ids, and top-p finds its edge in a histogram.
"""

from collections.abc import Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError, UsageError
from kvq_runtime.config import Sampling

__all__ = [
    "Sampling",
    "candidates",
    "distribution",
    "draw",
    "largest",
    "likeliest",
    "log_probability",
    "ranked",
    "sample",
]

Floats = NDArray[np.floating]
Ids = NDArray[np.int64]

# Top-p's histogram: number of steps, and nats below the largest logit. Logits below that weigh
# nothing.
_STEPS, _SPAN = 4096, 64.0
_GROUP = 32
# The probability of a token that is chosen alone.
_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False
# An infilling ends where its ends are this many times as likely as all other candidates together,
# for each candidate. Other tokens need this probability.
_END_WEIGHT, _LEAST_SURE = 3.0, 0.2


def sample(
    logits: Floats,
    sampling: Sampling,
    history: Sequence[int],
    generator: np.random.Generator,
    allowed: Ids | None = None,
) -> int:
    """Returns a token drawn from `distribution(logits, sampling, history, allowed)`."""
    return draw(*candidates(logits, sampling, history, allowed), generator)


def draw(ids: Ids, probabilities: NDArray[np.float64], generator: np.random.Generator) -> int:
    """Returns one of `ids`, drawn by its probability.

    A single id leaves `generator` untouched; otherwise one uniform number is drawn.
    """
    if len(ids) == 1:
        return int(ids[0])
    cumulative = np.cumsum(probabilities)
    drawn = generator.random() * float(cumulative[-1])
    place = int(np.searchsorted(cumulative, drawn, side="right"))
    return int(ids[min(place, len(ids) - 1)])


def distribution(
    logits: Floats, sampling: Sampling, history: Sequence[int], allowed: Ids | None = None
) -> NDArray[np.float64]:
    """Returns the probabilities float64 [V] of the next token, zero where a filter removed it."""
    ids, probabilities = candidates(logits, sampling, history, allowed)
    dense = np.zeros(len(logits), np.float64)
    dense[ids] = probabilities
    return dense


def candidates(
    logits: Floats, sampling: Sampling, history: Sequence[int], allowed: Ids | None = None
) -> tuple[Ids, NDArray[np.float64]]:
    """Returns the token ids that survive every filter, and their probabilities.

    They are in the order of size after top-k, else in the order of ids. Of equal logits the first
    ids survive.

    Args:
        logits: Float [V]; they are not changed.
        sampling: The filters.
        history: Tokens so far, for the penalties.
        allowed: Ids, in order, that may be chosen. None: every id.

    Returns:
        Ids int64 [n] and probabilities float64 [n].

    Raises:
        BackendError: For logits that are NaN.
        UsageError: When a logit bias leaves no token.
    """
    if sampling.logit_bias:
        logits = _biased(logits, sampling)
    if sampling.penalizes:
        logits = _penalized(logits, sampling, history)
    if allowed is not None:
        places, probabilities = _filtered(logits[allowed], sampling)
        return allowed[places], probabilities
    ids, probabilities = _filtered(logits, sampling)
    if sampling.infill_ends and not sampling.greedy:
        return _sure(ids, probabilities, sampling.infill_ends)
    return ids, probabilities


def ranked(
    logits: Floats, rank: int, allowed: Ids | None = None
) -> tuple[Ids, NDArray[np.float64]]:
    """Returns the allowed token that `rank` others are likelier than, as `candidates` returns it.

    It is the unlikeliest one where there are fewer tokens.
    """
    scores = logits if allowed is None else logits[allowed]
    places = largest(scores, rank + 1) if rank + 1 < len(scores) else _descending(scores)
    place = places[min(rank, len(places) - 1)]
    return np.array([place if allowed is None else allowed[place]], np.int64), _CERTAIN


def log_probability(logits: Floats, token: int) -> float:
    """Returns the natural log of the model's own probability of `token`, before any filter."""
    peak, total = _scale(logits)
    return float(logits[token] - peak) - total


def likeliest(logits: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """Returns the `count` likeliest tokens with `log_probability`, likeliest first, ties by id."""
    if count == 0:
        return ()
    ids = largest(logits, count) if count < len(logits) else _descending(logits)
    peak, total = _scale(logits)
    return tuple((int(token), float(logits[token] - peak) - total) for token in ids)


def _scale(logits: Floats) -> tuple[float, float]:
    """Returns the largest logit, and the log of the sum of all probabilities relative to it."""
    largest = logits.max()
    return largest, float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))


def _filtered(logits: Floats, sampling: Sampling) -> tuple[Ids, NDArray[np.float64]]:
    best = int(logits.argmax())
    if not isfinite(logits[best]):
        _refuse(float(logits[best]))
    if sampling.temperature == 0:
        return np.array([best], np.int64), _CERTAIN
    if 0 < sampling.top_k < len(logits):
        ids = largest(logits, sampling.top_k)
        ids = ids[_nucleus(logits[ids], sampling.top_p, sampling.min_p)]
    else:
        ids = _nucleus(logits, sampling.top_p, sampling.min_p)
    return ids, _softmax(logits[ids], sampling.temperature)


def _sure(
    ids: Ids, probabilities: NDArray[np.float64], ends: Sequence[int]
) -> tuple[Ids, NDArray[np.float64]]:
    """Returns the candidates that an infilling may go on with, or one of its `ends` alone."""
    is_end = np.isin(ids, ends)
    end_mass = float(probabilities[is_end].sum())
    is_sure = probabilities >= _LEAST_SURE
    texts = int((is_sure & ~is_end).sum())
    if not texts or _END_WEIGHT * end_mass * len(ids) > 1 - end_mass:
        likeliest_end = ids[np.argmax(probabilities * is_end)] if end_mass else ends[0]
        return np.array([likeliest_end], np.int64), _CERTAIN
    kept = is_sure | is_end
    ids, is_end, probabilities = ids[kept], is_end[kept], probabilities[kept]
    probabilities = probabilities / probabilities.sum()
    kept = is_end | (probabilities >= 1 / (texts + 1))
    return ids[kept], probabilities[kept] / probabilities[kept].sum()


def _biased(logits: Floats, sampling: Sampling) -> Floats:
    ids = np.fromiter(sampling.logit_bias, np.int64)
    if ids.min() < 0 or ids.max() >= len(logits):
        raise UsageError(
            f"logit bias names token {ids.min() if ids.min() < 0 else ids.max()}; "
            f"this model's tokens are 0 to {len(logits) - 1}"
        )
    logits = logits.copy()
    logits[ids] += np.fromiter(sampling.logit_bias.values(), logits.dtype)
    return logits


def _penalized(logits: Floats, sampling: Sampling, history: Sequence[int]) -> Floats:
    """Returns the logits with those of recent tokens made smaller, as llama.cpp does.

    Each token is penalised once: a positive logit is divided by `repeat_penalty`, a negative one
    multiplied. Then `presence_penalty` is subtracted, and `frequency_penalty` for each time that
    the token is there (OpenAI's formula).
    """
    window = sampling.repeat_window_tokens
    if window == 0 or not history:
        return logits
    recent, counts = np.unique(np.asarray(history[-window:], np.int64), return_counts=True)
    logits = logits.copy()
    recent_logits = logits[recent]
    penalty = sampling.repeat_penalty
    recent_logits = np.where(recent_logits > 0, recent_logits / penalty, recent_logits * penalty)
    fewer = counts * sampling.frequency_penalty + sampling.presence_penalty
    logits[recent] = recent_logits - fewer.astype(logits.dtype)
    return logits


def largest(logits: Floats, count: int) -> Ids:
    """Returns the ids of the `count` largest logits, largest first, ties by id.

    Where `count` covers all, they are in the order of ids. Logits of minus infinity are left out.
    """
    if count >= len(logits):
        ids = np.arange(len(logits))
        return ids[np.isfinite(logits)]
    ids = _largest_superset(logits, count)
    ids = ids[_descending(logits[ids])][:count]
    return ids[np.isfinite(logits[ids])]


def _largest_superset(logits: Floats, count: int) -> Ids:
    """Returns the ids, in order, of at least the `count` largest logits, and of few more.

    Logits are grouped by the remainder of their place, so that the maxima of all groups are found
    at once. At least `count` logits reach the count-th largest of these maxima.
    """
    groups = len(logits) // _GROUP
    if count >= groups:
        return np.arange(len(logits))
    whole = logits[: groups * _GROUP]
    maxima = whole.reshape(_GROUP, groups).max(axis=0)
    least = np.partition(maxima, -count)[-count]
    columns = np.flatnonzero(maxima >= least)
    ids = (columns + groups * np.arange(_GROUP)[:, None]).ravel()
    ids = np.concatenate([ids, np.arange(len(whole), len(logits))])
    return np.sort(ids[logits[ids] >= least])


def _descending(logits: Floats) -> Ids:
    """Returns the places from the largest logit to the smallest, ties by place."""
    return np.argsort(-logits, kind="stable")


def _nucleus(logits: Floats, top_p: float, min_p: float) -> Ids:
    """Returns the places, in order, of the logits that `top_p` and `min_p` leave.

    Top-p leaves the fewest logits, largest first, whose probabilities sum to `top_p`. Min-p leaves
    those that are at least `min_p` times as likely as the largest.
    """
    top = logits.max()
    least = top + float(np.log(min_p)) if min_p > 0 else np.finfo(logits.dtype).min
    places = np.flatnonzero(logits >= least)
    if top_p >= 1:
        return places
    weights = np.exp(logits - top)
    mass = top_p * float(weights.sum(dtype=np.float64))
    return places[_smallest_set(top - logits[places], weights[places], mass)]


def _smallest_set(depths: Floats, weights: Floats, mass: float) -> NDArray[np.bool_]:
    """Chooses the fewest items, those of the smallest depth first, that together weigh `mass`."""
    span = min(float(depths.max()), _SPAN)
    step = np.minimum(depths * ((_STEPS - 1) / max(span, 1e-30)), _STEPS - 1).astype(np.int32)
    reached = np.cumsum(np.bincount(step, weights, _STEPS))
    edge = int(np.searchsorted(reached, mass, side="left"))
    # Of the step in which the sum is reached, take as many items as are needed.
    inside = np.flatnonzero(step == edge)
    inside = inside[np.argsort(depths[inside], kind="stable")]
    before = float(reached[edge - 1]) if edge else 0.0
    sums = before + np.cumsum(weights[inside], dtype=np.float64)
    kept = step < edge
    kept[inside[: int(np.searchsorted(sums, mass, side="left")) + 1]] = True
    return kept


def _softmax(logits: Floats, temperature: float) -> NDArray[np.float64]:
    depths = (logits - logits.max()) / np.float64(temperature)
    exponentials = np.exp(depths.astype(np.float32)).astype(np.float64)
    return exponentials / exponentials.sum()


def _refuse(largest: float) -> None:
    if np.isnan(largest) or largest > 0:
        raise BackendError(
            "the model gave logits that are not finite; its weights or its cache are damaged: "
            "check the bundle with `kvq inspect` and export it again"
        )
    raise UsageError("the logit bias forbids every token that may come next; leave at least one")
