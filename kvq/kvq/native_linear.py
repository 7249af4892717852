"""Products with stored weights through the C ABI: what exports and measurements call.

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
        matrix(form), pointer_to(panels), pointer_to(x), pointer_to(norm), pointer_to(bias),
        pointer_to(residual), pointer_to(out), len(x), ACTIVATIONS.index(activation),
        VIEWS.index(view), exact_rows, first_row, norm_eps,
    )  # fmt: skip
    check_status(native_library.library().kvq_linear_run(ctypes.byref(call)))
    return out


def weight_bytes_read() -> int:
    """Counts the bytes of weights that all products of this process have read."""
    call = native_library.library().kvq_weight_bytes_read
    call.restype = c_int64
    return int(call())


def matrix(form: PanelFormat) -> NativeMatrix:
    """Returns the shape of a matrix in the library's terms."""
    return NativeMatrix(form.rows, form.columns, form.bits, form.block, form.grid)


def pointer_to(x: NDArray[Any] | None) -> Any:
    """Returns where the numbers of `x` lie, for a call; None where there is no `x`."""
    assert x is None or x.flags.c_contiguous
    return None if x is None else native.pointer(x)


def check_status(status: int) -> None:
    """Raises `BackendError` with the reason of a call that was refused."""
    if status:
        raise BackendError(f"the product was refused: {_STATUS.get(status, f'status {status}')}")
