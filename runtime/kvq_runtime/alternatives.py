"""Several ways a text may go on, written side by side for a person to choose from.

A `Writer` writes them in rows of one branch, which is forgotten afterwards: nothing of them enters
a page or a saved session. Taking one is an ordinary prefill of its tokens. `kvq_specdraft.writers`
holds the methods; this file knows what is asked of them and what they give, and no method.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.backends import C
from kvq_runtime.branch import Branch
from kvq_runtime.constraint import Ids
from kvq_runtime.generation import Cancel, Continuation, GenerationOptions, Vocabulary, never
from kvq_runtime.passes import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One way to go on: its token `ids`, their text, and what the model makes of each.

    `logprobs` are natural log-probabilities by the model itself, before sampling filters, of every
    token given those before it. `text` leaves out the forced beginning and what follows a stop
    string. `finish_reason` is stop, length or cancelled.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str

    @property
    def logprob(self) -> float:
        """Log-probability of the whole."""
        return sum(self.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One alternative while it is written; growing makes another line.

    `row` of the branch holds the last of its tokens that were run, -1 the text's end; `score` is
    what its method ranks it by. `text` is what its tokens complete, without a token that ended it.
    """

    so_far: Continuation
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    row: int = -1
    score: float = 0.0
    finish_reason: str | None = None

    @property
    def choices(self) -> Ids | None:
        """The tokens that may come next; None: every token."""
        return self.so_far.allowed

    def allowed(self, scores: NDArray[np.floating]) -> NDArray[np.floating]:
        """`scores` [V] where a token may come next, minus infinity elsewhere."""
        if self.choices is None:
            return scores
        masked = np.full_like(scores, -np.inf)
        masked[self.choices] = scores[self.choices]
        return masked


class AlternativesRequest:
    """`count` alternatives of up to `options.max_tokens` tokens after the text `history`.

    A branch of the session holds `branch_rows`, its context `room` tokens more. `cancel` is asked
    before each pass: once it says yes what there is, is what there will be. `recorded` is the
    method the model's bundle recommends. `exact`: log-probabilities are; else a writer may spend
    less on the tokens that it does not choose.
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
        generator: np.random.Generator,
        cancel: Cancel = never,
        recorded: str | None = None,
        exact: bool = True,
    ) -> None:
        if count < 1:
            raise UsageError(f"{count} drafts are not possible: ask for 1 or more")
        self.count = count
        self.options = options
        self.length = options.max_tokens or 1
        # Rows that one line may take: its forced beginning is made of tokens, too.
        self.longest = self.length + len(options.begin_with)
        self._branch_rows = branch_rows
        self._room = room
        self.history = tuple(history)
        self.generator = generator
        self.cancel = cancel
        self.recorded = recorded
        self.exact = exact
        # A line of no token yet.
        self.start = Line(
            so_far=Continuation(vocabulary, replace(options, max_tokens=self.length), room)
        )

    def need_rows(self, rows: int, method: str) -> None:
        """Refuses, before any pass, a branch larger than the session's."""
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
        """`line` and one token more; `score` None: by its log-probability."""
        score = line.score + logprob if score is None else score
        if line.so_far.is_end(token):
            return replace(line, score=score, finish_reason="stop")
        so_far = line.so_far.fork()
        return replace(
            line,
            so_far=so_far,
            ids=(*line.ids, token),
            logprobs=(*line.logprobs, logprob),
            text=line.text + (so_far.take(token) or ""),
            score=score,
            finish_reason=so_far.finish_reason,
        )

    def finished(self, line: Line) -> Alternative:
        """What a line has become."""
        return Alternative(
            ids=line.ids,
            logprobs=line.logprobs,
            text=line.text + line.so_far.fork().rest(),
            finish_reason=line.finish_reason or "cancelled",
        )

    def shortened(self, line: Line, length: int) -> Line:
        """The first `length` tokens of a line."""
        if length >= len(line.ids):
            return line
        cut = self.start
        for token, logprob in zip(line.ids[:length], line.logprobs, strict=False):
            cut = self.grow(cut, token, logprob)
        return replace(cut, row=line.row, score=line.score, finish_reason="length")


class Writer(Protocol):
    """A method of writing alternatives. Its dataclass fields are its options."""

    def writing(self, branch: Branch[C], asked: AlternativesRequest) -> Work[C, list[Line]]:
        """The lines, best first, their `logprobs` by the model; the branch holds nothing yet.

        Raises `UsageError` for what the method or the branch cannot do, before any pass.
        """
        ...


def step(
    branch: Branch[C], lines: list[Line], exact_rows: int = 0
) -> Work[C, tuple[list[Line], NDArray[np.float32]]]:
    """The lines with their last tokens run, and the logits float32 [len(lines), V] after each.

    `exact_rows`: see `SequencePass`.
    """
    first = branch.rows
    if not any(line.ids for line in lines):
        passed = yield from branch.extend((), rows=[-1] * len(lines))
        return lines, passed.logits
    passed = yield from branch.extend(
        [line.ids[-1] for line in lines],
        [line.row for line in lines],
        exact_rows=exact_rows,
    )
    return [replace(line, row=first + i) for i, line in enumerate(lines)], passed.logits


def log_normalizers(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """What to take off the logits of each row [R, V] for natural log-probabilities: float32 [R].

    A whole vocabulary of log-probabilities is rarely wanted, and takes longer than a row's pass.
    """
    most = logits.max(axis=-1)
    return most + np.log(np.exp(logits - most[..., None]).sum(axis=-1))
