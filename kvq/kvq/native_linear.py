"""Products with stored weights through the C ABI: what tests and measurements call.

A running model reaches the same code through the ONNX Runtime ops. `kvq.reference.linear` and
`kvq.reference.experts` define what they compute.
"""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint8
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq import native, native_library
from kvq.errors import BackendError
from kvq.reference.experts import SCORINGS, Scoring
from kvq.reference.linear import ACTIVATIONS, Bytes, Float, PanelFormat, View

_STATUS = {
    2: "shapes, ids or options do not fit the matrix",
    5: "no memory for its scratch",
    7: "what bounds the memory of its experts is closed",
    9: "its experts are no views of a file, so none can leave memory",
}
VIEWS: tuple[View, ...] = ("full", "hi")


class NativeMatrix(ctypes.Structure):
    """Mirrors `kvq_matrix`: the shape of a stored matrix."""

    _fields_ = tuple((name, c_int32) for name in ("rows", "columns", "bits", "block", "grid"))


class NativeLinear(ctypes.Structure):
    """Mirrors `kvq_linear`: one product."""

    _fields_ = (
        ("matrix", NativeMatrix),
        ("panels", POINTER(c_uint8)),
        *((name, POINTER(c_float)) for name in ("x", "norm", "bias", "residual", "out")),
        *((name, c_int32) for name in ("tokens", "activation", "view", "exact_rows", "first_row")),
        ("norm_eps", c_float),
    )


class NativeExperts(ctypes.Structure):
    """Mirrors `kvq_experts`: one mixture of experts."""

    _fields_ = (
        ("gate_up", NativeMatrix),
        ("down", NativeMatrix),
        *((f"{name}_panels", POINTER(c_uint8)) for name in ("gate_up", "down")),
        *((name, POINTER(c_float)) for name in ("x", "logits", "residual")),
        *((f"{name}_bias", POINTER(c_float)) for name in ("gate_up", "down", "choice")),
        ("out", POINTER(c_float)),
        *((name, c_int32) for name in ("tokens", "count", "chosen", "normalised", "activation")),
        ("view", c_int32),
        ("scoring", c_int32),
        ("residency", c_int64),
    )


class NativeEmbed(ctypes.Structure):
    """Mirrors `kvq_embed`: rows of a matrix, mixed."""

    _fields_ = (
        ("matrix", NativeMatrix),
        ("panels", POINTER(c_uint8)),
        ("ids", POINTER(c_int64)),
        ("weights", POINTER(c_float)),
        ("out", POINTER(c_float)),
        ("tokens", c_int32),
        ("mixed", c_int32),
    )


def linear(
    form: PanelFormat,
    panels: Bytes,
    x: Float,
    *,
    norm: Float | None = None,
    norm_eps: float = 0.0,
    activation: str = "",
    bias: Float | None = None,
    residual: Float | None = None,
    view: View = "full",
    exact_rows: int = 0,
    first_row: int = 0,
) -> Float:
    """Computes `residual + bias + input @ weight.T`, float32 [M, rows], on the calling thread.

    The input is x [M, columns], its RMS norm with weight `norm`, or with an activation
    `activation(x[:, :columns]) * x[:, columns:]` of x [M, 2 * columns]. `exact_rows` is the `count`
    of `kvq.reference.linear.linear_in_two_passes`, 0 for all; rows of the matrix before `first_row`
    are not read, their results are the residual or 0. Raises `BackendError`.
    """
    out = np.empty((len(x), form.rows), np.float32)
    x = np.ascontiguousarray(x, np.float32)
    call = NativeLinear(
        matrix(form), _pointer(panels), _pointer(x), _pointer(norm), _pointer(bias),
        _pointer(residual), _pointer(out), len(x), ACTIVATIONS.index(activation),
        VIEWS.index(view), exact_rows, first_row, norm_eps,
    )  # fmt: skip
    _check(native_library.library().kvq_linear_run(ctypes.byref(call)))
    return out


def experts(
    gate_up: tuple[PanelFormat, Bytes],
    down: tuple[PanelFormat, Bytes],
    x: Float,
    logits: Float,
    *,
    chosen: int,
    normalised: bool,
    activation: str = "silu",
    scoring: Scoring = "softmax",
    gate_up_bias: Float | None = None,
    down_bias: Float | None = None,
    choice_bias: Float | None = None,
    residual: Float | None = None,
    view: View = "full",
    residency: int = 0,
) -> Float:
    """Computes `residual` + the experts of each token, float32 [T, K], on the calling thread.

    As `kvq.reference.experts.experts`, with any activation. `residency`: the handle of what bounds
    their memory (`kvq.residency`), for panels that are mapped from a file. Raises `BackendError`.
    """
    x, logits = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(logits, np.float32)
    out = np.empty((len(x), down[0].rows), np.float32)
    call = NativeExperts(
        matrix(gate_up[0]), matrix(down[0]), _pointer(gate_up[1]), _pointer(down[1]),
        _pointer(x), _pointer(logits), _pointer(residual), _pointer(gate_up_bias),
        _pointer(down_bias), _pointer(choice_bias), _pointer(out), len(x), logits.shape[1],
        chosen, normalised, ACTIVATIONS.index(activation), VIEWS.index(view),
        SCORINGS.index(scoring), residency,
    )  # fmt: skip
    _check(native_library.library().kvq_experts_run(ctypes.byref(call)))
    return out


def embed(form: PanelFormat, panels: Bytes, ids: NDArray[np.int64], weights: Float) -> Float:
    """Adds up rows `ids[t, k]` times `weights[t, k]` for each token t: float32 [T, columns].

    Raises `BackendError`, for an id that is no row too.
    """
    out = np.empty((len(ids), form.columns), np.float32)
    ids = np.ascontiguousarray(ids, np.int64)
    call = NativeEmbed(
        matrix(form), _pointer(panels), _pointer(ids), _pointer(weights), _pointer(out), *ids.shape
    )
    _check(native_library.library().kvq_embed_run(ctypes.byref(call)))
    return out


def weight_bytes_read() -> int:
    """Counts the bytes of weights that all products of this process have read."""
    call = native_library.library().kvq_weight_bytes_read
    call.restype = c_int64
    return int(call())


def matrix(form: PanelFormat) -> NativeMatrix:
    """Returns the shape of a matrix in the library's terms."""
    return NativeMatrix(form.rows, form.columns, form.bits, form.block, form.grid)


def _pointer(x: NDArray[Any] | None) -> Any:
    assert x is None or x.flags.c_contiguous
    return None if x is None else native.pointer(x)


def _check(status: int) -> None:
    if status:
        raise BackendError(f"the product was refused: {_STATUS.get(status, f'status {status}')}")
