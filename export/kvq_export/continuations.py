"""What a predicted prompt costs the text after it. Knows engines and tokens, no text.

The truth is the model after the computed prompt; the other end is the model without the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from kvq_runtime.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """Token ids of a prompt, and those that follow it in the text."""

    prompt: Sequence[int]
    following: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Of one way to read prompts: nats per token that follows, divergence from the truth in nats.

    `share`: how far that is on the way from the computed prompt to none, 0 where a prompt is worth
    nothing. `prefill_s`: seconds of all prompts together.
    """

    nll: float
    kld: float
    share: float
    prefill_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuations:
    """Mean nats per token after computed prompts and after none, and each way between."""

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
) -> Continuations:
    """Reads every passage in each of `ways`, arguments of `predict`; `options` of a session."""
    options = {"context_tokens": max(len(one.prompt) + len(one.following) for one in passages)} | (
        options
    )
    names = [*ways]
    nll, kld, seconds = (np.zeros(len(names) + 2) for _ in range(3))
    for number, passage in enumerate(passages):
        progress(number, len(passages))
        truth, nll[0], seconds[0] = _added(engine, passage, "off", options, nll[0], seconds[0])
        for place, name in enumerate(names, start=1):
            found, nll[place], seconds[place] = _added(
                engine, passage, ways[name], options, nll[place], seconds[place]
            )
            kld[place] += (np.exp(truth) * (truth - found)).sum() / len(truth)
        alone = Passage(prompt=passage.prompt[:1], following=passage.following)
        _, nll[-1], _ = _added(engine, alone, "off", options, nll[-1], 0.0)
    nll, kld = nll / len(passages), kld / len(passages)
    way = nll[-1] - nll[0]
    return Continuations(
        exact_nll=float(nll[0]),
        no_prompt_nll=float(nll[-1]),
        exact_s=float(seconds[0]),
        ways={
            name: Cost(
                nll=float(nll[i]),
                kld=float(kld[i]),
                share=float((nll[i] - nll[0]) / way) if way > 0 else 0.0,
                prefill_s=float(seconds[i]),
            )
            for i, name in enumerate(names, start=1)
        },
    )


def _added(
    engine: Engine,
    passage: Passage,
    predict: str,
    options: Mapping[str, Any],
    nll: float,
    seconds: float,
) -> tuple[np.ndarray, float, float]:
    """Log-probabilities float64 [n, V] of what follows; with nats and seconds added."""
    with engine.session(predict=predict, **options) as session:
        since = perf_counter()
        session.prefill(passage.prompt)
        seconds += perf_counter() - since
        first = session.sequence.state().logits
        rest = list(session.logits(passage.following[:-1])) if len(passage.following) > 1 else []
    assert first is not None
    logits = np.concatenate([first[None], *rest]).astype(np.float64)
    logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    told = logs[np.arange(len(logs)), list(passage.following)]
    return logs, nll - float(told.mean()), seconds
