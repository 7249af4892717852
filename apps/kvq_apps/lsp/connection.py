"""One client over JSON-RPC: its messages to a handler, our answers and questions to it.

Knows what a request, an answer and a notification are, and no method but `exit`.
"""

import itertools
from collections.abc import Callable
from typing import Any, BinaryIO

from kvq.json_values import is_object
from kvq_apps.flags import told
from kvq_apps.lsp.frames import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    FrameWriter,
    RpcError,
    read_frames,
)

# What a handler returns that answers a request later.
LATER = object()

Handler = Callable[[str, dict[str, Any], Any], Any]


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
