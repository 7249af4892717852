"""What several drafts cost: each method against one greedy draft of the same length, in turn."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from kvq.config import MOST_DRAFT_TOKENS
from kvq.errors import UsageError, argument
from kvq_apps import output
from kvq_apps.bench.suite import Setup
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.session import Session
from kvq_specdraft import writer_named

METHODS = ("branches", "branches:kind=samples", "branches:kind=beam", "superposed")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeveralJob:
    """`drafts` numbers of drafts of `tokens` after `context` tokens, `repeat` times in turn."""

    context: int = 256
    drafts: tuple[int, ...] = (1, 3, 5)
    tokens: int = 10
    repeat: int = 9

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        if min(self.repeat, self.context, self.tokens, *self.drafts) < 1:
            raise UsageError(
                f"{argument('--repeat')}, {argument('--context')} and {argument('--drafts')} are "
                "not possible: give 1 or more"
            )


def measure(setup: Setup, job: SeveralJob) -> dict[str, Any]:
    """A row for each method and number of drafts. Raises `KvqError`."""
    options: dict[str, Any] = {
        "context_tokens": job.context + MOST_DRAFT_TOKENS + job.tokens,
        "draft_tokens": MOST_DRAFT_TOKENS,
        **setup.session_options,
    }
    with (
        Engine(setup.files, threads=setup.threads) as engine,
        engine.session(**options) as session,
    ):
        session.prefill([token % engine.model.vocab_size for token in range(7, 7 + job.context)])
        runs: dict[tuple[str, int], Callable[[], object]] = {
            ("greedy", 1): lambda: list(
                session.generate(job.tokens, sampling=Sampling(temperature=0), stop_ids=())
            )
        }
        for method in METHODS:
            writer = writer_named(method)
            for k in job.drafts:
                runs[method, k] = lambda writer=writer, k=k: session.drafts(
                    k, job.tokens, method=writer, stop_ids=()
                )
        seconds = {run: list[float]() for run in runs}
        for number in range(job.repeat + 1):
            setup.progress(number, job.repeat + 1, "drafts")
            for run, write in runs.items():
                since = perf_counter()
                write()
                seconds[run].append(perf_counter() - since)
                _back(session, job.context)
        name = engine.model.name
    plain = seconds["greedy", 1]
    found = [
        {
            "method": method,
            "k": k,
            # The first turn brings the weights back, and is not counted.
            "ms": 1e3 * median(own[1:]),
            "ms_ratio": median(a / b for a, b in zip(own[1:], plain[1:], strict=True)),
        }
        for (method, k), own in seconds.items()
    ]
    return {
        "model": name, "context": job.context, "tokens": job.tokens, "repeat": job.repeat,
        "rows": found,
    }  # fmt: skip


def print_report(data: dict[str, Any]) -> None:
    """The table for people."""
    cells = [
        (row["method"], row["k"], f"{row['ms']:.1f}", f"{row['ms_ratio']:.2f}")
        for row in data["rows"]
    ]
    output.print_table(cells, header=("method", "drafts", "ms", "times one greedy draft"))


def _back(session: Session[Any], context: int) -> None:
    """The prompt alone again, and the logits of its last token."""
    session.rollback(len(session.tokens) - context)
    if session.sequence.due():
        session.prefill()
