"""Policies decide which pages lose bits when the budget is short; one file, one row each.

A policy sees evidence and returns actions. It never touches a page itself, runs only at page
boundaries, and must be deterministic: ties go to the oldest page, then layer, then head.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError

POLICIES = {"oldest": "kvq.policies.oldest:Oldest"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a policy may look at.

    `facts` int64 [C, 4]: pos0, delta, first token, mask of each page column, oldest first.
    `widths` uint8 [L, Hk, C, 2]: K and V bits, 0 if evicted. `windows` [L]: sliding windows, 0 for
    none. `tokens`: tokens seen so far. `head_dim`: channels, which fix the bytes a page frees.
    """

    facts: NDArray[np.int64]
    widths: NDArray[np.uint8]
    windows: NDArray[np.int64]
    tokens: int
    head_dim: int


class Policy(Protocol):
    """Frees space when asked."""

    def relieve(
        self, evidence: Evidence, bytes_short: int, columns_short: int
    ) -> NDArray[np.int32]:
        """Actions int32 [n, 5] (layer, head, column, K bits, V bits) freeing what is short.

        Widths may only fall; 0 and 0 evict. Freeing less than asked is allowed only if nothing
        is left to free.
        """
        ...


def policy_named(name: str) -> Policy:
    """The policy `name` of the table. Raises `UsageError` naming the possible ones."""
    if name not in POLICIES:
        raise UsageError(
            f"--kv-policy {name!r} is unknown; possible: {', '.join(sorted(POLICIES))}"
        )
    module, attribute = POLICIES[name].split(":")
    return getattr(import_module(module), attribute)()
