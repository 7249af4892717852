"""Opens sockets to listen on: at an address, or as a file that only its owner may open."""

import contextlib
import os
import socket
import stat
from pathlib import Path

from kvq.errors import UsageError, argument
from kvq_apps.serve.server_connection import check_files_can_be_sockets

_BACKLOG = 256


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises `UsageError` for an address that cannot be used."""
    try:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = rows[0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        # Without this a body waits 40 ms after its head. Connections inherit it; asyncio sets it
        # only for sockets that were made with TCP's number.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen on {host} port {port}: {reason}; give another {argument('--port')} "
            f"(0: any free one) or {argument('--host')}"
        ) from error


def listen_on_file(path: Path) -> socket.socket:
    """Returns a listening unix socket of mode 0600 at `path`, in place of a dead server's socket.

    Raises `UsageError` where a server or another file is, or where no socket is possible.
    """
    check_files_can_be_sockets()
    _clear(path)
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            # Before `listen` nobody can connect.
            path.chmod(0o600)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(
            f"cannot listen on {path}: {error.strerror or error}; give a short "
            f"{argument('--socket')} path in a folder of yours"
        ) from error
    return listener


def remove_file(path: Path) -> None:
    """Removes the file of a socket, if it is one."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()


def _clear(path: Path) -> None:
    """Removes the socket of a server that was killed."""
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise UsageError(f"{argument('--socket')} {path} is not possible: something else is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            remove_file(path)
        except OSError as error:
            raise UsageError(
                f"{argument('--socket')} {path} is not possible: {error.strerror}"
            ) from error
        else:
            raise UsageError(
                f"{argument('--socket')} {path} is not possible: a server listens there already"
            )
