"""Reads a user's text from arguments, files and standard input.

Text that is not UTF-8 is a `DataError` that says where.
"""

import sys
import threading
from pathlib import Path

from kvq.errors import DataError, reason_of
from kvq_apps.terminal import output

_YES = ("y", "yes")


def read_text(path: str) -> str:
    """Returns a whole file as text; `-` is standard input."""
    if path == "-":
        return read_standard_input()
    try:
        return decode(Path(path).read_bytes(), path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from error


def read_standard_input() -> str:
    """Returns all of standard input as text."""
    if sys.stdin is None or sys.stdin.closed:
        raise DataError("standard input is closed; pipe text in, or name a file")
    return decode(sys.stdin.buffer.read(), "standard input")


def piped_input() -> str:
    """Returns the text that was piped or redirected into this command, empty at a terminal."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    return read_standard_input()


def agrees(question: str) -> bool:
    """Asks the person at the terminal; without a terminal the answer is no."""
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    output.print_note(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in _YES


def check_argument(text: str) -> str:
    """Returns `text` if it is valid Unicode; a shell can pass bytes that are not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the prompt is not valid UTF-8 at character {error.start}; pass it in UTF-8"
        ) from None
    return text


def decode(content: bytes, origin: str) -> str:
    """Returns the UTF-8 text of `content` without a leading byte order mark."""
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{origin} is not valid UTF-8 at byte {error.start} (0x{content[error.start]:02x}); "
            "convert it to UTF-8"
        ) from None
