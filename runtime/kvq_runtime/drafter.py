"""What a drafter proposes, and what it is told. Knows no file and no text.

A drafter guesses how a text goes on; one pass of the model checks all guesses at once, and only
tokens that plain decoding would have chosen are kept (arXiv 2211.17192). No drafter is an empty
draft, so there is one loop for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.backends import Backend
from kvq_runtime.branch import Branch
from kvq_runtime.config import SessionConfig
from kvq_runtime.passes import Work
from kvq_runtime.states import States


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Guessed tokens: a chain, or a tree when `parents` says which token each one follows.

    `parents[i]` is the place of an earlier token of the draft, or -1 for the end of the text.
    `probabilities` float [len(ids), V]: row i is what token i was drawn from, given that those
    guessed earlier at the same place are wrong; None: no guess was drawn, each is certain.
    `chances`, 0 to 1, are what the drafter thinks of each token if the one before it is right, to
    be compared with the same drafter's only; none where it has no opinion. For the next `pause`
    rounds its drafter wants neither to be asked nor to be told of them; `follow` tells all the same
    what the text has become.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probabilities: NDArray[np.floating] | None = field(default=None, compare=False)
    chances: tuple[float, ...] = ()
    pause: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents is None or self.parents == tuple(range(-1, len(self.ids) - 1))

    def places_after(self, place: int) -> list[int]:
        """Places of the tokens guessed right after `place` (-1: the text), in their order."""
        if self.parents is None:
            return [place + 1] if place + 1 < len(self.ids) else []
        return [own for own, parent in enumerate(self.parents) if parent == place]

    def after(self, place: int, token: int) -> int | None:
        """The place of `token` guessed right after `place` (-1: the text), or None."""
        return next((own for own in self.places_after(place) if self.ids[own] == token), None)

    def first(self, count: int) -> "Draft":
        """Its first `count` tokens, of which none follows a later one."""
        if count >= len(self.ids):
            return self
        count = max(0, count)
        parents, rows = self.parents, self.probabilities
        return Draft(
            ids=self.ids[:count],
            parents=None if parents is None else parents[:count],
            probabilities=None if rows is None else rows[:count],
            chances=self.chances[:count],
        )


NO_DRAFT = Draft()


class Round(NamedTuple):
    """What became of a draft, or of none.

    `tokens` followed the text: those at the draft's places `path`, and one more. `logits` float32
    [1 + len(draft.ids), V] are the model's after the text and after each guess, right or wrong,
    exact as far as the answer's choice needed them (`SequencePass.exact_rows`). `rows` are those of
    the whole pass, which took `seconds`: the guesses, and in a shared pass the rows of other
    sequences.
    """

    draft: Draft
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    rows: int
    seconds: float

    @property
    def drafted(self) -> int:
        """How many tokens were guessed."""
        return len(self.draft.ids)

    @property
    def accepted(self) -> int:
        """How many of these were kept."""
        return len(self.path)


class Foresight(Protocol):
    """The sampler of an answer, ahead of it: it goes along guesses and is then forgotten."""

    def choose(self, logits: NDArray[np.float32]) -> tuple[int, NDArray[np.float64] | None] | None:
        """The next guess, chosen among `logits` [V] as the answer chooses, and notes it.

        With the probabilities [V] that it was drawn from; None where the likeliest is taken. No
        guess where no token that may come next has a logit, or none may.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftContext:
    """Where a draft begins: at most `room` tokens after `due`, which the cache has not seen.

    `branch` is empty; rows that a draft brings into it are forgotten before its guesses are
    checked. `foresight` makes a sampler at the text's end, as many times as it is wanted; what it
    looks at are the `exact_rows` largest logits (`SequencePass.exact_rows`). `states` are those of
    cached tokens that were not taken yet, for a drafter that reads them.
    """

    branch: Branch[Any]
    due: Sequence[int]
    room: int
    exact_rows: int
    foresight: Callable[[], Foresight]
    states: States | None = None


class Drafter(Protocol):
    """Guesses how one text goes on. It is told how the text changes, and never reads it again.

    A drafter derives from this class. `branches`: its guesses may, which not every backend takes.
    `reads_states`: it guesses from the model's states. One that guesses with passes of its own, of
    this model or another, has a `drafting` of its own, and is opened and closed by its session.
    """

    branches: bool = False
    reads_states: bool = False

    @property
    def name(self) -> str:
        """What messages call it, and `--draft` one of the table."""
        return type(self).__name__.lower()

    @property
    def held_bytes(self) -> int:
        """What it holds for its session, beside the session's own cache."""
        return 0

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """Gets ready, before anything else, to draft for a session of this model.

        Raises `UsageError` or `BackendError` for a model that it cannot draft for.
        """

    def close(self) -> None:
        """Gives back what `open` took."""

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """The text is now its first `kept` tokens as they were, and then `new`."""

    def reading(self, states: States) -> Work[Any, float]:
        """Takes the states of a piece of a prompt, after it was told the text; its seconds."""
        yield from ()
        return 0.0

    def propose(self, room: int) -> Draft:
        """At most `room` tokens that may follow the text."""
        return NO_DRAFT

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """What is proposed there; yields the rows of the passes that this takes."""
        yield from ()
        return self.propose(draft_context.room)

    def observe(self, outcome: Round) -> None:
        """Notes what a pass made of the last draft; `follow` tells the tokens once more."""
