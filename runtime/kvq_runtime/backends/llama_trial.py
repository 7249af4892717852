"""Tries a file and a build of llama.cpp in a process of its own, before they are used here.

llama.cpp checks a file with assertions, which end the program. So does a build that uses
instructions which the processor announces and does not have, as AMX on some virtual machines. What
passed is remembered: a stranger's file for this build, and for files of our own the build alone.
"""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvq.errors import KvqError, ModelError
from kvq.limited_process import command
from kvq.settings import cache_folder, llama_folder
from kvq_runtime.backends.llama_library import REBUILD
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.machine import device

# Builds for what every x86 processor of the last ten years has.
PLAIN_BUILD = "-DGGML_NATIVE=OFF"
TIMEOUT_S = 1800
# A file that llama.cpp refuses without ending the program is refused again, with words, by the
# caller.
REFUSED = 3
# The product of a single row uses fewer instructions.
_ROWS = 16


def check(file: GgufFile) -> None:
    """Raises `ModelError` where llama.cpp ends the program that runs `file`."""
    mark = cache_folder() / "llama.cpp" / _digest(file)
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
            f'with every file: CMAKE_ARGS="{PLAIN_BUILD}" {REBUILD}'
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
        cache = backend.open_cache(backend.session_config(request))
        forward_chain(backend, cache, np.zeros(rows, np.int64), np.arange(rows))
        backend.close()
    except KvqError:
        sys.exit(REFUSED)


def _digest(file: GgufFile) -> str:
    """Returns a digest that changes with the build, the processor and a stranger's file."""
    facts = [file.fingerprint if file.untried else "", device.probe().processor]
    spec = importlib.util.find_spec("llama_cpp")
    folder = llama_folder() or Path(str(spec and spec.origin)).parent / "lib"
    for path in sorted((*folder.glob("*llama*"), *folder.glob("*ggml*"))):
        with contextlib.suppress(OSError):
            status = path.stat()
            facts.append(f"{path} {status.st_mtime_ns} {status.st_size}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
