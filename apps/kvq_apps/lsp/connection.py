"""One client over JSON-RPC: its messages to a handler, our answers and questions to it.

Knows frames of bytes, what a request, an answer and a notification are, and no method but `exit`.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

from kvq.json_values import is_object
from kvq_apps.flags import told

MOST_BYTES = 64 << 20

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
NOT_INITIALIZED = -32002
CANCELLED = -32800

# What a handler returns that answers a request later.
LATER = object()

Handler = Callable[[str, dict[str, Any], Any], Any]


class RpcError(Exception):
    """What a request is answered with instead of a result."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_frames(
    stream: BinaryIO, log: Callable[[str], None]
) -> Iterator[dict[str, Any] | RpcError]:
    """Each message of `stream` until it ends; an `RpcError` for a frame that holds none.

    Headers may come in any case and with others among them; lines that are no header are skipped.
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
    """What the next header says its body has; None at the end of the stream."""
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


def framed(message: dict[str, Any]) -> bytes:
    """One message as it stands in a stream."""
    body = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False).encode(
        "utf-8", "backslashreplace"
    )
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


class FrameWriter:
    """Whole frames to one stream, from any thread, in order.

    Nobody waits for a reader that is slow, and one that has gone is no error.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = Thread(target=self._write, name="kvq-lsp-writer", daemon=True)
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Queues one message."""
        self._waiting.put(framed(message))

    def close(self, within_s: float = 2.0) -> None:
        """Waits until all is written, but not for a reader that does not read."""
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
        """Gives each message to `handle`; whether the client said `exit` before its input ended.

        `handle` gets the method, the parameters and the request's id, None for a notification.
        It returns the result or `LATER`; an `RpcError` becomes the answer, and an error of
        parameters that make no sense, too.
        """
        for message in read_frames(self._source, self._log):
            if isinstance(message, RpcError):
                self.answer(None, error=message)
            elif message.get("method") == "exit":
                return True
            else:
                self._take(message, handle)
        return False

    def _take(self, message: dict[str, Any], handle: Handler) -> None:
        method, params, number = message.get("method"), message.get("params"), message.get("id")
        if not isinstance(method, str):
            if "result" not in message and "error" not in message:
                self.answer(None, error=RpcError(INVALID_REQUEST, "the message has no method"))
            elif (answered := self._calls.pop(str(number), None)) is not None:
                answered(message.get("result"))
            return
        try:
            result = handle(method, params if is_object(params) else {}, number)
        except RpcError as error:
            if number is not None:
                self.answer(number, error=error)
            else:
                self._log(f"{method}: {told(error)}")
        except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            self._log(f"{method}: {type(error).__name__}: {told(error)}")
            if number is not None:
                self.answer(number, error=RpcError(INVALID_PARAMS, f"{method}: {error!r}"))
        else:
            if number is not None and result is not LATER:
                self.answer(number, result=result)

    def answer(self, number: Any, *, result: Any = None, error: RpcError | None = None) -> None:
        """Answers the request of that id."""
        if error is None:
            self._writer.send({"id": number, "result": result})
        else:
            self._writer.send({"id": number, "error": {"code": error.code, "message": str(error)}})

    def call(self, method: str, params: dict[str, Any], then: Callable[[Any], None]) -> None:
        """A request of ours; `then` gets its result."""
        number = f"kvq-{self.number()}"
        self._calls[number] = then
        self._writer.send({"id": number, "method": method, "params": params})

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """A message that nobody answers."""
        self._writer.send({"method": method, "params": params})

    def number(self) -> int:
        """One that this connection has not used yet."""
        return next(self._numbers)

    def close(self) -> None:
        """Waits until all is written, but not for a client that does not read."""
        self._writer.close()
