"""The numpy forward pass over a bundle's weights: needs nothing native, defines the right answer.

Weights are restored to float32 on first use and kept: four bytes a parameter.
"""

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvq_models.reference import forward
from kvq_runtime.backends import ModelFiles, Pass
from kvq_runtime.backends.paged import PagedBackend, PagedCache
from kvq_runtime.bundle import Bundle


class ReferenceBackend(PagedBackend):
    """The slow path that always runs; numpy's own threads, whatever `threads` says."""

    name = "reference"
    cache_kind = "numpy"

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        super().__init__(bundle, threads=threads)
        self._weight = cache(bundle.read_weight)
        self._half_weight = cache(self._read_half)
        self._maps = bundle.restored_maps()

    @staticmethod
    def missing() -> str | None:
        """Why this backend cannot run here: it always can."""
        return None

    def forward(self, one_pass: Pass[PagedCache]) -> list[NDArray[np.float32]]:
        """See `Backend.forward`; one sequence after the other."""
        mode, config = one_pass.mode, self.bundle.config
        weight = self._weight if mode.view == "full" else self._half_weight
        if mode.view == "hi":  # a head that is tied is another reading of the embedding
            config = replace(config, tied_head=False)
        logits = [
            forward(
                config,
                weight,
                rows.ids[:, 0],
                rows.positions,
                rows.cache,
                rows.wanted,
                (rows.ids, rows.weights),
                long_rope=one_pass.rope_long,
                skipped=mode.skipped,
                predicted=mode.predicted,
                maps=self._maps if mode.fitted else None,
                joined=rows.joined,
                states=rows.states,
            )
            for rows in one_pass.rows
        ]
        if mode.head_tokens:
            for part in logits:
                part[:, mode.head_tokens :] = -np.inf
        return logits

    def _read_half(self, name: str) -> NDArray[np.float32]:
        """A weight by its upper nibbles; embeddings are always read whole."""
        return self.bundle.read_weight(name, view="full" if name == "embed" else "hi")

    def close(self) -> None:
        """See `Backend.close`."""
        super().close()
        self._weight.cache_clear()
        self._half_weight.cache_clear()


class FloatBackend(ReferenceBackend):
    """The reference's arithmetic over the native cache: what errs then is the cache alone.

    The graph rounds activations to 8 bits, which hides what a wide cache costs. Over a checkpoint
    the weights are its own.
    """

    name = "float"
    cache_kind = "native"

    @staticmethod
    def reads(files: ModelFiles) -> bool:
        """Whether these files hold a graph, or are a checkpoint."""
        return files.has_onnx or files.has_checkpoint
