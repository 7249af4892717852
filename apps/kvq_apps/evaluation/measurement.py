"""What all tasks share: a way to open sessions in, a `Measurement` out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.session.session import Session

OpenSession = Callable[[], Session[Any]]
Progress = Callable[[int, int], None]
Floats = NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Holds one task's outcome: `value` in `unit` over `n` samples, and further `details`.

    `kv_bytes` is the most that any of its sessions held, `bytes_per_token` what one more token
    costs at the plan's widths.
    """

    value: float
    unit: str
    n: int
    kv_bytes: int
    bytes_per_token: float
    details: dict[str, object] = field(default_factory=dict[str, object])


class PeakCacheUsage:
    """Records the most bytes that any session of a task held."""

    def __init__(self) -> None:
        self.peak = 0
        self.per_token = 0.0

    def record(self, session: Session[Any]) -> None:
        """Counts a session that has done its work."""
        stats = session.stats()
        self.peak = max(self.peak, stats.kv_bytes_peak)
        self.per_token = stats.bytes_per_token

    def measurement(self, value: float, unit: str, n: int, **details: object) -> Measurement:
        """Returns the task's outcome, with the bytes of its sessions."""
        return Measurement(
            value=value,
            unit=unit,
            n=n,
            kv_bytes=self.peak,
            bytes_per_token=self.per_token,
            details=details,
        )


def predictions(
    session: Session[Any], ids: Sequence[int], first: int
) -> Iterator[tuple[int, Floats]]:
    """Runs `ids` through an empty session; yields (position, logits [n, V]) from `first` on.

    The row at position i predicts token i + 1, so the last token has none.
    """
    if first:
        session.prefill(ids[:first])
    start = first
    for logits in session.logits(ids[first:]):
        rows = logits[: len(ids) - 1 - start]
        if len(rows):
            yield start, rows
        start += len(logits)


def log_softmax(logits: Floats) -> Floats:
    """Returns natural log-probabilities of logits [n, V], row by row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerScore:
    """Tells how well a session expected an answer, token by token.

    `nats` is the mean negative log-probability per token. `reciprocal_rank` is the mean of 1 / (1 +
    tokens that were more likely); 1: every token is the greedy choice.
    """

    nats: float
    reciprocal_rank: float


def score_answer(session: Session[Any], ids: Sequence[int], first: int) -> AnswerScore:
    """Scores tokens `ids[first:]` in a session that already holds `ids[: first - 1]`."""
    answer_ids = ids[first:]
    logits = np.concatenate(list(session.logits(ids[first - 1 : -1])))
    picked = np.arange(len(answer_ids)), np.asarray(answer_ids)
    likelier = (logits > logits[picked][:, None]).sum(1)
    return AnswerScore(
        nats=float(-log_softmax(logits)[picked].mean(dtype=np.float64)),
        reciprocal_rank=float((1 / (1 + likelier)).mean()),
    )
