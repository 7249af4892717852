"""The choices of an evaluation, with their defaults. Makes the material of its tasks."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvq.errors import UsageError, argument
from kvq_apps.evaluation import recall, text
from kvq_apps.evaluation.tasks import RECALL_TASKS, TEXT_TASKS, Material
from kvq_apps.settings.flag_values import check_range
from kvq_apps.terminal import text_input
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import check_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationChoices:
    """Holds the choices. Raises `UsageError` naming the flag of an impossible one.

    `max_tokens` cuts the text (None: all of it). `depths` and `trials` are for look-ups.
    """

    max_tokens: int | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(1, max_tokens=self.max_tokens, trials=self.trials)
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise UsageError(
                f"{argument('--depths')} {self.depths} is not possible: give numbers from 0 to 1"
            )
        check_seed(self.seed)

    def material(
        self,
        tokenizer: Tokenizer,
        tasks: Sequence[str],
        context_tokens: int,
        *,
        files: Sequence[str] = (),
        lengths: Sequence[int] = (),
    ) -> Material:
        """Makes what `tasks` ask of caches with a context of `context_tokens`.

        `files` are read as one text. Look-ups fill each of `lengths`, or the context.
        """
        rooms = [recall.ANSWER_TOKENS[task] for task in tasks if task in RECALL_TASKS]
        prose = "".join(map(text_input.read_text, files))
        windows: list[list[int]] = []
        if {*tasks} & {*TEXT_TASKS}:
            ids = tokenizer.encode(prose)[: self.max_tokens]
            windows = text.windows(ids, tokenizer.control.start, context_tokens)
        questions = {
            task: recall.questions(
                task,
                tokenizer,
                lengths=lengths or (context_tokens - max(rooms),),
                depths=self.depths,
                trials=self.trials,
                seed=self.seed,
                prose=prose,
            )
            for task in tasks
            if task in RECALL_TASKS
        }
        return Material(tokenizer=tokenizer, windows=windows, questions=questions)
