"""The selector `all`: all keys and values are read."""

from dataclasses import dataclass

from kvq.selectors import READ_ALL, ReadRule


@dataclass(frozen=True, kw_only=True)
class All:
    """Reads every page."""

    @property
    def rule(self) -> ReadRule:
        return READ_ALL
