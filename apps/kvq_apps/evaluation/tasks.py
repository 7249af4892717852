"""The tasks by name, over material made once: every cache that is compared is asked the same."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvq.errors import BudgetError
from kvq_apps.evaluation import infilling, problems, recall, text
from kvq_apps.evaluation.infilling import Gap, Passes
from kvq_apps.evaluation.measurement import Measurement, OpenSession, Progress
from kvq_apps.evaluation.problems import Problem
from kvq_apps.evaluation.recall import Question
from kvq_models.tokenizer import Tokenizer

TEXT_TASKS = ("ppl", "kld")
RECALL_TASKS = tuple(recall.ANSWER_TOKENS)
PROBLEM_TASKS = tuple(problems.UNITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """Windows of text in ids, questions by task, problems of one task, gaps.

    Gaps and problems are answered with `answer_tokens` at most.
    """

    tokenizer: Tokenizer
    windows: Sequence[Sequence[int]] = ()
    questions: Mapping[str, Sequence[Question]] = field(
        default_factory=dict[str, Sequence[Question]]
    )
    gaps: Sequence[Gap] = ()
    answer_tokens: int = 1
    passes: Passes | None = None
    problems: Sequence[Problem] = ()

    def sequences(self, task: str) -> list[list[int]]:
        """What each cache reads in a task."""
        if task in TEXT_TASKS:
            return [list(ids) for ids in self.windows]
        if task in RECALL_TASKS:
            return [question.answered for question in self.questions[task]]
        if task in PROBLEM_TASKS:
            return [problem.ids for problem in self.problems]
        return [gap.answered for gap in self.gaps]

    def digest(self, task: str) -> str:
        """SHA-256 of what is read in a task: results with equal digests may be compared."""
        return hashlib.sha256(json.dumps(self.sequences(task)).encode()).hexdigest()

    def measure(
        self, task: str, open_session: OpenSession, open_exact: OpenSession, progress: Progress
    ) -> Measurement:
        """One cache in one task; `open_exact` opens what `kld` compares with."""
        if task == "ppl":
            return text.perplexity(open_session, self.tokenizer, self.windows, progress)
        if task == "kld":
            (outcome,) = text.divergence([open_session], open_exact, self.windows, progress)
            if isinstance(outcome, BudgetError):
                raise outcome
            return outcome
        if task in RECALL_TASKS:
            asked, unit = self.questions[task], recall.UNITS[task]
            return recall.recall(open_session, self.tokenizer, asked, progress, unit)
        if task in PROBLEM_TASKS:
            unit = problems.UNITS[task]
            return problems.solving(open_session, self.problems, self.answer_tokens, progress, unit)
        return infilling.infilling(
            open_session, self.tokenizer, self.gaps, self.answer_tokens, progress, self.passes
        )

    def measure_all(
        self,
        task: str,
        sessions: Sequence[OpenSession],
        open_exact: OpenSession,
        progress: Progress,
    ) -> Iterator[Measurement | BudgetError]:
        """The outcome of each cache, in their order; `progress` counts sequences of all.

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
