"""Drafts made token by token, each with a pass: what such drafters share. Knows no model.

A guess costs a pass here, so how many to make is most of the art; `pace` decides it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.backends import WHOLE, Mode
from kvq_runtime.drafter import NO_DRAFT, Draft, DraftContext, Drafter, Round
from kvq_runtime.passes import Passed, Work
from kvq_specdraft.pace import Pace


@dataclass(kw_only=True, eq=False)
class Guessing(Drafter):
    """Guesses a chain, each token with a pass, as long as that pays.

    At most `most` tokens. With `least` above 0 it instead goes on for as long as the chance that
    all its guesses are right is at least that: a threshold on calibrated chances, as SpecDec++
    (arXiv 2405.19715) has it.
    """

    most: int = 7
    least: float = 0.0

    def __post_init__(self) -> None:
        name = self.name
        if self.most < 1:
            raise UsageError(about="draft", value=f"{name}: most={self.most}", possible="1 or more")
        if not 0 <= self.least < 1:
            raise UsageError(
                about="draft",
                value=f"{name}: least={self.least}",
                possible="0 (by what is measured) up to, not including, 1",
            )
        self._pace = Pace(most=self.most, least=self.least)

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """See `Drafter`."""
        room, goes_on = self._pace.begin(draft_context.room), True
        if not room:
            return NO_DRAFT
        foresight, ids, drawn = draft_context.foresight(), list[int](), list[NDArray[np.float64]]()
        new = draft_context.due
        while goes_on and len(ids) < room:
            passed = yield from self._guess(draft_context, new)
            logits = passed.logits[-1]
            chosen = foresight.choose(logits)
            if chosen is None:
                break
            token, probabilities = chosen
            new = [token]
            ids += new
            drawn += [] if probabilities is None else [probabilities]
            goes_on = self._pace.goes_on(likelihood(logits), passed.seconds)
        return Draft(
            ids=tuple(ids),
            probabilities=np.array(drawn) if drawn else None,
            chances=self._pace.chances,
        )

    def observe(self, outcome: Round) -> None:
        """See `Drafter`."""
        self._pace.observe(outcome)

    @abstractmethod
    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, Passed]:
        """A pass over `new`, what follows the text or the last guess; the last row counts."""


class SelfGuessing(Guessing):
    """Guesses with less than the whole of the session's own model, in its own rows."""

    _mode: Mode = WHOLE

    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, Passed]:
        return (yield from draft_context.branch.extend(list(new), mode=self._mode))


def likelihood(logits: NDArray[np.float32]) -> float:
    """The probability of the likeliest token by logits [V], before any filter."""
    return float(1 / np.exp(logits - logits.max()).sum(dtype=np.float64))
