"""Asks llama.cpp for its own quantiser, and for the answers of a finished file.

Knows no checkpoint and no bundle.
"""

import ctypes
import re
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np

from kvq.errors import BackendError, argument
from kvq_runtime.backends import forward_chain
from kvq_runtime.backends.llama_cpp import LlamaCppBackend
from kvq_runtime.backends.llama_library import library, missing
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.config import SessionRequest

# What llama.cpp's quantiser makes, each a mixture of types.
FILE_TYPES = ("q4_k_m",)


def llama_missing() -> str | None:
    """Returns why llama.cpp cannot be asked, or None."""
    try:
        return missing() or (library() and None)
    except BackendError as error:
        return str(error)


def quantize_file(
    source: Path, destination: Path, kind: str, threads: int, fixed: Iterable[tuple[str, str]]
) -> None:
    """Requantises a float GGUF file. A tensor whose rows do not fit falls back to another type.

    Tensors named in `fixed` stay of the type they have: else llama.cpp would round gates of a
    delta net. Raises `BackendError` with llama.cpp's words.
    """
    llama = library()
    functions = llama.functions
    parameters = functions.llama_model_quantize_default_params()
    parameters.ftype = getattr(functions, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    parameters.nthread = threads
    row = functions.llama_model_tensor_override
    rows = [
        row(f"^{re.escape(name)}$".encode(), getattr(functions, f"GGML_TYPE_{same.upper()}"))
        for name, same in fixed
    ]
    # A row without a name ends them.
    parameters.tt_overrides = (row * (len(rows) + 1))(*rows)
    names = str(source).encode(), str(destination).encode()
    if functions.llama_model_quantize(*names, ctypes.byref(parameters)):
        raise BackendError(
            f"llama.cpp could not quantise to {kind}: {llama.last_errors()}; make room on the "
            f"disk, or choose {argument('gguf_type', 'q8_0')}"
        )


def file_logits(path: Path, ids: np.ndarray, vocab_size: int, threads: int) -> np.ndarray:
    """Returns logits float32 [T, V] of `ids` int64 [T] from a GGUF file; the cache is in float16.

    Raises `KvqError` when llama.cpp does not load or run the file.
    """
    count = len(ids)
    request = SessionRequest(k_bits=16, v_bits=16, context_tokens=count, chunk_tokens=count)
    with closing(LlamaCppBackend(GgufFile.open(path).trusted(), threads=threads)) as backend:
        cache = backend.open_cache(backend.session_config(request))
        logits = forward_chain(backend, cache, ids, np.arange(count))
    assert logits.shape[1] == vocab_size
    return logits
