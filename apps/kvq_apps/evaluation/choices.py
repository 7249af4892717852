"""What a person wants measured, as files and numbers with their defaults; makes the material."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq.errors import DataError, UsageError, argument
from kvq_apps import text_input
from kvq_apps.evaluation import documents, infilling, ngram, problems, recall, text
from kvq_apps.evaluation.infilling import Gap, Passes, Sample
from kvq_apps.evaluation.tasks import PROBLEM_TASKS, RECALL_TASKS, TEXT_TASKS, Material
from kvq_apps.output import Shown
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import check_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationChoices:
    """The choices of an evaluation. Raises `UsageError` naming the flag of an impossible one.

    `files` are texts, source files and records; `max_tokens` cuts the text (None: all of it);
    `depths` and `trials` are of the look-ups; `limit` lines of `line_tokens` at most are filled
    in, or so many problems solved, `passes` runs their tests.
    """

    files: tuple[str, ...] = ()
    max_tokens: int | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 1
    limit: int = 200
    line_tokens: int = 64
    seed: int = 0
    passes: Passes | None = None

    def __post_init__(self) -> None:
        counts = {
            "max-tokens": self.max_tokens,
            "trials": self.trials,
            "limit": self.limit,
            "predict": self.line_tokens,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UsageError(about=f"--{name}", value=value, possible="give 1 or more")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError(
                f"{argument('--depths')} {self.depths} is not possible: give numbers from 0 to 1"
            )
        check_seed(self.seed)

    @property
    def texts(self) -> tuple[str, ...]:
        """The files to read on, where some may be records."""
        return tuple(file for file in self.files if not documents.is_records(file))

    @property
    def programs(self) -> tuple[str, ...]:
        """The files with lines to fill in, where some may be texts."""
        return tuple(
            file for file in self.files if documents.is_records(file) or file.endswith(".py")
        )

    def material(
        self,
        tokenizer: Tokenizer,
        tasks: Sequence[str],
        context_tokens: int,
        *,
        lengths: Sequence[int] = (),
        texts: Sequence[str] = (),
        programs: Sequence[str] = (),
        least_prompt_tokens: int = 1,
    ) -> Material:
        """What `tasks` ask of caches with a context of `context_tokens`.

        Look-ups fill each of `lengths`, or the context; `texts` are read as one; prompts for lines
        of `programs` have `least_prompt_tokens` or more.
        """
        rooms = [recall.ANSWER_TOKENS[task] for task in tasks if task in RECALL_TASKS]
        lengths = lengths or (context_tokens - max(rooms, default=0),)
        return Material(
            tokenizer=tokenizer,
            windows=self._windows(tokenizer, texts, context_tokens)
            if {*tasks} & {*TEXT_TASKS}
            else (),
            questions={
                task: recall.questions(
                    task,
                    tokenizer,
                    lengths=lengths,
                    depths=self.depths,
                    trials=self.trials,
                    seed=self.seed,
                    prose=_prose(texts) if task == "facts" else "",
                )
                for task in tasks
                if task in RECALL_TASKS
            },
            gaps=self._gaps(tokenizer, programs, context_tokens, least_prompt_tokens)
            if "fim" in tasks
            else (),
            answer_tokens=self.line_tokens,
            passes=self.passes,
            problems=[
                problem
                for task in tasks
                if task in PROBLEM_TASKS
                for problem in problems.problems(
                    task,
                    tokenizer,
                    programs,
                    limit=self.limit,
                    seed=self.seed,
                    most_tokens=context_tokens - self.line_tokens,
                    passes=self.passes,
                )
            ],
        )

    def baseline(
        self, tokenizer: Tokenizer, files: Sequence[str], gaps: Sequence[Gap], progress: Shown
    ) -> dict[str, Any]:
        """How well n-grams learnt from `files` fill in the lines, reading what is before them."""
        texts = (part for file in files for part in documents.training_texts(file))
        model = ngram.LineBaseline(
            tokenizer, texts, lambda done, total: progress(done, total, "n-grams")
        )
        samples = [gap.sample for gap in gaps]
        lines = [model.complete(sample.prefix, self.line_tokens) for sample in samples]
        return {
            "order": ngram.ORDER,
            "tokens": model.tokens,
            **infilling.line_scores(samples, lines),
        }

    def _windows(
        self, tokenizer: Tokenizer, texts: Sequence[str], context_tokens: int
    ) -> list[list[int]]:
        whole = _prose(texts)
        ids = tokenizer.encode(whole)[: self.max_tokens]
        return text.windows(ids, tokenizer.control.start, context_tokens)

    def _gaps(
        self, tokenizer: Tokenizer, programs: Sequence[str], context_tokens: int, least: int
    ) -> list[Gap]:
        samples: list[Sample] = infilling.read_samples(programs, seed=self.seed)
        found = infilling.gaps(
            tokenizer,
            samples,
            limit=self.limit,
            prompt_tokens=(least, context_tokens - self.line_tokens),
            answer_tokens=self.line_tokens,
        )
        if not found:
            raise DataError(
                f"no line of {', '.join(programs)} has {least} tokens around it; give longer "
                f"source files or a shorter {argument('--context')}"
            )
        return found


def _prose(texts: Sequence[str]) -> str:
    """The files as one text."""
    return "".join(map(text_input.read_text, texts))
