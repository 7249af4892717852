"""How a file changes on disk: whole, or not at all."""

import os
import re
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

# Nobody writes one file for so long.
LEFT_BEHIND_S = 24 * 60 * 60


@contextmanager
def replace_file(path: Path, *, private: bool = True) -> Generator[BinaryIO]:
    """A new file to write, which takes the place of `path` when the block ends.

    What was at `path` stays until then, and for good if the block raises. Only the owner can read
    a `private` file. What a process that was killed left of this file a day ago is removed. Raises
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


@contextmanager
def room_on_disk(num_bytes: int, folder: Path) -> Generator[int]:
    """The descriptor of a file without a name in `folder`; its bytes are its own and read as 0.

    0 bytes: -1, and no file. Raises `OSError` where there is no room.
    """
    if not num_bytes:
        yield -1
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as stream:
        os.posix_fallocate(stream.fileno(), 0, num_bytes)
        yield stream.fileno()


def left_behind(folder: Path, pattern: str) -> list[Path]:
    """What in `folder` has a name that `pattern` matches and was last changed a day ago.

    Empty for a folder that cannot be read.
    """
    found: list[Path] = []
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if re.fullmatch(pattern, path.name) and _age_s(path) > LEFT_BEHIND_S:
                    found.append(path)
    return found


def _age_s(path: Path) -> float:
    return time.time() - path.lstat().st_mtime


def _clear_leftovers(path: Path) -> None:
    for partial in left_behind(path.parent, rf"\.{re.escape(path.name)}-[0-9a-f]{{8}}"):
        with suppress(OSError):
            partial.unlink()
