"""The progress of a job of several phases, as one amount that only grows.

Each phase has a share of the whole, by its cost. Knows no job and no screen.
"""

from collections.abc import Callable, Mapping

# Called with the amount that is done, the total, and a label of what is being done.
Progress = Callable[[float, float, str], None]


def no_progress(done: float, total: float, label: str) -> None:
    """Ignores what it is told: a `Progress` for jobs that nobody watches."""


# The two phases of making a bundle, as they are shown.
FETCH, MAKE = "downloading", "making the bundle"
# Only `end` reports the whole.
_MOST_BEFORE_THE_END = 0.99


class Phases:
    """Makes one progress of the progress of several phases.

    `costs` names the phases in their order, with what each costs; the names are shown. A phase that
    never begins, or that reports less than its whole, counts as done when a later one begins.
    """

    def __init__(self, costs: Mapping[str, float], progress: Progress) -> None:
        self._costs = costs
        self._progress = progress
        self._furthest = 0.0

    def of(self, phase: str) -> Progress:
        """Begins a phase and returns its progress, whose labels are shown in place of its name."""
        names, all_costs = list(self._costs), sum(self._costs.values()) or 1.0
        before = sum(self._costs[name] for name in names[: names.index(phase)])

        def report(done: float, total: float, label: str = "") -> None:
            part = min(1.0, done / total) if total > 0 else 1.0
            share = (before + part * self._costs[phase]) / all_costs
            self._furthest = max(self._furthest, min(share, _MOST_BEFORE_THE_END))
            self._progress(self._furthest, 1.0, label or phase)

        if self._costs[phase]:
            report(0, 1)
        return report

    @classmethod
    def of_making(cls, progress: Progress, *, fetches: bool) -> "Phases":
        """Returns the phases of making a bundle, whose checkpoint may have to be fetched first."""
        return cls({FETCH: float(fetches), MAKE: 2.0}, progress)

    def end(self, label: str) -> None:
        """Reports that everything is done."""
        self._progress(1.0, 1.0, label)
