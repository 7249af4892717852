"""Measures what a predicted prompt costs the text after it. Knows engines and tokens, no text.

The cost lies between two ends: the model after the computed prompt, and after no prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from kvq_runtime.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """Holds token ids of a prompt, and those that follow it in the text."""

    prompt: Sequence[int]
    following: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Holds what one way to read prompts costs, per token that follows.

    `nll` is in nats, and `kld` is the divergence from the model after the computed prompt. `share`
    is how far `nll` lies on the way from the computed prompt to none, 0 where a prompt is worth
    nothing. `prefill_s` is the seconds of all prompts together.
    """

    nll: float
    kld: float
    share: float
    prefill_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionCosts:
    """Holds mean nats per token after computed prompts and after none, and the cost of each way."""

    exact_nll: float
    no_prompt_nll: float
    exact_s: float
    ways: Mapping[str, Cost]


def measure(
    engine: Engine,
    passages: Sequence[Passage],
    ways: Mapping[str, str],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> PredictionCosts:
    """Reads every passage in each of `ways`, arguments of `predict`; `options` are a session's."""
    longest = max(len(passage.prompt) + len(passage.following) for passage in passages)
    options = {"context_tokens": longest} | options
    names = [*ways]
    nll, kld, seconds = (np.zeros(len(names) + 2) for _ in range(3))
    for number, passage in enumerate(passages):
        progress(number, len(passages))
        truth, nll[0], seconds[0] = _read_passage(
            engine, passage, "off", options, nll[0], seconds[0]
        )
        for place, name in enumerate(names, start=1):
            predicted, nll[place], seconds[place] = _read_passage(
                engine, passage, ways[name], options, nll[place], seconds[place]
            )
            kld[place] += (np.exp(truth) * (truth - predicted)).sum() / len(truth)
        promptless = Passage(prompt=passage.prompt[:1], following=passage.following)
        _, nll[-1], _ = _read_passage(engine, promptless, "off", options, nll[-1], 0.0)
    nll, kld = nll / len(passages), kld / len(passages)
    worth = nll[-1] - nll[0]
    return PredictionCosts(
        exact_nll=float(nll[0]),
        no_prompt_nll=float(nll[-1]),
        exact_s=float(seconds[0]),
        ways={
            name: Cost(
                nll=float(nll[i]),
                kld=float(kld[i]),
                share=float((nll[i] - nll[0]) / worth) if worth > 0 else 0.0,
                prefill_s=float(seconds[i]),
            )
            for i, name in enumerate(names, start=1)
        },
    )


def _read_passage(
    engine: Engine,
    passage: Passage,
    predict: str,
    options: Mapping[str, Any],
    nll: float,
    seconds: float,
) -> tuple[np.ndarray, float, float]:
    """Returns log-probabilities float64 [n, V] of what follows, and adds its nats and seconds."""
    with engine.session(predict=predict, **options) as session:
        since = perf_counter()
        session.prefill(passage.prompt)
        seconds += perf_counter() - since
        first = session.sequence.state().logits
        rest = list(session.logits(passage.following[:-1])) if len(passage.following) > 1 else []
    assert first is not None
    logits = np.concatenate([first[None], *rest]).astype(np.float64)
    logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    log_probs = logs[np.arange(len(logs)), list(passage.following)]
    return logs, nll - float(log_probs.mean()), seconds
