"""Sockets to listen on: an address of this machine, or a file that its owner alone may open."""

import contextlib
import os
import socket
import stat
from pathlib import Path

from kvq.errors import UsageError
from kvq_apps.serve.reach import check_files_can_be_sockets

_BACKLOG = 256


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `UsageError` for an address that is not there or taken."""
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = rows[0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        # Else a body waits 40 ms behind its head; connections have it from here, since asyncio
        # sets it only where a socket was made with TCP's number.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on {host} port {port}: {reason}; give another --port "
            "(0: any free one) or --host"
        ) from error


def listen_on_file(path: Path) -> socket.socket:
    """A listening unix socket of mode 0600 at `path`; one that nobody answers is replaced.

    Raises `UsageError` where a server or anything else is, or no socket can be.
    """
    check_files_can_be_sockets()
    _clear(path)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            # Nobody can connect before it listens.
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot listen on {path}: {error.strerror or error}; give a short "
            "--socket path in a folder of yours"
        ) from error
    return listener


def remove_file(path: Path) -> None:
    """Removes a socket's file, if that is still one."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()


def _clear(path: Path) -> None:
    """Removes the socket of a server that was killed."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise UsageError(f"--socket {path} is not possible: something else is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            remove_file(path)
        except OSError as error:
            raise UsageError(f"--socket {path} is not possible: {error.strerror}") from error
        else:
            raise UsageError(f"--socket {path} is not possible: a server listens there already")
