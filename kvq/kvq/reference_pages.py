"""What a numpy cache holds: pages, the views that edits cut them into, floating-point rows."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import PAGE_TOKENS, PageForm
from kvq.reference import KEYS, VALUES, Bytes, Float, Grid, Half, decode, planes

# The mask of a page that is seen whole.
WHOLE = (1 << PAGE_TOKENS) - 1


def grid_axis(side: int, form: PageForm) -> int:
    """The axis of a page [64, D] that a group of its side lies along: 0 tokens, 1 channels."""
    return 1 if side == VALUES and not form & PageForm.CHANNEL_VALUES else 0


@dataclass(slots=True)
class Page:
    """One page of one (layer, KV head): codes kept whole, read at the widths it still has."""

    codes: tuple[Bytes, Bytes]
    grids: tuple[Grid, Grid]
    bits: tuple[int, int]
    form: PageForm = PageForm.PLAIN
    peak_weight: int = 0
    mean_mass: int = 0

    def read(self, side: int, view: str) -> Float:
        """Values as seen; the view "hi" reads 8 and 6 bits as 4, by their hi plane."""
        bits = min(self.bits[side], 4) if view == "hi" else self.bits[side]
        return decode(self.codes[side], self.grids[side], bits, grid_axis(side, self.form))

    def stored(self, constant_bytes: int) -> bytes:
        """The page's bytes as the native cache keeps them: constants in their room, then planes."""
        sides = [planes(self.codes[s], self.bits[s], s).tobytes() for s in (KEYS, VALUES)]
        grids = b"".join(grid.stored() for grid in self.grids)
        return b"".join([grids.ljust(constant_bytes, b"\0"), *sides])


@dataclass(slots=True)
class View:
    """Tokens of one page that have moved together, as edits leave them.

    Slot i holds token `first_token + i`, whose key was rotated to position `pos0 + i` and stands
    `delta` further now; it is visible where bit i of `mask` is set.
    """

    pos0: int
    delta: int
    first_token: int
    mask: int = WHOLE

    @property
    def place(self) -> tuple[int, int, int]:
        """What slots of one view share."""
        return self.pos0, self.delta, self.first_token

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Which slots are visible [64]."""
        return np.array([self.mask >> i & 1 for i in range(PAGE_TOKENS)], np.bool_)


@dataclass(slots=True)
class Column:
    """One page of all streams; `pages[stream]` is None once evicted."""

    views: list[View]
    pages: list[Page | None] = field(default_factory=lambda: [])


@dataclass(slots=True)
class Places:
    """Of floating-point rows their tokens, positions, and how far these have moved; int64 [n]."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    deltas: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: Any) -> "Places":
        return Places(self.tokens[rows], self.positions[rows], self.deltas[rows])

    def joined(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> "Places":
        """With rows behind them that have not moved."""
        return Places(
            np.concatenate([self.tokens, tokens]),
            np.concatenate([self.positions, positions]),
            np.concatenate([self.deltas, np.zeros_like(tokens)]),
        )

    def views(self) -> list[View]:
        """Those of a page of these rows, as many as they have places."""
        found: dict[tuple[int, int, int], View] = {}
        rows = zip(self.tokens.tolist(), self.positions.tolist(), self.deltas.tolist(), strict=True)
        for slot, (token, position, delta) in enumerate(rows):
            place = (position - delta - slot, delta, token - slot)
            view = found.setdefault(place, View(*place, mask=0))
            view.mask |= 1 << slot
        return list(found.values())

    @property
    def stretches(self) -> int:
        """Runs of rows whose tokens and positions count up and that have moved alike."""
        steps = np.diff([self.tokens, self.positions, self.deltas], axis=1)
        return int((steps != [[1], [1], [0]]).any(axis=0).sum()) + (len(self) > 0)


NO_PLACES = Places(*np.zeros((3, 0), np.int64))


@dataclass(slots=True)
class Rows:
    """Floating-point rows of one stream, float16 [n, D] each."""

    k: Half
    v: Half
