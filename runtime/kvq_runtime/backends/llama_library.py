"""Loads llama.cpp through llama-cpp-python, keeps its last errors, and owns a loaded model."""

import ctypes
import importlib
import importlib.util
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from kvq.errors import BackendError, ModelError

INSTALL = 'pip install "kvq-runtime[gguf]"'
# Without these options pip would take a wheel that it has built before, whatever CMAKE_ARGS says.
REBUILD = (
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python "
    "llama-cpp-python"
)
_LOG_ERROR = 4
# All layers. An older release takes -1 for none.
_ALL_LAYERS = 1 << 20
_REMEMBERED_ERRORS = 4


def missing() -> str | None:
    """Returns why llama.cpp cannot be used here, or None."""
    if importlib.util.find_spec("llama_cpp") is None:
        return f"llama-cpp-python is not installed; {INSTALL}"
    return None


def why_no_gpu() -> str | None:
    """Returns why llama.cpp, which is installed, computes on no GPU, or None."""
    if library().functions.llama_supports_gpu_offload():
        return None
    return f"llama-cpp-python was built without CUDA; CMAKE_ARGS=-DGGML_CUDA=on {REBUILD}"


class LlamaLibrary:
    """Holds the functions and last errors of llama.cpp. It is made once: the log has one receiver.

    Nothing of the log is printed.
    """

    def __init__(self) -> None:
        # Imported by name, as its types are known only where the extra is installed.
        functions: Any = importlib.import_module("llama_cpp")
        self.functions = functions
        self.version: str = functions.__version__
        self._errors: deque[str] = deque(maxlen=_REMEMBERED_ERRORS)
        self._callback: Any = functions.llama_log_callback(self._receive)
        functions.llama_log_set(self._callback, ctypes.c_void_p(0))
        functions.llama_backend_init()

    def last_errors(self) -> str:
        """Returns the last errors in llama.cpp's words, and forgets them."""
        errors = "; ".join(dict.fromkeys(self._errors))
        self._errors.clear()
        return errors or "it gave no reason"

    def _receive(self, level: int, text: bytes | None, _data: Any) -> None:
        """Receives one message. As a callback of C it must not raise."""
        line = (text or b"").decode("utf-8", errors="replace").strip()
        if level == _LOG_ERROR and line:
            self._errors.append(line)


@cache
def library() -> LlamaLibrary:
    """Loads llama.cpp on first use. Raises `BackendError` where the installed one is broken."""
    try:
        return LlamaLibrary()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendError(
            f"the llama.cpp backend cannot run: llama-cpp-python does not load ({error}); "
            f"install it again: {INSTALL}"
        ) from error


class LlamaModel:
    """Holds a model in memory, from its loading to `close`."""

    def __init__(self, path: Path, *, on_gpu: bool = False) -> None:
        """Loads a file that `gguf_file` has checked, all of it onto a GPU if `on_gpu`.

        Raises `ModelError` with llama.cpp's words.
        """
        self.library = library()
        self.on_gpu = on_gpu
        functions = self.library.functions
        parameters = functions.llama_model_default_params()
        parameters.n_gpu_layers = _ALL_LAYERS if on_gpu else 0
        pointer = functions.llama_model_load_from_file(str(path).encode(), parameters)
        if not pointer:
            raise ModelError(
                f"llama.cpp {self.library.version} does not load {path}: "
                f"{self.library.last_errors()}; convert the model again or upgrade "
                "llama-cpp-python"
            )
        self._pointer: Any = pointer

    @property
    def pointer(self) -> Any:
        """Returns the handle for llama.cpp's functions. Raises `BackendError` after `close`."""
        if self._pointer is None:
            raise BackendError("this model is closed; open it again with Engine.open")
        return self._pointer

    @property
    def vocabulary(self) -> Any:
        """Returns the handle for llama.cpp's vocabulary functions."""
        return self.library.functions.llama_model_get_vocab(self.pointer)

    @property
    def has_states(self) -> bool:
        """Tells whether some layers have a recurrent state, which holds all tokens so far."""
        return bool(self.library.functions.llama_model_is_hybrid(self.pointer))

    @property
    def window_tokens(self) -> int:
        """Returns the window of the layers that have one; 0: none has."""
        return int(self.library.functions.llama_model_n_swa(self.pointer))

    def close(self) -> None:
        """Frees the memory; every context over it must be closed before."""
        if self._pointer is not None:
            self.library.functions.llama_model_free(self._pointer)
            self._pointer = None
