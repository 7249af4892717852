"""Loads llama.cpp through llama-cpp-python, keeps its last errors, and owns a loaded model.

Before a model is loaded, its file is tried in a child process.
"""

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
from collections import deque
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kvq.errors import BackendError, KvqError, ModelError
from kvq.limited_process import command
from kvq.settings import cache_folder
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.machine import device

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
# A trial may take so long.
TIMEOUT_S = 1800
# A trial ends so for a file that llama.cpp refuses without ending the program: the caller is
# refused again, with words.
REFUSED = 3
# The product of a single row uses fewer instructions.
_ROWS = 16


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
        self._pointer: Any = functions.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._pointer:
            raise ModelError(
                f"llama.cpp {self.library.version} does not load {path}: "
                f"{self.library.last_errors()}; convert the model again or upgrade "
                "llama-cpp-python"
            )
        # Whether some layers have a recurrent state, which holds all tokens so far; and the window
        # of the layers that have one, or 0.
        self.has_states = bool(functions.llama_model_is_hybrid(self._pointer))
        self.window_tokens = int(functions.llama_model_n_swa(self._pointer))

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

    def close(self) -> None:
        """Frees the memory; every context over it must be closed before."""
        if self._pointer is not None:
            self.library.functions.llama_model_free(self._pointer)
            self._pointer = None


def check(file: GgufFile) -> None:
    """Raises `ModelError` where llama.cpp ends the program that runs `file`.

    It checks a file with assertions, which end the program. So does a build that uses instructions
    which the processor announces and does not have, as AMX on some virtual machines. So both are
    tried in a process of its own. What passed is remembered: a stranger's file for this version and
    processor, and for files of our own these two alone.
    """
    fingerprint = file.fingerprint if file.untried else ""
    facts = (fingerprint, device.probe().processor, version("llama-cpp-python"))
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    mark = cache_folder() / "llama.cpp" / digest
    if mark.exists():
        return
    try:
        trial = subprocess.run(  # noqa: S603  our own interpreter and script
            command(__name__, str(file.path)), capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"llama.cpp did not load {file.path} in {TIMEOUT_S} s; it is damaged, or too large"
        ) from None
    if trial.returncode not in (0, REFUSED):
        words = trial.stderr.decode(errors="replace").strip().splitlines()
        raise ModelError(
            f"llama.cpp ends the program that runs {file.path} "
            f"({words[-1] if words else f'status {trial.returncode}'}): the file is damaged, so "
            "copy or convert it again; or llama.cpp was built for another processor, if it ends "
            f'with every file: CMAKE_ARGS="-DGGML_NATIVE=OFF" {REBUILD}'
        )
    if trial.returncode == 0:
        with contextlib.suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def main(path: str) -> None:
    """Loads the file and computes a few tokens; exits with `REFUSED` where that is refused."""
    from kvq_runtime.backends import forward_chain
    from kvq_runtime.backends.llama_cpp import LlamaCppBackend
    from kvq_runtime.config import SessionRequest

    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Without this, llama.cpp starts a debugger on the ended program.
    os.putenv("GGML_NO_BACKTRACE", "1")
    try:
        file = GgufFile.open(path)
        backend = LlamaCppBackend(file, threads=1, tried=True)
        rows = min(_ROWS, file.context_length)
        request = SessionRequest(k_bits=16, v_bits=16, context_tokens=rows)
        opened = backend.open_cache(backend.session_config(request))
        forward_chain(backend, opened, np.zeros(rows, np.int64), np.arange(rows))
        backend.close()
    except KvqError:
        sys.exit(REFUSED)
