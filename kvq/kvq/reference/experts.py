"""Defines `kvq::Experts`: which experts a token chooses, and the arithmetic over their weights.

A mixture of experts (2401.04088) has `count` gated MLPs; a router gives each a share for every
token, and the token is fed to those with the largest. Matrices of all experts lie one behind the
other, each of whole panels (`kvq.reference.linear`). Knows no model and no file.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvq.reference.delta import sigmoid
from kvq.reference.linear import Bytes, Float, PanelFormat, View, linear

# Functions that turn a router's products into shares; the attribute `scoring` is an index here.
Scoring = Literal["softmax", "sigmoid"]
SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid")
# Added to the sum that sigmoid shares are divided by.
LEAST_SUM = np.float32(1e-6)
# Constants of `clamped_swiglu`.
LIMIT, STEEPNESS = np.float32(7), np.float32(1.702)


def clamped_swiglu(gate: Float, up: Float) -> Float:
    """Computes gpt-oss's gate: g * sigmoid(1.702 g) * (u + 1), g at most 7 and u from -7 to 7.

    What is not finite gives what is not a number.
    """
    nothing = np.float32(0) * gate * up
    gate = (np.minimum(gate, LIMIT) + nothing).astype(np.float32)
    up = np.clip(up, -LIMIT, LIMIT).astype(np.float32)
    return (gate * sigmoid(STEEPNESS * gate) * (up + np.float32(1))).astype(np.float32)


def routed(
    logits: Float,
    count: int,
    *,
    normalised: bool,
    scoring: Scoring = "softmax",
    choice_bias: Float | None = None,
) -> tuple[NDArray[np.int64], Float]:
    """Returns each token's experts int64 [T, count], the largest first, and their shares float32.

    It decides by a router's products, `logits` float32 [T, E]; of equal ones the first is chosen.
    Shares are a softmax's over all experts, divided by the sum of those chosen where `normalised`;
    or sigmoids, likewise, and then a `choice_bias` float32 [E] is added where experts are chosen,
    but not to their shares.
    """
    if scoring == "sigmoid":
        weights = sigmoid(logits)
        scores = weights if choice_bias is None else weights + choice_bias
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, :count]
        shares = np.take_along_axis(weights, chosen, axis=1)
        whole = shares.sum(axis=1, keepdims=True) + LEAST_SUM
        return chosen, shares / whole if normalised else shares
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = np.take_along_axis(weights, chosen, axis=1)
    whole = shares if normalised else weights
    return chosen, shares / whole.sum(axis=1, keepdims=True)


def by_expert(chosen: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorts the places in `chosen` [T, k] by expert, those of one expert in the tokens' order.

    Returns the places int64 [T k], and how many each expert has, int64 [count].
    """
    order = np.argsort(chosen.ravel(), kind="stable")
    return order, np.bincount(chosen.ravel(), minlength=count)


def added(outputs: Float, order: NDArray[np.int64], shares: Float) -> Float:
    """Adds up each token's outputs of its experts, float32 [T k, N], in the order of `by_expert`.

    Each counts times its share of `shares` [T, k]; a token's are added in the order of the experts.
    """
    out = np.zeros((len(shares), outputs.shape[1]), np.float32)
    np.add.at(out, order // shares.shape[1], outputs * shares.ravel()[order, None])
    return out


def experts(
    gate_up: tuple[PanelFormat, Bytes],
    down: tuple[PanelFormat, Bytes],
    x: Float,
    logits: Float,
    *,
    chosen: int,
    normalised: bool,
    activation: Literal["silu", "clamped_swiglu"] = "silu",
    scoring: Scoring = "softmax",
    gate_up_bias: Float | None = None,
    down_bias: Float | None = None,
    choice_bias: Float | None = None,
    view: View = "full",
) -> Float:
    """Computes what the kernels do: x float32 [T, K], logits [T, E] -> float32 [T, K].

    A format is that of one expert, the panels are those of all; biases are [E, rows].
    """
    experts_of, shares = routed(
        logits, chosen, normalised=normalised, scoring=scoring, choice_bias=choice_bias
    )
    order, counts = by_expert(experts_of, logits.shape[1])
    parts = np.split(x[order // chosen], np.cumsum(counts)[:-1])
    outputs: list[Float] = []
    for expert, rows in enumerate(parts):
        if not len(rows):
            continue
        inner = linear(gate_up[0], _panels_of(gate_up, expert), rows, view)
        inner = inner if gate_up_bias is None else inner + gate_up_bias[expert]
        gate, up = np.split(inner, 2, axis=1)
        clamped = activation == "clamped_swiglu"
        active = clamped_swiglu(gate, up) if clamped else gate * sigmoid(gate) * up
        out = linear(down[0], _panels_of(down, expert), active, view)
        outputs.append(out if down_bias is None else out + down_bias[expert])
    return added(np.concatenate(outputs), order, shares)


def _panels_of(stack: tuple[PanelFormat, Bytes], expert: int) -> Bytes:
    form, panels = stack
    return panels[expert * form.panels : (expert + 1) * form.panels]
