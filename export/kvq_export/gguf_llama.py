"""What an export asks of llama.cpp itself: its own quantiser, and the answers of a finished file.

Knows no checkpoint and no bundle.
"""

import ctypes
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from kvq.errors import BackendError, argument
from kvq_runtime.backends.llama_library import LlamaModel, library, missing

# llama.cpp pads a context to a multiple of this.
_CONTEXT_STEP = 256

# What llama.cpp's quantiser calls a mixture of types.
FILE_TYPES: Mapping[str, str] = {"q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}


def llama_missing() -> str | None:
    """Why llama.cpp cannot be asked, or None."""
    try:
        return missing() or (library() and None)
    except BackendError as error:
        return str(error)


def quantize_file(
    source: Path, destination: Path, kind: str, threads: int, *, kept: Mapping[str, str]
) -> None:
    """Requantises a float GGUF file. A tensor whose rows do not fit falls back to another type.

    Those called as in `kept` stay of the type they have: else it would round gates of a delta net.
    Raises `BackendError` with llama.cpp's words.
    """
    llama = library()
    parameters = llama.functions.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama.functions, FILE_TYPES[kind])
    parameters.nthread = threads
    row = llama.functions.llama_model_tensor_override
    rows = [
        row(f"^{re.escape(name)}$".encode(), getattr(llama.functions, f"GGML_TYPE_{same.upper()}"))
        for name, same in kept.items()
    ]
    # The first that has no name ends them.
    parameters.tt_overrides = (row * (len(rows) + 1))(*rows)
    with llama.messages.collected():
        status = llama.functions.llama_model_quantize(
            str(source).encode(), str(destination).encode(), ctypes.byref(parameters)
        )
    if status:
        raise BackendError(
            f"llama.cpp could not quantise to {kind}: {llama.messages.last_errors()}; "
            f"make room on the disk, or choose {argument('gguf_type', 'q8_0')}"
        )


def context_tokens(tokens: int) -> int:
    """The size of the context that `file_logits` opens for so many tokens."""
    return -(-tokens // _CONTEXT_STEP) * _CONTEXT_STEP


def file_logits(path: Path, ids: np.ndarray, vocab_size: int, threads: int) -> np.ndarray:
    """Logits float32 [T, V] of `ids` int64 [T] from a GGUF file; the cache is in float16.

    Raises `KvqError` when llama.cpp does not load or run the file.
    """
    with closing(LlamaModel(path)) as model:
        return _decode(model, ids, vocab_size, threads)


def _decode(model: LlamaModel, ids: np.ndarray, vocab_size: int, threads: int) -> np.ndarray:
    functions = model.library.functions
    parameters = functions.llama_context_default_params()
    parameters.n_ctx = context_tokens(len(ids))
    parameters.n_batch = parameters.n_ubatch = len(ids)
    parameters.n_threads = parameters.n_threads_batch = threads
    context = functions.llama_init_from_model(model.pointer, parameters)
    if not context:
        raise BackendError(f"llama.cpp does not open a context of {len(ids)} tokens")
    batch = functions.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids.tolist()):
            batch.token[row], batch.pos[row] = token, row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = True
        status = functions.llama_decode(context, batch)
        if status:
            raise BackendError(f"llama.cpp could not decode: status {status}")
        pointer = functions.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, (len(ids), vocab_size)).copy()
    finally:
        functions.llama_batch_free(batch)
        functions.llama_free(context)
