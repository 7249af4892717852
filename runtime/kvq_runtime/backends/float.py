"""The forward pass in numpy, over the quantised cache: defines the right answer of a model.

It needs no native library. Weights are restored to float32 on first use and kept: four bytes a
parameter.
"""

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvq import native_library
from kvq.cache import Cache
from kvq_models.reference import forward
from kvq_runtime.backends import ModelFiles, Pass
from kvq_runtime.backends.paged import PagedBackend
from kvq_runtime.bundle.bundle import Bundle


class FloatBackend(PagedBackend):
    """Computes in float32, so that only the stored weights and the cache lose anything.

    The graph rounds activations to 8 bits, which hides what a wide cache costs. Over a checkpoint
    the weights are its original ones. numpy uses its own threads, whatever `threads` says.
    """

    name = "float"
    cache_kind = "native"

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        super().__init__(bundle, threads=threads)
        self._weight = cache(bundle.read_weight)
        self._half_weight = cache(self._read_half)
        self._maps = bundle.restored_maps()

    @staticmethod
    def missing() -> str | None:
        """Returns why this backend cannot run here: there is no native library for the cache."""
        return native_library.why_not() or None

    @staticmethod
    def reads(files: ModelFiles) -> bool:
        """Returns whether these files hold a graph, or are a checkpoint."""
        return files.has_onnx or files.has_checkpoint

    def forward(self, one_pass: Pass[Cache]) -> list[NDArray[np.float32]]:
        """Computes one sequence after the other; see `Backend.forward`."""
        mode, config = one_pass.rows[0].mode, self.bundle.config
        weight = self._weight if mode.view == "full" else self._half_weight
        if mode.view == "hi":  # a tied head reads the embedding by halves
            config = replace(config, tied_head=False)
        logits = [
            forward(
                config,
                weight,
                rows.ids[:, 0],
                rows.positions,
                rows.cache,
                rows.logit_rows,
                (rows.ids, rows.weights),
                long_rope=one_pass.rope_long,
                predicted=mode.predicted,
                maps=self._maps if mode.fitted else None,
                joined=rows.joined,
                states=rows.hidden_states,
            )
            for rows in one_pass.rows
        ]
        if mode.head_tokens:
            for part in logits:
                part[:, mode.head_tokens :] = -np.inf
        return logits

    def _read_half(self, name: str) -> NDArray[np.float32]:
        """Reads a weight by its upper nibbles; embeddings are always read whole."""
        return self.bundle.read_weight(name, view="full" if name == "embed" else "hi")

    def close(self) -> None:
        """Implements `Backend.close`."""
        super().close()
        self._weight.cache_clear()
        self._half_weight.cache_clear()
