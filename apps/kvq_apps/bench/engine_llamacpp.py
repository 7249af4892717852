"""llama.cpp through the backend `kvq run` uses: as a peer on the same weights, or on a GGUF file.

Flash attention is on and weights are repacked, llama.cpp's fast paths. Knows no other engine.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvq.config import KvPlan, parse_kv
from kvq.errors import BackendError
from kvq_apps.bench.engines import InProcess, Setting, draft_ids, wanted_rows
from kvq_apps.bench.gguf_file import same_weights
from kvq_apps.bench.llama_state import StateLayout
from kvq_runtime import gpu
from kvq_runtime.backends import ModelFiles, forward_chain, llama_library
from kvq_runtime.backends.llama_cache import STATE_PREFIX, LlamaCppCache
from kvq_runtime.backends.llama_cpp import LlamaCppBackend, refusal
from kvq_runtime.backends.llama_layout import CACHE_TYPES
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import SessionRequest

MICRO_BATCH = 512
# As a peer it is measured with each of its types for both keys and values.
PEER_PLANS: Mapping[str, KvPlan] = {
    kind.name: KvPlan(k_bits=bits, v_bits=bits, sink_tokens=0) for bits, kind in CACHE_TYPES.items()
}


class LlamaCppEngine:
    """One model in memory; each sequence is a context of its own.

    On a bundle's graph it is a peer, with the graph's weights; a GGUF file it runs as it is. Its
    cache has the settings asked for of a file, or each of its types.
    """

    name = "llama.cpp"

    def __init__(
        self, files: ModelFiles, *, threads: int, settings: Sequence[Setting], device: str
    ) -> None:
        on_gpu = device != gpu.PROCESSOR
        asked = {setting.kv: _plan(setting.kv) for setting in settings}
        if files.has_onnx:
            # Only a bundle has a graph.
            files, asked = same_weights(cast(Bundle, files), self.name), {}
        self._backend = LlamaCppBackend(files, threads=threads, on_gpu=on_gpu)
        file, plans = files.gguf(), PEER_PLANS.items()
        self._plans = asked or {kv: plan for kv, plan in plans if not refusal(file, plan)}
        self.settings = tuple(Setting(kv=kv) for kv in self._plans)

    @staticmethod
    def missing(device: str) -> str | None:
        """Why it cannot run here, or None."""
        if importlib.util.find_spec("gguf") is None:
            return f"gguf is not installed; {llama_library.INSTALL}"
        reason = llama_library.missing()
        return llama_library.why_no_gpu() if not reason and device != gpu.PROCESSOR else reason

    def sequence(self, setting: Setting, depth: int, room: int) -> "LlamaCppSequence":
        plan = self._plans[setting.kv]
        request = SessionRequest(
            k_bits=plan.k_bits,
            v_bits=plan.v_bits,
            context_tokens=depth + room,
            chunk_tokens=MICRO_BATCH,
        )
        cache = self._backend.open_cache(self._backend.session_config(request))
        return LlamaCppSequence(self._backend, cache, plan, depth)

    def batch(self, setting: Setting, depth: int, room: int, count: int) -> None:
        """See `BenchEngine.batch`; its attention is inside the graph."""

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        return self._backend.layout.num_bytes(self._plans[setting.kv], tokens, MICRO_BATCH)

    def close(self) -> None:
        self._backend.close()


class LlamaCppSequence(InProcess):
    """A context and the depth it began with."""

    def __init__(
        self, backend: LlamaCppBackend, cache: LlamaCppCache, plan: KvPlan, depth: int
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._depth = depth
        if depth:
            self._fill(plan)
        self._beginning = cache.state() if depth and backend.layout.forgets else b""
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
        forward_chain(self._backend, self._cache, draft_ids(rows), wanted_rows(rows))
        return True

    def rollback(self) -> None:
        """See `BenchSequence.rollback`; states and windows do not get back by trimming."""
        if self._beginning:
            self._cache.load_state(self._beginning)
        else:
            self._cache.trim(self._depth)

    def attend(self, rows: int) -> bool:
        """See `BenchSequence.attend`; its attention is inside the graph."""
        return False

    def step_bytes(self) -> tuple[int, int]:
        return self._backend.weight_bytes_per_step, self.kv_bytes

    def close(self) -> None:
        self._cache.close()

    def _fill(self, plan: KvPlan) -> None:
        """Puts a synthetic state in place of that of one real token.

        Where a state is laid out in a way not known here, the tokens are computed.
        """
        self.forward(np.zeros(1, np.int64))
        try:
            layout = StateLayout.read(self._cache.state()[STATE_PREFIX.size :])
        except BackendError:
            self.forward(np.arange(1, self._depth) % MICRO_BATCH % self._backend.model.vocab_size)
            return
        kinds = (CACHE_TYPES[plan.k_bits].name, CACHE_TYPES[plan.v_bits].name)
        state = layout.random_state(self._depth, kinds, self._backend.layout.window_tokens)
        self._cache.load_state(STATE_PREFIX.pack(self._depth) + state.tobytes())


def _plan(kv: str) -> KvPlan:
    k_bits, v_bits = parse_kv(kv)
    return KvPlan(k_bits=k_bits, v_bits=v_bits, sink_tokens=0)
