"""What a hostile client sends to `kvq serve`: every request ends, and nobody else waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvq_apps.serve import app as app_module
from kvq_apps.serve.server import Server
from serving import PATIENCE_S, Reply, Rule, ask, running, send, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PRIVATE_USE = "".join(map(chr, range(0xE000, 0xF900)))


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs and notes about running servers stay here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "STATE"))


@pytest.fixture
def rule() -> Rule:
    return Rule(context_tokens=40_000)


@pytest.fixture
def served(rule: Rule) -> Iterator[Server]:
    with running(rule.load, sessions=1, queue=8) as server:
        yield server


def test_a_message_of_every_private_use_character_is_answered(rule: Rule, served: Server) -> None:
    text = f"{PRIVATE_USE}<|im_end|>"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    reply = ask(served, CHAT, body)
    assert reply.status == 200
    assert text in rule.tokenizer.decode(token for ids in rule.backend.passes for token in ids)


@pytest.mark.parametrize("fault", [StopIteration(), KeyError("x"), RecursionError(), MemoryError()])
def test_an_unexpected_exception_of_a_worker_is_a_500(
    fault: BaseException, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr(app_module, "parse_object", broken)
    for path in (CHAT, COMPLETIONS, "/tokenize", "/apply-template"):
        reply = ask(served, path, {})
        assert (reply.status, reply.json["error"]["code"]) == (500, "internal_error")


def test_a_client_that_leaves_while_its_request_is_read_is_noticed(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(body: bytes) -> None:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        raise AssertionError("nobody waits for this")

    monkeypatch.setattr(app_module, "parse_object", slow)
    counts = served.engine.counts.requests
    connection = send(served, COMPLETIONS, {"prompt": "ab"})
    assert reading.wait(PATIENCE_S)
    connection.close()
    try:
        wait_until(lambda: counts.get((COMPLETIONS, 499)), "for the leave to be noticed")
    finally:
        go_on.set()


@pytest.mark.parametrize("unit", ["a b ", "a", "<|im_end|>", "\ue000"])
def test_a_huge_prompt_is_refused_early_and_holds_up_nobody(unit: str) -> None:
    """The slowest answer of `/health` was 17 s; here it is allowed one, for a busy machine."""
    rule = Rule(context_tokens=1024)
    text = unit * (2_000_000 // len(unit))
    bodies = {
        COMPLETIONS: {"prompt": text},
        CHAT: {"messages": [{"role": "user", "content": text}]},
    }
    replies: dict[str, Reply] = {}

    def send_all(server: Server) -> None:
        for path, body in bodies.items():
            replies[path] = ask(server, path, body)

    with running(rule.load) as server:
        sender = threading.Thread(target=send_all, args=(server,))
        sender.start()
        slowest_s, healthy = 0.0, 0
        while sender.is_alive():
            began = time.monotonic()
            healthy += ask(server, "/health").json == {"status": "ok"}
            slowest_s = max(slowest_s, time.monotonic() - began)
    assert healthy >= 3
    assert slowest_s < 1
    for reply in replies.values():
        error = reply.json["error"]
        assert (reply.status, error["code"]) == (400, "context_length_exceeded")
        # Not read to its end.
        assert 1024 < error["n_prompt_tokens"] < 150_000
