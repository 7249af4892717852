"""How a file changes on disk: whole, or not at all."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO


@contextmanager
def replace_file(path: Path, *, private: bool = True) -> Generator[BinaryIO]:
    """A new file to write, which takes the place of `path` when the block ends.

    What was at `path` stays until then, and for good if the block raises. Only the owner can read
    a `private` file. Raises `OSError`.
    """
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
