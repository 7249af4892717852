"""Several continuations of a text, written side by side for a person to choose from.

A `Writer` writes them in rows of one branch, which is forgotten afterwards, so nothing of them
enters a page or a saved session. To take one of them is an ordinary prefill of its tokens.
`kvq_specdraft.writers` has the methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.answer.constraint import Ids
from kvq_runtime.answer.generation import (
    Cancel,
    Continuation,
    GenerationOptions,
    Vocabulary,
    never_cancelled,
)
from kvq_runtime.backends import C
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """Holds one continuation: its token ids, their text and their log-probabilities.

    Attributes:
        ids: Tokens of the continuation.
        logprobs: Natural log-probability of every token by the model itself, before sampling
            filters, given the tokens before it.
        text: Text of the tokens, without the forced beginning and without what follows a stop
            string.
        ends: Characters of the text that are known after each token.
        finish_reason: `stop`, `length` or `cancelled`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ends: tuple[int, ...]
    finish_reason: str

    @property
    def logprob(self) -> float:
        """Returns the natural log-probability of the whole continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Holds one alternative while it is written; to grow it makes another line.

    `row` is the row of the branch that holds the last of its tokens that was run, -1 for the text's
    end. `score` is what its method ranks it by. `text` is the text of its tokens, without a token
    that ended it, and `ends` are its lengths after each of them.
    """

    so_far: Continuation
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    ends: tuple[int, ...] = ()
    row: int = -1
    score: float = 0.0
    finish_reason: str | None = None

    @property
    def choices(self) -> Ids | None:
        """Returns the tokens that may come next, None for every token."""
        return self.so_far.allowed


class AlternativesRequest:
    """Asks for `count` alternatives of up to `options.max_tokens` tokens after the text `history`.

    A branch of the session holds `branch_rows`, its context `room` more tokens. `cancel` is asked
    before each pass; once it returns True, the lines that exist are the result. With `exact` False
    a writer may spend less on the log-probabilities of tokens that it does not choose.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: GenerationOptions,
        *,
        count: int,
        branch_rows: int,
        room: int,
        history: Sequence[int],
        cancel: Cancel = never_cancelled,
        exact: bool = True,
    ) -> None:
        if count < 1:
            raise UsageError(f"{count} drafts are not possible: ask for 1 or more")
        self.count = count
        self.options = options
        self.length = options.max_tokens or 1
        # Rows that a line may take: its forced beginning takes some, too.
        self.longest = self.length + len(options.begin_with)
        self._branch_rows = branch_rows
        self._room = room
        self.history = tuple(history)
        self.cancel = cancel
        self.exact = exact
        # A line without a token.
        self.start = Line(
            so_far=Continuation(vocabulary, replace(options, max_tokens=self.length), room)
        )

    def need_rows(self, rows: int, method: str) -> None:
        """Raises `UsageError`, before any pass, for a branch that is larger than the session's."""
        if rows > self._branch_rows:
            raise UsageError(
                f"{self.count} drafts of {self.length} tokens by {method!r} need {rows} rows; this "
                f"session has room for {self._branch_rows}: open it with draft_tokens={rows}, or "
                "ask for fewer or shorter ones"
            )
        if rows > self._room:
            raise UsageError(
                f"{self.count} drafts of {self.length} tokens need {rows} rows and the context has "
                f"room for {self._room}: ask for fewer or shorter ones, or for a larger context"
            )

    def grow(self, line: Line, token: int, logprob: float, *, score: float | None = None) -> Line:
        """Returns `line` with one token more; `score` None: its log-probability is added."""
        score = line.score + logprob if score is None else score
        if token in line.so_far.stop_ids:
            return replace(line, score=score, finish_reason="stop")
        so_far = line.so_far.fork()
        text = line.text + (so_far.take(token) or "")
        return replace(
            line,
            so_far=so_far,
            ids=(*line.ids, token),
            logprobs=(*line.logprobs, logprob),
            text=text,
            ends=(*line.ends, len(text)),
            score=score,
            finish_reason=so_far.finish_reason,
        )

    def finished(self, line: Line) -> Alternative:
        """Returns the alternative that a line has become."""
        text = line.text + line.so_far.fork().rest()
        return Alternative(
            ids=line.ids,
            logprobs=line.logprobs,
            text=text,
            ends=(*line.ends[:-1], len(text)) if line.ends else (),
            finish_reason=line.finish_reason or "cancelled",
        )

    def shortened(self, line: Line, length: int) -> Line:
        """Returns the first `length` tokens of a line."""
        if length >= len(line.ids):
            return line
        cut = self.start
        for token, logprob in zip(line.ids[:length], line.logprobs, strict=False):
            cut = self.grow(cut, token, logprob)
        return replace(cut, row=line.row, score=line.score, finish_reason="length")


class Writer(Protocol):
    """Writes alternatives by one method. Its dataclass fields are the options of the method."""

    def writing(self, branch: Branch[C], request: AlternativesRequest) -> Work[C, list[Line]]:
        """Writes the lines that `request` asks for, best first, with the model's `logprobs`.

        `branch` is empty and after the text; its rows are forgotten afterwards. Raises `UsageError`
        for what the method or the branch cannot do, before any pass.
        """
        ...


def step(
    branch: Branch[C], lines: list[Line], exact_rows: int = 0
) -> Work[C, tuple[list[Line], NDArray[np.float32]]]:
    """Runs the last token of each line; returns the lines and the logits float32 [lines, V] after.

    Either all lines have tokens or none has. `exact_rows`: see `SequencePass`.
    """
    first = branch.rows
    if not lines[0].ids:
        result = yield from branch.extend((), rows=[-1] * len(lines))
        return lines, result.logits
    result = yield from branch.extend(
        [line.ids[-1] for line in lines],
        [line.row for line in lines],
        exact_rows=exact_rows,
    )
    return [replace(line, row=first + i) for i, line in enumerate(lines)], result.logits


def log_normalizers(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns float32 [R]: what to subtract from each row of logits [R, V] for log-probabilities.

    The log-probabilities of a whole vocabulary are rarely needed, and take longer than a row's
    pass.
    """
    most = logits.max(axis=-1)
    return most + np.log(np.exp(logits - most[..., None]).sum(axis=-1))
