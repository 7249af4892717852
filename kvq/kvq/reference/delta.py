"""Defines what a gated delta net computes, in numpy.

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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvq.config import FOLD_TOKENS, DeltaShape
from kvq.reference.stored import normalize

Float = NDArray[np.float32]

# Added to the squares of a query or key before it is divided by their root.
SQUARES_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """Holds the weights of a delta net, beside the products before and behind it.

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
        """Returns whether they are of a net of this shape."""
        heads = (shape.value_heads,)
        return (
            self.conv.shape == (shape.conv_width, shape.taps)
            and self.decay.shape == self.dt_bias.shape == heads
            and self.scale.shape == (shape.value_dim,)
            and self.key_heads == shape.key_heads
        )

    def shape(self) -> DeltaShape:
        """Returns the shape of one such net."""
        values = len(self.decay) * len(self.scale)
        return DeltaShape(
            num_layers=1,
            key_heads=self.key_heads,
            value_heads=len(self.decay),
            key_dim=(len(self.conv) - values) // (2 * self.key_heads),
            value_dim=len(self.scale),
            taps=self.conv.shape[1],
        )


class DeltaStep(NamedTuple):
    """Holds a token's q and k [key heads, Dk], v [value heads, Dv], g and beta [value heads]."""

    q: Float
    k: Float
    v: Float
    g: Float
    beta: Float


class DeltaRow(NamedTuple):
    """Holds what is kept of a token: k [key heads, Dk], u [value heads, Dv], G [value heads]."""

    k: Float
    u: Float
    total: Float


def sigmoid(x: Float) -> Float:
    """Computes 1 / (1 + exp(-x)) by tanh, which does not overflow."""
    half = np.float32(0.5)
    return half * np.tanh(half * x) + half


def step_of(shape: DeltaShape, seen: Float, gates: Float, weights: DeltaWeights) -> DeltaStep:
    """Computes one token's step from the rows [taps, channels] that end with its own.

    `gates` are b, then a: float32 [2 * value heads].
    """
    total = seen[-1] * weights.conv[:, -1]
    for k in range(shape.taps - 2, -1, -1):
        total = total + seen[k] * weights.conv[:, k]
    mixed = total * sigmoid(total)
    keys = shape.key_heads * shape.key_dim
    q, k = (mixed[at : at + keys].reshape(shape.key_heads, -1) for at in (0, keys))
    beta, a = np.split(gates, 2)
    with np.errstate(over="ignore"):  # the cache refuses what is not finite
        g = -np.exp(weights.decay) * np.logaddexp(np.float32(0), a + weights.dt_bias)
    return DeltaStep(
        q=_unit(q) * np.float32(shape.key_dim**-0.5),
        k=_unit(k),
        v=mixed[2 * keys :].reshape(shape.value_heads, shape.value_dim),
        g=g,
        beta=sigmoid(beta),
    )


def _unit(x: Float) -> Float:
    squares = np.sum(np.square(x), axis=-1, keepdims=True)
    return x * (np.float32(1) / np.sqrt(squares + np.float32(SQUARES_EPS)))


def apply_step(state: Float, rows: Sequence[DeltaRow], step: DeltaStep) -> tuple[DeltaRow, Float]:
    """Computes the row of a token, and its heads' outputs [value heads, Dv].

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
    """Computes the state behind `rows`, oldest first, from the one before them."""
    total = rows[-1].total
    folded: Float = np.exp(total)[:, None, None] * state
    shared = len(total) // len(rows[-1].k)
    for row in rows:
        keys = np.exp(total - row.total)[:, None] * np.repeat(row.k, shared, axis=0)
        folded += keys[:, :, None] * row.u[:, None, :]
    return folded


def gated(output: Float, z: Float, weights: DeltaWeights) -> Float:
    """Returns what leaves a delta net: its heads' outputs [..., Dv] normalised, times silu(z)."""
    return normalize(output, weights.scale, weights.norm_eps) * (z * sigmoid(z))


def base_of(token: int) -> int:
    """Returns the token whose state the row of `token` is computed with."""
    return token - token % FOLD_TOKENS


class Recurrence:
    """Runs one delta net over a text from its beginning, token by token, without any base."""

    def __init__(self, weights: DeltaWeights) -> None:
        self.shape = weights.shape()
        self.state = no_state(self.shape)
        self._seen = np.zeros((self.shape.taps, self.shape.conv_width), np.float32)

    def run(self, rows: Float, gates: Float, weights: DeltaWeights) -> Float:
        """Returns its outputs for the tokens that come next: float32 [T, value heads * Dv].

        rows float32 [T, conv_width + value_width]: q, k, v and z; gates [T, 2 * value heads].
        """
        shape, out = self.shape, np.empty((len(rows), self.shape.value_width), np.float32)
        for t, row in enumerate(rows):
            self._seen = np.concatenate([self._seen[1:], row[None, : shape.conv_width]])
            step = step_of(shape, self._seen, gates[t], weights)
            new_row, output = apply_step(self.state, (), step)
            self.state = fold(self.state, [new_row])
            z = row[shape.conv_width :].reshape(shape.value_heads, shape.value_dim)
            out[t] = gated(output, z, weights).ravel()
        return out


def no_state(shape: DeltaShape) -> Float:
    """Returns the matrices of a layer before any token: zeros [value heads, Dk, Dv]."""
    return np.zeros((shape.value_heads, shape.key_dim, shape.value_dim), np.float32)
