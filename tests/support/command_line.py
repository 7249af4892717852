"""Commands from outside, as a user starts them."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

# A fixture of the commands' tests: runs one with `--json` in this process and returns its object.
Ask = Callable[..., dict[str, Any]]
RUN_KEYS = {
    *("text", "prompt_tokens", "new_tokens", "ttft_ms", "decode_tok_s"),
    *("kv_bytes_peak", "kv_budget", "finish_reason"),
}


def kvq(
    *words: str, home: dict[str, str], stdin: bytes = b"", **extra: str
) -> subprocess.CompletedProcess[bytes]:
    """A command in a process of its own, once it has ended."""
    return subprocess.run(
        [sys.executable, "-m", "kvq_apps.cli", *words],
        input=stdin,
        env=home | extra,
        capture_output=True,
        timeout=120,
        check=False,
    )


def started(*words: str, home: dict[str, str]) -> subprocess.Popen[bytes]:
    """A command at work, with nothing to read and pipes for what it says."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", *words],
        env=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def answer(finished: subprocess.CompletedProcess[bytes]) -> dict[str, object]:
    """The one object on stdout of a command that worked."""
    assert finished.returncode == 0, finished.stderr.decode()
    return json.loads(finished.stdout)
