"""Batches on a real Ray: the same files as without, also after all of it was killed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import kvq
from ray_fleet import kill_session
from serving import wait_until
from shelf import Shelf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(max_position_embeddings=1024))


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines(True) if line[-1] == "\n"]


def texts(file: Path) -> list[str | None]:
    return [row["choices"][0]["text"] if "choices" in row else None for row in rows(file)]


def killed_once(words: list[str], home: dict[str, str], begun: Callable[[], Any]) -> None:
    """Starts a command and, once `begun` holds, ends it and its Ray without a word."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", *words],
        env=home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as command:  # fmt: skip
        try:
            wait_until(lambda: begun() or command.poll() is not None)
            assert command.poll() is None
        finally:
            kill_session(command.pid)
            command.kill()


def test_a_batch_that_lost_its_head_goes_on(
    bundle: str, ray_home: dict[str, str], tmp_path: Path
) -> None:
    file, plain, out = (tmp_path / name for name in ("prompts", "plain", "out"))
    lines = [{"prompt": f"Number {number}", "max_tokens": 40} for number in range(150)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "no JSON\n")
    words = ["batch", bundle, str(file), "--temp", "0", "--threads", "1", "--json"]
    assert kvq(*words, "--out", str(plain), home=ray_home).returncode == 2
    on_ray = [*words, "--out", str(out), "--ray", "--replicas", "2"]
    journal = Path(f"{out}.partial")
    killed_once(on_ray, ray_home, lambda: journal.exists() and journal.read_bytes().count(b"\n"))
    finished = {row["line"]: row.get("id") for row in rows(journal)}
    assert 0 < len(finished) < 151
    again = kvq(*on_ray, home=ray_home)
    assert again.returncode == 2, again.stderr
    assert json.loads(again.stdout) == {
        "lines": 151, "answered": 151 - len(finished), "failed": 1, "out": str(out),
    }  # fmt: skip
    assert finished.items() <= {row["line"]: row.get("id") for row in rows(out)}.items()
    assert [row["line"] for row in rows(out)] == list(range(1, 152))
    assert texts(out) == texts(plain)
    assert [text is None for text in texts(out)].count(True) == 1


def test_a_fleet_that_cannot_start_says_why(ray_home: dict[str, str]) -> None:
    words = ("serve", "nano", "--ray", "--port", "0", "--kv-budget", "1KiB", "--threads", "1")
    refused = kvq(*words, home=ray_home)
    assert refused.returncode == 2, refused.stderr
    line = refused.stderr.decode().splitlines()[-1]
    assert refused.stdout == b""
    assert line.startswith("error: the fleet did not start: ")
    assert "1.0 KiB" in line
