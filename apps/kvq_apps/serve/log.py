"""A running server's log: files that rotate, readable by their owner, without what users write.

Errors are logged as where they happened and their class, never with their text, which may quote
a prompt; `debug` keeps the text too.
"""

import logging
import os
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from copy import copy
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from kvq.settings import state_folder
from kvq_apps import output

FILE_BYTES = 1 << 20
OLD_FILES = 3
# Other packages may say anything.
_OURS = ("kvq", "kvq_apps", "kvq_runtime", "kvq_models", "uvicorn")


def log_path(name: str) -> Path:
    """Where the server called `name` logs."""
    return state_folder() / f"serve-{name}.log"


@contextmanager
def logged(path: Path, *, debug: bool = False) -> Generator[None]:
    """While inside, what our packages log from INFO on is also written to `path`.

    What reaches the terminal stays as it was. A file that cannot be written is one note there.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = _PrivateFile(path)
    except OSError as error:
        output.print_note(f"warning: there is no log: {path}: {error.strerror}")
        yield
        return
    handler.addFilter(lambda record: record.name.partition(".")[0] in _OURS)
    handler.setFormatter(_Formatter(with_errors=debug))
    root = logging.getLogger()
    level, others = root.level, [(other, other.level) for other in root.handlers]
    for other, own in others:
        other.setLevel(max(own, level))
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO))
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        root.setLevel(level)
        for other, own in others:
            other.setLevel(own)


class _PrivateFile(RotatingFileHandler):
    """A rotating file of mode 0600 whose trouble is said once."""

    def __init__(self, path: Path) -> None:
        self._in_trouble = False
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        handle = os.open(self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        # Unbuffered: what a full disk refuses is dropped at once, and closing cannot fail.
        stream = os.fdopen(handle, "ab", buffering=0)
        return TextIOWrapper(
            cast(Any, stream), encoding="utf-8", errors="backslashreplace", write_through=True
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """A full disk must not fill the terminal instead."""
        if not self._in_trouble:
            self._in_trouble = True
            output.print_note(f"warning: {self.baseFilename} cannot be written")


class _Formatter(logging.Formatter):
    def __init__(self, *, with_errors: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s")
        self._with_errors = with_errors

    def format(self, record: logging.LogRecord) -> str:
        """One line, and an error's place; shares no text with other formatters."""
        own = copy(record)
        own.exc_text = None
        return super().format(own)

    def formatException(  # noqa: N802  logging's name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        if self._with_errors or ei[0] is None:
            return super().formatException(ei)
        frames = "".join(traceback.format_tb(ei[2]))
        return f"{frames}{ei[0].__name__} (its text is in the log with --debug)"
