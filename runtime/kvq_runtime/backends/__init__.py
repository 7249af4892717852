"""The seam between the loop and an engine: one protocol, one table. Knows no engine itself.

To add a backend: one file with a class that has `Backend`'s members, one row in `BACKENDS`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.errors import UsageError
from kvq_runtime.bundle import Bundle

logger = logging.getLogger(__name__)

BACKENDS = {
    "onnx": "kvq_runtime.backends.onnx:OnnxBackend",
    "reference": "kvq_runtime.backends.reference:ReferenceBackend",
}

# `auto` takes the first of these that can run here.
PREFERENCE = ("onnx", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInput:
    """What one forward pass computes over T new tokens.

    `ids` int64 [T, K] and `weights` float32 [T, K]: the embedding of row t is
    sum_k weights[t, k] * E[ids[t, k]]; plain text has K = 1 and weight 1. `positions` int64 [T].
    `rows` int64 [R]: the rows whose logits are wanted. `rope_long`: use the long-context rotary
    frequencies of a model that has two sets; the same for every pass of a session.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    rope_long: bool = False


def plain_input(
    ids: NDArray[np.int64], first: int, rows: NDArray[np.int64], *, rope_long: bool
) -> ForwardInput:
    """Tokens `ids` [T] at positions `first`, `first` + 1, ..."""
    return ForwardInput(
        ids=ids[:, None],
        weights=np.ones((len(ids), 1), np.float32),
        positions=np.arange(first, first + len(ids), dtype=np.int64),
        rows=rows,
        rope_long=rope_long,
    )


class Backend(Protocol):
    """Computes forward passes of one bundle over any number of caches."""

    name: str
    native_cache: bool
    weight_bytes_per_step: int

    def forward(self, cache: Cache, inputs: ForwardInput) -> NDArray[np.float32]:
        """Logits float32 [R, V] of `inputs.rows`; writes the new tokens' K and V into `cache`.

        The caller has called `cache.begin(T)` and will call `commit` or `abort`.
        """
        ...

    def close(self) -> None:
        """Gives the weights' memory back; the backend cannot be used afterwards."""
        ...


def open_backend(name: str, bundle: Bundle, *, threads: int) -> Backend:
    """The backend called `name` (or the best one for `auto`) with `bundle`'s weights loaded.

    Raises `UsageError` for an unknown name and `BackendError` for one that cannot run here.
    """
    if name == "auto":
        name = next(name for name in PREFERENCE if missing(name) is None)
        if name != PREFERENCE[0]:
            logger.warning("using the slow %s backend: %s", name, missing(PREFERENCE[0]))
    elif name not in BACKENDS:
        raise UsageError(
            f"backend {name!r} is not known; choose auto, {', '.join(sorted(BACKENDS))}"
        )
    return _load(name)(bundle, threads=threads)


def missing(name: str) -> str | None:
    """Why backend `name` cannot run here, or None when it can."""
    return _load(name).missing()


def _load(name: str) -> Any:
    module_name, _, class_name = BACKENDS[name].partition(":")
    factory: Callable[..., Backend] = getattr(import_module(module_name), class_name)
    return factory
