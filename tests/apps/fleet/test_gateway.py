"""The door of a fleet without Ray: what passes, what is tried again, what breaks off."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from kvq_apps.fleet.gateway import ForwardedRequest, gateway, lost_replica_error, proxy_middlewares
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.hosted_app import ask, replies

HEAD: Message = {
    "type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/x")],
}  # fmt: skip


def piece(text: str, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Fleet:
    """Replicas that say what they are told: for each try messages, or an error to raise."""

    def __init__(self, *tries: Sequence[Message | Exception]) -> None:
        self.tries = list(tries)
        self.requests: list[ForwardedRequest] = []
        self.left = 0

    async def forward(self, request: ForwardedRequest) -> AsyncGenerator[Sequence[Message]]:
        self.requests.append(request)
        try:
            for message in self.tries.pop(0):
                if isinstance(message, Exception):
                    raise message
                yield [message]
            await asyncio.sleep(0)
        finally:
            self.left += 1


async def answered(
    fleet: Fleet,
    body: bytes = b"{}",
    headers: dict[str, str] | None = None,
    *,
    leaves: bool = False,
    **settings: Any,
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of what the fleet's door answers; `leaves`: nobody waits for it."""
    said: list[Message] = []
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        if leaves:
            return {"type": "http.disconnect"}
        return await asyncio.Future[Message]()

    async def send(message: Any) -> None:
        said.append(message)

    rows = {"host": "127.0.0.1", "content-type": "application/json"} | (headers or {})
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"a=1",
        "http_version": "1.1", "scheme": "http", "root_path": "", "app": "not passed on",
        "headers": [(name.encode(), value.encode()) for name, value in rows.items()],
    }  # fmt: skip
    await gateway(fleet.forward, ServeConfig(**settings))(scope, receive, send)
    if not said:
        return 0, {}, ""
    head = {name.decode(): value.decode() for name, value in said[0]["headers"]}
    assert said[-1].get("more_body", False) is False
    return said[0]["status"], head, b"".join(part.get("body", b"") for part in said).decode()


async def test_a_request_reaches_a_replica_and_its_answer_the_client() -> None:
    fleet = Fleet([HEAD, piece("a", more=True), piece("b")])
    body = json.dumps({"prompt": "x" * 128}).encode()
    status, head, text = await answered(fleet, body)
    assert (status, text, head["content-type"], head["x-kvq-protocol"]) == (
        200,
        "ab",
        "text/x",
        "1",
    )
    (forwarded,) = fleet.requests
    assert (forwarded.body, [len(chain) for chain in forwarded.chains]) == (body, [2])
    assert (forwarded.scope["path"], forwarded.scope["query_string"]) == ("/v1/completions", b"a=1")
    assert "app" not in forwarded.scope


async def test_a_replica_lost_before_it_spoke_is_not_seen() -> None:
    fleet = Fleet([lost_replica_error()], [HEAD, lost_replica_error()], [HEAD, piece("whole")])
    assert (await answered(fleet))[::2] == (200, "whole")
    assert (len(fleet.requests), fleet.left) == (3, 3)


async def test_replicas_lost_again_and_again_are_one_error() -> None:
    fleet = Fleet(*[[lost_replica_error()]] * 9)
    status, head, text = await answered(fleet)
    assert (status, head["retry-after"], len(fleet.requests)) == (503, "1", 3)
    assert json.loads(text)["error"]["code"] == "replica_lost"


async def test_a_stream_that_breaks_off_says_so_in_its_last_event() -> None:
    for end in ([lost_replica_error()], []):  # it is lost, or ends without an end
        fleet = Fleet([HEAD, piece("data: 1\n\n", more=True), *end])
        status, _, text = await answered(fleet)
        first, last, rest = text.split("\n\n")
        assert (status, first, rest, len(fleet.requests)) == (200, "data: 1", "", 1)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "replica_lost"


async def test_a_full_fleet_is_not_asked_twice() -> None:
    full = RequestError("full", status=429, code="queue_full", retry_s=2)
    fleet = Fleet([full], [HEAD, piece("")])
    status, head, _ = await answered(fleet)
    assert (status, head["retry-after"], len(fleet.requests)) == (429, "2", 1)


async def test_what_may_not_pass_reaches_no_replica() -> None:
    fleet = Fleet()
    assert (await answered(fleet, headers={"host": "evil.example"}))[0] == 403
    assert (await answered(fleet, api_key="k"))[0] == 401
    assert (await answered(fleet, b"x" * 100, body_bytes=99))[0] == 413
    assert fleet.requests == []


async def test_a_client_that_leaves_ends_its_answer() -> None:
    fleet = Fleet([HEAD, piece("a", more=True)] * 2)

    async def forever(request: ForwardedRequest) -> AsyncGenerator[Sequence[Message]]:
        try:
            yield [HEAD]
            await asyncio.Future()
        finally:
            fleet.left += 1

    fleet.forward = forever  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        assert (await answered(fleet, leaves=True))[0] == 0
        await asyncio.sleep(0)
        while not fleet.left:
            await asyncio.sleep(0)


async def test_no_route_of_rays_own_proxy_is_answered() -> None:
    (middleware,) = proxy_middlewares()
    proxy = middleware.cls(PlainTextResponse("passed on"))
    for path in ("/-/routes", "/-/healthz", "/-/anything"):
        status, body = await ask(proxy, path, b"")
        assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
    assert await ask(proxy, "/health", b"") == (200, b"passed on")


async def test_who_closes_an_answer_ends_it() -> None:
    ended: list[Message] = []

    async def endless(_: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(HEAD)
            await send(piece("a", more=True))
            ended.append(await receive())
            await receive()
        finally:
            ended.append({"type": "end"})

    answer = replies(endless, {"type": "http"}, b"{}")
    assert await anext(answer) == [HEAD, piece("a", more=True)]
    await answer.aclose()
    assert ended == [{"type": "http.request", "body": b"{}", "more_body": False}, {"type": "end"}]


async def test_an_error_is_raised_only_where_no_answer_tells_of_it() -> None:
    async def fails(scope: Scope, _: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send(HEAD)
            await send(piece("said"))
        raise ValueError("a fault")

    assert await ask(fails, "/late", b"") == (200, b"said")
    with pytest.raises(ValueError, match="a fault"):
        await ask(fails, "/early", b"")
