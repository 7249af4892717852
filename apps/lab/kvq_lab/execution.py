"""Runs a program a model wrote, with its test, in a process of its own with limits.

The limits (time, memory, size of files, an empty environment, a folder of its own) stop accidents,
not malice: this is no sandbox, and runs only if the user asks for it.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kvq.errors import BackendError, argument
from kvq_lab.infilling import Sample

TIMEOUT_S = 10.0
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20

# What the child returns after the test: a program that ends early does not pass.
_PASSED = 42

# The child sets its own limits: code between fork and exec is not safe beside threads.
_LAUNCHER = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({int(TIMEOUT_S)}, {int(TIMEOUT_S)}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, {FILE_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with open(sys.argv[1], encoding="utf-8") as file:
    program = file.read()
exec(compile(program, "program", "exec"), {{"__name__": "__main__"}})
os._exit({_PASSED})
"""


def check_possible() -> None:
    """Raises `BackendError` on a system that cannot limit a process."""
    if importlib.util.find_spec("resource") is None:
        raise BackendError(
            f"{argument('--execute')} needs limits of time and memory, which this system does not "
            "have; leave it out, or run it on Linux or macOS"
        )


def passes(sample: Sample, line: str, *, timeout_s: float = TIMEOUT_S) -> bool:
    """Tells whether the program with `line` filled in passes its test within the limits."""
    program = f"{sample.prefix}{line}\n{sample.suffix}\n{sample.test}\n"
    with tempfile.TemporaryDirectory(prefix="kvq-execute-") as folder:
        path = Path(folder) / "program.py"
        path.write_text(f"{program}check({sample.entry_point})\n", encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCHER, str(path)],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(timeout_s) == _PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
