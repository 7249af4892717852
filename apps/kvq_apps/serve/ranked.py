"""Generation that also says which other tokens were likely. Knows one session."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvq_apps.serve.outbox import TokenLog
from kvq_apps.serve.requests import Ask
from kvq_models.tokenizer import IncrementalDetokenizer, Tokenizer
from kvq_runtime.sampling import log_probability, sample
from kvq_runtime.session import Session, Step
from kvq_runtime.stop_strings import StopStrings


def ranked_steps(
    session: Session, tokenizer: Tokenizer, ask: Ask, seed: int, limit: int, ends: frozenset[int]
) -> Iterator[tuple[Step, TokenLog]]:
    """What `Session.generate` yields for the same seed, each step with its likeliest tokens.

    The session holds the prompt; up to `limit` tokens are added.
    """
    generator = np.random.default_rng(seed)
    detokenizer = IncrementalDetokenizer(tokenizer)
    stops = StopStrings(ask.stop)
    token = session.tokens[-1]
    session.rollback(1)
    for count in range(1, limit + 1):
        logits = next(iter(session.logits([token])))[-1]
        token = sample(logits, ask.sampling, session.tokens, generator)
        text = stops.feed(detokenizer.push(token))
        stopped = token in ends or stops.found is not None
        reason = "stop" if stopped else "length" if count == limit else None
        if reason is not None and stops.found is None:
            text += stops.feed(detokenizer.flush())
            text += "" if stops.found is not None else stops.flush()
        logprob = log_probability(logits, token)
        log = TokenLog(token=token, logprob=logprob, top=_likeliest(logits, ask.top_logprobs))
        yield Step(token=token, text=text, logprob=logprob, finish_reason=reason), log
        if reason is not None:
            return


def _likeliest(logits: NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens and their log-probabilities, likeliest first, ties by id."""
    count = min(count, len(logits))
    ids = np.argsort(-logits, kind="stable")[:count]
    return tuple((int(token), log_probability(logits, int(token))) for token in ids)
