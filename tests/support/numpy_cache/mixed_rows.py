"""Rows that convolutions and delta nets of a numpy cache remember of a sequence."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.config import CONV_CHECKPOINTS, FOLD_TOKENS, ConvShape, DeltaShape
from kvq.errors import CacheError, SnapshotError
from kvq.geometry import LEAST_DELTA_STATES
from kvq.reference.conv import products, short_conv
from kvq.reference.delta import (
    DeltaRow,
    DeltaWeights,
    apply_step,
    base_of,
    fold,
    gated,
    no_state,
    step_of,
)
from regions import (
    CONV_BACK_ROWS,
    CONV_STEP_TOKENS,
    MOST_WANTED,
    delta_newest,
    delta_row_width,
    most_delta_newest,
)

Float = NDArray[np.float32]


def least_missed(places: Sequence[int], coming: int, kept: Sequence[int]) -> int:
    """Which of the rising `places` to forget, when `coming` joins them; none that is `kept`.

    Where all are, the one that was used longest ago, the last of `kept`. Else the one without which
    least is computed again for how far one goes back: the gap it leaves is the least of the
    distance from `coming` to where that ends, and a step. So places thin out with their distance,
    and what is computed again is a share of it.
    """
    best, least = next((places.index(at) for at in reversed(kept) if at in places), 0), (1, 0)
    for i, place in enumerate(places):
        before = places[i - 1] if i else 0
        after = places[i + 1] if i + 1 < len(places) else coming
        gap, distance = after - before, coming - after + CONV_STEP_TOKENS
        if place not in kept and gap * least[1] < least[0] * distance:
            best, least = i, (gap, distance)
    return best


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
        self._marked: list[int] = []
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
            earlier = [place for place in self._marked if place != tokens]
            self._marked = [tokens, *earlier][: self._most_wanted]

    def _wanted_within(self, start: int, stop: int) -> int:
        """The one used last of those wanted behind `start` and not behind `stop`, 0: none."""
        return next((place for place in self._marked if start < place <= stop), 0)

    def begin(self, rows: int) -> None:
        """The pass under way brings `rows` rows."""
        self._branch = np.concatenate([self._branch, self._none(rows)], axis=1)
        self._attended = set()

    def why_not_keep(self, rows: int) -> str | None:
        """Why so many of the branch's first rows cannot be kept, or None."""
        num_rows = self._branch.shape[1]
        if rows in (0, num_rows) or rows <= self._draft_tokens or num_rows <= self._draft_tokens:
            return None
        return (
            f"of a pass of {num_rows} rows all can be kept, or up to {self._draft_tokens}; {rows} "
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
        entering = products(bcx)
        if not np.isfinite(entering).all():
            raise CacheError("a number that a convolution is asked to remember is not finite")
        first = len(parents) - len(bcx)
        self._branch[layer, first:] = entering
        self._attended.add(layer)
        seen = np.zeros((len(bcx), self.shape.taps, self.shape.width), np.float32)
        for t in range(len(bcx)):
            row, back = first + t, self.shape.taps
            while row >= 0 and back:
                back -= 1
                seen[t, back] = self._branch[layer, row]
                row = parents[row]
            count = min(back, self._newest.shape[1])
            if count:
                seen[t, back - count : back] = self._newest[layer, -count:]
        return short_conv(bcx, weight, seen)

    def commit(self, path: Sequence[int], tokens: int) -> None:
        """Keeps the rows of `path`, which follow `tokens` committed ones; the branch ends."""
        stop = tokens + len(path)
        known = np.concatenate([self._newest, self._branch[:, list(path)]], axis=1)
        if marked := self._wanted_within(tokens, stop):
            self._take(marked, known[:, : known.shape[1] - (stop - marked)])
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
            del self._checkpoints[places[least_missed(places, place, self._marked)]]
        rows = np.zeros((self.shape.num_layers, self.shape.before, self.shape.width), np.float32)
        count = min(self.shape.before, known.shape[1])
        rows[:, self.shape.before - count :] = known[:, known.shape[1] - count :]
        self._checkpoints[place] = rows

    def trim(self, tokens: int, num_tokens: int) -> int:
        """How many of `num_tokens` can be kept, at most `tokens`; these are what is held then."""
        first = num_tokens - self._newest.shape[1]
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
        places = np.array([*padded(self._marked), *self._checkpoints], np.int64)
        rows = np.array([*self._checkpoints.values()], np.float32)
        return {"conv_newest": self._newest, "conv_places": places, "conv_rows": rows}

    def restore(self, arrays: dict[str, NDArray[Any]], tokens: int) -> None:
        """Becomes what `arrays` gave beside `tokens` tokens. Raises `SnapshotError`, unchanged."""
        shape = self.shape
        newest, rows = arrays["conv_newest"], arrays["conv_rows"]
        marked, places = wanted_first(arrays["conv_places"])
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
            and min(marked, default=0) >= 0
        )
        if not fits or not (np.isfinite(newest).all() and np.isfinite(rows).all()):
            raise SnapshotError("the saved cache is damaged")
        self._newest, self._marked = newest, marked
        self._checkpoints = dict(zip(places, rows, strict=True))
        self.forget()


def padded(marked: Sequence[int]) -> list[int]:
    """`MOST_WANTED` numbers: the wanted places, then zeros."""
    return [*marked, *[0] * (MOST_WANTED - len(marked))]


def wanted_first(saved: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """The wanted places, and those that are kept. Raises `SnapshotError` for too few numbers."""
    if saved.ndim != 1 or len(saved) < MOST_WANTED:
        raise SnapshotError("the saved cache is damaged")
    places: list[int] = saved.tolist()
    return [place for place in places[:MOST_WANTED] if place], places[MOST_WANTED:]


class DeltaRows(MixedRows):
    """What the delta nets of one sequence remember, in numpy.

    The states of some bases, at most `states`: that of the newest tokens, by which the next are
    computed, the one before, to which a few tokens can be gone back, and some further back: where a
    chunk began, where somebody went back to last, and others, thinned out as convolutions' are.
    Beside each the rows that the convolutions behind it need. Then the rows of the newest committed
    tokens and those of the branch; a row holds what was convolved, and k, u and G.
    """

    def __init__(self, shape: DeltaShape, draft_tokens: int, states: int) -> None:
        places = min(max(1, states - LEAST_DELTA_STATES), MOST_WANTED)
        super().__init__(shape.num_layers, delta_row_width(shape), draft_tokens, places)
        self.shape = shape
        self._most, self._most_newest = states, delta_newest(shape, states)
        self._begin_anew()

    def _begin_anew(self) -> None:
        layers, before = self.shape.num_layers, (self.shape.before, self.shape.conv_width)
        self._states = {0: np.stack([no_state(self.shape)] * layers)}
        self._before = {0: np.zeros((layers, *before), np.float32)}
        self._live = 0

    def recur(
        self,
        layer: int,
        rows: Float,
        gates: Float,
        weights: DeltaWeights,
        parents: Sequence[int],
        tokens: int,
    ) -> Float:
        """What a layer gives of the newest rows; `parents` are those of all rows of the branch."""
        shape, first = self.shape, len(parents) - len(rows)
        if not self._attended and len(parents) > self._draft_tokens:
            self._make_room(len(self._places_of_chunk(tokens, len(parents))))
        out = np.empty((len(rows), shape.value_width), np.float32)
        states = {(self._live, -1): self._states[self._live][layer]}
        for t, row in enumerate(rows):
            self._branch[layer, first + t, : shape.conv_width] = row[: shape.conv_width]
            path = _ancestors(parents, first + t)
            seen = self._seen(layer, path)[-shape.taps :, : shape.conv_width]
            step = step_of(shape, seen, gates[t], weights)
            base = base_of(tokens + len(path) - 1)
            state = self._state(states, layer, path[:-1], base, tokens)
            delta_row, output = apply_step(state, self._since(layer, path[:-1], base, tokens), step)
            kept = [delta_row.k.ravel(), delta_row.u.ravel(), delta_row.total]
            self._branch[layer, first + t, shape.conv_width :] = np.concatenate(kept)
            z = row[shape.conv_width :].reshape(shape.value_heads, shape.value_dim)
            out[t] = gated(output, z, weights).ravel()
        if not np.isfinite(self._branch[layer, first:]).all():
            raise CacheError("a number that a delta net is asked to remember is not finite")
        self._attended.add(layer)
        return out

    def _seen(self, layer: int, path: Sequence[int]) -> Float:
        """The newest rows and those of a path, behind as many of zeros as a convolution sees."""
        start = np.zeros((self.shape.before, delta_row_width(self.shape)), np.float32)
        return np.concatenate([start, self._newest[layer], self._branch[layer, list(path)]])

    def _since(self, layer: int, path: Sequence[int], base: int, tokens: int) -> list[DeltaRow]:
        """The rows from `base` on of a path that follows `tokens` committed ones."""
        count = tokens + len(path) - base
        rows = self._seen(layer, path)
        return [self._row(row) for row in rows[len(rows) - count :]]

    def _row(self, row: Float) -> DeltaRow:
        shape = self.shape
        at = np.cumsum([shape.conv_width, shape.key_heads * shape.key_dim, shape.value_width])
        _, k, u, total = np.split(row, at)
        return DeltaRow(k.reshape(shape.key_heads, -1), u.reshape(shape.value_heads, -1), total)

    def _state(
        self,
        states: dict[tuple[int, int], Float],
        layer: int,
        path: Sequence[int],
        base: int,
        tokens: int,
    ) -> Float:
        """The state of a base on a path: that of the newest tokens, or folded further."""
        path = path[: max(0, base - tokens)]
        key = (base, path[-1] if path else -1)
        if key not in states:
            before = self._state(states, layer, path, base - FOLD_TOKENS, tokens)
            rows = self._since(layer, path, base - FOLD_TOKENS, tokens)
            states[key] = fold(before, rows)
        return states[key]

    def _places_of_chunk(self, tokens: int, rows: int) -> list[int]:
        """Bases within a chunk whose states are kept.

        The last but one, so that a few tokens can be gone back, and where somebody went back to.
        """
        last = base_of(tokens + rows) - FOLD_TOKENS
        if last <= self._live:
            return []
        # Of a token its base is wanted, which lies between these two.
        marked = self._wanted_within(self._live + FOLD_TOKENS - 1, last - 1)
        return [base_of(marked), last] if marked and self._most > 2 else [last]

    def commit(self, path: Sequence[int], tokens: int) -> None:
        """Keeps the rows of `path`, which follow `tokens` committed ones; the branch ends."""
        places = list[int]()
        if len(path) > self._draft_tokens:
            places = self._places_of_chunk(tokens, len(path))
        state = self._states[self._live]
        for count, row in enumerate(path, tokens + 1):
            known = np.concatenate([self._newest, self._branch[:, [row]]], axis=1)
            self._newest = known[:, -self._most_newest :]
            if count % FOLD_TOKENS:
                continue
            rows = known[:, -FOLD_TOKENS:]
            state = np.stack(
                [
                    fold(head_state, [self._row(row) for row in rows[i]])
                    for i, head_state in enumerate(state)
                ]
            )
            if not places or count > places[-1]:
                self._make_room(1)
            if not places or count > places[-1] or count in places:
                self._states[count], self._live = state, count
                self._before[count] = self._conv_rows_before()
        self.forget()

    def _conv_rows_before(self) -> Float:
        rows = [self._seen(layer, ())[-self.shape.before :] for layer in range(len(self._newest))]
        return np.stack(rows)[:, :, : self.shape.conv_width]

    def _make_room(self, count: int) -> None:
        """Forgets states until there is room for `count` more; never that of the newest tokens."""
        while self._most - len(self._states) < count:
            places = sorted(set(self._states) - {self._live})
            bases = [base_of(place) for place in self._marked]
            # The beginning is known without having been kept.
            self._drop(places[0 if places[0] == 0 else least_missed(places, self._live, bases)])

    def _drop(self, base: int) -> None:
        del self._states[base], self._before[base]

    def trim(self, tokens: int, num_tokens: int) -> int:
        """How many of `num_tokens` can be kept, at most `tokens`; these are what is held then."""
        first = num_tokens - self._newest.shape[1]
        for base in [base for base in self._states if base > tokens]:
            self._drop(base)
        if not self._states:
            self._begin_anew()
        base = max(self._states)
        if base == base_of(tokens) and first <= max(0, min(base, tokens - self.shape.before)):
            self._newest = self._newest[:, : tokens - first]
            self._live = base
            return tokens
        self.mark(tokens)
        self._live = base
        count = min(base, self.shape.before)
        self._newest = np.zeros((len(self._newest), count, delta_row_width(self.shape)), np.float32)
        rows = self._before[base]
        self._newest[:, :, : self.shape.conv_width] = rows[:, self.shape.before - count :]
        return base

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What `restore` takes."""
        bases = sorted(self._states)
        return {
            "delta_newest": self._newest,
            "delta_places": np.array([*padded(self._marked), *bases], np.int64),
            "delta_states": np.array([self._states[base] for base in bases], np.float32),
            "delta_before": np.array([self._before[base] for base in bases], np.float32),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]], tokens: int) -> None:
        """Becomes what `arrays` gave beside `tokens` tokens. Raises `SnapshotError`, unchanged."""
        shape, layers = self.shape, self.shape.num_layers
        newest, states, before = (arrays[f"delta_{n}"] for n in ("newest", "states", "before"))
        marked, bases = wanted_first(arrays["delta_places"])
        matrices = (shape.value_heads, shape.key_dim, shape.value_dim)
        live = base_of(tokens)
        least = min(tokens, max(tokens - live, shape.before))
        fits = (
            newest.dtype == states.dtype == before.dtype == np.float32
            and newest.shape[::2] == (layers, delta_row_width(shape))
            and least <= newest.shape[1] <= min(tokens, most_delta_newest(shape))
            and 0 < len(bases) == len(states) == len(before) <= self._most
            and states.shape[1:] == (layers, *matrices)
            and before.shape[1:] == (layers, shape.before, shape.conv_width)
            and bases == sorted(set(bases))
            and all(base >= 0 and base == base_of(base) for base in bases)
            and bases[-1] == live
            and min(marked, default=0) >= 0
        )
        if not fits or not all(np.isfinite(array).all() for array in (newest, states, before)):
            raise SnapshotError("the saved cache is damaged")
        self._newest, self._marked, self._live = newest[:, -self._most_newest :], marked, live
        self._states = dict(zip(bases, states, strict=True))
        self._before = dict(zip(bases, before, strict=True))
        self.forget()


def _ancestors(parents: Sequence[int], row: int) -> list[int]:
    """The path from the root to a row of the branch, and the row."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
