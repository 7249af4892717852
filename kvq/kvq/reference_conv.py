"""Short convolutions in numpy: what they compute, and what a sequence remembers for them.

A layer multiplies two thirds of what enters it, sums the product's rows over a row and those before
it, channel by channel, and multiplies that by the last third. So of every row its product is kept,
like a key, until it can no longer be asked for: a row of a branch sees its ancestors' alone. Native
code has the same places, and its numbers are these, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import ConvShape
from kvq.errors import CacheError, SnapshotError
from kvq.geometry import CONV_BACK_ROWS, CONV_CHECKPOINTS, CONV_STEP_TOKENS, MOST_WANTED

Float = NDArray[np.float32]


def products(bcx: Float) -> Float:
    """B * x [T, width] of rows [B | C | x] float32 [T, 3 width]."""
    b, _, x = np.split(bcx, 3, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # whoever remembers them looks
        return b * x


def short_conv(bcx: Float, weight: Float, seen: Float) -> Float:
    """C * sum over k of weight[:, k] * seen[:, k], from the newest on: float32 [T, width].

    bcx float32 [T, 3 width]; weight [width, taps]; seen [T, taps, width]: of every row the products
    of those before it, oldest first, and its own.
    """
    total: Float = seen[:, -1] * weight[:, -1]
    for k in range(weight.shape[1] - 2, -1, -1):
        total += seen[:, k] * weight[:, k]
    gate: Float = np.split(bcx, 3, axis=1)[1]
    return gate * total


def seen_rows(rows: Float, taps: int) -> Float:
    """What each of a text's rows [n, width] sees, oldest first: [n, taps, width], a view."""
    padded = np.concatenate([np.zeros((taps - 1, rows.shape[1]), np.float32), rows])
    return np.lib.stride_tricks.sliding_window_view(padded, taps, axis=0).transpose(0, 2, 1)


def least_missed(places: Sequence[int], coming: int, kept: Sequence[int]) -> int:
    """Which of the rising `places` to forget, when `coming` joins them; none that is `kept`.

    Where all are, the one that was used longest ago, the last of `kept`. Else the one without which
    least is computed again for how far one goes back: the gap it leaves is the least of the
    distance from `coming` to where that ends, and a step. So places thin out with their distance,
    and what is computed again is a share of it.
    """
    found, least = next((places.index(at) for at in reversed(kept) if at in places), 0), (1, 0)
    for i, place in enumerate(places):
        before = places[i - 1] if i else 0
        after = places[i + 1] if i + 1 < len(places) else coming
        gap, distance = after - before, coming - after + CONV_STEP_TOKENS
        if place not in kept and gap * least[1] < least[0] * distance:
            found, least = i, (gap, distance)
    return found


class MixedRows:
    """Rows that mixers without pages remember of a sequence: the newest committed, the branch's.

    float32 [layers, rows, width]; `ConvRows` and `DeltaRows` add what they keep of earlier tokens.
    """

    def __init__(self, num_layers: int, width: int, draft_tokens: int, places: int) -> None:
        self._num_layers, self._width = num_layers, width
        self._draft_tokens = draft_tokens
        self._newest = self._none()
        self._branch = self._none()
        # Places that were marked or gone back to, the one used last first, and how many at most.
        self._wanted: list[int] = []
        self._most_wanted = places
        self._attended: set[int] = set()

    def _none(self, rows: int = 0) -> Float:
        return np.zeros((self._num_layers, rows, self._width), np.float32)

    @property
    def unattended(self) -> bool:
        """Whether a layer has not seen the pass under way."""
        return len(self._attended) < self._num_layers

    def mark(self, tokens: int) -> None:
        """The place behind so many tokens is wanted."""
        if tokens:
            others = [place for place in self._wanted if place != tokens]
            self._wanted = [tokens, *others][: self._most_wanted]

    def _wanted_within(self, start: int, stop: int) -> int:
        """The one used last of those wanted behind `start` and not behind `stop`, 0: none."""
        return next((place for place in self._wanted if start < place <= stop), 0)

    def begin(self, rows: int) -> None:
        """The pass under way brings `rows` rows."""
        self._branch = np.concatenate([self._branch, self._none(rows)], axis=1)
        self._attended = set()

    def why_not_keep(self, rows: int) -> str | None:
        """Why so many of the branch's first rows cannot be kept, or None."""
        held = self._branch.shape[1]
        if rows in (0, held) or rows <= self._draft_tokens or held <= self._draft_tokens:
            return None
        return (
            f"of a pass of {held} rows all can be kept, or up to {self._draft_tokens}; {rows} "
            "were asked for"
        )

    def rewind(self, rows: int) -> None:
        """Keeps the first `rows` rows of the branch."""
        self._branch = self._branch[:, :rows]

    def forget(self) -> None:
        """The branch ends."""
        self._branch = self._none()


class ConvRows(MixedRows):
    """What the convolutions of one sequence remember, in numpy.

    The newest committed rows; the branch's; and the rows before some places further back, at most
    `CONV_CHECKPOINTS`: a token before a chunk ended, so that its last one can go through the model
    again for its logits, every `CONV_STEP_TOKENS` tokens, and where somebody went back to last.
    """

    def __init__(self, shape: ConvShape, draft_tokens: int) -> None:
        super().__init__(shape.num_layers, shape.width, draft_tokens, MOST_WANTED)
        self.shape = shape
        self._checkpoints: dict[int, Float] = {}

    def convolve(self, layer: int, bcx: Float, weight: Float, parents: Sequence[int]) -> Float:
        """What a layer gives of the newest rows; `parents` are those of all rows of the branch."""
        own = products(bcx)
        if not np.isfinite(own).all():
            raise CacheError("a number that a convolution is asked to remember is not finite")
        first = len(parents) - len(bcx)
        self._branch[layer, first:] = own
        self._attended.add(layer)
        seen = np.zeros((len(bcx), self.shape.taps, self.shape.width), np.float32)
        for t in range(len(bcx)):
            row, back = first + t, self.shape.taps
            while row >= 0 and back:
                back -= 1
                seen[t, back] = self._branch[layer, row]
                row = parents[row]
            held = min(back, self._newest.shape[1])
            if held:
                seen[t, back - held : back] = self._newest[layer, -held:]
        return short_conv(bcx, weight, seen)

    def commit(self, path: Sequence[int], tokens: int) -> None:
        """Keeps the rows of `path`, which follow `tokens` committed ones; the branch ends."""
        stop = tokens + len(path)
        known = np.concatenate([self._newest, self._branch[:, list(path)]], axis=1)
        if wanted := self._wanted_within(tokens, stop):
            self._take(wanted, known[:, : known.shape[1] - (stop - wanted)])
        self._newest = known[:, -self.shape.before - CONV_BACK_ROWS :]
        if len(path) > self._draft_tokens or stop // CONV_STEP_TOKENS > tokens // CONV_STEP_TOKENS:
            self._take(stop - 1, known[:, :-1])
        self.forget()

    def _take(self, place: int, known: Float) -> None:
        """Remembers the last rows of `known`, which end at `place`, unless a later one is."""
        places = list(self._checkpoints)
        if places and places[-1] >= place:
            return
        if len(places) == CONV_CHECKPOINTS:
            del self._checkpoints[places[least_missed(places, place, self._wanted)]]
        rows = np.zeros((self.shape.num_layers, self.shape.before, self.shape.width), np.float32)
        count = min(self.shape.before, known.shape[1])
        rows[:, self.shape.before - count :] = known[:, known.shape[1] - count :]
        self._checkpoints[place] = rows

    def trim(self, tokens: int, held: int) -> int:
        """How many of `held` tokens can be kept, at most `tokens`; these are what is held then."""
        first = held - self._newest.shape[1]
        if max(0, tokens - self.shape.before) >= first:
            self._newest = self._newest[:, : tokens - first]
        else:
            self.mark(tokens)
            tokens = max((place for place in self._checkpoints if place <= tokens), default=0)
            count = min(tokens, self.shape.before)
            rows = self._checkpoints.get(tokens, self._none())
            self._newest = rows[:, rows.shape[1] - count :].copy()
        self._checkpoints = {at: rows for at, rows in self._checkpoints.items() if at <= tokens}
        return tokens

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What `restore` takes."""
        places = np.array([*padded(self._wanted), *self._checkpoints], np.int64)
        rows = np.array([*self._checkpoints.values()], np.float32)
        return {"conv_newest": self._newest, "conv_places": places, "conv_rows": rows}

    def restore(self, arrays: dict[str, NDArray[Any]], tokens: int) -> None:
        """Becomes what `arrays` gave beside `tokens` tokens. Raises `SnapshotError`, unchanged."""
        shape = self.shape
        newest, rows = arrays["conv_newest"], arrays["conv_rows"]
        wanted, places = wanted_first(arrays["conv_places"])
        most = min(tokens, shape.before + CONV_BACK_ROWS)
        sizes = (shape.num_layers, shape.before, shape.width)
        fits = (
            newest.dtype == rows.dtype == np.float32
            and newest.shape[::2] == sizes[::2]
            and min(tokens, shape.before) <= newest.shape[1] <= most
            and len(places) == len(rows) <= CONV_CHECKPOINTS
            and (not places or rows.shape[1:] == sizes)
            and places == sorted(set(places))
            and all(0 < place <= tokens for place in places)
            and min(wanted, default=0) >= 0
        )
        if not fits or not (np.isfinite(newest).all() and np.isfinite(rows).all()):
            raise SnapshotError("the saved cache is damaged")
        self._newest, self._wanted = newest, wanted
        self._checkpoints = dict(zip(places, rows, strict=True))
        self.forget()


def padded(wanted: Sequence[int]) -> list[int]:
    """`MOST_WANTED` numbers: the wanted places, then zeros."""
    return [*wanted, *[0] * (MOST_WANTED - len(wanted))]


def wanted_first(saved: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """The wanted places, and those that are kept. Raises `SnapshotError` for too few numbers."""
    if saved.ndim != 1 or len(saved) < MOST_WANTED:
        raise SnapshotError("the saved cache is damaged")
    places: list[int] = saved.tolist()
    return [place for place in places[:MOST_WANTED] if place], places[MOST_WANTED:]
