"""What is slow about a request, beside the event loop and under the eyes of its client."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from kvq.errors import KvqError
from kvq_apps.serve.errors import as_request_error

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_worker(
    request: Request,
    function: Callable[..., T],
    *arguments: Any,
    executor: Executor | None = None,
) -> T:
    """What `function` gives, called in a thread once the request's body is read.

    The thread is one of `executor`, None: of those that all requests share.

    Raises the `KvqError` it raises, and a `RequestError` of status 500, told to the log, for any
    other exception: a StopIteration would never reach an awaiter. Raises `ClientDisconnect` as
    soon as the client leaves; the thread then ends by itself.
    """

    def outcome() -> T | Exception:
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  one request's fault must not end the server
            return error

    work = asyncio.get_running_loop().run_in_executor(executor, outcome)
    leave = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((work, leave), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
    finally:
        leave.cancel()
    found = work.result()
    if isinstance(found, KvqError):
        raise found
    if isinstance(found, Exception):
        logger.error("a request failed", exc_info=found)
        raise as_request_error(found) from found
    return found


async def _gone(request: Request) -> None:
    """Returns when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
