"""Gated delta nets in numpy: what they compute, and what a sequence remembers for them.

A head keeps a matrix S [key channels, value channels] in place of keys and values (Gated DeltaNet,
2412.06464). A token lets S decay, looks up what S says of its key, and adds its key times what its
value differs from that by:

    S <- exp(g) S;  u = beta (v - S' k);  S <- S + k u';  output S' q

A matrix that has been added to cannot be gone back in, and tokens of a branch would each need one
of their own. So S stays that of a *base*, the last multiple of `FOLD_TOKENS`, and of every later
token its row (k, u, G) is kept, where G is the sum of g since the base. With D[j] = exp(G - G[j])

    u = beta (v - exp(G) S' k - sum_j D[j] (k[j] . k) u[j])
    output exp(G) S' q + sum_j D[j] (k[j] . q) u[j], its own row among the j

over the rows of its own path alone. Every `FOLD_TOKENS` tokens the rows are folded into S. Where
that happens depends on a token's place and on nothing else, so its output does not depend on how
tokens came, in chunks or as drafts. Native code has the same places and the same sums.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvq.config import FOLD_TOKENS, DeltaShape
from kvq.errors import CacheError, SnapshotError
from kvq.geometry import LEAST_DELTA_STATES, MOST_WANTED, delta_newest, most_delta_newest
from kvq.reference import normalize
from kvq.reference_conv import MixedRows, least_missed, padded, wanted_first

Float = NDArray[np.float32]

# Added to the squares of a query or key before it is divided by their root.
SQUARES_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """What a delta net computes with, beside the products before and behind it.

    `conv` float32 [channels, taps] of queries, keys, values; `decay`, `dt_bias` [value heads];
    `scale` [value channels of a head]; the value heads share `key_heads` evenly.
    """

    conv: Float
    decay: Float
    dt_bias: Float
    scale: Float
    key_heads: int
    norm_eps: float

    def belong_to(self, shape: DeltaShape) -> bool:
        """Whether they are of a net of this shape."""
        heads = (shape.value_heads,)
        return (
            self.conv.shape == (shape.conv_width, shape.taps)
            and self.decay.shape == self.dt_bias.shape == heads
            and self.scale.shape == (shape.value_dim,)
            and self.key_heads == shape.key_heads
        )

    def shape(self) -> DeltaShape:
        """Of one such net."""
        values = len(self.decay) * len(self.scale)
        return DeltaShape(
            num_layers=1,
            key_heads=self.key_heads,
            value_heads=len(self.decay),
            key_dim=(len(self.conv) - values) // (2 * self.key_heads),
            value_dim=len(self.scale),
            taps=self.conv.shape[1],
        )


class Step(NamedTuple):
    """What a token brings: q and k [key heads, Dk], v [value heads, Dv], g, beta [value heads]."""

    q: Float
    k: Float
    v: Float
    g: Float
    beta: Float


class DeltaRow(NamedTuple):
    """What is kept of a token: k [key heads, Dk], u [value heads, Dv], G [value heads]."""

    k: Float
    u: Float
    total: Float


def sigmoid(x: Float) -> Float:
    """1 / (1 + exp(-x)), by tanh, which does not overflow."""
    half = np.float32(0.5)
    return half * np.tanh(half * x) + half


def step_of(shape: DeltaShape, seen: Float, gates: Float, weights: DeltaWeights) -> Step:
    """One token's step, of the rows [taps, channels] that end with its own and its gates [b | a].

    gates float32 [2 * value heads].
    """
    total = seen[-1] * weights.conv[:, -1]
    for k in range(shape.taps - 2, -1, -1):
        total = total + seen[k] * weights.conv[:, k]
    mixed = total * sigmoid(total)
    keys = shape.key_heads * shape.key_dim
    q, k = (mixed[at : at + keys].reshape(shape.key_heads, -1) for at in (0, keys))
    beta, a = np.split(gates, 2)
    with np.errstate(over="ignore"):  # whoever remembers it looks
        g = -np.exp(weights.decay) * np.logaddexp(np.float32(0), a + weights.dt_bias)
    return Step(
        q=_unit(q) * np.float32(shape.key_dim**-0.5),
        k=_unit(k),
        v=mixed[2 * keys :].reshape(shape.value_heads, shape.value_dim),
        g=g,
        beta=sigmoid(beta),
    )


def _unit(x: Float) -> Float:
    squares = np.sum(np.square(x), axis=-1, keepdims=True)
    return x * (np.float32(1) / np.sqrt(squares + np.float32(SQUARES_EPS)))


def apply_step(state: Float, rows: Sequence[DeltaRow], step: Step) -> tuple[DeltaRow, Float]:
    """The row of a token and what its heads give [value heads, Dv].

    `state` [value heads, Dk, Dv] is that of the base, `rows` those of its path from there on.
    """
    shared = len(step.v) // len(step.k)
    total = step.g if not rows else rows[-1].total + step.g
    k, q = np.repeat(step.k, shared, axis=0), np.repeat(step.q, shared, axis=0)
    faded = np.exp(total)[:, None]
    known = faded * np.einsum("hde,hd->he", state, k)
    output = faded * np.einsum("hde,hd->he", state, q)
    for row in rows:
        fades = np.exp(total - row.total)
        near_k, near_q = (
            np.repeat(np.einsum("hd,hd->h", row.k, now), shared) for now in (step.k, step.q)
        )
        known += (fades * near_k)[:, None] * row.u
        output += (fades * near_q)[:, None] * row.u
    u = step.beta[:, None] * (step.v - known)
    near = np.repeat(np.einsum("hd,hd->h", step.k, step.q), shared)
    return DeltaRow(step.k, u, total), output + near[:, None] * u


def fold(state: Float, rows: Sequence[DeltaRow]) -> Float:
    """The state behind `rows`, oldest first, of the one before them."""
    total = rows[-1].total
    found: Float = np.exp(total)[:, None, None] * state
    shared = len(total) // len(rows[-1].k)
    for row in rows:
        keys = np.exp(total - row.total)[:, None] * np.repeat(row.k, shared, axis=0)
        found += keys[:, :, None] * row.u[:, None, :]
    return found


def gated(output: Float, z: Float, weights: DeltaWeights) -> Float:
    """What leaves a delta net: its heads' outputs [..., Dv] normalised, times silu(z)."""
    return normalize(output, weights.scale, weights.norm_eps) * (z * sigmoid(z))


def base_of(token: int) -> int:
    """The token whose state the row of `token` is computed with."""
    return token - token % FOLD_TOKENS


class Recurrence:
    """One delta net over a text from its beginning, token by token, without any base."""

    def __init__(self, weights: DeltaWeights) -> None:
        self.shape = weights.shape()
        self.state = _no_state(self.shape)
        self._seen = np.zeros((self.shape.taps, self.shape.conv_width), np.float32)

    def run(self, rows: Float, gates: Float, weights: DeltaWeights) -> Float:
        """What it gives of the tokens that come next: float32 [T, value heads * Dv].

        rows float32 [T, conv_width + value_width]: q, k, v and z; gates [T, 2 * value heads].
        """
        shape, out = self.shape, np.empty((len(rows), self.shape.value_width), np.float32)
        for t, row in enumerate(rows):
            self._seen = np.concatenate([self._seen[1:], row[None, : shape.conv_width]])
            step = step_of(shape, self._seen, gates[t], weights)
            own, output = apply_step(self.state, (), step)
            self.state = fold(self.state, [own])
            z = row[shape.conv_width :].reshape(shape.value_heads, shape.value_dim)
            out[t] = gated(output, z, weights).ravel()
        return out


def _no_state(shape: DeltaShape) -> Float:
    return np.zeros((shape.value_heads, shape.key_dim, shape.value_dim), np.float32)


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
        super().__init__(shape.num_layers, shape.row_width, draft_tokens, places)
        self.shape = shape
        self._most, self._held = states, delta_newest(shape, states)
        self._begin_anew()

    def _begin_anew(self) -> None:
        layers, before = self.shape.num_layers, (self.shape.before, self.shape.conv_width)
        self._states = {0: np.stack([_no_state(self.shape)] * layers)}
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
            own, output = apply_step(state, self._since(layer, path[:-1], base, tokens), step)
            kept = [own.k.ravel(), own.u.ravel(), own.total]
            self._branch[layer, first + t, shape.conv_width :] = np.concatenate(kept)
            z = row[shape.conv_width :].reshape(shape.value_heads, shape.value_dim)
            out[t] = gated(output, z, weights).ravel()
        if not np.isfinite(self._branch[layer, first:]).all():
            raise CacheError("a number that a delta net is asked to remember is not finite")
        self._attended.add(layer)
        return out

    def _seen(self, layer: int, path: Sequence[int]) -> Float:
        """The newest rows and those of a path, behind as many of zeros as a convolution sees."""
        start = np.zeros((self.shape.before, self.shape.row_width), np.float32)
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
        wanted = self._wanted_within(self._live + FOLD_TOKENS - 1, last - 1)
        return [base_of(wanted), last] if wanted and self._most > 2 else [last]

    def commit(self, path: Sequence[int], tokens: int) -> None:
        """Keeps the rows of `path`, which follow `tokens` committed ones; the branch ends."""
        places = list[int]()
        if len(path) > self._draft_tokens:
            places = self._places_of_chunk(tokens, len(path))
        state = self._states[self._live]
        for count, row in enumerate(path, tokens + 1):
            known = np.concatenate([self._newest, self._branch[:, [row]]], axis=1)
            self._newest = known[:, -self._held :]
            if count % FOLD_TOKENS:
                continue
            rows = known[:, -FOLD_TOKENS:]
            state = np.stack(
                [fold(own, [self._row(row) for row in rows[i]]) for i, own in enumerate(state)]
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
            wanted = [base_of(place) for place in self._wanted]
            # The beginning is known without having been kept.
            self._drop(places[0 if places[0] == 0 else least_missed(places, self._live, wanted)])

    def _drop(self, base: int) -> None:
        del self._states[base], self._before[base]

    def trim(self, tokens: int, held: int) -> int:
        """How many of `held` tokens can be kept, at most `tokens`; these are what is held then."""
        first = held - self._newest.shape[1]
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
        self._newest = np.zeros((len(self._newest), count, self.shape.row_width), np.float32)
        rows = self._before[base]
        self._newest[:, :, : self.shape.conv_width] = rows[:, self.shape.before - count :]
        return base

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What `restore` takes."""
        bases = sorted(self._states)
        return {
            "delta_newest": self._newest,
            "delta_places": np.array([*padded(self._wanted), *bases], np.int64),
            "delta_states": np.array([self._states[base] for base in bases], np.float32),
            "delta_before": np.array([self._before[base] for base in bases], np.float32),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]], tokens: int) -> None:
        """Becomes what `arrays` gave beside `tokens` tokens. Raises `SnapshotError`, unchanged."""
        shape, layers = self.shape, self.shape.num_layers
        newest, states, before = (arrays[f"delta_{n}"] for n in ("newest", "states", "before"))
        wanted, bases = wanted_first(arrays["delta_places"])
        matrices = (shape.value_heads, shape.key_dim, shape.value_dim)
        live = base_of(tokens)
        least = min(tokens, max(tokens - live, shape.before))
        fits = (
            newest.dtype == states.dtype == before.dtype == np.float32
            and newest.shape[::2] == (layers, shape.row_width)
            and least <= newest.shape[1] <= min(tokens, most_delta_newest(shape))
            and 0 < len(bases) == len(states) == len(before) <= self._most
            and states.shape[1:] == (layers, *matrices)
            and before.shape[1:] == (layers, shape.before, shape.conv_width)
            and bases == sorted(set(bases))
            and all(base >= 0 and base == base_of(base) for base in bases)
            and bases[-1] == live
            and min(wanted, default=0) >= 0
        )
        if not fits or not all(np.isfinite(one).all() for one in (newest, states, before)):
            raise SnapshotError("the saved cache is damaged")
        self._newest, self._wanted, self._live = newest[:, -self._held :], wanted, live
        self._states = dict(zip(bases, states, strict=True))
        self._before = dict(zip(bases, before, strict=True))
        self.forget()


def _ancestors(parents: Sequence[int], row: int) -> list[int]:
    """The path from the root to a row of the branch, and the row."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
