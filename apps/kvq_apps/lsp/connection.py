"""One client over JSON-RPC: passes its messages to a handler, sends answers and requests.

Knows frames of bytes, and what a request, an answer and a notification are, but no method but
`exit`.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

from kvq.errors import reason_of
from kvq.json_values import is_object
from kvq_apps.settings.flags import format_error

MOST_BYTES = 64 << 20

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
NOT_INITIALIZED = -32002
CANCELLED = -32800

# A handler returns this when it will answer a request later.
LATER = object()

# A handler raises these for parameters that make no sense.
_PARAMETER_ERRORS = (
    LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError,
)  # fmt: skip

Handler = Callable[[str, dict[str, Any], Any], Any]


class RpcError(Exception):
    """Answers a request instead of a result."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_frames(
    stream: BinaryIO, log: Callable[[str], None]
) -> Iterator[dict[str, Any] | RpcError]:
    """Yields each message of `stream` until it ends; an `RpcError` for a frame without one.

    Headers may come in any case and order; lines that are no header are skipped.
    """
    while True:
        length = _length(stream, log)
        if length is None:
            return
        if length > MOST_BYTES:
            log(f"a message of {length} bytes is left out; {MOST_BYTES} are possible")
            _skip(stream, length)
            yield RpcError(INVALID_REQUEST, f"the message is longer than {MOST_BYTES} bytes")
            continue
        body = stream.read(length)
        if len(body) < length:
            return
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            yield RpcError(PARSE_ERROR, "the message is not JSON")
            continue
        if isinstance(message, dict):
            yield message
        else:
            yield RpcError(INVALID_REQUEST, "the message is not an object")


def _length(stream: BinaryIO, log: Callable[[str], None]) -> int | None:
    """Returns the body's length from the next header; None at the end of the stream."""
    length = None
    while True:
        line = stream.readline(4096)
        if not line:
            return None
        if not line.strip():
            if length is not None:
                return length
            continue
        name, colon, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            length = int(value)
        elif not colon:
            log("a line between messages is left out")


def _skip(stream: BinaryIO, length: int) -> None:
    while length > 0:
        part = stream.read(min(length, 1 << 20))
        if not part:
            return
        length -= len(part)


def frame(message: dict[str, Any]) -> bytes:
    """Encodes one message as a frame."""
    body = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False).encode(
        "utf-8", "backslashreplace"
    )
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


class FrameWriter:
    """Writes whole frames to one stream, from any thread, in order.

    Nobody waits for a slow reader, and a reader that has gone is no error.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = Thread(target=self._write, name="kvq-lsp-writer", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Queues one message."""
        self._waiting.put(frame(message))

    def close(self, within_s: float = 2.0) -> None:
        """Waits until all is written, but only `within_s` for a reader that does not read."""
        self._waiting.put(None)
        self._thread.join(within_s)

    def _write(self) -> None:
        while (frame := self._waiting.get()) is not None:
            try:
                rest = memoryview(frame)
                while rest:
                    rest = rest[self._stream.write(rest) :]
                self._stream.flush()
            except (OSError, ValueError):
                return


class Connection:
    """Reads `source` and writes to `sink`; `log` takes lines. Any thread may send."""

    def __init__(self, source: BinaryIO, sink: BinaryIO, log: Callable[[str], None]) -> None:
        self._source = source
        self._writer = FrameWriter(sink)
        self._log = log
        self._calls: dict[str, Callable[[Any], None]] = {}
        self._numbers = itertools.count()

    def serve(self, handle: Handler) -> bool:
        """Gives each message to `handle`; returns whether the client sent `exit` before its end.

        `handle` gets the method, the parameters and the request's id (None for a notification). It
        returns the result or `LATER`. An `RpcError`, and an error about parameters that make no
        sense, become the answer.
        """
        for message in read_frames(self._source, self._log):
            if isinstance(message, RpcError):
                self.answer(None, error=message)
            elif not isinstance(message.get("id"), int | str | None):
                # Such an id cannot be sent back, for example one that is nested too deeply.
                self.answer(None, error=RpcError(INVALID_REQUEST, "an id is a text or a number"))
            elif message.get("method") == "exit":
                return True
            else:
                self._dispatch(message, handle)
        return False

    def _dispatch(self, message: dict[str, Any], handle: Handler) -> None:
        method, params, number = message.get("method"), message.get("params"), message.get("id")
        if not isinstance(method, str):
            if "result" not in message and "error" not in message:
                self.answer(None, error=RpcError(INVALID_REQUEST, "the message has no method"))
            elif (callback := self._calls.pop(str(number), None)) is not None:
                callback(message.get("result"))
            return
        try:
            result = handle(method, params if is_object(params) else {}, number)
        except RpcError as error:
            if number is not None:
                self.answer(number, error=error)
            else:
                self._log(f"{method}: {format_error(error)}")
        except _PARAMETER_ERRORS as error:
            self._log(f"{method}: {type(error).__name__}: {format_error(error)}")
            if number is not None:
                self.answer(number, error=RpcError(INVALID_PARAMS, f"{method}: {reason_of(error)}"))
        else:
            if number is not None and result is not LATER:
                self.answer(number, result=result)

    def answer(self, number: Any, *, result: Any = None, error: RpcError | None = None) -> None:
        """Answers the request with this id."""
        if error is None:
            self._writer.send({"id": number, "result": result})
        else:
            self._writer.send({"id": number, "error": {"code": error.code, "message": str(error)}})

    def call(self, method: str, params: dict[str, Any], callback: Callable[[Any], None]) -> None:
        """Sends a request to the client; `callback` gets its result."""
        number = f"kvq-{self.next_number()}"
        self._calls[number] = callback
        self._writer.send({"id": number, "method": method, "params": params})

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Sends a message that nobody answers."""
        self._writer.send({"method": method, "params": params})

    def next_number(self) -> int:
        """Returns a number that this connection has not used yet."""
        return next(self._numbers)

    def close(self) -> None:
        """Waits until all is written, but not for a client that does not read."""
        self._writer.close()
