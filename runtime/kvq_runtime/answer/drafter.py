"""What a drafter proposes, and what it is told.

A drafter guesses how a text goes on. One pass of the model checks all guesses at once, and only
tokens that plain decoding would have chosen are kept (arXiv 2211.17192). A session without a
drafter uses empty drafts, so one loop serves both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq_runtime.backends import Backend
from kvq_runtime.config import SessionConfig
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import Work
from kvq_runtime.sequence.states import HiddenStates


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Holds guessed tokens: a chain, or a tree where `parents` says which token each one follows.

    Attributes:
        ids: The guessed tokens.
        parents: For each token the place of an earlier token of the draft that it follows, -1 for
            the end of the text. None: each token follows the one before it.
        probabilities: Float [len(ids), V]. Row i is the distribution that token i was drawn from,
            given that the tokens guessed earlier at the same place are wrong. None: no token was
            drawn, each one counts as certain.
        chances: The drafter's own estimate, 0 to 1, that each token is right if the one before it
            is. Comparable within one drafter only; empty where it has none.
        pause: For so many of the next rounds the drafter is not asked and not told the outcome.
            `Drafter.follow` is called all the same.
    """

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probabilities: NDArray[np.floating] | None = field(default=None, compare=False)
    chances: tuple[float, ...] = ()
    pause: int = 0

    @property
    def is_chain(self) -> bool:
        """Returns whether each token follows the one before it."""
        return self.parents is None or self.parents == tuple(range(-1, len(self.ids) - 1))

    def places_after(self, place: int) -> list[int]:
        """Returns the places of the tokens guessed right after `place` (-1: the text), in order."""
        if self.parents is None:
            return [place + 1] if place + 1 < len(self.ids) else []
        return [child for child, parent in enumerate(self.parents) if parent == place]

    def after(self, place: int, token: int) -> int | None:
        """Returns the place of `token` guessed right after `place` (-1: the text), or None."""
        return next((child for child in self.places_after(place) if self.ids[child] == token), None)

    def first(self, count: int) -> "Draft":
        """Returns the draft's first `count` tokens, none of which follows a later one."""
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
    """Says what became of a draft.

    Attributes:
        draft: The draft, perhaps empty.
        path: Places of the draft's tokens that were kept.
        tokens: The tokens that followed the text: those of `path` and one more.
        logits: Float32 [1 + len(draft.ids), V], the model's logits after the text and after each
            guess, right or wrong. They are exact as far as the answer's choice needed them, see
            `SequencePass.exact_rows`.
        rows: How many rows the whole pass had: the guesses, and in a shared pass the rows of other
            sequences.
        seconds: Time of the whole pass.
    """

    draft: Draft
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[np.float32]
    rows: int
    seconds: float

    @property
    def drafted(self) -> int:
        """Returns how many tokens were guessed."""
        return len(self.draft.ids)

    @property
    def accepted(self) -> int:
        """Returns how many guessed tokens were kept."""
        return len(self.path)


class Foresight(Protocol):
    """Samples ahead of an answer, along guesses, and is then forgotten."""

    def choose(self, logits: NDArray[np.float32]) -> tuple[int, NDArray[np.float64] | None] | None:
        """Chooses the next guess among `logits` [V] as the answer would choose, and notes it.

        Returns:
            The token, and the probabilities float64 [V] that it was drawn from, or None for these
            where the likeliest token is taken. None alone where no token may come next.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftContext:
    """Says where a draft begins.

    Attributes:
        branch: An empty branch. Rows that a draft adds to it are forgotten before its guesses are
            checked.
        due: Tokens at the text's end that the cache does not hold yet.
        room: How many tokens the draft may have at most.
        exact_rows: How many of the largest logits the answer's sampler looks at, see
            `SequencePass.exact_rows`.
        foresight: Makes a sampler at the text's end, as often as it is called.
        hidden_states: Hidden states of cached tokens that were not taken yet, for a drafter that
            reads them.
    """

    branch: Branch[Any]
    due: Sequence[int]
    room: int
    exact_rows: int
    foresight: Callable[[], Foresight]
    hidden_states: HiddenStates | None = None


class Drafter(Protocol):
    """Guesses how one text goes on. It is told how the text changes and keeps its own copy.

    A drafter derives from this class and overrides `follow` and `propose`, or `drafting` if it
    needs passes of its own model or of another one. Its session opens and closes it.

    Attributes:
        branches: True: its drafts may be trees, which not every backend takes. Default False.
        reads_states: True: it guesses from the model's hidden states. Default False.
    """

    branches: bool = False
    reads_states: bool = False

    @property
    def name(self) -> str:
        """Returns its name in messages; `--draft` uses the same name."""
        return type(self).__name__.lower()

    @property
    def held_bytes(self) -> int:
        """Returns the bytes it holds for its session, beside the session's own cache."""
        return 0

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """Gets ready to draft for a session, before anything else is called.

        Args:
            backend: Backend of the session's model.
            config: What the session holds.

        Raises:
            UsageError: For options that do not suit the model.
            BackendError: For a model that it cannot draft for.
        """

    def close(self) -> None:
        """Frees what `open` took."""

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """Notes that the text is now its first `kept` tokens as they were, and then `new`.

        Args:
            kept: How many first tokens have not changed since the last call.
            new: All tokens after them.
        """

    def reading(self, states: HiddenStates) -> Work[Any, float]:
        """Takes the hidden states of a piece of a prompt, after `follow` was called for it.

        Args:
            states: Hidden states of the newest tokens, float32 [T, hidden].

        Returns:
            Work that gives the seconds of its passes. By default it does nothing.
        """
        yield from ()
        return 0.0

    def propose(self, room: int) -> Draft:
        """Returns at most `room` tokens that may follow the text. By default none."""
        return NO_DRAFT

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """Drafts with passes of its own; by default it calls `propose`.

        Args:
            draft_context: Where the draft begins, and how long it may be.

        Returns:
            Work that yields requests for passes and gives the draft.
        """
        yield from ()
        return self.propose(draft_context.room)

    def observe(self, outcome: Round) -> None:
        """Notes what a pass made of the last draft; `follow` is called for the same tokens too.

        Args:
            outcome: The draft, the tokens that followed, and the model's logits.
        """
