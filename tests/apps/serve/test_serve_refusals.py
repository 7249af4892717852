"""What the server refuses: bad input, bodies without end, clients too many or unknown."""

import hashlib
import json
import logging
import re
import socket
import time
from base64 import b64encode
from dataclasses import replace
from typing import Any

import openai
import pytest

from kvq.errors import UsageError
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.page import page
from kvq_apps.serve.server import Server
from kvq_runtime.serving.pool import SessionPool
from serving import (
    CHAT,
    COMPLETIONS,
    Reply,
    Rule,
    ask,
    chat,
    client,
    connect,
    read_all,
    request_bytes,
    running,
    send,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("own_state")


# Bad input (SRV-3, SRV-10, SRV-17)

BAD = [
    (CHAT, b"{", 400, None),
    (CHAT, b"\xff\xfe", 400, None),
    (CHAT, b"[1]", 400, None),
    (CHAT, b'{"messages": NaN}', 400, None),
    (CHAT, b'{"a":' * 100_000, 400, None),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    (CHAT, chat("\ud800"), 400, "messages"),
    (CHAT, chat("hi", n=0), 400, "n"),
    (CHAT, chat("hi", n=99), 400, "n"),
    (CHAT, chat("hi", n=True), 400, "n"),
    (CHAT, chat("hi", stop=list("abcde" * 13)), 400, "stop"),
    (CHAT, chat("hi", stop=[3]), 400, "stop"),
    (CHAT, chat("hi", max_tokens=-2), 400, "max_tokens"),
    (CHAT, chat("hi", max_completion_tokens=1.5), 400, "max_completion_tokens"),
    (CHAT, chat("hi", temperature="hot"), 400, "temperature"),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}', 400, "temperature"),
    (CHAT, chat("hi", top_p=-0.1), 400, "top_p"),
    (CHAT, chat("hi", stream="yes"), 400, "stream"),
    (CHAT, chat("hi", logit_bias={"9999": 1}), 400, "logit_bias"),
    (CHAT, chat("hi", logit_bias=[1]), 400, "logit_bias"),
    (CHAT, chat("hi", logit_bias=[[1, 2], [3, True]]), 400, "logit_bias[1].bias"),
    (CHAT, chat("hi", logit_bias=[[{}, 2]]), 400, "logit_bias"),
    (CHAT, chat("hi", logit_bias=[["\ud800", 2]]), 400, "logit_bias"),
    (CHAT, chat("hi", top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat("hi", presence_penalty=2.5), 400, "presence_penalty"),
    (CHAT, chat("hi", x_kvq={"priority": "now"}), 400, "x_kvq.priority"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["x", True]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["x", 9999]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [["x", []]]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "n": 2, "best_of": 1}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "x", "suffix": "y", "echo": True}, 400, "echo"),
    (COMPLETIONS, {"prompt": [9999]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "echo": 1}, 400, "echo"),
    ("/infill", {"input_prefix": 3}, 400, "input_prefix"),
    ("/infill", {"input_extra": [{"text": 3}]}, 400, "input_extra[0].text"),
    ("/completion", {"prompt": "x", "grammar": "root"}, 400, "grammar"),
    ("/tokenize", {"content": 3}, 400, "content"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/nowhere", {}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_input_is_refused_by_name(
    path: str, body: Any, status: int, param: str | None, tiny: Server
) -> None:
    reply = ask(tiny, path, body)
    assert (reply.status, reply.json["error"]["param"]) == (status, param)
    assert reply.json["error"].keys() >= {"message", "type", "param", "code"}
    assert ask(tiny, "/health").status == 200


def test_other_methods_are_json_errors_too(tiny: Server) -> None:
    reply = ask(tiny, CHAT)
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_what_asks_for_nothing_special_is_accepted(tiny: Server) -> None:
    harmless = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "stop": None,
        "user": "me",
        "unknown": {"deep": [1]},
        "max_tokens": 1,
    }
    assert ask(tiny, CHAT, chat("hi", **harmless)).status == 200


@pytest.mark.parametrize(
    "body",
    [
        chat("hi", messages=[{"role": "r" * 10**7, "content": "hi"}]),
        {"prompt": "hi", "x_kvq": {"predict": "p" * 10**7}},
        {"prompt": "hi", "x_kvq": {"draft": "d" * 10**7}},
    ],
    ids=["role", "predict", "draft"],
)
def test_an_error_does_not_repeat_all_that_was_sent(body: Any, tiny: Server) -> None:
    reply = ask(tiny, CHAT if "messages" in body else COMPLETIONS, body)
    assert 400 <= reply.status < 500
    assert len(reply.json["error"]["message"]) < 1100


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_reads_why(chunked: bool, rule: Rule) -> None:
    """It writes all before it reads, as most do: closed on, it would see a reset."""
    body = b" " * (17 << 20)
    headers = {"Transfer-Encoding": "chunked", "Content-Length": "-"} if chunked else {}
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    with running(rule.load) as server, connect(server) as connection:
        connection.sendall(
            request_bytes("POST", CHAT, b"" if chunked else body, headers).removesuffix(body) + sent
        )
        reply = Reply(read_all(connection))
        assert (reply.status, reply.json["error"]["code"]) == (413, "request_too_large")


def test_bodies_are_bounded(rule: Rule) -> None:
    with running(rule.load, body_bytes=1000) as server:
        for headers in ({"Content-Length": "100000000"}, {"Content-Length": "1001"}):
            with connect(server) as connection:
                connection.sendall(request_bytes("POST", CHAT, {}, headers).removesuffix(b"{}"))
                assert Reply(read_all(connection)).status == 413
        chunk = b"400\r\n" + b" " * 0x400 + b"\r\n"
        streamed = {"Transfer-Encoding": "chunked", "Content-Length": "-"}
        with connect(server) as connection:
            connection.sendall(request_bytes("POST", CHAT, b"", streamed) + chunk * 2)
            assert Reply(read_all(connection)).json["error"]["code"] == "request_too_large"
        body = json.dumps({"prompt": "hi", "max_tokens": 3}).encode()
        parts = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in body) + b"0\r\n\r\n"
        with connect(server) as connection:
            connection.sendall(request_bytes("POST", COMPLETIONS, b"", streamed) + parts)
            reply = Reply(read_all(connection))
        assert reply.json["choices"][0]["text"] == rule.text("hi", 3)


def test_a_body_that_never_ends_is_given_up(rule: Rule) -> None:
    with running(rule.load, upload_s=0.05) as server, connect(server) as connection:
        connection.sendall(request_bytes("POST", CHAT, {}, {"Content-Length": "900"}))
        assert Reply(read_all(connection)).status == 408


def test_a_head_that_never_ends_is_given_up(rule: Rule) -> None:
    with running(rule.load, head_s=0.2) as server:
        for begun in (b"", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
            with connect(server) as connection:
                connection.sendall(begun)
                reply = Reply(read_all(connection))
                assert (reply.status, reply.json["error"]["code"]) == (408, "head_too_slow")
        # The second request of a connection, half of it sent with the first.
        first = request_bytes("GET", "/health", headers={"Connection": "keep-alive"})
        with connect(server) as connection:
            connection.sendall(first)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.sendall(first[:20])
            assert Reply(read_all(connection)).status == 408
        # An answer may take longer than a head.
        rule.backend.shut = True
        with send(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 3}) as connection:
            wait_until(lambda: rule.backend.arrivals == 1)
            time.sleep(0.4)
            rule.backend.open()
            reply = Reply(read_all(connection))
            assert reply.json["choices"][0]["text"] == rule.text("hi", 3)


_HEAD = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
_REFUSED, _PASSED = b"Content-Type: text/plain\r\n", b"Content-Type: application/json\r\n"
_PIPELINED = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([b"\x16\x03\x01\x02\x00\r\n\r\n"], [400]),
        ([b"GET / HTTP/1.1\r\n\r\n"], [400]),
        ([b"GET /\r\n\r\n"], [400]),
        ([_HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"], [400]),
        ([_HEAD + b"Transfer-Encoding: gzip\r\n\r\n"], [400]),
        ([_HEAD + b"X: " + b"a" * 100_000], [400]),
        ([_HEAD + _REFUSED + _CHUNKED + b"ZZ\r\n"], [400]),
        ([_HEAD + _REFUSED + _CHUNKED, b"ZZ\r\n"], [415]),
        ([_HEAD + _PASSED + _CHUNKED + b"2\r\n{}\r\nZZ\r\n"], [400]),
        ([_HEAD + _PASSED + _CHUNKED, b"2\r\n{}\r\nZZ\r\n"], [400]),
        ([_PIPELINED, b"xxxx\r\n\r\n"], [200, 400]),
        ([_HEAD + b"Connection: upgrade\r\nUpgrade: websocket\r\n" + _REFUSED + b"\r\n"], [415]),
    ],
)
def test_what_is_no_http_is_one_line_of_the_log(
    parts: list[bytes], statuses: list[int], rule: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    with running(rule.load, head_s=0.5) as server:
        caplog.clear()
        with connect(server) as connection:
            for part in parts[:-1]:
                connection.sendall(part)
                time.sleep(0.1)
            connection.sendall(parts[-1])
            connection.shutdown(socket.SHUT_WR)
            raw = read_all(connection)
        # Later than the time for a head, nothing more is done for this connection.
        time.sleep(0.7)
        assert ask(server, "/health").status == 200
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", raw)] == statuses
    if statuses[-1] == 400:
        assert b'"type": "invalid_request_error"' in raw
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert lines[0].exc_info is None
    assert "\n" not in lines[0].getMessage()


def test_a_connection_too_many_is_refused(rule: Rule) -> None:
    with running(rule.load, sessions=1, queue=1, spare_connections=1) as server:
        connections = [connect(server) for _ in range(3)]
        reply = ask(server, "/health")
        assert (reply.status, reply.json["error"]["code"]) == (503, "too_many_connections")
        assert reply.headers["retry-after"] == "1"
        for connection in connections:
            connection.close()
        wait_until(lambda: ask(server, "/health").status == 200)


def test_a_pool_that_cannot_be_closed_ends_with_that_error(rule: Rule) -> None:
    def load() -> ServedModel:
        def close() -> None:
            raise OSError("the disk is gone")

        return replace(rule.load(config), close=close)

    config = ServeConfig(port=0, chunk_tokens=16)
    pool = SessionPool(load, config, lambda: None)
    pool.start()
    wait_until(lambda: pool.ready)
    pool.stop()
    assert pool.ended
    assert str(pool.error) == "the disk is gone"


def test_a_prompt_too_long_is_told_both_numbers(tiny: Server) -> None:
    ids = [70] * 600
    reply = ask(tiny, COMPLETIONS, {"prompt": ids})
    error = reply.json["error"]
    assert (reply.status, error["code"]) == (400, "context_length_exceeded")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (600, 512)
    assert "600 tokens" in error["message"]
    assert "512" in error["message"]
    late = ask(tiny, COMPLETIONS, {"prompt": ids[:505], "max_tokens": 50, "logit_bias": {"0": -99}})
    assert late.json["choices"][0]["finish_reason"] == "length"
    assert late.json["usage"]["completion_tokens"] == 7


# Who may ask (SRV-7, SRV-8)


def test_a_key_is_needed_everywhere_but_in_public(
    rule: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"prompt": "hi", "max_tokens": 2}
    with running(rule.load, api_key="s3cret-à") as server:
        for path in ("/health", "/v1/models"):
            assert ask(server, path).status == 200
        for path in ("/metrics", "/props", "/v1/models/rule"):
            assert ask(server, path).status == 401
        for value in ("Bearer wrong", "Bearer s3cret", "s3cret-à", "Basic s3cret-à", "Bearer "):
            reply = ask(server, COMPLETIONS, body, {"Authorization": value})
            assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
        right = {"Authorization": "Bearer s3cret-à"}
        assert ask(server, COMPLETIONS, body, right).status == 200
        with client(server, api_key="wrong") as sdk, pytest.raises(openai.AuthenticationError):
            sdk.completions.create(model="default", prompt="hi")
    assert "s3cret" not in caplog.text


def test_a_browser_is_told_what_is_served_and_how_to_connect(rule: Rule) -> None:
    load = rule.load

    def named(config: ServeConfig) -> ServedModel:
        return replace(load(config), name="<script>alert(1)</script>&'\"")

    with running(named, sessions=1, api_key="secret") as server:
        host = server.address.removeprefix("http://")
        reply = ask(server, "/", headers={"Host": host})
        text = reply.body.decode()
        assert reply.status == 200
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in text
        # The one script is the page's own, and no other is let run.
        (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = reply.headers["content-security-policy"]
        assert re.findall("script-src[^;]*", policy) == [f"script-src 'sha256-{digest}'"]
        assert text.count("<script") == 1
        assert f"{server.address}/v1" in text
        assert "secret" not in text
        assert not re.search("(src|href)=.(?!/)", text)  # nothing from elsewhere
        odd = ask(server, "/", headers={"Host": "localhost:1'\"><b>"})
        assert (odd.status, odd.headers["content-type"]) == (403, "application/json")
        # Of a server that is not on this machine's loopback address, any Host is shown.
        row = ask(server, "/v1/models", headers={"Authorization": "Bearer secret"}).json["data"][0]
        assert "<b>" not in page("http://server:1'\"><b>", row, keyed=True)
        assert ask(server, "/slots").status == 401


def test_slots_are_told_without_their_text(rule: Rule, served: Server) -> None:
    (slot,) = ask(served, "/slots").json
    assert (slot["id"], slot["n_ctx"], slot["is_processing"], slot["n_past"]) == (0, 2000, False, 0)
    rule.backend.shut = True
    with send(served, COMPLETIONS, {"prompt": "abc", "max_tokens": 2}) as connection:
        wait_until(lambda: ask(served, "/slots").json[0]["is_processing"])
        rule.backend.open()
        read_all(connection)
    wait_until(lambda: not ask(served, "/slots").json[0]["is_processing"])
    assert ask(served, "/slots").json[0]["n_past"] >= 3


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(UsageError, match="--api-key is empty"):
        ServeConfig(api_key=" ")


def test_web_pages_are_kept_out(rule: Rule) -> None:
    body = {"prompt": "hi", "max_tokens": 2}
    good, evil = "http://good.example", "http://evil.example"
    with running(rule.load, origins=(good,)) as server:
        rebound = ask(server, "/v1/models", headers={"Host": "evil.example:8012"})
        assert (rebound.status, rebound.json["error"]["code"]) == (403, "foreign_host")
        for host in ("localhost:1", "[::1]:8012", "[::1]", "127.0.0.1", "LOCALHOST"):
            assert ask(server, "/health", headers={"Host": host}).status == 200
        for host in (
            "[::1].evil.example", "[127.0.0.1]evil.example:80", "[::1]:80:evil.example", "[::1",
            "127.0.0.1:evil.example", "localhost:80@evil.example", "[127.0.0.1]", "", ":80",
        ):  # fmt: skip
            assert ask(server, "/health", headers={"Host": host}).status == 403, host
        for origin in (evil, "null", f"{good}.evil.example"):
            reply = ask(server, COMPLETIONS, body, {"Origin": origin})
            assert (reply.status, reply.json["error"]["code"]) == (403, "foreign_origin")
            seen = ask(server, "/v1/models", headers={"Origin": origin})
            assert not [name for name in seen.headers if name.startswith("access-control")]
            assert (
                ask(server, COMPLETIONS, headers={"Origin": origin}, method="OPTIONS").status == 403
            )
        flight = ask(server, COMPLETIONS, headers={"Origin": good}, method="OPTIONS")
        assert flight.status == 204
        assert flight.headers["access-control-allow-origin"] == good
        assert "POST" in flight.headers["access-control-allow-methods"]
        # "*" never means Authorization; OpenAI's client sends headers of its own beside it
        assert flight.headers["access-control-allow-headers"] == "authorization, *"
        assert "access-control-allow-credentials" not in flight.headers
        allowed = ask(server, COMPLETIONS, body, {"Origin": good})
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, good)
        for kind in ("text/plain", "multipart/form-data; boundary=x"):
            assert ask(server, COMPLETIONS, body, {"Content-Type": kind}).status == 415
        kind = "application/json; charset=utf-8"
        assert ask(server, COMPLETIONS, body, {"Content-Type": kind}).status == 200


@pytest.mark.parametrize("kind", ["-", "application/x-www-form-urlencoded"])
def test_json_without_its_type_is_read_and_no_page_may_send_it(kind: str, rule: Rule) -> None:
    """As `curl -d` sends it, with or without its own type."""
    body, typed = {"prompt": "hi", "max_tokens": 2}, {"Content-Type": kind}
    with running(rule.load) as server:
        reply = ask(server, COMPLETIONS, body, typed)
        assert reply.json["choices"][0]["text"] == rule.text("hi", 2)
        origin = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
        assert ask(server, COMPLETIONS, body, typed | origin).status == 200
        for foreign in (
            {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://127.0.0.1:1"},
        ):  # fmt: skip
            reply = ask(server, COMPLETIONS, body, typed | foreign)
            assert (reply.status, reply.json["error"]["code"]) == (403, "foreign_origin"), foreign
        # What a form itself sends is no JSON.
        form = ask(server, COMPLETIONS, b"prompt=hi&max_tokens=2", typed)
        assert (form.status, form.json["error"]["type"]) == (400, "invalid_request_error")
