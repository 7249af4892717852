"""Native code as tests alone call it: experts and embeddings outside graphs, and any kernels."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint8

import numpy as np
from numpy.typing import NDArray

from kvq import native_library
from kvq.errors import BackendError
from kvq.native_linear import VIEWS, NativeMatrix, check_status, matrix, pointer_to
from kvq.reference.experts import SCORINGS, Scoring
from kvq.reference.linear import ACTIVATIONS, Bytes, Float, PanelFormat, View


class NativeExperts(ctypes.Structure):
    """`kvq_experts`: one mixture of experts."""

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
    """`kvq_embed`: rows of a matrix, mixed."""

    _fields_ = (
        ("matrix", NativeMatrix),
        ("panels", POINTER(c_uint8)),
        ("ids", POINTER(c_int64)),
        ("weights", POINTER(c_float)),
        ("out", POINTER(c_float)),
        ("tokens", c_int32),
        ("mixed", c_int32),
    )


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
    """`residual` + the experts of each token, float32 [T, K], on the calling thread.

    As `kvq.reference.experts.experts`, with any activation. `residency`: the handle of what bounds
    their memory (`kvq.residency`), for panels that are mapped from a file. Raises `BackendError`.
    """
    x, logits = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(logits, np.float32)
    out = np.empty((len(x), down[0].rows), np.float32)
    call = NativeExperts(
        matrix(gate_up[0]), matrix(down[0]), pointer_to(gate_up[1]), pointer_to(down[1]),
        pointer_to(x), pointer_to(logits), pointer_to(residual), pointer_to(gate_up_bias),
        pointer_to(down_bias), pointer_to(choice_bias), pointer_to(out), len(x), logits.shape[1],
        chosen, normalised, ACTIVATIONS.index(activation), VIEWS.index(view),
        SCORINGS.index(scoring), residency,
    )  # fmt: skip
    check_status(native_library.library().kvq_experts_run(ctypes.byref(call)))
    return out


def embed(form: PanelFormat, panels: Bytes, ids: NDArray[np.int64], weights: Float) -> Float:
    """Row t is the sum of `weights[t, k]` times row `ids[t, k]`: float32 [T, columns].

    Raises `BackendError`, for an id that is no row too.
    """
    out = np.empty((len(ids), form.columns), np.float32)
    ids = np.ascontiguousarray(ids, np.int64)
    call = NativeEmbed(
        matrix(form), pointer_to(panels), pointer_to(ids), pointer_to(weights), pointer_to(out),
        *ids.shape,
    )  # fmt: skip
    check_status(native_library.library().kvq_embed_run(ctypes.byref(call)))
    return out


def select_isa(name: str) -> None:
    """Switches kernels for the whole process. Raises `BackendError` if they cannot run here."""
    if native_library.library().kvq_isa_select(name.encode()):
        possible = ", ".join(native_library.isas())
        raise BackendError(f"kernels {name!r} cannot run here; choose from {possible}")
