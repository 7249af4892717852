"""A drafter that costs no pass first, and where it has nothing one that guesses with passes."""

from collections.abc import Sequence
from typing import Any

from kvq_runtime.backends import Backend
from kvq_runtime.config import SessionConfig
from kvq_runtime.drafter import NO_DRAFT, Draft, DraftContext, Drafter, Round
from kvq_runtime.passes import Work
from kvq_runtime.states import States


class Relay(Drafter):
    """Asks `first`, and where that has no draft `second`; each learns from its own drafts.

    `--draft auto+model:path=nano`. How long a draft of the second is, and whether there is one, its
    own pace decides as if it were alone.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.branches = first.branches
        self.reads_states = second.reads_states
        self._asked_first, self._asked_second = True, False
        # Rounds that the first is left alone for.
        self._pause = 0

    @property
    def name(self) -> str:
        """See `Drafter`."""
        return f"{self.first.name}+{self.second.name}"

    @property
    def held_bytes(self) -> int:
        """See `Drafter`."""
        return self.second.held_bytes

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """See `Drafter`."""
        self.second.open(backend, config)

    def close(self) -> None:
        """See `Drafter`."""
        self.second.close()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`."""
        self.first.follow(kept, new)
        self.second.follow(kept, new)

    def propose(self, room: int) -> Draft:
        """See `Drafter`: what needs no pass."""
        return self.first.propose(room)

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """See `Drafter`."""
        self._asked_first = self._pause == 0
        self._pause = max(0, self._pause - 1)
        draft = self.first.propose(draft_context.room) if self._asked_first else NO_DRAFT
        self._asked_second = not draft.ids
        if draft.ids:
            return draft
        self._pause += draft.pause
        return (yield from self.second.drafting(draft_context))

    def reading(self, states: States) -> Work[Any, float]:
        """See `Drafter`."""
        return (yield from self.second.reading(states))

    def observe(self, outcome: Round) -> None:
        """See `Drafter`. The first learns what passes take from the second's as well."""
        if self._asked_first:
            self.first.observe(outcome)
        if self._asked_second:
            self.second.observe(outcome)
