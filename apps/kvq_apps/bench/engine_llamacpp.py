"""llama.cpp through the backend of `kvq run`: as a peer on the same weights, or on a GGUF file.

Flash attention is on and weights are repacked, llama.cpp's fast paths. Knows no other engine.
"""

import importlib.util
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvq.config import KvPlan, parse_kv
from kvq_apps.bench.engines import BenchSequence, Setting, draft_ids, logit_rows
from kvq_apps.bench.gguf_file import gguf_of
from kvq_runtime.backends import ModelFiles, forward_chain, llama_library
from kvq_runtime.backends.llama_cache import CACHE_TYPES, LlamaCppCache
from kvq_runtime.backends.llama_cpp import LlamaCppBackend, refusal
from kvq_runtime.config import SessionRequest
from kvq_runtime.machine import gpu

MICRO_BATCH = 512


class LlamaCppEngine:
    """Holds one model in memory; each sequence is a context of its own.

    Its cache has the requested settings; as a peer it has none and is measured with each of its
    types for both keys and values.
    """

    name = "llama.cpp"

    def __init__(
        self, files: ModelFiles, *, threads: int, settings: Sequence[Setting], device: str
    ) -> None:
        file = gguf_of(files, self.name)
        self._backend = LlamaCppBackend(file, threads=threads, on_gpu=device != gpu.PROCESSOR)
        self._widths = {setting.kv: parse_kv(setting.kv) for setting in settings} or {
            kind.name.lower(): (bits, bits)
            for bits, kind in CACHE_TYPES.items()
            if not refusal(file, KvPlan(k_bits=bits, v_bits=bits, sink_tokens=0))
        }
        self.settings = tuple(Setting(kv=kv) for kv in self._widths)

    @staticmethod
    def missing(device: str) -> str | None:
        """Says why it cannot run here, or None."""
        if importlib.util.find_spec("gguf") is None:
            return f"gguf is not installed; {llama_library.INSTALL}"
        reason = llama_library.missing()
        return llama_library.why_no_gpu() if not reason and device != gpu.PROCESSOR else reason

    def sequence(self, setting: Setting, depth: int, room: int) -> "LlamaCppSequence":
        k_bits, v_bits = self._widths[setting.kv]
        request = SessionRequest(
            k_bits=k_bits, v_bits=v_bits, context_tokens=depth + room, chunk_tokens=MICRO_BATCH
        )
        cache = self._backend.open_cache(self._backend.session_config(request))
        return LlamaCppSequence(self._backend, cache, depth)

    def close(self) -> None:
        self._backend.close()


class LlamaCppSequence(BenchSequence):
    """Holds a context and the depth it began with, whose tokens are computed."""

    def __init__(self, backend: LlamaCppBackend, cache: LlamaCppCache, depth: int) -> None:
        self._backend = backend
        self._cache = cache
        self._depth = depth
        self.forward(np.arange(depth) % MICRO_BATCH % backend.model.vocab_size)
        self._beginning = cache.state() if depth and backend.forgets else b""
        self.kv_bytes = cache.used_bytes

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        logits = np.zeros((1, 0), np.float32)
        for start in range(0, len(ids), self._cache.chunk_tokens):
            chunk = ids[start : start + self._cache.chunk_tokens]
            last = np.array([len(chunk) - 1])
            logits = forward_chain(self._backend, self._cache, chunk, last)
        return logits[0]

    def verify(self, rows: int) -> bool:
        if rows > self._cache.chunk_tokens:
            return False
        forward_chain(self._backend, self._cache, draft_ids(rows), logit_rows(rows))
        return True

    def rollback(self) -> None:
        """Restores the state; states and windows cannot be trimmed."""
        if self._beginning:
            self._cache.load_state(self._beginning)
        else:
            self._cache.trim(self._depth)

    def step_bytes(self) -> tuple[int, int]:
        return self._backend.weight_bytes_per_step, self.kv_bytes

    def close(self) -> None:
        self._cache.close()
