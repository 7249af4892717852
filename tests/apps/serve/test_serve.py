"""`kvq serve` from outside: official client, raw sockets, real processes, faults on purpose."""

import json
import logging
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from kvq.errors import UsageError
from kvq_apps.chat.client import Stream, Turn
from kvq_apps.chat.messages import Message
from kvq_apps.chat.remote import RemoteClient
from kvq_apps.cli import main
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.fields import parse_object
from kvq_apps.serve.loading import ServedModel, serve_engine
from kvq_apps.serve.prometheus import prometheus_text
from kvq_apps.serve.server import Server
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.serving import saving as saved_module
from kvq_runtime.serving.indent import IndentLimit
from kvq_runtime.serving.outbox import Delta, Finished, Outbox, Report, TokenLog
from kvq_runtime.serving.pool import measured_chunk
from kvq_runtime.serving.saving import SavedSessions, as_ids
from kvq_runtime.serving.slots import Slot
from kvq_runtime.snapshot import SnapshotError
from kvq_specdraft.lookup import Lookup
from serving import (
    PATIENCE_S,
    Reply,
    Rule,
    ask,
    connect,
    fault,
    process,
    read_all,
    request_bytes,
    running,
    send,
    wait_until,
)
from shelf import Shelf

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0}

pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(max_position_embeddings=4096))


@pytest.fixture(scope="module")
def tiny(bundle: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a real engine that keeps nothing on disk."""

    def load(config: ServeConfig) -> ServedModel:
        return serve_engine(Engine.open(bundle, threads=1), {"context_tokens": 512}, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with running(load, saved_bytes=0, aliases=("default", "gpt-tiny")) as server:
            yield server


@pytest.fixture
def rule() -> Rule:
    return Rule()


@pytest.fixture
def served(rule: Rule) -> Iterator[Server]:
    """A server on the rule, with one session: what runs and what waits is plain."""
    with running(rule.load, sessions=1, queue=8) as server:
        yield server


def client(server: Server, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.address}/v1", max_retries=0, **{"api_key": "none"} | settings
    )


def metric(server: Server, name: str) -> float:
    text = ask(server, "/metrics").body.decode()
    return float(re.search(rf"^kvq_{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])


def data(reply: Reply) -> list[Any]:
    """The objects of a stream; its last event must be [DONE]."""
    *events, last = [event.removeprefix("data: ") for event in reply.events if event[0] != ":"]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


# The official client (SRV-1)


def test_the_official_client_chats(tiny: Server) -> None:
    with client(tiny) as sdk:
        (model,) = sdk.models.list().data
        assert sdk.models.retrieve(model.id).id == model.id == "bundle"
        messages = [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}],
            },
        ]
        settings = {"model": model.id, "messages": messages, "seed": 7, "max_completion_tokens": 6}
        whole = sdk.chat.completions.create(**settings, n=3)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in whole.choices}) == 3
        assert whole.usage.completion_tokens == 18
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 18
        with sdk.chat.completions.create(
            **settings, n=3, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    *pieces, last = chunks
    assert (last.choices, last.usage.completion_tokens) == ([], 18)
    for index, choice in enumerate(whole.choices):
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in mine) == choice.message.content
        assert [piece.finish_reason for piece in mine[-2:]] == [None, "length"]
        assert mine[-1].delta.content is None


def test_the_official_client_completes_with_logprobs(tiny: Server) -> None:
    with client(tiny) as sdk:
        settings = {"model": "default", "max_tokens": 5, **GREEDY}
        one = sdk.completions.create(prompt="The quick", logprobs=3, **settings)
        both = sdk.completions.create(prompt=["The quick", "hi"], **settings)
        ids = sdk.completions.create(prompt=[[70, 71], [72]], **settings)
        talk = sdk.chat.completions.create(
            **{**settings, **chat("hi")}, logprobs=True, top_logprobs=2
        )
    (choice,) = one.choices
    assert [other.index for other in both.choices] == [0, 1]
    assert both.choices[0].text == choice.text
    assert ids.usage.prompt_tokens == 3
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 5
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        # greedy: the token is the likeliest of its alternatives
        assert max(top.values()) == top[token] == logprob
        assert logprob < 0
    rows = talk.choices[0].logprobs.content
    assert [len(row.top_logprobs) for row in rows] == [2] * 5
    assert all(row.top_logprobs[0].logprob >= row.top_logprobs[1].logprob for row in rows)
    text = b"".join(bytes(row.bytes) for row in rows).decode(errors="replace")
    assert text == talk.choices[0].message.content


def test_top_logprobs_change_no_token(tiny: Server) -> None:
    body = {"prompt": "The quick brown", "max_tokens": 12, "temperature": 1, "seed": 3}
    plain, ranked = (
        ask(tiny, COMPLETIONS, body | {"logprobs": count}).json["choices"][0] for count in (0, 4)
    )
    assert plain["text"] == ranked["text"]
    assert plain["logprobs"]["tokens"] == ranked["logprobs"]["tokens"]
    assert ranked["logprobs"]["token_logprobs"] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-4
    )


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"model": "bundle", "temperature": -1}, openai.BadRequestError),
        ({"model": "bundle", "prompt": "word " * 600}, openai.BadRequestError),
    ],
)
def test_errors_map_to_the_clients_classes(
    settings: dict[str, Any], error: type[openai.APIStatusError], tiny: Server
) -> None:
    with client(tiny) as sdk, pytest.raises(error) as raised:
        sdk.completions.create(**{"prompt": "hi"} | settings)
    assert raised.value.type in ("invalid_request_error", "not_found_error")


# The wire (SRV-2)


def test_a_stream_is_plain_server_sent_events(tiny: Server) -> None:
    body = chat("Größe \u2028 🎉", stream=True, max_tokens=40, temperature=2, seed=1)
    reply = ask(tiny, CHAT, body)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    # ASCII only, one `data` line an event: every way to split lines agrees
    assert re.fullmatch(rb"(data: [\x20-\x7e]+\n\n)+", reply.body)
    assert reply.body.decode().splitlines() == reply.body.decode().split("\n")[:-1]
    chunks = data(reply)
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks].count("assistant") == 1
    assert all("usage" not in chunk for chunk in chunks)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    whole = ask(tiny, CHAT, body | {"stream": False}).json
    assert whole["choices"][0]["message"]["content"] == text
    assert chunks[-1]["x_kvq"].keys() == whole["x_kvq"].keys()
    held = whole["x_kvq"]
    assert 0 < held["kv_bytes"] <= held["kv_bytes_peak"] <= held["kv_budget"]
    assert (held["mean_k_bits"], held["mean_v_bits"], held["evicted_share"]) == (16, 16, 0)


def test_three_readers_of_one_stream_agree(tiny: Server) -> None:
    sampling = {"temperature": 1.5, "seed": 11, "max_tokens": 40, "top_p": 0.9}
    raw = data(ask(tiny, CHAT, chat("Größe 🎉", stream=True, **sampling)))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in raw)
    with client(tiny) as sdk:
        settings = {"model": "bundle", **chat("Größe 🎉"), **sampling}
        with sdk.chat.completions.create(stream=True, **settings) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    ours = RemoteClient(tiny.address)
    ours.open()
    written = Stream()
    reason = ours.reply(
        Turn(
            messages=[Message(role="user", text="Größe 🎉")],
            sampling=Sampling(temperature=1.5, top_p=0.9),
            max_tokens=40,
            seed=11,
        ),
        written,
    )
    assert "".join(pieces) == text != ""
    assert (written.take().text, reason) == (text, raw[-1]["choices"][0]["finish_reason"])


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
    (CHAT, chat("hi", stop=list("abcde")), 400, "stop"),
    (CHAT, chat("hi", stop=[""]), 400, "stop"),
    (CHAT, chat("hi", max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat("hi", max_completion_tokens=1.5), 400, "max_completion_tokens"),
    (CHAT, chat("hi", temperature="hot"), 400, "temperature"),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}', 400, "temperature"),
    (CHAT, chat("hi", top_p=0), 400, "top_p"),
    (CHAT, chat("hi", stream="yes"), 400, "stream"),
    (CHAT, chat("hi", logit_bias={"9999": 1}), 400, "logit_bias.9999"),
    (CHAT, chat("hi", logit_bias=[1]), 400, "logit_bias"),
    (CHAT, chat("hi", top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat("hi", tools=[{"type": "function"}]), 400, "tools[0].function.name"),
    (CHAT, chat("hi", functions=[{}]), 400, "functions"),
    (CHAT, chat("hi", presence_penalty=2.5), 400, "presence_penalty"),
    (CHAT, chat("hi", model="other"), 404, "model"),
    (CHAT, chat("hi", x_kvq={"priority": "now"}), 400, "x_kvq.priority"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [9999]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "echo": 1}, 400, "echo"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
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


@pytest.mark.parametrize("model", ["bundle", "default", "gpt-tiny", None])
def test_the_model_answers_to_its_names(model: str | None, tiny: Server) -> None:
    reply = ask(tiny, COMPLETIONS, {"prompt": "hi", "model": model, "max_tokens": 1})
    assert (reply.status, reply.json["model"]) == (200, "bundle")


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


# Clients that leave (SRV-4, SRV-19)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_a_client_that_leaves_stops_its_generation(
    stream: bool, half: bool, rule: Rule, served: Server
) -> None:
    backend = rule.backend
    backend.shut = True
    body = {"prompt": "abc", "max_tokens": 500, "stream": stream}
    with send(served, COMPLETIONS, body) as connection:
        backend.let(5)
        wait_until(lambda: backend.arrivals == 6)
        if half:
            connection.shutdown(socket.SHUT_WR)
            wait_until(lambda: job_cancelled(served))
    wait_until(lambda: job_cancelled(served))
    backend.let(2)
    wait_until(lambda: served.pool.queue == (0, 0))
    # the pass that was waiting at the gate, and no other
    assert len(backend.passes) == 6
    backend.open()
    assert metric(served, "jobs_cancelled_total") == 1
    assert ask(served, COMPLETIONS, {"prompt": "hi", "max_tokens": 2}).status == 200


def job_cancelled(server: Server) -> bool:
    return all(job.cancelled for job in server.pool.running)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_queued_or_prefilling(
    stream: bool, rule: Rule, served: Server
) -> None:
    backend = rule.backend
    backend.shut = True
    prompt = [70] * 160
    with ExitStack() as stack:
        first = stack.enter_context(send(served, CHAT, chat("a", max_tokens=50)))
        wait_until(lambda: served.pool.queue == (0, 1))
        queued = send(served, COMPLETIONS, {"prompt": prompt, "stream": stream})
        wait_until(lambda: served.pool.queue == (1, 1))
        queued.close()
        wait_until(lambda: all(job.cancelled for job in served.pool.waiting))
        reading = stack.enter_context(
            send(served, COMPLETIONS, {"prompt": prompt, "stream": stream})
        )
        wait_until(lambda: len(served.pool.waiting) == 2)
        wait_until(lambda: backend.arrivals == 1)
        first.close()
        wait_until(lambda: job_cancelled(served))
        # the first one's last pass, then three chunks of 16 tokens
        backend.let(4)
        wait_until(lambda: backend.arrivals == 5)
        assert backend.passes[1:] == [[prompt[:16]]] * 3
        reading.close()
        wait_until(lambda: job_cancelled(served))
        backend.let(1)
        wait_until(lambda: served.pool.queue == (0, 0))
    assert len(backend.passes) == 5
    backend.open()
    assert metric(served, "jobs_cancelled_total") == 3


def held() -> tuple[int, int, int]:
    """(descriptors, threads, resident bytes) of this process.

    Not counted are asyncio's own helpers, of which there are a few more or fewer, never many.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), threads, pages * os.sysconf("SC_PAGE_SIZE")


def mixed(server: Server, count: int) -> None:
    """`count` requests of every kind: whole, streamed, refused, broken, left at any moment."""
    # Long enough to be worth saving.
    question = "How many pages does a book of a thousand columns have?"
    talk = {"messages": [{"role": "user", "content": question}], "max_tokens": 3}
    for number in range(count):
        text = {"prompt": f"text {number % 7}", "max_tokens": 3, "stream": number % 2 == 0}
        match number % 10:
            case 0 | 1:  # gone before anything could be said
                send(server, COMPLETIONS, text).close()
            case 2:  # gone in the middle
                with send(server, CHAT, talk | {"stream": True, "max_tokens": 60}) as connection:
                    connection.recv(1)
            case 3:  # a request that never ends
                with connect(server) as connection:
                    connection.sendall(request_bytes("POST", CHAT, talk)[:-9])
            case 4:
                assert ask(server, COMPLETIONS, b'{"prompt": ').status == 400
            case 5:
                assert ask(server, CHAT, talk | {"n": 2, "stream": True}).status == 200
            case 6:
                body = {"input_prefix": "a = ", "input_suffix": "b", "n_predict": 2}
                assert ask(server, "/infill", body).status == 200
            case 7:
                with send(server, CHAT, talk) as connection:
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
            case _:
                assert ask(server, COMPLETIONS, text).status == 200


@pytest.mark.slow
def test_a_thousand_mixed_requests_leave_nothing_behind(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path, infills=True)
    with running(rule.load, sessions=2, idle_save_s=0.01) as server:
        saved = server.pool.served.slots.saved

        def quiet() -> bool:
            return server.pool.queue == (0, 0) and saved.writer.has_room

        mixed(server, 100)
        # The thread that writes sessions begins with the first of them.
        wait_until(lambda: saved.saved and quiet())
        files, threads, before = held()
        mixed(server, 1000)
        wait_until(quiet)
        # Each kind came a hundred times, so what any of them leaves would be a hundred; a few
        # descriptors and threads come and go by themselves.
        wait_until(lambda: held()[0] < files + 10 and held()[1] < threads + 10)
        assert held()[2] - before < max(4 << 20, before // 50)
        assert not server.pool.busy
        assert not any(slot.busy for slot in server.pool.served.slots.all)
        assert len(rule.sessions) == 2
        counts = server.pool.counts
        assert counts.failed == 0
        assert counts.cancelled > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvq-writer"]
    assert list(tmp_path.rglob(".*")) == []


def test_requests_that_are_left_give_every_page_back(bundle: str) -> None:
    load = tiny_load(bundle, context_tokens=512)
    with running(load, sessions=2, saved_bytes=0) as server:
        arenas = server.pool.served.slots.all
        empty = [slot.session.stats().kv_bytes for slot in arenas]
        for number in range(60):
            body = {"prompt": f"{number} " + "pages and pages " * 15, "max_tokens": 200}
            with send(server, COMPLETIONS, body | {"stream": True}) as connection:
                if number % 2:
                    connection.recv(1)
        wait_until(lambda: server.pool.queue == (0, 0))
        assert server.pool.counts.cancelled > 0
        held_bytes = [slot.session.stats().kv_bytes for slot in arenas]
        assert sum(held_bytes) > sum(empty)
        for slot in arenas:
            slot.session.rollback(len(slot.session.tokens))
        assert [slot.session.stats().kv_bytes for slot in arenas] == empty
        assert ask(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 2}).status == 200


# Slow readers (SRV-5)


def test_an_outbox_merges_and_bounds() -> None:
    notified: list[int] = []
    outbox = Outbox(1000, lambda: notified.append(1))
    log = TokenLog(token=1, logprob=-1.0)
    for number in range(50):
        outbox.put(Delta(index=0, text=f"{number} ", logs=(log,)))
    outbox.put(Delta(index=1, text="other"))
    outbox.put(Finished(index=1, reason="stop", report=Report()))
    assert outbox.full
    assert len(notified) == 52
    first, second, third = (outbox.take() for _ in range(3))
    assert isinstance(first, Delta)
    assert first.text == "".join(f"{number} " for number in range(50))
    assert first.logs == (log,) * 50
    assert (second, third) == (Delta(index=1, text="other"), outbox.take() or third)
    assert not outbox.full
    assert outbox.num_bytes == 0
    assert outbox.take() is None
    assert outbox.stalled_s() == 0.0


class Loud:
    """Every token is 20 000 letters."""

    def push(self, token: int) -> str:
        return chr(97 + token % 26) * 20_000

    def flush(self) -> str:
        return ""


def test_a_slow_reader_holds_up_nobody_and_misses_nothing() -> None:
    loud = Rule(detokenizer=Loud)
    with running(loud.load, sessions=2) as server:
        with connect(server) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
            body = {"prompt": "abc", "max_tokens": 600, "stream": True}
            slow.sendall(request_bytes("POST", COMPLETIONS, body))
            wait_until(lambda: any(job.outbox.full for job in server.pool.running))
            (job,) = server.pool.running
            # others are served while the first cannot take more
            for _ in range(10):
                other = ask(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 2})
                assert len(other.json["choices"][0]["text"]) == 40_000
                assert job.outbox.num_bytes <= 256 << 10
            assert server.pool.running == (job,)
            assert len(loud.backend.passes) < 600
            reply = Reply(read_all(slow))
        text = "".join(chunk["choices"][0]["text"] for chunk in data(reply))
        letters = loud.backend.letters
        assert len(text) == 600 * 20_000
        total = sum(loud.tokenizer.encode("abc"))
        for place in range(0, len(text), 20_000):
            token = letters[total % len(letters)]
            assert text[place] == text[place + 19_999] == chr(97 + token % 26)
            total += token


def test_a_reader_that_never_reads_is_given_up() -> None:
    loud = Rule(detokenizer=Loud)
    with running(loud.load, sessions=1, stall_s=0.2) as server, connect(server) as dead:
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"prompt": "abc", "max_tokens": 1500, "stream": True}
        dead.sendall(request_bytes("POST", COMPLETIONS, body))
        wait_until(lambda: metric(server, "jobs_cancelled_total") == 1)
        assert server.pool.queue == (0, 0)


# The queue (SRV-6, SRV-20)


def test_a_hundred_requests_at_a_queue_of_eight(rule: Rule, served: Server) -> None:
    backend = rule.backend
    backend.shut = True
    with ExitStack() as stack:
        first = stack.enter_context(send(served, CHAT, chat("first", max_tokens=1)))
        wait_until(lambda: served.pool.queue == (0, 1))
        marks = [70 + number for number in range(8)]
        waiting = []
        for number, mark in enumerate(marks):
            # completions and batch work in turn, told apart by their prompts
            body = {"prompt": [mark] * 5, "max_tokens": 1}
            body |= {"x_kvq": {"priority": "batch"}} if number % 2 else {}
            waiting.append(stack.enter_context(send(served, COMPLETIONS, body)))
            wait_until(lambda count=number: served.pool.queue[0] == count + 1)
        refused = [ask(served, COMPLETIONS, {"prompt": "hi"}) for _ in range(91)]
        assert {reply.status for reply in refused} == {429}
        assert refused[0].json["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused[0].headers["retry-after"]) <= 60
        backend.open()
        assert Reply(read_all(first)).status == 200
        assert {Reply(read_all(connection)).status for connection in waiting} == {200}
    order = [ids[0] for (ids,) in backend.passes if ids[0] in marks]
    assert order == marks[::2] + marks[1::2]
    assert metric(served, "jobs_refused_total") == 91


def test_a_completion_overtakes_a_long_prompt(rule: Rule) -> None:
    backend = rule.backend
    backend.shut = True
    with running(rule.load, sessions=3, chunk_tokens=16) as server, ExitStack() as stack:
        stack.callback(backend.open)
        long_prompt = [70] * 800
        body = {"prompt": long_prompt, "max_tokens": 1, "x_kvq": {"priority": "chat"}}
        long = stack.enter_context(send(server, COMPLETIONS, body))
        backend.let(3)
        wait_until(lambda: backend.arrivals == 4)
        quick = stack.enter_context(send(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 4}))
        wait_until(lambda: server.pool.queue[0] + server.pool.queue[1] == 2)
        backend.let(1)
        wait_until(lambda: backend.arrivals == 5)
        backend.open()
        assert Reply(read_all(quick)).json["choices"][0]["text"] == rule.text("abc", 4)
        assert Reply(read_all(long)).status == 200
    # one chunk was at the gate; then the completion ran to its end, then the prompt went on
    kinds = "".join("p" if [70] * 16 in ids else "q" for ids in backend.passes)
    assert kinds.startswith("pppp" + "qqqq" + "pp")


def test_a_completion_shares_the_passes_of_a_chat(rule: Rule) -> None:
    backend = rule.backend
    backend.shut = True
    with running(rule.load, sessions=3) as server, ExitStack() as stack:
        stack.callback(backend.open)
        talk = stack.enter_context(send(server, CHAT, chat("a", max_tokens=40)))
        backend.let(5)
        wait_until(lambda: backend.arrivals == 6)
        slow = backend.owners[-1][0]
        for count in (6, 20):
            quick = stack.enter_context(
                send(server, COMPLETIONS, {"prompt": "abc", "max_tokens": count})
            )
            wait_until(lambda: sum(server.pool.queue) == 2)
            backend.let(count + 3)
            assert len(Reply(read_all(quick)).json["choices"][0]["text"]) == count
            wait_until(lambda: backend.arrivals == len(backend.passes) + 1)
        backend.open()
        assert Reply(read_all(talk)).json["usage"]["completion_tokens"] == 40
    order = "".join("b" if len(owners) == 2 else "s" for owners in backend.owners)
    # neither waits for the other: the chat's rows are in every pass, the completion's in its own
    assert all(slow in owners for owners in backend.owners[5:])
    assert [len(run) for run in re.findall("b+", order)] == [6, 20]
    assert (
        len(backend.passes) == 41
    )  # two chunks of its prompt, then a pass for each letter but one


def test_answers_of_one_rank_share_their_passes(rule: Rule) -> None:
    backend = rule.backend
    backend.shut = True
    with running(rule.load, sessions=4) as server, ExitStack() as stack:
        stack.callback(backend.open)
        talks = []
        for text in "ab":
            talks.append(stack.enter_context(send(server, CHAT, chat(text, max_tokens=6))))
            wait_until(lambda: sum(server.pool.queue) == len(talks))
        backend.let(1)
        wait_until(lambda: backend.arrivals == 2)
        backend.open()
        assert {Reply(read_all(talk)).status for talk in talks} == {200}
    letters = [[len(ids) for ids in one_pass] for one_pass in backend.passes]
    # five tokens each go through the model after the prompts, and at least four passes hold two
    assert sum(one_pass.count(1) for one_pass in letters) == 10
    assert sum(len(one_pass) == 2 for one_pass in letters) >= 4


def test_a_pass_that_fails_is_made_again_for_each_alone(rule: Rule) -> None:
    backend = rule.backend
    backend.shut = True
    broken = rule.text("b", 1)
    assert broken not in rule.text("d", 8) + rule.text("e", 8)
    backend.fails_on = {rule.tokenizer.encode(broken)[0]: fault()}
    with running(rule.load, sessions=4) as server, ExitStack() as stack:
        stack.callback(backend.open)
        talks = {}
        for prompt in "dbe":
            body = {"prompt": prompt, "max_tokens": 8}
            talks[prompt] = stack.enter_context(send(server, COMPLETIONS, body))
            wait_until(lambda: sum(server.pool.queue) == len(talks))
        backend.open()
        replies = {prompt: Reply(read_all(talk)) for prompt, talk in talks.items()}
    assert any(len(one_pass) == 3 for one_pass in backend.owners)
    assert replies["b"].status == 500
    for prompt in "de":
        assert replies[prompt].json["choices"][0]["text"] == rule.text(prompt, 8)


def test_answers_written_side_by_side_are_those_written_alone(tiny: Server) -> None:
    def text(number: int) -> str:
        body = {"prompt": f"{number} The quick brown fox", "max_tokens": 24, **GREEDY}
        reply = ask(tiny, COMPLETIONS, body | {"cache_prompt": False})
        return reply.json["choices"][0]["text"]

    alone = [text(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(text, range(12))) == alone
    assert len(set(alone)) > 6


def test_choices_of_one_prompt_are_what_they_are_in_turn(rule: Rule) -> None:
    def choices(count: int, length: int, **more: Any) -> list[dict[str, Any]]:
        body = {"prompt": "The quick brown fox", "max_tokens": length, "seed": 5, "n": count}
        settings = {"temperature": 1.2, "top_k": 0, "top_p": 1, "min_p": 0, "logprobs": 2}
        reply = ask(server, COMPLETIONS, body | settings | more).json
        found: list[dict[str, Any]] = reply["choices"]
        written = sum(len(one["logprobs"]["tokens"]) for one in found)
        assert reply["usage"]["completion_tokens"] - written in range(count + 1)  # ends are hidden
        return found

    with running(rule.load, sessions=1) as server:
        # 16 tokens of each of 4 fit the rows of a branch; 17 do not, and are written in turn.
        together, apart = choices(4, 16), choices(4, 17)
        letter = together[0]["text"][2]
        stopped = choices(4, 16, stop=[letter])
    assert len({one["text"] for one in together}) == 4
    assert [len(own[0]) for own in rule.backend.passes[1:16]] == [4] * 15
    for one, longer in zip(together, apart, strict=True):
        assert longer["text"].startswith(one["text"])
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            assert longer["logprobs"][key][:16] == one["logprobs"][key]
    for one, whole in zip(stopped, together, strict=True):
        assert one["text"] == whole["text"].split(letter)[0]
        assert one["finish_reason"] == ("stop" if letter in whole["text"] else "length")


# Who may ask (SRV-7, SRV-8)


def test_a_key_is_needed_everywhere_but_in_public(
    rule: Rule, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"prompt": "hi", "max_tokens": 2}
    with running(rule.load, api_key="s3cret-ü") as server:
        for path in ("/health", "/v1/models"):
            assert ask(server, path).status == 200
        for path in ("/metrics", "/props", "/v1/models/rule"):
            assert ask(server, path).status == 401
        for value in ("Bearer wrong", "Bearer s3cret", "s3cret-ü", "Basic s3cret-ü", "Bearer "):
            reply = ask(server, COMPLETIONS, body, {"Authorization": value})
            assert (reply.status, reply.json["error"]["type"]) == (401, "authentication_error")
        right = {"Authorization": "Bearer s3cret-ü"}
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
        assert "<script" not in text
        assert f"{server.address}/v1" in text
        assert "secret" not in text
        assert not re.search("(src|href)=.(?!/)", text)  # nothing from elsewhere
        odd = ask(server, "/", headers={"Host": "localhost:1'\"><b>"}).body.decode()
        assert "<b>" not in odd
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
        for host in ("localhost:1", "[::1]:8012", "127.0.0.1", "LOCALHOST"):
            assert ask(server, "/health", headers={"Host": host}).status == 200
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
        assert "access-control-allow-credentials" not in flight.headers
        allowed = ask(server, COMPLETIONS, body, {"Origin": good})
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, good)
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            assert ask(server, COMPLETIONS, body, {"Content-Type": kind}).status == 415
        kind = "application/json; charset=utf-8"
        assert ask(server, COMPLETIONS, body, {"Content-Type": kind}).status == 200


# Health and metrics: SRV-9


def test_health_waits_for_the_model(rule: Rule) -> None:
    loading = threading.Event()

    def load(config: ServeConfig) -> ServedModel:
        assert loading.wait(PATIENCE_S)
        return rule.load(config)

    config = ServeConfig(port=0, chunk_tokens=16, grace_s=0)
    server = Server(lambda: load(config), config, lambda *_: None)
    server.address = server.url
    thread = threading.Thread(target=server.run)
    thread.start()
    for path, body in (("/health", None), ("/v1/models", None), (CHAT, chat("hi"))):
        reply = ask(server, path, body)
        assert (reply.status, reply.json["error"]["type"]) == (503, "unavailable_error")
        assert reply.headers["retry-after"] == "1"
    assert metric(server, "steps_total") == 0
    loading.set()
    wait_until(lambda: ask(server, "/health").status == 200)
    server.stop()
    thread.join(PATIENCE_S)


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def load() -> ServedModel:
        raise UsageError("no such model")

    server = Server(load, ServeConfig(port=0), lambda *_: None)
    with pytest.raises(UsageError, match="no such model"):
        server.run()


def test_a_port_that_is_taken_is_refused(served: Server) -> None:
    port = int(served.address.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"port {port}"):
        Server(lambda: None, ServeConfig(port=port), lambda *_: None)


def test_metrics_parse_and_only_grow(served: Server) -> None:
    def values() -> dict[str, float]:
        reply = ask(served, "/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        rows = [line for line in reply.body.decode().splitlines() if line[0] != "#"]
        assert all(re.fullmatch(r"kvq_[a-z_]+(\{.*\})? [0-9.e+-]+", row) for row in rows)
        return {name: float(value) for name, _, value in (row.rpartition(" ") for row in rows)}

    before = values()
    ask(served, CHAT, chat("hello", max_tokens=5))
    ask(served, "/nowhere/" + "x" * 30)
    after = values()
    assert all(after[name] >= value for name, value in before.items() if "total" in name)
    assert after["kvq_new_tokens_total"] - before["kvq_new_tokens_total"] == 5
    assert after['kvq_requests_total{path="other",status="404"}'] == 1
    assert after["kvq_kv_peak_bytes"] <= after["kvq_kv_budget_bytes"] == 1 << 20
    assert prometheus_text([]) == "\n"


def test_drafts_are_counted_and_change_no_answer(bundle: str) -> None:
    """Every session of a server has a drafter of its own; a request may do without."""
    made: list[Lookup] = []

    def drafter() -> Lookup:
        made.append(Lookup(min_ngram=1))
        return made[-1]

    bodies = [
        {"prompt": text * 3, "max_tokens": 40, "seed": 3, "cache_prompt": False, **settings}
        for text in ("The quick brown ", "for index in range(10):")
        for settings in (
            {"temperature": 0},
            {"temperature": 0.9, "repeat_penalty": 1.2, "logit_bias": {"7": -5}},
            {"temperature": 0.5, "n": 2, "stop": "e"},
        )
    ]
    with (
        running(tiny_load(bundle, context_tokens=512), saved_bytes=0, sessions=1) as plain,
        running(tiny_load(bundle, context_tokens=512, draft=drafter), saved_bytes=0) as drafts,
    ):
        wanted = [ask(plain, COMPLETIONS, body).json for body in bodies]
        assert len({id(one) for one in made}) == len(made) > 1
        for off in ({}, {"x_kvq": {"draft": False}}):
            with ThreadPoolExecutor(len(bodies)) as threads:
                asked = [threads.submit(ask, drafts, COMPLETIONS, body | off) for body in bodies]
                found = [one.result().json for one in asked]
            for answer, plain_answer in zip(found, wanted, strict=True):
                assert answer["choices"] == plain_answer["choices"]
                assert answer["usage"]["completion_tokens"] > 0
            guessed = [answer["timings"]["draft_n"] for answer in found]
            right = [answer["x_kvq"]["accepted_tokens"] for answer in found]
            assert (sum(guessed) > 0) is (not off)
            assert all(0 <= one <= other for one, other in zip(right, guessed, strict=True))
            if not off:
                metrics = ask(drafts, "/metrics").body.decode()
                assert f"kvq_drafted_tokens_total {sum(guessed)}\n" in metrics
                assert f"kvq_accepted_tokens_total {sum(right)}\n" in metrics
        named = ask(plain, COMPLETIONS, bodies[0] | {"x_kvq": {"draft": "recycle"}}).json
        assert named["choices"] == wanted[0]["choices"]
        assert named["x_kvq"]["drafted_tokens"] > 0
        assert named["x_kvq"]["draft_ms"] > 0
        assert ask(plain, COMPLETIONS, bodies[0]).json["timings"]["draft_n"] == 0
        off = ask(drafts, COMPLETIONS, bodies[0] | {"x_kvq": {"draft": "none"}}).json
        assert (off["choices"], off["timings"]["draft_n"]) == (wanted[0]["choices"], 0)
        for name in ("model", "suffix:store=9"):
            refused = ask(drafts, COMPLETIONS, bodies[0] | {"x_kvq": {"draft": name}})
            assert (refused.status, refused.json["error"]["param"]) == (400, "x_kvq.draft")


def test_a_predicted_prompt_is_never_the_beginning_of_an_exact_one(bundle: str) -> None:
    """A request asks for it, and says so; idle time makes what it left exact."""
    body = {"prompt": "The quick brown fox. " * 30, "max_tokens": 8, "temperature": 0}
    asked = body | {"x_kvq": {"predict": "50%:tail=3"}}
    with running(tiny_load(bundle, context_tokens=512), saved_bytes=0, sessions=1) as server:
        wanted = ask(server, COMPLETIONS, body | {"cache_prompt": False}).json
        assert (wanted["x_kvq"]["predicted_tokens"], wanted["x_kvq"]["exact"]) == (0, True)
        found = ask(server, COMPLETIONS, asked | {"cache_prompt": False}).json
        count = found["usage"]["prompt_tokens"]
        assert found["x_kvq"]["predicted_tokens"] > count - 12
        assert not found["x_kvq"]["exact"]
        again = ask(server, COMPLETIONS, body).json
        assert again["choices"] == wanted["choices"]
        assert again["x_kvq"]["exact"]
        ask(server, COMPLETIONS, asked | {"cache_prompt": False})
        assert not ask(server, "/slots").json[0]["x_kvq"]["exact"]
        wait_until(lambda: ask(server, "/slots").json[0]["x_kvq"]["exact"], "for idle time")
        found = ask(server, COMPLETIONS, asked).json
        assert (found["x_kvq"]["predicted_tokens"], found["x_kvq"]["exact"]) == (0, True)
        refused = ask(server, COMPLETIONS, body | {"x_kvq": {"predict": "some"}})
        assert (refused.status, refused.json["error"]["param"]) == (400, "x_kvq.predict")


# Text: stop strings, seeds, what stands between (SRV-11, SRV-12, SRV-18)


def test_stop_strings_end_the_text_and_are_never_sent(rule: Rule, served: Server) -> None:
    text = rule.text("abc", 30)
    cases = {
        "across tokens": ([text[7:10]], text[:7]),
        "overlapping": ([text[9:12], text[7:11]], text[:7]),
        "at the beginning": ([text[:2]], ""),
        "never": (["ABC"], text),
    }
    for name, (stop, expected) in cases.items():
        for stream in (False, True):
            body = {"prompt": "abc", "max_tokens": 30, "stop": stop, "stream": stream}
            reply = ask(served, COMPLETIONS, body)
            if stream:
                chunks = [chunk["choices"][0] for chunk in data(reply)]
                found = "".join(chunk["text"] for chunk in chunks)
                reason = chunks[-1]["finish_reason"]
            else:
                (choice,) = reply.json["choices"]
                found, reason = choice["text"], choice["finish_reason"]
            assert (found, reason) == (expected, "stop" if expected != text else "length"), name


def test_a_stop_string_inside_a_character() -> None:
    class Halves:
        """Every second token completes an é."""

        def __init__(self) -> None:
            self.half = False

        def push(self, token: int) -> str:
            self.half = not self.half
            return "" if self.half else "é"

        def flush(self) -> str:
            return "\ufffd" if self.half else ""

    with running(Rule(detokenizer=Halves).load, sessions=1) as server:
        body = {"prompt": "abc", "max_tokens": 9, "stop": "éé"}
        (choice,) = ask(server, COMPLETIONS, body).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        (choice,) = ask(server, COMPLETIONS, body | {"stop": None}).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("éééé\ufffd", "length")


def test_a_seed_repeats_and_greedy_ignores_it(tiny: Server) -> None:
    prompt = {"prompt": "The quick brown fox", "max_tokens": 12}

    def texts(count: int, **settings: Any) -> set[str]:
        replies = [ask(tiny, COMPLETIONS, prompt | settings) for _ in range(count)]
        return {reply.json["choices"][0]["text"] for reply in replies}

    seeded = texts(20, temperature=1.5, seed=5)
    assert len(seeded) == 1
    assert seeded != texts(1, temperature=1.5, seed=-5)
    assert len(texts(6, temperature=1.5)) >= 4
    assert len(texts(1, temperature=0, seed=1) | texts(1, temperature=0, seed=2)) == 1
    first, second = ask(tiny, COMPLETIONS, prompt | {"temperature": 1.5, "seed": 5, "n": 2}).json[
        "choices"
    ]
    assert {first["text"]} == seeded != {second["text"]}


def test_a_suffix_and_infill_give_the_same_text(tiny: Server) -> None:
    settings = {"temperature": 0, "max_tokens": 8, "n_predict": 8}
    prefix, suffix = "def add(first, second):\n    return ", "\n\nprint(add(1, 2))"
    suffixed = ask(tiny, COMPLETIONS, {"prompt": prefix, "suffix": suffix, **settings}).json
    body = {"input_prefix": prefix[:-4], "prompt": prefix[-4:], "input_suffix": suffix, **settings}
    infilled = ask(tiny, "/infill", body).json
    assert infilled["content"] == suffixed["choices"][0]["text"]
    assert infilled["tokens_evaluated"] == suffixed["usage"]["prompt_tokens"]
    reverse = ask(tiny, "/infill", body | {"input_prefix": suffix, "input_suffix": prefix}).json
    assert reverse["content"] != infilled["content"]


# What llama.vim sends (LSP-29)
LLAMA_VIM = {
    "id_slot": 0,
    "input_prefix": "def add(first, second):\n",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": [
        {"text": "def sub(a, b):\n    return a - b\n", "time": [1, 2], "filename": "sub.py"},
        {"text": "VALUE = 3\n", "time": [1, 2], "filename": "value.py"},
    ],
    "prompt": "    return ",
    "n_predict": 16,
    "stop": ["\n\n\n"],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/prompt_per_token_ms",
        "timings/prompt_per_second",
        "timings/predicted_n",
        "timings/predicted_ms",
        "timings/predicted_per_token_ms",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
    ],
}


def test_llama_vims_requests_are_understood(tiny: Server) -> None:
    reply = ask(tiny, "/infill", LLAMA_VIM).json
    assert list(reply) == LLAMA_VIM["response_fields"]
    assert reply["truncated"] is False
    again = ask(tiny, "/infill", LLAMA_VIM).json
    assert again["tokens_cached"] == reply["timings/prompt_n"] - 1
    assert again["timings/prompt_n"] == 1
    # the extras stand in front: a new one behind them costs only itself and what follows
    warm = {**LLAMA_VIM, "n_predict": 0, "response_fields": [""], "prompt": ""}
    assert ask(tiny, "/infill", warm).json == {}
    three = {**LLAMA_VIM, "n_cmpl": 3, "temperature": 1.5}
    assert [row["content"] for row in ask(tiny, "/infill", three).json].__len__() == 3
    streamed = ask(tiny, "/infill", {**LLAMA_VIM, "stream": True, "response_fields": None})
    events = [json.loads(event.removeprefix("data: ")) for event in streamed.events]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_an_editors_next_infill_is_an_edit_of_the_text_before(tiny: Server) -> None:
    """Only what changed is read again; `exact` reads all that follows."""
    lines = [f"value_{number} = {number}\n" for number in range(12)]
    body = {"input_prefix": "".join(lines), "input_suffix": "print(total)\n", "n_predict": 2}
    ask(tiny, "/infill", body)
    for exact, word in ((False, "other"), (True, "third")):
        lines[6] = f"{word} = 1\n"
        changed = body | {"input_prefix": "".join(lines), "x_kvq": {"exact": exact}}
        told = ask(tiny, "/infill", changed).json["x_kvq"]
        assert (told["edited"] == 0) == exact
        read = told["prompt_tokens"] - told["cached_tokens"]
        assert (read > told["prompt_tokens"] // 3) == exact


def test_infill_drops_the_far_context_first(tiny: Server) -> None:
    near = {"input_prefix": "x = ", "input_suffix": "\n", "n_predict": 4, "temperature": 0}
    alone = ask(tiny, "/infill", near).json
    extra = [{"filename": f"{n}.py", "text": f"value_{n} = {n}\n" * 12} for n in range(12)]
    crowded = ask(tiny, "/infill", {**near, "input_extra": extra}).json
    assert crowded["truncated"]
    assert alone["tokens_evaluated"] < crowded["tokens_evaluated"] <= 512 - 4
    newest = ask(tiny, "/infill", {**near, "input_extra": extra[-1:]}).json
    assert not newest["truncated"]
    long = ask(tiny, "/infill", {**near, "input_prefix": "word " * 900 + "x = "}).json
    assert long["truncated"]
    assert long["tokens_evaluated"] == 508


def test_a_model_that_cannot_infill_is_named(served: Server) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        reply = ask(served, path, body)
        assert (reply.status, reply.json["error"]["code"]) == (400, "no_infilling")
        assert reply.json["error"]["message"].startswith("rule: ")


@pytest.mark.parametrize("size", [1, 2, 100])
def test_infilled_text_ends_with_its_block(size: int) -> None:
    text = "a)\n        b\n\n        c\n    d\n"
    limit = IndentLimit(8)
    shown = ""
    for place in range(0, len(text), size):
        shown += limit.feed(text[place : place + size])
        if limit.reached:
            break
    assert shown + limit.flush() == "a)\n        b\n\n        c\n"
    assert limit.reached
    unlimited = IndentLimit(0)
    assert unlimited.feed(text) == text


def test_an_answer_ends_at_a_line_break_when_its_time_is_over() -> None:
    class Lines:
        """Every token is a line."""

        def push(self, token: int) -> str:
            time.sleep(0.004)
            return "line\n"

        def flush(self) -> str:
            return ""

    with running(Rule(detokenizer=Lines).load, sessions=1) as server:
        body = {"prompt": "abc", "n_predict": 1500, "t_max_predict_ms": 1}
        reply = ask(server, "/completion", body).json
        assert reply["content"] == "line\n"
        assert (reply["stop_type"], reply["tokens_predicted"]) == ("limit", 1)


def test_llama_servers_small_routes(tiny: Server) -> None:
    text = "Größe <|im_end|> 🎉"
    ids = ask(tiny, "/tokenize", {"content": text}).json["tokens"]
    assert ask(tiny, "/detokenize", {"tokens": ids}).json == {"content": text}
    special = ask(tiny, "/tokenize", {"content": text, "parse_special": True}).json["tokens"]
    assert len(special) < len(ids)
    pieces = ask(tiny, "/tokenize", {"content": "🎉", "with_pieces": True}).json["tokens"]
    content = b"".join(
        bytes(row["piece"]) if isinstance(row["piece"], list) else row["piece"].encode()
        for row in pieces
    )
    assert content.decode() == "🎉"
    prompt = ask(tiny, "/apply-template", chat("hi")).json["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    props = ask(tiny, "/props").json
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["total_slots"] == 4
    native = ask(tiny, "/completion", {"prompt": "The quick", "n_predict": 4, **GREEDY}).json
    whole = ask(tiny, COMPLETIONS, {"prompt": "The quick", "max_tokens": 4, **GREEDY}).json
    assert native["content"] == whole["choices"][0]["text"]
    assert (native["tokens_predicted"], native["stop_type"]) == (4, "limit")


# Faults of the engine (SRV-15), long prompts (SRV-16)


@pytest.mark.parametrize("error", [fault(), ZeroDivisionError("a fault")])
def test_an_engine_error_ends_one_request(
    error: Exception, rule: Rule, served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    bad = rule.tokenizer.encode("Q")[0]
    rule.backend.fails_on[bad] = error
    whole = ask(served, COMPLETIONS, {"prompt": "abcQ"})
    assert (whole.status, whole.json["error"]["type"]) == (500, "server_error")
    # fails in the middle: the rule's fifth letter does
    text = rule.text("abc", 8)
    rule.backend.fails_on = {rule.tokenizer.encode(text[4])[0]: error}
    if text[4] in text[:4]:
        pytest.skip("the rule repeats itself too soon")
    reply = ask(served, COMPLETIONS, {"prompt": "abc", "stream": True})
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in reply.events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:5]
    assert last["error"]["type"] == "server_error"
    rule.backend.fails_on = {}
    assert served.pool.served.slots.all[0].session.tokens == ()
    after = ask(served, COMPLETIONS, {"prompt": "abc", "max_tokens": 8}).json
    assert after["choices"][0]["text"] == text
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert metric(served, "jobs_failed_total") == 2
    assert ("a request failed" in caplog.text) == isinstance(error, ZeroDivisionError)


@pytest.mark.parametrize(
    ("seconds_per_token", "tokens"), [(1e-5, 256), (0.0003, 128), (0.001, 32), (0.02, 16)]
)
def test_a_chunk_takes_about_fifty_milliseconds(
    seconds_per_token: float, tokens: int, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, passes = rule.session(), rule.backend.passes

    def clock() -> float:
        return seconds_per_token * sum(len(ids) for one_pass in passes for ids in one_pass)

    monkeypatch.setattr("kvq_runtime.serving.pool.perf_counter", clock)
    assert measured_chunk(session) == tokens
    assert session.tokens == ()


def test_a_long_prompt_pings_with_its_progress(rule: Rule) -> None:
    backend = rule.backend
    with running(rule.load, sessions=1, ping_s=0.02, chunk_tokens=16) as server:
        backend.shut = True
        body = {"prompt": [70] * 96, "max_tokens": 1, "stream": True}
        with send(server, COMPLETIONS, body) as connection:
            seen = b""
            for _ in range(4):
                backend.let(1)
                known = seen.count(b": prompt ")
                while seen.count(b": prompt ") < known + 2:
                    seen += connection.recv(1 << 16)
            backend.open()
            reply = Reply(seen + read_all(connection))
    pings = [event for event in reply.events if event.startswith(":")]
    counts = [tuple(map(int, ping.removeprefix(": prompt ").split("/"))) for ping in pings]
    assert {total for _, total in counts} == {96}
    done = [count for count, _ in counts]
    assert done == sorted(done)
    assert {16, 32, 48} <= set(done)
    assert data(reply)[-1]["choices"][0]["finish_reason"] == "length"


# Prefixes, arenas and the disk (SRV-14, SRV-23)


def test_a_conversation_is_read_once(rule: Rule, served: Server) -> None:
    messages = [{"role": "user", "content": "How many pages does a session hold?"}]
    first = ask(served, CHAT, {"messages": messages, "max_tokens": 6})
    assert first.cached_tokens == 0
    answer = first.json["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]
    rule.backend.passes.clear()
    second = ask(served, CHAT, {"messages": messages, "max_tokens": 1})
    # all of the first prompt and of the answer, but what its end made different
    assert second.cached_tokens >= first.json["usage"]["prompt_tokens"] + 4
    prompt = second.json["usage"]["prompt_tokens"]
    read = [len(ids) for one_pass in rule.backend.passes for ids in one_pass]
    assert sum(read) == prompt - second.cached_tokens
    # an earlier message edited: only what stands before it is reused
    messages[0]["content"] = messages[0]["content"].replace("session", "bundle")
    third = ask(served, CHAT, {"messages": messages, "max_tokens": 1})
    assert 0 < third.cached_tokens < first.json["usage"]["prompt_tokens"]
    off = ask(served, CHAT, {"messages": messages, "max_tokens": 1, "cache_prompt": False})
    assert off.cached_tokens == 0
    assert off.json["choices"] == third.json["choices"]


def test_more_conversations_than_arenas_go_to_disk_and_back(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path / "sessions")
    with running(rule.load, sessions=2, idle_save_s=3600) as server:
        prompts = [[70 + number] * 100 for number in range(4)]
        texts = []
        for ids in prompts:
            reply = ask(server, COMPLETIONS, {"prompt": ids, "max_tokens": 2})
            assert reply.cached_tokens == 0
            texts.append(reply.json["choices"][0]["text"])
        wait_until(lambda: metric(server, "sessions_saved_total") == 2)
        for ids, text in zip(prompts, texts, strict=True):
            rule.backend.passes.clear()
            reply = ask(server, COMPLETIONS, {"prompt": ids, "max_tokens": 2})
            assert reply.cached_tokens == 99
            assert sum(map(len, rule.backend.passes)) == 2
            assert reply.json["choices"][0]["text"] == text
        assert metric(server, "sessions_restored_total") == 4
        assert len(rule.sessions) == 2
        assert metric(server, "kv_budget_bytes") == 2 << 20
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    folders = {stat.S_IMODE(path.parent.stat().st_mode) for path in files}
    assert folders == {0o700}


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_prompt_is_found_again_by_its_owner_only(sessions: int, tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    prompt = [70] * 50 + [71] * 50

    def found(salt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
        return ask(server, COMPLETIONS, body).cached_tokens

    with running(rule.load, sessions=sessions, idle_save_s=0.0) as server:
        assert [found(salt) for salt in ("a", "a", "b", "", "b")] == [0, 100, 0, 0, 100]
        # with one slot the text comes back from the disk, and from its owner's file
        wait_until(lambda: metric(server, "sessions_saved_total") >= 1)
        assert found("c") == 0
        assert found("a") == 100


def test_a_short_common_beginning_does_not_destroy_a_long_session(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1, idle_save_s=3600) as server:
        head = [70] * 40
        ask(server, COMPLETIONS, {"prompt": head + [71] * 300, "max_tokens": 1})
        other = ask(server, COMPLETIONS, {"prompt": head + [72] * 10, "max_tokens": 1})
        assert other.cached_tokens == 40
        again = ask(server, COMPLETIONS, {"prompt": head + [71] * 300, "max_tokens": 1})
        # the logits of the prompt's last token are still held
        assert again.cached_tokens == 340


def test_an_editors_keystrokes_leave_the_chats_alone(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path, infills=True)
    talks = [chat(f"{number} " + "How many pages does a session hold? " * 4) for number in range(2)]
    with running(rule.load, sessions=4, idle_save_s=3600) as server:
        for talk in talks:
            ask(server, CHAT, {**talk, "max_tokens": 2})
        for number in range(12):
            body = {"input_prefix": f"x{number} = ", "input_suffix": "\nprint(x)" * 20}
            assert ask(server, "/infill", {**body, "n_predict": 3}).json["tokens_predicted"] == 3
        assert metric(server, "sessions_saved_total") == 0
        held = [slot for slot in server.pool.served.slots.all if len(slot.tokens)]
        assert [slot.transient for slot in held].count(True) == 1
        for talk in talks:
            reply = ask(server, CHAT, {**talk, "max_tokens": 2})
            assert reply.cached_tokens == reply.json["usage"]["prompt_tokens"] - 1
    # only the chats are worth a file
    assert len(list(tmp_path.rglob("*.kvq"))) == 2


def tiny_load(bundle: str, **options: Any) -> Any:
    def load(config: ServeConfig) -> ServedModel:
        return serve_engine(Engine.open(bundle, threads=1), options, config)

    return load


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "ids", "foreign"])
def test_a_damaged_session_file_costs_time_only(
    damage: str, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load = tiny_load(bundle, context_tokens=512)
    body = {
        "prompt": "The quick brown fox jumps over the lazy dog. " * 4,
        "max_tokens": 8,
        **GREEDY,
    }
    with running(load, sessions=1) as server:
        text = ask(server, COMPLETIONS, body).json["choices"][0]["text"]
    (path,) = tmp_path.rglob("*.kvq")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-10])
    elif damage == "remove":
        path.unlink()
    elif damage == "ids":
        path.with_suffix(".ids").write_bytes(b"123")
    else:
        options = {"context_tokens": 256}
        with running(tiny_load(bundle, **options), sessions=1) as server:
            ask(server, COMPLETIONS, body)
        (other,) = set(tmp_path.rglob("*.kvq")) - {path}
        path.write_bytes(other.read_bytes())
    with running(load, sessions=1) as server:
        reply = ask(server, COMPLETIONS, body)
        assert reply.cached_tokens == 0
        assert reply.json["choices"][0]["text"] == text
        failures = metric(server, "session_files_failed_total")
    assert failures == (1 if damage in ("flip", "truncate", "foreign") else 0)


def test_a_full_disk_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise SnapshotError("the session cannot be saved: No space left on device")

    monkeypatch.setattr("kvq_runtime.snapshot.write", full)
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1, idle_save_s=0.01) as server:
        for _ in range(2):
            for number in range(3):
                body = {"prompt": [70 + number] * 100, "max_tokens": 3}
                assert ask(server, COMPLETIONS, body).status == 200
        wait_until(lambda: metric(server, "session_files_failed_total") >= 6)
        assert metric(server, "sessions_saved_total") == 0
    assert "No space left" in caplog.text
    assert list(tmp_path.rglob("*.kvq")) == []


def test_saved_sessions_stay_within_their_bytes(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    session = rule.session()
    saved = SavedSessions(tmp_path, "key", 8000)
    rows = []
    for number in range(6):
        session.rollback(len(session.tokens))
        session.prefill([70 + number] * 200)
        rows.append(saved.save(session, as_ids(session.tokens), None))
        saved.writer.wait()
        os.utime(rows[-1].path, (number, number)) if rows[-1].path.exists() else None
        total = sum(path.stat().st_size for path in tmp_path.rglob("*.kvq"))
        assert total <= 8000
    assert 1 <= len(saved) < 6
    assert rows[-1].path.exists()
    assert saved.best(as_ids([75] * 200))[1] == 200
    assert saved.best(as_ids([70] * 200)) == (None, 0)
    # one that can never fit is not even tried
    assert (
        SavedSessions(tmp_path, "key", 100).save(session, as_ids([1] * 99), None).path.exists()
        is False
    )
    longer = as_ids([*session.tokens, 1, 2, 3])
    assert saved.save(session, longer, rows[-1]).path == rows[-1].path
    saved.writer.close()


def test_half_written_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    session = rule.session()
    session.prefill([70] * 50)
    saved = SavedSessions(tmp_path, "key", 1 << 20)
    row = saved.save(session, as_ids(session.tokens), None)
    saved.writer.close()
    old, young = (row.path.with_name(f".{name}.kvq-abc") for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert len(SavedSessions(tmp_path, "key", 1 << 20)) == 1
    assert (old.exists(), young.exists()) == (False, True)


def test_a_squeezed_session_is_not_reused_for_what_fits(rule: Rule) -> None:
    session = rule.session()
    session.sequence.cache.bytes_per_token = (1 << 20) / 100  # the budget holds 100 tokens
    slot = Slot(session)

    def reused(length: int) -> int:
        ids = [70] * length
        count = slot.align(ids)
        if session.pending_tokens:
            session.prefill()
        slot.settle()
        return count

    assert [reused(length) for length in (80, 90, 150, 160)] == [0, 80, 90, 150]
    # what was given up for 160 tokens would be missing from 60, so these are read anew
    assert [reused(length) for length in (60, 70)] == [0, 60]


# Leaving (SRV-13), a real process (SRV-14, SRV-22)


def test_leaving_ends_streams_with_an_error_and_refuses_newcomers(rule: Rule) -> None:
    backend = rule.backend
    with ExitStack() as stack:
        server = stack.enter_context(running(rule.load, sessions=1, grace_s=PATIENCE_S))
        backend.shut = True
        body = {"prompt": "abc", "max_tokens": 900, "stream": True}
        stream = stack.enter_context(send(server, COMPLETIONS, body))
        wait_until(lambda: server.pool.queue == (0, 1))
        queued = stack.enter_context(send(server, COMPLETIONS, {"prompt": "abc"}))
        wait_until(lambda: server.pool.queue == (1, 1))
        backend.let(5)
        wait_until(lambda: backend.arrivals == 6)
        server.stop()
        assert Reply(read_all(queued)).status == 503
        for path, ask_body in (("/health", None), (COMPLETIONS, {"prompt": "hi"})):
            reply = ask(server, path, ask_body)
            assert (reply.status, reply.json["error"]["code"]) == (503, "shutting_down")
        server.stop()
        wait_until(lambda: server.pool.stopping)
        backend.let(2)
        events = Reply(read_all(stream)).events
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert last["error"]["type"] == "unavailable_error"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert len(text) >= 5
    assert rule.text("abc", 10).startswith(text)


def test_a_short_answer_may_end_while_leaving(rule: Rule) -> None:
    backend = rule.backend
    with ExitStack() as stack:
        server = stack.enter_context(running(rule.load, sessions=1, grace_s=PATIENCE_S))
        backend.shut = True
        stream = stack.enter_context(send(server, COMPLETIONS, {"prompt": "abc", "max_tokens": 4}))
        wait_until(lambda: server.pool.queue == (0, 1))
        server.stop()
        wait_until(lambda: server.pool.draining)
        backend.open()
        assert Reply(read_all(stream)).json["choices"][0]["text"] == rule.text("abc", 4)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    import sys

    roots = os.pathsep.join(path for path in sys.path if path)
    folders = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "STATE", "CONFIG")}
    return {**folders, "PYTHONPATH": roots}


@pytest.mark.slow
def test_a_process_leaves_on_sigterm_and_comes_back_with_its_sessions(
    bundle: str, home: dict[str, str], tmp_path: Path
) -> None:
    prompt = "Secret words nobody logs: the quick brown fox jumps over the lazy dog. " * 3
    body = {"prompt": prompt, "max_tokens": 20, **GREEDY}
    with process(bundle, home, "--kv", "fp", "--debug") as server:
        assert server.facts["kv_budget_total"] == 4 * server.facts["kv_budget"]
        port = server.address.rpartition(":")[2]
        first = ask(server, COMPLETIONS, body)
        assert first.cached_tokens == 0
        with send(server, CHAT, chat("more", max_tokens=4000, stream=True)) as stream:
            stream.recv(1 << 12)
            code, complaint = server.end(signal.SIGTERM)
        assert (code, "Traceback" in complaint) == (0, False)
    assert "Secret words" not in complaint
    assert "sessions of" in complaint
    with process(bundle, home, "--kv", "fp", "--port", port) as server:
        assert server.address.rpartition(":")[2] == port
        again = ask(server, COMPLETIONS, body)
        # The last token is healed, the one before it gone through again for its logits.
        assert again.cached_tokens == first.json["usage"]["prompt_tokens"] - 2
        assert again.json["choices"] == first.json["choices"]
        # saved while idle: even a kill costs nothing
        later = {**body, "prompt": "Another text entirely. " * 8}
        text = ask(server, COMPLETIONS, later).json["choices"][0]["text"]
        wait_until(lambda: metric(server, "sessions_saved_total") >= 2)
        assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
    with process(bundle, home, "--kv", "fp") as server:
        reply = ask(server, COMPLETIONS, later)
        assert reply.cached_tokens > 30
        assert reply.json["choices"][0]["text"] == text
        assert server.end(signal.SIGINT)[0] == 0


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sessions", "0"], "--sessions 0 is not possible"),
        (["--port", "70000"], "--port 70000 is not possible"),
        (["--sessions-disk", "10tok"], "--sessions-disk 10tok is not possible"),
        (["--grace", "-1"], "--grace -1.0 is not possible"),
        (["a", "-m", "b"], "give the model once"),
        (["/nowhere/at/all", "--port", "0"], "there is no model at /nowhere/at/all"),
    ],
)
def test_bad_flags_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_open_door_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/nowhere/at/all", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "warning: 0.0.0.0 lets other machines in" in capsys.readouterr().err


def test_nothing_of_a_prompt_is_logged(
    rule: Rule, served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ask(served, CHAT, chat("my secret"))
    ask(served, COMPLETIONS, b'{"prompt": "my secret", ')
    rule.backend.fails_on[70] = ZeroDivisionError()
    assert (
        ask(served, COMPLETIONS, {"prompt": [70, *rule.tokenizer.encode("my secret")]}).status
        == 500
    )
    assert "a request failed" in caplog.text
    assert "secret" not in caplog.text


def test_a_session_file_is_not_trusted_for_its_ids(tmp_path: Path) -> None:
    rule = Rule(folder=tmp_path)
    with running(rule.load, sessions=1) as server:
        text = ask(server, COMPLETIONS, {"prompt": [70] * 100, "max_tokens": 3}).json
    (path,) = tmp_path.rglob("*.ids")
    path.write_bytes(as_ids([71] * 100).tobytes())
    with running(rule.load, sessions=1) as server:
        wrong = ask(server, COMPLETIONS, {"prompt": [71] * 100, "max_tokens": 3}).json
        right = ask(server, COMPLETIONS, {"prompt": [70] * 100, "max_tokens": 3}).json
    assert wrong["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert right["choices"] == text["choices"]


def test_numbers_may_be_whole_floats() -> None:
    assert parse_object(b'{"n": 2.0}').whole("n", 1, 4, 1) == 2
    assert saved_module.common_prefix(as_ids([1, 2, 3]), as_ids([1, 2, 4])) == 2
    assert saved_module.common_prefix(as_ids([]), as_ids([1])) == 0
