"""Text a user hands in: arguments, files, standard input.

All of it becomes Unicode text, or a `DataError` that says where it is not UTF-8.
"""

import os
import stat
import sys
from pathlib import Path

from kvq.errors import DataError
from kvq.formats import format_bytes


def read_text(path: str) -> str:
    """The whole file as text; `-` is standard input."""
    if path == "-":
        return read_standard_input()
    try:
        return decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_regular(path: Path, most_bytes: int, *, through_links: bool = True) -> bytes:
    """The bytes of a file that may be a stranger's; nobody waits for a pipe to be written.

    Raises `OSError`, also for a symbolic link if none is followed, and `DataError` for what is no
    regular file or has more than `most_bytes`.
    """
    wanted = ["O_NONBLOCK", "O_BINARY"] + ["O_NOFOLLOW"] * (not through_links)
    flags = os.O_RDONLY
    for name in wanted:
        flags |= getattr(os, name, 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataError(f"{path} is no regular file, and is not read")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise DataError(f"{path} is larger than {format_bytes(most_bytes)}, and is not read")
    return content


def read_standard_input() -> str:
    """All of standard input as text."""
    if sys.stdin is None or sys.stdin.closed:
        raise DataError("standard input is closed; pipe text in, or name a file")
    return decode(sys.stdin.buffer.read(), "standard input")


def piped_input() -> str:
    """What was piped or redirected into this command, or nothing at a terminal."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    return read_standard_input()


def check_argument(text: str) -> str:
    """`text` unchanged if it is valid Unicode; the shell can pass bytes that are not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the prompt is not valid UTF-8 at character {error.start}; pass it in UTF-8"
        ) from None
    return text


def decode(content: bytes, origin: str) -> str:
    """UTF-8 text of `content`; a leading byte order mark is dropped."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin} is not valid UTF-8 at byte {error.start} (0x{content[error.start]:02x}); "
            "convert it to UTF-8"
        ) from None
