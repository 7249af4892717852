"""`kvq serve --ray` for tests: a real Ray on this machine, in a session of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0


class Fleet:
    """`kvq serve --ray` in a process of its own, ready to answer."""

    def __init__(self, home: dict[str, str], folder: Path, *words: str) -> None:
        self.home, self.folder = home, folder
        command = [sys.executable, "-m", "kvq_apps.cli", "serve", "nano", "--ray", "--json"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--sessions-folder", str(folder), *words],
            env=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        lines: list[bytes] = []
        for line in self.process.stdout:
            lines.append(line)
            if line == b"}\n":
                break
        assert lines, self.process.communicate()[1].decode()
        self.facts: dict[str, Any] = json.loads(b"".join(lines))
        self.address: str = self.facts["url"]

    def replicas(self) -> set[int]:
        """The processes that answer."""
        return {
            pid
            for pid in processes_of(self.process.pid)
            if b"ServeReplica:kvq:replica" in command_of(pid)
        }

    def end(self) -> tuple[int, str]:
        """Asks it to end as a user does; the exit code and what stood on stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, complaint = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, complaint.decode()

    def close(self) -> None:
        """Whatever happened, nothing of it stays."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        kill_session(self.process.pid)
        self.process.communicate()


def command_of(pid: int) -> bytes:
    """What a process calls itself; nothing where it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def processes_of(session: int) -> Iterator[int]:
    """All processes of a session, Ray's too."""
    for folder in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            if os.getsid(int(folder.name)) == session:
                yield int(folder.name)


def kill_session(session: int) -> None:
    """Ends all of it at once, as a machine that loses its power."""
    for pid in processes_of(session):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
