"""A server's log: rotating files that only their owner may read, without users' texts.

An error is logged with its class and its place. Its text may quote a prompt, so it is logged only
with `debug`.
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
from kvq_apps.terminal import output

FILE_BYTES = 1 << 20
OLD_FILES = 3
# Other packages may log anything, so they are left out.
_OURS = ("kvq", "kvq_apps", "kvq_runtime", "kvq_models", "uvicorn")


def log_path(name: str) -> Path:
    """Returns the path of the log of the server called `name`."""
    return state_folder() / f"serve-{name}.log"


@contextmanager
def logged(path: Path, *, debug: bool = False) -> Generator[None]:
    """Writes what our packages log from INFO on also to `path`, while inside.

    The terminal shows the same as before, and one note if the file cannot be written.
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
    level, handler_levels = root.level, [(existing, existing.level) for existing in root.handlers]
    for existing, handler_level in handler_levels:
        existing.setLevel(max(handler_level, level))
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO))
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        root.setLevel(level)
        for existing, handler_level in handler_levels:
            existing.setLevel(handler_level)


class _PrivateFile(RotatingFileHandler):
    """Writes a rotating file of mode 0600 and reports its first failure only."""

    def __init__(self, path: Path) -> None:
        self._has_failed = False
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        handle = os.open(self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        # Without a buffer, what a full disk refuses is dropped at once, and closing cannot fail.
        stream = os.fdopen(handle, "ab", buffering=0)
        return TextIOWrapper(
            cast(Any, stream), encoding="utf-8", errors="backslashreplace", write_through=True
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Notes the first error, so that a full disk does not fill the terminal."""
        if not self._has_failed:
            self._has_failed = True
            output.print_note(f"warning: {self.baseFilename} cannot be written")


class _Formatter(logging.Formatter):
    def __init__(self, *, with_errors: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s")
        self._with_errors = with_errors

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, with an error's place; other formatters must not reuse its text."""
        record_copy = copy(record)
        record_copy.exc_text = None
        return super().format(record_copy)

    def formatException(  # noqa: N802  logging's name
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        if self._with_errors or ei[0] is None:
            return super().formatException(ei)
        frames = "".join(traceback.format_tb(ei[2]))
        return f"{frames}{ei[0].__name__} (its text is in the log with --debug)"
