"""Perplexity, and divergence from an unquantised cache.

Texts are cut into windows of equal length. The second half of each window is scored, so every
scored token has half of the context, and a cache under pressure has already given something up.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BudgetError, DataError
from kvq_apps.evaluation.measurement import (
    Floats,
    Measurement,
    OpenSession,
    PeakCacheUsage,
    Progress,
    log_softmax,
    predictions,
)
from kvq_models.tokenizer import Tokenizer

# Most rows of logits at once: 64 rows of a 150k vocabulary are 38 MB. It is one page, so that no
# budget shortens the chunks of one cache and not those of another.
SCORE_CHUNK_TOKENS = 64

MIN_WINDOW_TOKENS = 4


def windows(ids: Sequence[int], start: Sequence[int], context_tokens: int) -> list[list[int]]:
    """Cuts `ids` into runs that fill `context_tokens` with the model's `start` tokens before each.

    A shorter end counts only when it is all there is. Raises `DataError` for a text too short.
    """
    run = context_tokens - len(start)
    if min(len(ids), run) < MIN_WINDOW_TOKENS:
        raise DataError(
            f"the text has {len(ids)} tokens and a window takes {run}; "
            f"scoring needs at least {MIN_WINDOW_TOKENS}"
        )
    count = max(1, len(ids) // run)
    return [[*start, *ids[i * run : (i + 1) * run]] for i in range(count)]


def perplexity(
    open_session: OpenSession,
    tokenizer: Tokenizer,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> Measurement:
    """Measures perplexity of the scored tokens of `texts` (windows of ids), and bits per byte."""
    nats, scored, text_bytes, usage = 0.0, 0, 0, PeakCacheUsage()
    for number, ids in enumerate(texts):
        with open_session() as session:
            for start, logits in predictions(session, ids, _first_scored(ids)):
                targets = np.asarray(ids[start + 1 : start + 1 + len(logits)])
                rows = log_softmax(logits)[np.arange(len(targets)), targets]
                nats -= float(rows.sum(dtype=np.float64))
                scored += len(targets)
            usage.record(session)
        text_bytes += len(tokenizer.decode(list(ids[_first_scored(ids) + 1 :])).encode())
        progress(number + 1, len(texts))
    return usage.measurement(
        _perplexity(nats / scored),
        "perplexity",
        scored,
        nats_per_token=nats / scored,
        bits_per_byte=nats / log(2) / max(1, text_bytes),
        windows=len(texts),
    )


def divergence(
    sessions: Sequence[OpenSession],
    open_reference: OpenSession,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> list[Measurement | BudgetError]:
    """Measures the mean KL divergence of next-token distributions from the reference session's.

    All `sessions` read a window side by side, chunk by chunk, so the reference is computed once and
    only a chunk of logits is held. A cache whose budget cannot hold the window gives its
    `BudgetError` instead of a measurement.
    """
    scores = [_DivergenceScore(open_session) for open_session in sessions]
    for number, ids in enumerate(texts):
        first = _first_scored(ids)
        with ExitStack() as stack:
            for score in scores:
                score.enter(stack, ids, first)
            reference = stack.enter_context(open_reference())
            for start, logits in predictions(reference, ids, first):
                expected = log_softmax(logits)
                targets = np.asarray(ids[start + 1 : start + 1 + len(logits)])
                for score in scores:
                    score.add(start, expected, targets)
            for score in scores:
                score.leave()
        progress(number + 1, len(texts))
    return [score.refusal or score.measurement(len(texts)) for score in scores]


class _DivergenceScore:
    """Scores one of several caches against the reference, window after window."""

    def __init__(self, open_session: OpenSession) -> None:
        self._open = open_session
        self._session: Any = None
        self._rows: Iterator[tuple[int, Floats]] = iter(())
        self._divergences: list[Floats] = []
        self._ends: list[int] = []  # of the windows, in scored tokens
        self._agreed = 0
        self._moved = 0.0
        self._nats = 0.0
        self._usage = PeakCacheUsage()
        self.refusal: BudgetError | None = None

    def enter(self, stack: ExitStack, ids: Sequence[int], first: int) -> None:
        """Opens a session for the next window."""
        if self.refusal is not None:
            return
        try:
            self._session = stack.enter_context(self._open())
        except BudgetError as error:
            self.refusal = error
            return
        self._rows = predictions(self._session, ids, first)

    def add(self, start: int, expected: Floats, targets: NDArray[np.int64]) -> None:
        """Compares the next chunk with the reference's log-probabilities `expected` [n, V]."""
        if self.refusal is not None:
            return
        try:
            place, logits = next(self._rows)
        except BudgetError as error:
            self.refusal = error
            return
        assert (place, len(logits)) == (start, len(expected))
        actual = log_softmax(logits)
        self._divergences.append(kl_divergence(expected, actual))
        self._agreed += int((actual.argmax(1) == expected.argmax(1)).sum())
        picked = np.arange(len(targets)), targets
        self._moved += float(np.square(np.exp(actual[picked]) - np.exp(expected[picked])).sum())
        self._nats -= float(actual[picked].sum(dtype=np.float64))

    def leave(self) -> None:
        """Counts the bytes of the window's session before it is closed."""
        if self.refusal is None:
            self._usage.record(self._session)
            self._ends.append(sum(map(len, self._divergences)))

    def measurement(self, num_windows: int) -> Measurement:
        """Returns the outcome over all windows."""
        values = np.concatenate(self._divergences)
        windows = [float(part.mean()) for part in np.split(values, self._ends[:-1])]
        return self._usage.measurement(
            float(values.mean()),
            "nats",
            len(values),
            kld_99=float(np.quantile(values, 0.99)),
            kld_99_9=float(np.quantile(values, 0.999)),
            kld_max=float(values.max()),
            rms_delta_p=float(np.sqrt(self._moved / len(values))),
            same_top_1=self._agreed / len(values),
            perplexity=_perplexity(self._nats / len(values)),
            windows=num_windows,
            window_nats=windows,
        )


def kl_divergence(expected: Floats, actual: Floats) -> Floats:
    """Returns KL(expected || actual) in nats per row of two log-distributions [n, V], 0 or more."""
    return np.maximum((np.exp(expected) * (expected - actual)).sum(1, dtype=np.float64), 0.0)


def _perplexity(nats_per_token: float) -> float:
    """Returns a finite perplexity, so that a report of a hopeless cache is still JSON."""
    return exp(min(nats_per_token, 700.0))


def _first_scored(ids: Sequence[int]) -> int:
    """Returns the row whose prediction is the first to be scored."""
    return len(ids) // 2 - 1
