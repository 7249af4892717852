"""Writes a file whole or not at all, reads files of any origin, and turns a text into a path."""

import os
import re
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from kvq.errors import DataError, KvqError, UsageError, reason_of
from kvq.formats import format_bytes

# Seconds after which an unfinished file belongs to no running process.
LEFT_BEHIND_S = 24 * 60 * 60
# Bytes read of a file whose size is 0, as files below /proc have.
_SIZELESS_BYTES = 1 << 20


@contextmanager
def replace_file(path: Path, *, private: bool = True) -> Generator[BinaryIO]:
    """Yields a new file to write, which replaces `path` when the block ends.

    If the block raises, the old file at `path` stays. Only the owner can read a `private` file.
    Unfinished files that a killed process left here more than a day ago are removed. Raises
    `OSError`.
    """
    _clear_leftovers(path)
    partial = path.with_name(f".{path.name}-{token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(partial, flags, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_regular(
    path: Path, most_bytes: int, *, through_links: bool = True, private: bool = False
) -> bytes:
    """Returns the bytes of a file that a stranger may have made, opened by `open_regular`.

    Raises `OSError`, and `DataError` also for one of more than `most_bytes`, of which nothing more
    is read.
    """
    with open_regular(path, through_links=through_links, private=private) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        content = file.read(min(num_bytes or _SIZELESS_BYTES, most_bytes) + 1)
    if max(num_bytes, len(content)) > most_bytes:
        raise DataError(f"{path} is larger than {format_bytes(most_bytes)}, and is not read")
    return content


def open_regular(path: Path, *, through_links: bool = True, private: bool = False) -> BinaryIO:
    """Opens a file that a stranger may have made, for reading; it never waits for a pipe.

    Raises `OSError` where it cannot be opened, or is a link and not to be read `through_links`, and
    `DataError` for what is no regular file, or another user's where it is to be `private`.
    """
    names = ["O_NONBLOCK", "O_BINARY"] + ["O_NOFOLLOW"] * (not through_links)
    flags = os.O_RDONLY
    for name in names:
        flags |= getattr(os, name, 0)
    file = os.open(path, flags)
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and (is_private(status) or not private):
        return os.fdopen(file, "rb")
    os.close(file)
    regular = stat.S_ISREG(status.st_mode)
    reason = "belongs to another user" if regular else "is no regular file"
    raise DataError(f"{path} {reason}, and is not read")


def is_private(status: os.stat_result) -> bool:
    """Returns whether a file is a regular one of this user; Windows names no owner."""
    user = os.geteuid() if hasattr(os, "geteuid") else status.st_uid
    return stat.S_ISREG(status.st_mode) and status.st_uid == user


@contextmanager
def room_on_disk(num_bytes: int, folder: Path) -> Generator[int]:
    """Yields the descriptor of a new file without a name in `folder`; its bytes read as 0.

    For 0 bytes it yields -1 and makes no file. Raises `OSError` where there is no room.
    """
    if not num_bytes:
        yield -1
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as stream:
        os.posix_fallocate(stream.fileno(), 0, num_bytes)
        yield stream.fileno()


def left_behind(folder: Path, pattern: str) -> list[Path]:
    """Returns paths in `folder` whose names match `pattern` and that are unchanged for a day.

    The list is empty if the folder cannot be read.
    """
    leftovers: list[Path] = []
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if re.fullmatch(pattern, path.name) and _age_s(path) > LEFT_BEHIND_S:
                    leftovers.append(path)
    return leftovers


def _age_s(path: Path) -> float:
    return time.time() - path.lstat().st_mtime


def _clear_leftovers(path: Path) -> None:
    for partial in left_behind(path.parent, rf"\.{re.escape(path.name)}-[0-9a-f]{{8}}"):
        with suppress(OSError):
            partial.unlink()


def path_of(text: str | Path, error: type[KvqError] = UsageError) -> Path:
    """Returns the path that a user wrote, with `~` replaced; nothing needs to be there.

    Raises `error` for a text that the system does not take as a path: it is too long, has a zero
    byte, is a loop of links, or goes through a folder that this user may not enter.
    """
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise error(f"{text} is not possible: there is no such user; write ./{text}") from None
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError) as problem:
        raise error(f"{text} cannot be read: {reason_of(problem)}") from problem
    return path
