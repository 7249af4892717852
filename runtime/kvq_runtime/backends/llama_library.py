"""llama.cpp through llama-cpp-python: found, loaded, silenced; a model in memory and its lifetime.

llama.cpp reports everything it does; here the lines are kept for those who ask (the sizes of a
cache stand nowhere else) and for the texts of errors. Knows no session.
"""

import ctypes
import importlib
import importlib.util
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

from kvq.errors import BackendError, ModelError
from kvq_runtime.backends import llama_probe

INSTALL = 'pip install "kvq-runtime[gguf]"'
_LOG_ERROR = 4
# Where an older release takes -1 for none.
_ALL_LAYERS = 1 << 20
_REMEMBERED_ERRORS = 4


def missing() -> str | None:
    """Why llama.cpp cannot be used here, or None; asked before `library`, which it may end."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None:
        return f"llama-cpp-python is not installed; {INSTALL}"
    return llama_probe.fault(Path(next(iter(spec.submodule_search_locations or ()), "")))


def why_no_gpu() -> str | None:
    """Why llama.cpp, which is installed, computes on no GPU, or None."""
    if library().functions.llama_supports_gpu_offload():
        return None
    return (
        f"llama-cpp-python was built without CUDA; CMAKE_ARGS=-DGGML_CUDA=on {llama_probe.REBUILD}"
    )


class Messages:
    """llama.cpp's log: nothing of it is printed, the last errors are remembered."""

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=_REMEMBERED_ERRORS)
        self._lines: list[str] = []
        self._collecting = False
        self._lock = RLock()

    def receive(self, level: int, text: bytes | None, _data: Any) -> None:
        """The callback; it must not raise."""
        line = (text or b"").decode("utf-8", errors="replace").strip()
        if level == _LOG_ERROR and line:
            self._errors.append(line)
        if self._collecting:
            self._lines.append(line)

    @contextmanager
    def collected(self) -> Generator[list[str]]:
        """The lines of what happens inside, filled in at its end; one thread at a time."""
        found: list[str] = []
        with self._lock:
            self._lines, self._collecting = [], True
            self._errors.clear()
            try:
                yield found
            finally:
                self._collecting = False
                found += self._lines

    def last_errors(self) -> str:
        """What went wrong last, in llama.cpp's words."""
        return "; ".join(dict.fromkeys(self._errors)) or "it gave no reason"


class LlamaLibrary:
    """The functions of llama.cpp, and its messages. Made once: its log has one receiver."""

    def __init__(self) -> None:
        # By name: its types are known only where the extra is installed.
        functions: Any = importlib.import_module("llama_cpp")
        self.functions = functions
        self.version: str = functions.__version__
        self.messages = Messages()
        self._callback: Any = functions.llama_log_callback(self.messages.receive)
        functions.llama_log_set(self._callback, ctypes.c_void_p(0))
        functions.llama_backend_init()


@cache
def library() -> LlamaLibrary:
    """llama.cpp, loaded on first use. Raises `BackendError` when what is installed is broken."""
    try:
        return LlamaLibrary()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise BackendError(
            f"the llama.cpp backend cannot run: llama-cpp-python does not load ({error}); "
            f"install it again: {INSTALL}"
        ) from error


class LlamaModel:
    """A model in memory, from its loading to `close`."""

    def __init__(self, path: Path, *, on_gpu: bool = False) -> None:
        """Loads a file that `gguf_file` has checked; `on_gpu`: all of it onto a GPU, else nothing.

        Raises `ModelError` with llama.cpp's words.
        """
        self.library = library()
        self.on_gpu = on_gpu
        functions = self.library.functions
        parameters = functions.llama_model_default_params()
        parameters.n_gpu_layers = _ALL_LAYERS if on_gpu else 0
        with self.library.messages.collected():
            pointer = functions.llama_model_load_from_file(str(path).encode(), parameters)
        if not pointer:
            raise ModelError(
                f"llama.cpp {self.library.version} does not load {path}: "
                f"{self.library.messages.last_errors()}; convert the model again or upgrade "
                "llama-cpp-python"
            )
        self._pointer: Any = pointer

    @property
    def pointer(self) -> Any:
        """What llama.cpp's functions take. Raises `BackendError` once the model is closed."""
        if self._pointer is None:
            raise BackendError("this model is closed; open it again with Engine.open")
        return self._pointer

    @property
    def vocabulary(self) -> Any:
        """What llama.cpp's vocabulary functions take."""
        return self.library.functions.llama_model_get_vocab(self.pointer)

    def close(self) -> None:
        """Gives the memory back; every context over it must be closed before."""
        if self._pointer is not None:
            self.library.functions.llama_model_free(self._pointer)
            self._pointer = None
