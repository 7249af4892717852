"""What a hostile client sends to `kvq serve`: every request ends, and nobody else waits for it."""

from __future__ import annotations

import string
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvq_apps.serve import http_app as app_module
from kvq_apps.serve.guard import owner_of
from kvq_apps.serve.server import Server
from kvq_runtime.serving.saving import SavedSessions, as_ids
from serving import CHAT, COMPLETIONS, PATIENCE_S, Reply, Rule, ask, running, send, wait_until

pytestmark = pytest.mark.usefixtures("own_state")
PRIVATE_USE = "".join(map(chr, range(0xE000, 0xF900)))


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
    rows = [ids for one_pass in rule.backend.passes for ids in one_pass]
    assert text in rule.tokenizer.decode(token for ids in rows for token in ids)


@pytest.mark.parametrize("fault", [StopIteration(), KeyError("x")])
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
    departure = f'path="{COMPLETIONS}",status="499"'.encode()
    connection = send(served, COMPLETIONS, {"prompt": "ab"})
    assert reading.wait(PATIENCE_S)
    connection.close()
    try:
        wait_until(lambda: departure in ask(served, "/metrics").body, "for the leave to be noticed")
    finally:
        go_on.set()


@pytest.mark.sampled
@pytest.mark.parametrize("unit", ["a b ", "a", "<|im_end|>", "\ue000"])
def test_a_huge_prompt_is_refused_early_and_holds_up_nobody(unit: str) -> None:
    """Allows the slowest answer of `/health` one second of this process's CPU."""
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
            began_s = time.process_time()
            healthy += ask(server, "/health").json == {"status": "ok"}
            slowest_s = max(slowest_s, time.process_time() - began_s)
    assert healthy >= 3
    assert slowest_s < 1
    for reply in replies.values():
        error = reply.json["error"]
        assert (reply.status, error["code"]) == (400, "context_length_exceeded")
        # Not read to its end.
        assert 1024 < error["n_prompt_tokens"] < 150_000


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("logit_bias", {"0" * 12 + "99999": 1}, "logit_bias"),
        ("logit_bias", {"0" * 12 + "9" * 5000: 1}, "logit_bias"),
        ("logit_bias", {"\ud800": 1}, "logit_bias"),
        ("max_tokens", int("9" * 4200), "max_tokens"),
    ],
    ids=("zeros", "digits", "surrogate", "whole"),
)
def test_numbers_that_are_none_are_refused_in_short(
    field: str, value: object, param: str, served: Server
) -> None:
    reply = ask(served, COMPLETIONS, {"prompt": "a", field: value})
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert len(reply.json["error"]["message"]) < 200


def test_ids_become_text_beside_the_event_loop(
    rule: Rule, served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def decode(*_: object, **__: object) -> str:
        threads.append(threading.current_thread().name)
        return "text"

    monkeypatch.setattr(rule.tokenizer, "decode", decode)
    talk = {"messages": [{"role": "user", "content": "a"}]}
    assert ask(served, "/detokenize", {"tokens": [70]}).json == {"content": "text"}
    assert ask(served, "/apply-template", talk).json == {"prompt": "text"}
    assert [name.partition("_")[0] for name in threads] == ["asyncio"] * 2
    many = ask(served, "/detokenize", {"tokens": [70] * ((1 << 18) + 1)})
    assert (many.status, many.json["error"]["param"]) == (400, "tokens")


def test_owners_are_told_apart_by_key_and_salt() -> None:
    first, second = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    names = [
        owner_of(headers, salt, keyed=True) for headers in (first, second) for salt in ("", "a")
    ]
    assert len({*names, ""}) == 5
    assert owner_of(first, "", keyed=True) == names[0]
    assert owner_of(first, "", keyed=False) == owner_of({}, "", keyed=True) == ""
    assert owner_of({}, "Bearer one", keyed=True) != names[0]


def test_saved_sessions_are_found_by_their_owner_only(rule: Rule, tmp_path: Path) -> None:
    tokens = as_ids([70] * 50)
    session = rule.session()
    session.prefill(tokens.tolist())
    saved = SavedSessions(tmp_path, "rule", 1 << 20)
    saved.save(session, tokens, None, "0123456789abcdef")
    saved.close()
    for sessions in (saved, SavedSessions(tmp_path, "rule", 1 << 20)):
        assert sessions.best(tokens)[1] == sessions.best(tokens, "fedcba9876543210")[1] == 0
        assert sessions.best(tokens, "0123456789abcdef")[1] == 50


def test_a_field_nobody_reads_is_named_once(
    served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "a", "max_tokens": 1, "user": "me", "tempreature": 0}
    for _ in range(2):
        assert ask(served, COMPLETIONS, body).status == 200
    assert caplog.text.count("'tempreature'") == 1
    assert "'user'" not in caplog.text


def test_penalties_reach_the_sampler(served: Server) -> None:
    """Has every letter in the prompt six times; the rule's letter leads by 8."""
    body = {"prompt": string.ascii_lowercase * 6, "max_tokens": 1, "temperature": 0}
    body |= {"repeat_last_n": 1000}
    letter = ask(served, COMPLETIONS, body).json["choices"][0]["text"]
    for penalties, same in (
        ({"presence_penalty": 2.0}, True),
        ({"frequency_penalty": 1.0}, True),
        ({"frequency_penalty": 2.0}, False),
        ({"frequency_penalty": 1.0, "presence_penalty": 2.0}, False),
    ):
        reply = ask(served, COMPLETIONS, body | penalties).json
        assert (reply["choices"][0]["text"] == letter) == same
    for name in ("presence_penalty", "frequency_penalty"):
        reply = ask(served, COMPLETIONS, {"prompt": "a", name: 2.5})
        assert (reply.status, reply.json["error"]["param"]) == (400, name)


def test_hostile_forms_end_soon_and_hold_up_nobody() -> None:
    """Answers or refuses each without a 500, and `/health` all the while."""
    pytest.importorskip("llguidance")
    nested: object = {}
    for _ in range(300):
        nested = {"type": "array", "items": nested}
    patterns = [{"type": "string", "pattern": f"a.{{{n}}}b{n}"} for n in range(60)]
    bodies = [
        {"json_schema": nested},
        {"json_schema": {"enum": [f"{n} values" for n in range(30_000)]}},
        {"json_schema": {"allOf": patterns}},
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"regex": "(a|aa)+" * 2000},
        {"regex": "(" * 50_000},
        {"grammar": "root ::= " + "(" * 50_000},
        {"grammar": "root ::= root root | root"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested}}] * 9},
    ]
    replies: list[Reply] = []
    with running(Rule(context_tokens=1024).load) as server:

        def send_all() -> None:
            for body in bodies:
                request = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **body}
                replies.append(ask(server, CHAT, request))

        sender = threading.Thread(target=send_all)
        sender.start()
        healthy = 0
        while sender.is_alive():
            healthy += ask(server, "/health").status == 200
            time.sleep(0.01)
        assert healthy >= 3
        ok = {"messages": [{"role": "user", "content": "a"}], "regex": "x{3}"}
        assert ask(server, CHAT, ok).json["choices"][0]["message"]["content"] == "xxx"
    assert [reply.status for reply in replies] == [400] * len(bodies)
    assert all(len(reply.json["error"]["message"]) < 1000 for reply in replies)
