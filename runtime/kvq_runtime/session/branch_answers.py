"""Several answers to one prompt, written side by side: each pass brings one token of each.

The rows of all answers lie in one branch, and at most one answer is kept. No row sees those of
another answer, so each answer is the same as it would be alone with the same seed. It can differ
where a random draw falls within the rounding of a pass of several rows.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Generic

from kvq_runtime.answer.generation import Cancel, Generation, Step, never_cancelled
from kvq_runtime.backends import C
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import Work


class BranchAnswers(Generic[C]):
    """Writes several answers over one branch.

    Attributes:
        running: Numbers of the answers that have not ended.
        kept: Number of the answer that the sequence goes on with. None: with none.
    """

    def __init__(self, branch: Branch[C], answers: Sequence[Generation]) -> None:
        self.running = list(range(len(answers)))
        self.kept: int | None = None
        self._branch = branch
        self._rows: list[list[int]] = [[] for _ in answers]
        self._answers = answers
        # For each answer its last token, and the row of the token before it.
        self._last: list[tuple[int, int] | None] = [None] * len(answers)

    def leave(self, number: int) -> None:
        """Ends an answer early."""
        if number in self.running:
            self.running.remove(number)

    def commit(self) -> list[int]:
        """Keeps the rows of the answer `kept`, if any; returns its last token, which has no row."""
        pair = None if self.kept is None else self._last[self.kept]
        if self.kept is None or pair is None:
            return []
        self._branch.commit(self._rows[self.kept])
        return [pair[0]]

    def stepping(
        self, cancel: Cancel = never_cancelled
    ) -> Work[C, tuple[list[tuple[int, Step]], float]]:
        """Adds a token to each running answer; returns (number, step) pairs, and the seconds.

        Tokens that only spell the prompt's end make no step.
        """
        first, numbers = self._branch.rows, tuple(self.running)
        last = [pair for pair in map(self._last.__getitem__, numbers) if pair is not None]
        result = yield from self._branch.extend(
            [token for token, _ in last],
            [row for _, row in last],
            rows=None if last else [-1] * len(numbers),
            exact_rows=min(self._answers[number].exact_rows for number in numbers)
            and max(self._answers[number].exact_rows for number in numbers),
        )
        began, steps = perf_counter(), list[tuple[int, Step]]()
        for place, number in enumerate(numbers):
            answer = self._answers[number]
            accepted = answer.take(result.logits[place : place + 1], cancel=cancel)
            if last:
                self._rows[number].append(first + place)
            self._last[number] = accepted.token, first + place if last else -1
            steps += [(number, step) for step in accepted.steps]
            if answer.finish_reason is not None:
                self.running.remove(number)
        return steps, result.seconds + perf_counter() - began
