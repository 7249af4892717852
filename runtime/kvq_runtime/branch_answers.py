"""Several answers to one prompt, written side by side: a pass brings the next token of each.

The rows of all answers lie in one branch, of which at most one answer is kept. No row sees those of
another answer, so each says what it would say alone with the same seed; where a draw falls within
the rounding of a pass of several rows it may say something else.
"""

from collections.abc import Sequence
from typing import Generic

from kvq_runtime.backends import C
from kvq_runtime.branch import Branch
from kvq_runtime.generation import Cancel, Generation, Step, never
from kvq_runtime.metrics import Stopwatch
from kvq_runtime.passes import Work


class BranchAnswers(Generic[C]):
    """Answers over one branch; `going` are the numbers of those that have not ended.

    `kept` is the number of the answer that the sequence goes on with, None: with none.
    """

    def __init__(self, branch: Branch[C], answers: Sequence[Generation]) -> None:
        self.going = list(range(len(answers)))
        self.kept: int | None = None
        self._branch = branch
        self._rows: list[list[int]] = [[] for _ in answers]
        self._answers = answers
        # Of each answer its last token, and the row that the token before it is in.
        self._last: list[tuple[int, int] | None] = [None] * len(answers)

    def leave(self, number: int) -> None:
        """Ends an answer that its reader has had enough of."""
        if number in self.going:
            self.going.remove(number)

    def commit(self) -> list[int]:
        """Keeps the rows of `kept`, if there is one; its last token, which is in no row yet."""
        pair = None if self.kept is None else self._last[self.kept]
        if self.kept is None or pair is None:
            return []
        self._branch.commit(self._rows[self.kept])
        return [pair[0]]

    def stepping(self, cancel: Cancel = never) -> Work[C, tuple[list[tuple[int, Step]], float]]:
        """A token more for each that is going: (its number, the step), and the seconds it took.

        Tokens that only spell the prompt's end make no step.
        """
        first, numbers = self._branch.rows, tuple(self.going)
        last = [pair for pair in map(self._last.__getitem__, numbers) if pair is not None]
        passed = yield from self._branch.extend(
            [token for token, _ in last],
            [row for _, row in last],
            rows=None if last else [-1] * len(numbers),
            exact_rows=min(self._answers[number].exact_rows for number in numbers)
            and max(self._answers[number].exact_rows for number in numbers),
        )
        watch, steps = Stopwatch(), list[tuple[int, Step]]()
        for place, number in enumerate(numbers):
            answer = self._answers[number]
            taken = answer.take(passed.logits[place : place + 1], cancel=cancel)
            if last:
                self._rows[number].append(first + place)
            self._last[number] = taken.token, first + place if last else -1
            steps += [(number, step) for step in taken.steps]
            if answer.finish_reason is not None:
                self.going.remove(number)
        return steps, passed.seconds + watch.lap()
