"""From logits to a token: pure functions over numpy arrays. Knows no model, cache or text.

The filters run in llama.cpp's order: logit bias, penalties, top-k, top-p, min-p,
temperature. Top-p and min-p therefore look at probabilities before the temperature.

Without top-k every token of the vocabulary may survive. Nothing sorts that many: what survives
stays in the order of ids, and top-p finds its edge in a histogram.
"""

from collections.abc import Sequence

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

# Top-p's histogram: steps, and nats below the largest logit. What is less likely weighs nothing.
_STEPS, _SPAN = 4096, 64.0
_GROUP = 32


def sample(
    logits: Floats,
    sampling: Sampling,
    history: Sequence[int],
    generator: np.random.Generator,
    allowed: Ids | None = None,
) -> int:
    """Token drawn from `distribution(logits, sampling, history, allowed)`."""
    return draw(*candidates(logits, sampling, history, allowed), generator)


def draw(ids: Ids, probabilities: NDArray[np.float64], generator: np.random.Generator) -> int:
    """One of `ids` with its probability.

    A single one leaves `generator` untouched; everything else draws one uniform number.
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
    """Probabilities float64 [V] the next token is drawn from; zero where a filter removed it."""
    ids, probabilities = candidates(logits, sampling, history, allowed)
    dense = np.zeros(len(logits), np.float64)
    dense[ids] = probabilities
    return dense


def candidates(
    logits: Floats, sampling: Sampling, history: Sequence[int], allowed: Ids | None = None
) -> tuple[Ids, NDArray[np.float64]]:
    """Token ids that survive every filter, and their probabilities.

    `logits` is [V] and stays unchanged. Largest first after top-k, else in the order of ids; of
    equal logits the first ids survive. `allowed`, ids in order, leaves out all others before the
    filters; None: none. Raises `BackendError` for NaN
    logits and `UsageError` when a bias leaves no token.
    """
    if sampling.logit_bias:
        logits = _biased(logits, sampling)
    if sampling.penalizes:
        logits = _penalized(logits, sampling, history)
    if allowed is not None:
        places, probabilities = _filtered(logits[allowed], sampling)
        return allowed[places], probabilities
    return _filtered(logits, sampling)


def ranked(
    logits: Floats, rank: int, allowed: Ids | None = None
) -> tuple[Ids, NDArray[np.float64]]:
    """As `candidates`: the one token, of those allowed, that `rank` others are likelier than.

    The unlikeliest where there are not so many.
    """
    own = logits if allowed is None else logits[allowed]
    found = largest(own, rank + 1) if rank + 1 < len(own) else _descending(own)
    place = found[min(rank, len(found) - 1)]
    return np.array([place if allowed is None else allowed[place]], np.int64), np.ones(1)


def log_probability(logits: Floats, token: int) -> float:
    """Natural log of the model's own probability of `token`, before any filter."""
    peak, total = _scale(logits)
    return float(logits[token] - peak) - total


def likeliest(logits: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens with `log_probability`, likeliest first, ties by id."""
    if count == 0:
        return ()
    ids = largest(logits, count) if count < len(logits) else _descending(logits)
    peak, total = _scale(logits)
    return tuple((int(token), float(logits[token] - peak) - total) for token in ids)


def _scale(logits: Floats) -> tuple[float, float]:
    """The largest logit, and the log of the sum of all probabilities relative to its."""
    largest = logits.max()
    return largest, float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))


def _filtered(logits: Floats, sampling: Sampling) -> tuple[Ids, NDArray[np.float64]]:
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        _refuse(float(logits[best]))
    if sampling.greedy:
        return np.array([best], np.int64), np.ones(1)
    if 0 < sampling.top_k < len(logits):
        ids = largest(logits, sampling.top_k)
        ids = ids[_likely(logits[ids], sampling.top_p, sampling.min_p)]
    else:
        ids = _likely(logits, sampling.top_p, sampling.min_p)
    return ids, _softmax(logits[ids], sampling.temperature)


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
    """Logits of recent tokens made smaller, as llama.cpp does.

    Once for each token: a positive logit is divided by `repeat_penalty`, a negative one
    multiplied. Then `presence_penalty` is taken off, and `frequency_penalty` for each time that
    the token is there (OpenAI's formula).
    """
    window = sampling.repeat_window_tokens
    if window == 0 or not history:
        return logits
    recent, counts = np.unique(np.asarray(history[-window:], np.int64), return_counts=True)
    logits = logits.copy()
    seen = logits[recent]
    penalty = sampling.repeat_penalty
    seen = np.where(seen > 0, seen / penalty, seen * penalty)
    fewer = counts * sampling.frequency_penalty + sampling.presence_penalty
    logits[recent] = seen - fewer.astype(logits.dtype)
    return logits


def largest(logits: Floats, count: int) -> Ids:
    """Ids of the `count` largest logits, largest first and ties by id; of all, in order of id.

    Logits of minus infinity are left out.
    """
    if count >= len(logits):
        ids = np.arange(len(logits))
        return ids[np.isfinite(logits)]
    ids = _reaching(logits, count)
    ids = ids[_descending(logits[ids])][:count]
    return ids[np.isfinite(logits[ids])]


def _reaching(logits: Floats, count: int) -> Ids:
    """Ids, in order, of at least the `count` largest logits, and of few more.

    Logits are grouped by their place's remainder, which makes maxima of whole rows at once; at
    least `count` logits reach the count-th largest of the groups' maxima.
    """
    groups = len(logits) // _GROUP
    if count >= groups:
        return np.arange(len(logits))
    whole = logits[: groups * _GROUP]
    maxima = whole.reshape(_GROUP, groups).max(axis=0)
    least = np.partition(maxima, -count)[-count]
    found = np.flatnonzero(maxima >= least)
    ids = (found + groups * np.arange(_GROUP)[:, None]).ravel()
    ids = np.concatenate([ids, np.arange(len(whole), len(logits))])
    return np.sort(ids[logits[ids] >= least])


def _descending(logits: Floats) -> Ids:
    """Places from the largest logit to the smallest, ties by place."""
    return np.argsort(-logits, kind="stable")


def _likely(logits: Floats, top_p: float, min_p: float) -> Ids:
    """Places, in order, of logits in the nucleus of `top_p` that `min_p` leaves too.

    The nucleus: the fewest logits, largest first, whose probabilities sum to `top_p`. `min_p`: as
    likely as that times the largest, or likelier.
    """
    top = logits.max()
    least = top + float(np.log(min_p)) if min_p > 0 else np.finfo(logits.dtype).min
    places = np.flatnonzero(logits >= least)
    if top_p >= 1:
        return places
    weights = np.exp(logits - top)
    wanted = top_p * float(weights.sum(dtype=np.float64))
    return places[_fewest(top - logits[places], weights[places], wanted)]


def _fewest(depths: Floats, weights: Floats, wanted: float) -> NDArray[np.bool_]:
    """Which items, those of the smallest depth first, weigh `wanted` together: the fewest."""
    span = min(float(depths.max()), _SPAN)
    step = np.minimum(depths * ((_STEPS - 1) / max(span, 1e-30)), _STEPS - 1).astype(np.int32)
    reached = np.cumsum(np.bincount(step, weights, _STEPS))
    edge = int(np.searchsorted(reached, wanted, side="left"))
    # Of the step in which the sum is reached, as many as it takes.
    inside = np.flatnonzero(step == edge)
    inside = inside[np.argsort(depths[inside], kind="stable")]
    before = float(reached[edge - 1]) if edge else 0.0
    sums = before + np.cumsum(weights[inside], dtype=np.float64)
    kept = step < edge
    kept[inside[: int(np.searchsorted(sums, wanted, side="left")) + 1]] = True
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
