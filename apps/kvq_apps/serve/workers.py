"""Runs the slow parts of a request in threads, and gives back the memory that they leave."""

import asyncio
import ctypes
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from kvq.errors import KvqError
from kvq_apps.serve.errors import as_request_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

# glibc keeps freed memory for later. After texts this large these are hundreds of megabytes, spread
# over the arenas of all threads that have encoded one.
LARGE_BYTES = 1 << 19


async def in_worker(
    request: Request,
    function: Callable[..., T],
    *arguments: Any,
    executor: Executor | None = None,
) -> T:
    """Calls `function` in a thread, once the request's body is read, and returns its result.

    The thread is one of `executor`, or else of those that all requests share.

    Raises the `KvqError` that it raises, and a `RequestError` of status 500 for any other
    exception, which is logged. Raises `ClientDisconnect` as soon as the client leaves; the thread
    then ends by itself.
    """

    def outcome() -> T | Exception:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  one request's fault must not end the server
            return error

    work = asyncio.get_running_loop().run_in_executor(executor, outcome)
    disconnect = asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
    finally:
        disconnect.cancel()
    result = work.result()
    if isinstance(result, KvqError):
        raise result
    if isinstance(result, Exception):
        logger.error("a request failed", exc_info=result)
        raise as_request_error(result) from result
    return result


async def gone(receive: Receive) -> None:
    """Returns when the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def reclaim() -> None:
    """Gives freed memory back, which takes 5 to 50 ms; does nothing where libc is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
