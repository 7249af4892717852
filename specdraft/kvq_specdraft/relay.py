"""Two drafters in turn: one without passes first, then one that guesses with passes."""

from collections.abc import Sequence
from typing import Any

from kvq_runtime.answer.drafter import NO_DRAFT, Draft, DraftContext, Drafter, Round
from kvq_runtime.backends import Backend
from kvq_runtime.config import SessionConfig
from kvq_runtime.sequence.passes import Work
from kvq_runtime.sequence.states import HiddenStates


class Relay(Drafter):
    """Asks `first`, and `second` where the first has no draft; each learns from its own drafts.

    `--draft auto+model:path=nano` makes one. The second drafter decides by its own pace whether it
    drafts, and how much, as if it were alone.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first, self.second = first, second
        self.branches = first.branches
        self.reads_states = second.reads_states
        self._asked_first, self._asked_second = True, False
        # Rounds in which the first is not asked.
        self._pause = 0

    @property
    def name(self) -> str:
        return f"{self.first.name}+{self.second.name}"

    @property
    def held_bytes(self) -> int:
        return self.second.held_bytes

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        self.second.open(backend, config)

    def close(self) -> None:
        self.second.close()

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self.first.follow(kept, new)
        self.second.follow(kept, new)

    def propose(self, room: int) -> Draft:
        """Asks the first drafter only, since this allows no pass."""
        return self.first.propose(room)

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        self._asked_first = self._pause == 0
        self._pause = max(0, self._pause - 1)
        draft = self.first.propose(draft_context.room) if self._asked_first else NO_DRAFT
        self._asked_second = not draft.ids
        if draft.ids:
            return draft
        self._pause += draft.pause
        return (yield from self.second.drafting(draft_context))

    def reading(self, states: HiddenStates) -> Work[Any, float]:
        return (yield from self.second.reading(states))

    def observe(self, outcome: Round) -> None:
        """Tells each drafter its rounds, and the first those of the second too, for their costs."""
        if self._asked_first:
            self.first.observe(outcome)
        if self._asked_second:
            self.second.observe(outcome)
