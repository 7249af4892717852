"""The tasks by name, over material made once: every compared cache gets the same."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvq.errors import BudgetError
from kvq_apps.evaluation import recall, text
from kvq_apps.evaluation.measurement import Measurement, OpenSession, Progress
from kvq_apps.evaluation.recall import RecallQuestion
from kvq_models.tokenizer import Tokenizer

TEXT_TASKS = ("ppl", "kld")
RECALL_TASKS = tuple(recall.ANSWER_TOKENS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Holds windows of text in ids, and questions by task."""

    tokenizer: Tokenizer
    windows: Sequence[Sequence[int]] = ()
    questions: Mapping[str, Sequence[RecallQuestion]] = field(
        default_factory=dict[str, Sequence[RecallQuestion]]
    )

    def measure(
        self, task: str, open_session: OpenSession, open_exact: OpenSession, progress: Progress
    ) -> Measurement:
        """Measures one cache in one task; `open_exact` opens what `kld` compares with."""
        if task == "ppl":
            return text.perplexity(open_session, self.tokenizer, self.windows, progress)
        if task == "kld":
            (outcome,) = text.divergence([open_session], open_exact, self.windows, progress)
            if isinstance(outcome, BudgetError):
                raise outcome
            return outcome
        unit = recall.UNITS[task]
        return recall.recall(open_session, self.tokenizer, self.questions[task], progress, unit)

    def measure_all(
        self,
        task: str,
        sessions: Sequence[OpenSession],
        open_exact: OpenSession,
        progress: Progress,
    ) -> Iterator[Measurement | BudgetError]:
        """Yields the outcome of each cache, in their order; `progress` counts sequences of all.

        In `kld` they read side by side, so that the unquantised logits are computed once.
        """
        count = len(sessions)
        if task == "kld":
            yield from text.divergence(
                sessions,
                open_exact,
                self.windows,
                lambda done, total: progress(done * count, total * count),
            )
            return
        for number, open_session in enumerate(sessions):

            def shown(done: int, total: int, before: int = number) -> None:
                progress(before * total + done, count * total)

            try:
                yield self.measure(task, open_session, open_exact, shown)
            except BudgetError as error:
                yield error
