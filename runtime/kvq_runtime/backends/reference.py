"""The numpy forward pass over a bundle's weights: needs nothing native, defines the right answer.

Weights are restored to float32 on first use and kept: four bytes a parameter.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq_models.reference import forward
from kvq_runtime.backends import ForwardInput
from kvq_runtime.backends.paged import PagedBackend
from kvq_runtime.bundle import Bundle


class ReferenceBackend(PagedBackend):
    """The slow path that always runs; numpy's own threads, whatever `threads` says."""

    name = "reference"
    cache_kind = "numpy"

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        super().__init__(bundle, threads=threads)
        self._weight = cache(bundle.read_weight)

    @staticmethod
    def missing() -> str | None:
        """Why this backend cannot run here: it always can."""
        return None

    def forward(self, cache: Cache, inputs: ForwardInput) -> NDArray[np.float32]:
        """See `Backend.forward`."""
        return forward(
            self._bundle.config,
            self._weight,
            inputs.ids[:, 0],
            inputs.positions,
            cache.attend,
            inputs.rows,
            (inputs.ids, inputs.weights),
            long_rope=inputs.rope_long,
        )

    def close(self) -> None:
        """See `Backend.close`."""
        self._weight.cache_clear()
