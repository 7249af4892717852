"""The gateway of a fleet: reads a request, lets a replica answer it, passes the answer on.

It knows HTTP and the function `forward`, but not Ray. If a replica is lost before its answer
begins, another one answers. A stream that has begun ends with an event that says so.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvq_apps.fleet.prefixes import Chain, chains_of
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.guard import Guard
from kvq_apps.serve.http_app import error_response, read_body
from kvq_apps.serve.protocol import own_headers
from kvq_apps.serve.workers import gone

# The code of an error after which another replica can answer the request.
LOST = "replica_lost"
# A request is sent so many times if replicas are lost before their answer begins.
_TRIES = 3
# The paths that Ray's proxy answers itself: its routes and its health.
_RAY_PATHS = "/-/"
# The parts of a request that a replica gets.
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardedRequest:
    """Holds a request for a replica, and the digests of its text."""

    scope: dict[str, Any]
    body: bytes
    chains: tuple[Chain, ...]


# Yields the ASGI messages of a replica's answer, as many at once as there are. Raises
# `RequestError`, with the code `LOST` where the replica is lost.
Forward = Callable[[ForwardedRequest], AsyncGenerator[Sequence[Message]]]


def lost_replica_error() -> RequestError:
    """Returns the error for a request whose replica is lost."""
    return RequestError(
        "the replica that answered is lost, and is being replaced; ask again",
        status=503,
        code=LOST,
        retry_s=1,
    )


def gateway(forward: Forward, config: ServeConfig) -> Starlette:
    """Returns the ASGI application that answers with `forward`."""
    return Starlette(
        routes=[Mount("/", app=_GatewayApp(forward, config))],
        middleware=[Middleware(Guard, config=config, refuse=error_response)],
    )


def proxy_middlewares() -> list[Middleware]:
    """Returns the middleware of Ray's proxies, which hides Ray's own routes."""
    return [Middleware(_HiddenRoutes)]


class _HiddenRoutes:
    """Answers 404 on the routes of Ray's proxy, which come before the gateway and its guard."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_RAY_PATHS):
            error = RequestError("there is no such path here", status=404)
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _GatewayApp:
    def __init__(self, forward: Forward, config: ServeConfig) -> None:
        self._forward = forward
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _ForwardedAnswer(send)
        try:
            body = await read_body(Request(scope, receive), self._config)
            owner = Headers(scope=scope).get("authorization", "") if self._config.api_key else ""
            request = ForwardedRequest(
                scope={name: scope[name] for name in _SCOPE if name in scope},
                body=body,
                chains=await asyncio.to_thread(chains_of, body, owner) if body else (),
            )
            passing = asyncio.create_task(self._pass_on(request, answer))
            leaving = asyncio.create_task(gone(receive))
            try:
                await asyncio.wait((passing, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                passing.cancel()
            if passing.done():
                passing.result()
        except ClientDisconnect:
            return
        except RequestError as error:
            if answer.begun:
                await answer.break_off(error)
            else:
                await error_response(error)(scope, receive, send)

    async def _pass_on(self, request: ForwardedRequest, answer: "_ForwardedAnswer") -> None:
        for tried in range(1, _TRIES + 1):
            try:
                async for messages in self._forward(request):
                    for message in messages:
                        await answer.send(message)
                if not answer.ended:
                    raise lost_replica_error()
            except RequestError as error:
                if error.code != LOST or answer.begun or tried == _TRIES:
                    raise
            else:
                return


class _ForwardedAnswer:
    """Sends an answer to the client; its head waits for the first piece of its body."""

    def __init__(self, send: Send) -> None:
        self.begun = self.ended = False
        self._send = send
        self._head: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            version_headers = [
                (name.lower().encode(), value.encode()) for name, value in own_headers()
            ]
            self._head = {**message, "headers": [*message.get("headers", ()), *version_headers]}
            return
        if not self.begun:
            assert self._head is not None
            self.begun = True
            await self._send(self._head)
        self.ended = not message.get("more_body", False)
        await self._send(message)

    async def break_off(self, error: RequestError) -> None:
        """Ends a stream that has begun with an event that says why."""
        if not self.ended:
            body = f"data: {json.dumps(error_body(error))}\n\n".encode()
            await self.send({"type": "http.response.body", "body": body})
