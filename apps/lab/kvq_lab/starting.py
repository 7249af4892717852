"""How long an editor waits for `kvq lsp` to begin, and for the VS Code extension where it is built.

Both are measured from nothing: a process is started each time. The model loads after that, and is
not waited for.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, BinaryIO, cast

from kvq_apps.lsp.connection import framed, read_frames

STARTS = 7
# In a checkout, beside this package.
_EXTENSION = Path(__file__).parents[2] / "editors/vscode"


def measure(starts: int = STARTS) -> dict[str, float | None]:
    """Median milliseconds to the first answer of a server, and to an extension that is active."""
    return {
        "server_ms": 1e3 * median(_server_s() for _ in range(starts)),
        "extension_ms": _extension_ms(starts),
    }


def _server_s() -> float:
    asked: dict[str, Any] = {"id": 1, "method": "initialize", "params": {"capabilities": {}}}
    command = [sys.executable, "-c", "from kvq_apps.entry import main; main()", "lsp"]
    pipe, since = subprocess.PIPE, perf_counter()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(framed(asked))
        process.stdin.flush()
        next(read_frames(cast(BinaryIO, process.stdout), lambda _: None))
        seconds = perf_counter() - since
        process.kill()
    return seconds


def _extension_ms(starts: int) -> float | None:
    """Nothing where there is no Node.js, or no extension that `npm run package` has built."""
    node, script = shutil.which("node"), _EXTENSION / "test/activation.mjs"
    if node is None or not (_EXTENSION / "dist/extension.js").exists():
        return None
    command = [node, str(script)]
    return median(float(subprocess.check_output(command, text=True)) for _ in range(starts))
