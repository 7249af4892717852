"""JSON-RPC frames of the Language Server Protocol: bytes in, messages out. Knows no method."""

import json
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

MOST_BYTES = 64 << 20

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
NOT_INITIALIZED = -32002
CANCELLED = -32800


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
