"""Memory that large requests leave behind, given back to the system.

glibc keeps what a thread freed for later, and after texts of megabytes that is hundreds of
megabytes, spread over the arenas of all threads that ever encoded one.
"""

import asyncio
import ctypes
import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGE_BYTES = 1 << 19


class Reclaiming:
    """Passes on to `app`; once a request of `LARGE_BYTES` is answered, frees what it took."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            if num_bytes >= LARGE_BYTES:
                asyncio.get_running_loop().run_in_executor(None, reclaim)


def reclaim() -> None:
    """Gives freed memory back, 5 to 50 ms of work; does nothing where libc is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
