"""Keeps a list of this user's running servers: a small locked file for each process.

The lock, not the process id, tells a running server from a file that a killed one left, since ids
are reused.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from kvq.errors import BackendError, DataError, UsageError, argument
from kvq.files import open_regular
from kvq.settings import state_folder
from kvq_apps.terminal import output

if sys.platform != "win32":
    import fcntl

_POLL_S = 0.02
# After its grace a server may still have sessions to write.
_LAST_WRITES_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """Describes a running server: where it listens (`url`, `socket`), since when, its protocol.

    `model` is the name it was asked to serve. Its answers get `grace_s` to end. Fields that another
    version did not write have their defaults.
    """

    pid: int
    url: str | None = None
    socket: str | None = None
    model: str = "?"
    version: str = "?"
    protocol: int = 0
    started_at: float = 0.0
    grace_s: float = 0.0
    log: str = ""

    @property
    def address(self) -> str:
        return self.url or f"unix:{self.socket}"


@contextmanager
def announce(instance: Instance) -> Generator[None]:
    """Lets `running` find `instance` while inside; a note says so where that is not possible."""
    if sys.platform == "win32":
        yield
        return
    path = _folder() / f"{instance.pid}.json"
    try:
        stream = _locked_file(path, json.dumps(asdict(instance)))
    except OSError as error:
        output.print_note(
            f"warning: `kvq serve --status` will not find this server: {path.parent}: "
            f"{error.strerror}; point XDG_STATE_HOME elsewhere"
        )
        yield
        return
    with stream:
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def running() -> list[Instance]:
    """Returns the servers that run now, the oldest first, and deletes files of killed ones.

    Raises `UsageError` on a system without file locks.
    """
    if sys.platform == "win32":
        raise UsageError("finding servers needs a system with file locks; use the server's address")
    instances: list[Instance] = []
    for path in _folder().glob("*.json"):
        with (
            contextlib.suppress(OSError, DataError),
            open_regular(path, through_links=False, private=True) as stream,
        ):
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                instances += _read(stream)
            else:
                path.unlink()
    return sorted(instances, key=lambda instance: instance.started_at)


def find_instance(port: int | None, socket: str | None) -> Instance:
    """Returns the only running server, or the one at `port` or `socket`. Raises `UsageError`."""
    instances = running()
    matching = [
        instance
        for instance in instances
        if (port is None or (instance.url or "").endswith(f":{port}"))
        and (socket is None or instance.socket == os.path.abspath(socket))
    ]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(f"{instance.address} (process {instance.pid})" for instance in instances)
    if not instances:
        raise UsageError("no `kvq serve` of this user is running")
    if not matching:
        raise UsageError(f"no `kvq serve` listens there; these do: {listed}")
    raise UsageError(
        f"{len(matching)} servers run; name one by {argument('--port')} or {argument('--socket')}: "
        f"{listed}"
    )


def stop(instance: Instance) -> None:
    """Ends `instance` by SIGTERM and waits for it. Raises `BackendError` if it stays."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(instance.pid, signal.SIGTERM)
    end = time.monotonic() + instance.grace_s + _LAST_WRITES_S
    while any(other.pid == instance.pid for other in running()):
        if time.monotonic() > end:
            raise BackendError(
                f"process {instance.pid} was told to end and has not; "
                f"`kill -9 {instance.pid}` ends it, what it has not saved is read again"
            )
        time.sleep(_POLL_S)


def _folder() -> Path:
    return state_folder() / "servers"


def _locked_file(path: Path, content: str) -> TextIO:
    """Writes a file at `path` that is locked until it is closed; nobody sees it unlocked."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    stream = os.fdopen(handle, "w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(content)
        stream.flush()
        os.replace(name, path)
    except BaseException:
        stream.close()
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return stream


def _read(stream: BinaryIO) -> list[Instance]:
    """Returns the server that a file describes, or nothing if the file cannot be read."""
    known = {field.name for field in fields(Instance)}
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        values: dict[str, Any] = json.load(stream)
        return [Instance(**{name: value for name, value in values.items() if name in known})]
    return []
