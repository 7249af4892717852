"""Controls the process that renders one chat template.

The template is code by whoever made the model. Its limits bound what it may take, and a template
that takes more ends only its own process. jinja2 is imported in that process alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Timer
from typing import Any
from weakref import finalize

from kvq.errors import DataError, ModelError
from kvq.limited_process import OUT_OF_MEMORY, command, ran_out_of_time, read_value, write_value

_CHILD = "kvq_models.template_child"
_MOST_SOURCE_BYTES = 1 << 20
# Limits of compiling and of each rendering. A conversation that fills a context of a million tokens
# needs far less.
_SECONDS = 3
_MEMORY_BYTES = 512 << 20
_ANSWER_BYTES = 64 << 20
# Ends a process that has no time limit (Windows), or that a busy machine holds up.
_PATIENCE_S = 5 if sys.platform == "win32" else 60
_COMPILING, _RENDERING = "does not compile", "refuses these messages"


class LimitError(ModelError):
    """Says that a template took more than it may."""


class TemplateProcess:
    """Runs a process that compiles `source` and renders it on request, one rendering at a time.

    It starts when it is first needed or by `begin`, and again after it has ended. It ends with this
    object, and with the program, however that ends.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: finalize[..., TemplateProcess] | None = None
        self._variables: frozenset[str] | None = None
        self._complaint: ModelError | None = None

    def begin(self) -> None:
        """Starts the process without waiting; it is ready after about a tenth of a second."""
        with self._lock:
            self._started()

    def variables(self) -> frozenset[str]:
        """Returns the names that the template looks up. Raises ModelError for a damaged one."""
        with self._lock:
            if self._variables is None:
                self._compiled()
            return self._variables or frozenset()

    def render(self, context: Mapping[str, Any]) -> str:
        """Returns the text. Raises ModelError where the template refuses, and LimitError."""
        with self._lock:
            process = self._compiled()
            return self._exchange(process, context, _RENDERING)["text"]

    def _compiled(self) -> subprocess.Popen[bytes]:
        """Returns the process after it has compiled the template."""
        if self._complaint is not None:
            raise self._complaint
        process = self._process
        if process is not None and process.poll() is None and self._variables is not None:
            return process
        self._variables = None
        process = self._started()
        try:
            _check_source(self._source)
            answer = self._exchange(process, self._source, _COMPILING)
        except ModelError as error:
            self._complaint = error
            raise
        self._variables = frozenset(answer["variables"])
        return process

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        limits = map(str, (_SECONDS, _MEMORY_BYTES, _ANSWER_BYTES))
        try:
            process = subprocess.Popen(  # noqa: S603  our own interpreter and script
                command(_CHILD, *limits, bare=True),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise ModelError(
                f"the process that renders chat templates cannot be started ({error}); end other "
                "programs, or raise the limit of processes"
            ) from error
        self._process, self._end = process, finalize(self, _end, process)
        return process

    def _exchange(self, process: subprocess.Popen[bytes], request: Any, doing: str) -> Any:
        """Sends a request and returns its answer; any failure ends the process."""
        impatience = Timer(_PATIENCE_S, process.kill)
        impatience.daemon = True
        impatience.start()
        answer = None
        try:
            with suppress(OSError):
                _send(process, request)
                assert process.stdout is not None
                answer = read_value(process.stdout, _ANSWER_BYTES)
        except ValueError as error:
            raise LimitError(f"the model's chat template {doing}: it makes {error}") from error
        finally:
            late = impatience.finished.is_set()
            impatience.cancel()
            if answer is None:
                self._stop()
        if answer is None:
            raise LimitError(f"the model's chat template {doing}: {_reason(process, late=late)}")
        if "complaint" in answer:
            raise ModelError(f"the model's chat template {doing}: {answer['complaint']}")
        return answer

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()
            self._end = None


def _check_source(source: str) -> None:
    if len(source.encode("utf-8", "surrogatepass")) > _MOST_SOURCE_BYTES:
        raise ModelError(
            f"the model's chat template has {len(source)} characters; at most 1 MiB is possible"
        )


def _send(process: subprocess.Popen[bytes], request: Any) -> None:
    assert process.stdin is not None
    try:
        write_value(process.stdin, request)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"messages and variables are values of JSON: {error}") from error


def _reason(process: subprocess.Popen[bytes], *, late: bool) -> str:
    """Returns why a process ended without an answer."""
    status = process.returncode
    if late or ran_out_of_time(status):
        return f"it takes more than {_SECONDS} s"
    if status == OUT_OF_MEMORY:
        return f"it needs more than {_MEMORY_BYTES >> 20} MiB"
    return f"it ended the process that renders it (exit status {status})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and closes its pipes."""
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    process.wait()
