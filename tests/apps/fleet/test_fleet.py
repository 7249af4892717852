"""A fleet on a real Ray: as one server from outside, whatever happens to its replicas.

The tests are in the order of a fleet's life: the last one ends it.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from command_line import answer, kvq
from ray_fleet import PATIENCE_S, Fleet
from serving import CHAT, COMPLETIONS, GREEDY, ask, process, request_bytes, wait_until

pytestmark = pytest.mark.slow


async def answered(fleet: Fleet, body: dict[str, Any], started: list[int] | None = None) -> bytes:
    """All that comes of one request; its place is in `started` once the first piece is there."""
    host, _, port = fleet.address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request_bytes("POST", COMPLETIONS, body))
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if started is not None:
            started.append(1)
        return head + await reader.read()
    finally:
        writer.close()


def calls(fleet: Fleet) -> list[int]:
    """How many requests each replica has answered, by Ray's own logs."""
    logs = Path(fleet.home["RAY_TMPDIR"]).glob("ray/session_*/logs/serve/replica_kvq_replica_*.log")
    return [log.read_text().count("CALL answer") for log in logs]


def test_a_fleet_answers_as_a_server_does(fleet: Fleet) -> None:
    assert fleet.facts["sessions"] == 8
    words = ("run", "-m", "nano", "def f(", "--json", "-n", "8", "--temp", "0")
    text = answer(kvq(*words, home=fleet.home))["text"]
    client = openai.OpenAI(base_url=f"{fleet.address}/v1", api_key="none", max_retries=0)
    request = {"model": "nano", "prompt": "def f(", "max_tokens": 8, "temperature": 0}
    assert client.completions.create(**request).choices[0].text == text
    # However busy the machine is, a second's answer comes in pieces.
    long = request | {"max_tokens": 800, "stream": True, "extra_body": {"ignore_eos": True}}
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**long)]
    assert len(pieces) > 5
    assert "".join(pieces).startswith(text)
    assert ask(fleet, "/health").json == {"status": "ok"}
    assert ask(fleet, "/health").headers["x-kvq-protocol"] == "1"
    refused = ask(fleet, COMPLETIONS, {"prompt": "a", "temperature": "hot"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "temperature")
    for path in ("/nothing", "/-/routes", "/-/healthz"):
        assert ask(fleet, path).status == 404
        assert ask(fleet, path).json["error"]["type"] == "not_found_error"


def test_a_chat_stays_where_its_cache_is(fleet: Fleet) -> None:
    chats = [
        [{"role": "user", "content": f"Story number {number}. " + "It was a dark night. " * 8}]
        for number in range(6)
    ]
    shares: list[float] = []
    for turn in range(4):
        for messages in chats:
            reply = ask(fleet, CHAT, {"messages": messages, "max_tokens": 4, **GREEDY})
            usage = reply.json["usage"]
            if turn:
                shares.append(reply.cached_tokens / usage["prompt_tokens"])
            text = reply.json["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go."}]
    assert min(shares) > 0.8
    assert min(calls(fleet)) >= 8


async def test_more_than_a_fleet_can_hold_is_told_to_wait(fleet: Fleet) -> None:
    body = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True}
    async with asyncio.timeout(PATIENCE_S):
        replies = await asyncio.gather(*(answered(fleet, body) for _ in range(90)))
    heads = [reply.partition(b"\r\n\r\n")[0].lower() for reply in replies]
    statuses = [int(head.split()[1]) for head in heads]
    assert {*statuses} == {200, 429}
    # What fits is answered: 4 sessions and 24 that wait, twice.
    assert statuses.count(200) >= 50
    assert all(b"retry-after: " in head for head in heads if b" 429 " in head)
    assert all(b"queue_full" in reply for reply in replies if b" 429 " in reply[:20])


async def test_a_replica_that_is_killed_costs_one_clear_error_each(fleet: Fleet) -> None:
    before = await asyncio.to_thread(fleet.replicas)
    assert len(before) == 2
    started: list[int] = []
    body = {"prompt": "def f(", "max_tokens": 300, "stream": True, "ignore_eos": True, "seed": 1}
    async with asyncio.timeout(PATIENCE_S):
        pending = [
            asyncio.create_task(answered(fleet, body | {"prompt": f"def f{number}("}, started))
            for number in range(50)
        ]
        # A replica has four at work, so that each has one that began.
        while len(started) < 5:
            await asyncio.sleep(0.01)
        os.kill(min(before), signal.SIGKILL)
        replies = await asyncio.gather(*pending)
    whole = [reply for reply in replies if b"data: [DONE]" in reply]
    broken = [reply for reply in replies if reply.count(b'"code": "replica_lost"') == 1]
    # What was not begun went to the other replica, as far as that has room.
    refused = [reply for reply in replies if b" 429 " in reply[:20] and b"queue_full" in reply]
    assert len(whole) + len(broken) + len(refused) == 50
    assert not any(b'{"error":' in reply for reply in whole)
    assert len(whole) >= 4
    assert 0 < len(broken) <= 8
    wait_until(lambda: len(fleet.replicas()) == 2 and fleet.replicas() != before)
    assert min(before) not in fleet.replicas()
    assert ask(fleet, "/health").status == 200


def test_what_leaves_saves_its_sessions_for_others(fleet: Fleet) -> None:
    prompt = "def total(values):\n" + "    count = count + 1\n" * 20
    body = {"prompt": prompt, "max_tokens": 8, **GREEDY}
    first = ask(fleet, COMPLETIONS, body).json["usage"]
    code, complaint = fleet.end()
    assert (code, complaint.count("Traceback")) == (0, 0)
    assert fleet.replicas() == set()
    with process("nano", fleet.home, "--sessions-folder", str(fleet.folder)) as server:
        again = ask(server, COMPLETIONS, body | {"prompt": prompt + "    return"})
    assert again.cached_tokens >= first["prompt_tokens"] - 2
