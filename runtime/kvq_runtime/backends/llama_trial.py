"""A first load of a stranger's file in a process of its own, which llama.cpp may end as it likes.

llama.cpp checks a file with assertions too, and those end the program. A file that passed is
remembered by its fingerprint, so this happens once. Judges nothing else: a file that llama.cpp
refuses in an orderly way is refused again, with words, by the caller.
"""

import contextlib
import os
import subprocess
import sys

from kvq.errors import KvqError, ModelError
from kvq.settings import cache_folder
from kvq_runtime.backends.llama_library import library
from kvq_runtime.gguf_file import GgufFile

TIMEOUT_S = 1800
REFUSED = 3
_SCRIPT = "import sys; sys.path[:0] = {path!r}; from {module} import main; main({file!r})"


def check(file: GgufFile) -> None:
    """Raises `ModelError` when llama.cpp ends the program that loads `file`."""
    mark = cache_folder() / "gguf" / f"{file.fingerprint[:32]}-{library().version}"
    if mark.exists():
        return
    script = _SCRIPT.format(path=sys.path, module=__name__, file=str(file.path))
    try:
        trial = subprocess.run(  # noqa: S603  our own interpreter and script
            [sys.executable, "-c", script], capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"llama.cpp did not load {file.path} in {TIMEOUT_S} s; it is damaged, or too large"
        ) from None
    if trial.returncode not in (0, REFUSED):
        words = trial.stderr.decode(errors="replace").strip().splitlines()
        raise ModelError(
            f"{file.path} is damaged: llama.cpp ends the program that loads it "
            f"({words[-1] if words else trial.returncode}); copy or convert the model again"
        )
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def main(path: str) -> None:
    """Loads the file and computes a token; exits with `REFUSED` where that is refused."""
    from kvq_runtime.engine import Engine

    # A debugger's look at the ended program is of no use to anyone here.
    os.putenv("GGML_NO_BACKTRACE", "1")
    try:
        file = GgufFile.open(path).vouched_for()
        with Engine(file, threads=1, backend="llama.cpp") as engine:
            context_tokens = min(64, engine.model.context_length)
            with engine.session(kv_budget=f"{context_tokens}tok", k_bits=16, v_bits=16) as session:
                session.prefill([0])
    except KvqError:
        sys.exit(REFUSED)
