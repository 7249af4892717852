"""Bounds the memory of a model's experts: how much of a mapped file stays in it.

Knows no model and no file; `kvq/csrc/linear/residency.h` does the work, inside passes.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from mmap import PAGESIZE

from kvq import native_library
from kvq.abi import NativeResidencyStats
from kvq.errors import BackendError, argument


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """Counts what has happened: `held_bytes` of experts are in memory, at most `budget_bytes`.

    Passes have chosen `chosen` experts, counted once for each layer and pass, and `fetched` of
    these were not in memory.
    """

    budget_bytes: int
    held_bytes: int
    chosen: int
    fetched: int

    @property
    def hit_share(self) -> float:
        """Returns which share of the chosen experts was in memory; 1 before any was chosen."""
        return 1 - self.fetched / self.chosen if self.chosen else 1.0


class Residency:
    """Bounds the memory of one model's experts to `budget_bytes`.

    Before an expert is read, others leave memory until there is room for it, the one that newer
    passes chose least often first. One expert by itself may take more than the budget, and while it
    is read the system may bring up to 4 MiB of each of its two matrices' neighbours along. Raises
    `BackendError` where the system does not say that pages have left memory.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._library = native_library.library()
        handle = ctypes.c_int64()
        if self._library.kvq_residency_open(budget_bytes, ctypes.byref(handle)):
            raise BackendError(
                f"{argument('weights_budget')} needs Linux, which says when weights have left "
                "memory; leave it out, and the system keeps in memory what it has room for"
            )
        self.handle = handle.value

    def stats(self) -> Resident:
        """Returns what is in memory, and how often it sufficed. Raises `BackendError`: closed."""
        stats = NativeResidencyStats()
        if self._library.kvq_residency_stats_of(self.handle, ctypes.byref(stats)):
            raise BackendError("this model is closed; open it again with Engine.open")
        return Resident(**{name: getattr(stats, name) for name in Resident.__slots__})

    def close(self) -> None:
        """Ends the bound; passes that name it fail."""
        self._library.kvq_residency_close(self.handle)


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """Counts the bytes of a model's experts: all that are `stored`, and one token's, `chosen`.

    `largest` is the most that one of them may take in memory, the least that can be a budget.
    """

    stored: int
    chosen: int
    largest: int

    def to_json(self) -> dict[str, int]:
        """Returns the bytes as reports have them."""
        return {"bytes": self.stored, "token_bytes": self.chosen, "least_budget": self.largest}


def most_in_memory(parts: Iterable[int]) -> int:
    """Returns what an expert with matrices of so many bytes may take, wherever they lie."""
    return sum(-(-part // PAGESIZE) * PAGESIZE + PAGESIZE for part in parts)
