"""The peer llama.cpp: the same weights as GGUF, through llama-cpp-python's low-level interface.

Flash attention is on and weights are repacked, llama.cpp's fast paths. Knows no other engine.
"""

import ctypes
import hashlib
import importlib.util
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import BackendError
from kvq.settings import cache_folder
from kvq_apps import output
from kvq_apps.bench.llama_state import StateLayout
from kvq_models.config import ModelConfig
from kvq_runtime.bundle import DATA_FILE, MODEL_FILE, Bundle

# ggml's number of the type, and its bytes per 32 values.
TYPES: Mapping[str, tuple[int, int]] = {"f16": (1, 64), "q8_0": (8, 34), "q4_0": (2, 18)}
BLOCK = 32
# llama.cpp pads a context to a multiple of this.
CONTEXT_PADDING = 256
MICRO_BATCH = 512
FLASH_ATTENTION_ON = 1


class LlamaCppEngine:
    """One model in memory; each sequence is a context of its own."""

    name = "llama.cpp"

    def __init__(self, bundle: Bundle, *, threads: int, kv_settings: Many[str]) -> None:
        del kv_settings
        from kvq_apps.bench import gguf_file

        reason = gguf_file.refusal(bundle.config)
        if reason is not None:
            raise BackendError(f"the peer llama.cpp cannot compute this model: {reason}")
        self._config = bundle.config
        self._threads = threads
        blocks = bundle.config.head_dim % BLOCK == 0
        self.kv_settings = tuple(TYPES) if blocks else ("f16",)
        # llama.cpp reports each tensor it loads; the wrapper prints from this level on, and takes
        # warnings for errors. A real failure shows in a status or a null pointer.
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        library = _library()
        library.llama_backend_init()
        path = _gguf(bundle)
        parameters = library.llama_model_default_params()
        self._model = library.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise BackendError(f"llama.cpp does not load {path}; delete it and try again")

    @staticmethod
    def missing() -> str | None:
        """Why it cannot run here, or None."""
        packages = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
        absent = [name for module, name in packages.items() if not _found(module)]
        if absent:
            return f"{' and '.join(absent)} not installed; pip install {' '.join(absent)}"
        return None

    def sequence(self, kv: str, depth: int, room: int) -> "LlamaCppSequence":
        """See `Engine.sequence`."""
        return LlamaCppSequence(self._model, self._config, kv, depth, room, self._threads)

    def cache_bytes(self, kv: str, tokens: int) -> int:
        """See `Engine.cache_bytes`."""
        return tokens * _bytes_per_token(self._config, kv)

    def close(self) -> None:
        """See `Engine.close`."""
        _library().llama_model_free(self._model)


class LlamaCppSequence:
    """A context with one sequence, number 0."""

    def __init__(
        self, model: Any, config: ModelConfig, kv: str, depth: int, room: int, threads: int
    ) -> None:
        self.kv_bytes = depth * _bytes_per_token(config, kv)
        self._vocab_size = config.vocab_size
        self._depth = depth
        self._context = _open_context(model, kv, depth + room, threads)
        if depth:
            self._fill(kv)

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Sequence.forward`."""
        library = _library()
        for start in range(0, len(ids), MICRO_BATCH):
            chunk = ids[start : start + MICRO_BATCH].tolist()
            tokens = (ctypes.c_int32 * len(chunk))(*chunk)
            batch = library.llama_batch_get_one(tokens, len(tokens))
            status = library.llama_decode(self._context, batch)
            if status:
                raise BackendError(f"llama.cpp could not decode: status {status}")
        pointer = library.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._vocab_size,))

    def rollback(self) -> None:
        """See `Sequence.rollback`."""
        _library().llama_memory_seq_rm(self._memory(), 0, self._depth, -1)

    def attend(self, rows: int) -> bool:
        """See `Sequence.attend`; its attention is inside the graph."""
        return False

    def close(self) -> None:
        """See `Sequence.close`."""
        _library().llama_free(self._context)

    def _memory(self) -> Any:
        return _library().llama_get_memory(self._context)

    def _fill(self, kv: str) -> None:
        """Puts a synthetic state in place of that of one real token."""
        library = _library()
        self.forward(np.zeros(1, np.int64))
        size = library.llama_state_seq_get_size(self._context, 0)
        one = (ctypes.c_uint8 * size)()
        library.llama_state_seq_get_data(self._context, one, size, 0)
        state = StateLayout.read(bytes(one)).random_state(self._depth, kv)
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        taken = library.llama_state_seq_set_data(self._context, pointer, state.nbytes, 0)
        last = library.llama_memory_seq_pos_max(self._memory(), 0)
        if taken != state.nbytes or last != self._depth - 1:
            raise BackendError(
                f"llama.cpp took {taken} of {state.nbytes} bytes of a {kv} cache of "
                f"{self._depth} tokens; leave out --peer llama.cpp"
            )


def _open_context(model: Any, kv: str, tokens: int, threads: int) -> Any:
    library = _library()
    parameters = library.llama_context_default_params()
    parameters.n_ctx = -(-tokens // CONTEXT_PADDING) * CONTEXT_PADDING
    parameters.n_batch = parameters.n_ubatch = MICRO_BATCH
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.type_k = parameters.type_v = TYPES[kv][0]
    parameters.flash_attn_type = FLASH_ATTENTION_ON
    context = library.llama_init_from_model(model, parameters)
    if not context:
        raise BackendError(f"llama.cpp does not open a {kv} context of {tokens} tokens")
    return context


def _gguf(bundle: Bundle) -> Path:
    """The bundle's weights as GGUF in the cache folder, written the first time."""
    from kvq_apps.bench.gguf_file import REVISION, write_gguf

    files = bundle.manifest.files
    hashes = f"{REVISION}" + "".join(files[name].sha256 for name in (MODEL_FILE, DATA_FILE))
    digest = hashlib.sha256(hashes.encode()).hexdigest()[:12]
    path = cache_folder() / "bench" / f"{bundle.manifest.name}-{digest}.gguf"
    if not path.exists():
        output.print_note(f"writing the weights once for llama.cpp: {path}")
        try:
            write_gguf(bundle, path)
        except OSError as error:
            raise BackendError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _bytes_per_token(config: ModelConfig, kv: str) -> int:
    blocks = config.num_kv_heads * config.head_dim // BLOCK
    return 2 * config.num_layers * blocks * TYPES[kv][1]


def _library() -> Any:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    return llama_cpp


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
