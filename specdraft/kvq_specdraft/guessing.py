"""The base of drafters that make each guess with a pass."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError
from kvq_runtime.answer.drafter import NO_DRAFT, Draft, DraftContext, Drafter, Round
from kvq_runtime.backends import WHOLE, Mode
from kvq_runtime.sequence.passes import PassResult, Work
from kvq_specdraft.pace import Pace


@dataclass(kw_only=True, eq=False)
class Guessing(Drafter):
    """Guesses a chain of tokens, each with a pass, as long as that pays.

    Args:
        most: The most guesses of a draft. Default 7.
        least: Above 0 and below 1, guesses go on while the chance that all of them are right is at
            least this, a threshold on calibrated chances as in SpecDec++ (arXiv 2405.19715). 0, the
            default: while they pay, as measured (`pace`).
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
        room, goes_on = self._pace.begin(draft_context.room), True
        if not room:
            return NO_DRAFT
        foresight, ids, distributions = (
            draft_context.foresight(),
            list[int](),
            list[NDArray[np.float64]](),
        )
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
            distributions += [] if probabilities is None else [probabilities]
            goes_on = self._pace.goes_on(likelihood(logits), passed.seconds)
        return Draft(
            ids=tuple(ids),
            probabilities=np.array(distributions) if distributions else None,
            chances=self._pace.chances,
        )

    def observe(self, outcome: Round) -> None:
        self._pace.observe(outcome)

    @abstractmethod
    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, PassResult]:
        """Runs a pass over `new`, what follows the text or the last guess; its last row counts."""


class SelfGuessing(Guessing):
    """Guesses with a part of the session's own model, in the rows of the session."""

    _mode: Mode = WHOLE

    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, PassResult]:
        return (yield from draft_context.branch.extend(list(new), mode=self._mode))


def likelihood(logits: NDArray[np.float32]) -> float:
    """Returns the probability of the likeliest token by logits [V], before any filter."""
    return float(1 / np.exp(logits - logits.max()).sum(dtype=np.float64))
