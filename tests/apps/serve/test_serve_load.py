"""A server under load: clients that leave, slow readers, a full queue, faults of the engine."""

import json
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.server import Server
from kvq_runtime.config import Sampling
from kvq_runtime.serving.job import Job
from kvq_runtime.serving.outbox import Delta, Finished, Outbox, Report, TokenLog
from kvq_runtime.serving.pool import SessionPool, measured_chunk
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.scheduler import Turns
from serving import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    Reply,
    Rule,
    ask,
    chat,
    connect,
    data,
    fault,
    loaded,
    metric,
    read_all,
    request_bytes,
    running,
    send,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("own_state")


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


def resources() -> tuple[int, int, int]:
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
            return server.pool.queue == (0, 0) and saved.has_room

        mixed(server, 100)
        # The thread that writes sessions begins with the first of them.
        wait_until(lambda: saved.saved and quiet())
        files, threads, before = resources()
        mixed(server, 1000)
        wait_until(quiet)
        # Each kind came a hundred times, so what any of them leaves would be a hundred; a few
        # descriptors and threads come and go by themselves.
        wait_until(lambda: resources()[0] < files + 10 and resources()[1] < threads + 10)
        assert resources()[2] - before < max(4 << 20, before // 50)
        assert not server.pool.busy
        assert not any(slot.busy for slot in server.pool.served.slots.all)
        assert len(rule.sessions) == 2
        counts = server.pool.counts
        assert counts.failed == 0
        assert counts.cancelled > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvq-writer"]
    assert list(tmp_path.rglob(".*")) == []


def test_requests_that_are_left_give_every_page_back(bundle: str) -> None:
    load = loaded(bundle, context_tokens=512)
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


@pytest.mark.slow
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
            wait_until(lambda: server.pool.running == (job,))  # an answer precedes its end
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


@pytest.mark.parametrize("readers", [1, 2])
def test_a_reader_that_never_reads_gives_way_to_who_waits(readers: int, tmp_path: Path) -> None:
    loud = Rule(detokenizer=Loud, folder=tmp_path)
    settings = {"stall_s": 3600.0, "contended_stall_s": 0.3}
    with ExitStack() as stack:
        server = stack.enter_context(running(loud.load, sessions=readers, **settings))
        for number in range(readers):
            dead = stack.enter_context(connect(server))
            dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            body = {"prompt": [70 + number] * 100, "max_tokens": 1500, "stream": True}
            dead.sendall(request_bytes("POST", COMPLETIONS, body))

        def stalled() -> list[float]:
            return [job.outbox.stalled_s() for job in server.pool.running]

        # As long as nobody waits they keep their slots.
        wait_until(lambda: len(stalled()) == readers and min(stalled()) > 0.6)
        assert metric(server, "jobs_cancelled_total") == 0
        started = time.monotonic()
        other = ask(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 2})
        assert time.monotonic() - started < 3.0
        assert len(other.json["choices"][0]["text"]) == 40_000
        # One waited, so one had to go; what it had computed is reused.
        assert metric(server, "jobs_cancelled_total") == 1
        cached = []
        for number in range(readers):
            # An answer precedes the end of its job: until then no slot is free.
            wait_until(lambda: len(server.pool.running) == readers - 1)
            body = {"prompt": [70 + number] * 100, "max_tokens": 1}
            cached.append(ask(server, COMPLETIONS, body).cached_tokens)
        assert sorted(cached) == [0] * (readers - 1) + [99]


def test_a_reader_that_never_reads_is_given_up_while_others_are_served(rule: Rule) -> None:
    backend, config = rule.backend, ServeConfig(sessions=2, chunk_tokens=16, stall_s=0.0)
    pool = SessionPool(lambda: rule.load(config), config, lambda: None)
    request = GenerationRequest(
        prompts=((70, 71),), sampling=Sampling(temperature=0), seed=1, rank=0, max_tokens=1000
    )
    read, dead = (Job(request, Outbox(limit, lambda: None)) for limit in (1 << 20, 1))
    backend.shut = True
    pool.start()
    wait_until(lambda: pool.ready)
    pool.submit(read)
    pool.submit(dead)
    for passes in range(1, 20):
        backend.let()
        wait_until(lambda count=passes: backend.arrivals > count)
    assert pool.running == (read,)
    backend.open()
    pool.stop()


def test_a_chat_with_another_model_waits_for_the_editor() -> None:
    """Two models share the processor: no pass of the chat's falls between those of a completion."""
    turns, chat_model, editor_model = Turns(), Rule(), Rule()
    order: list[str] = []
    for name, rule in (("chat", chat_model), ("editor", editor_model)):
        arrive = rule.backend.on_pass

        def noted(one_pass: Any, name: str = name, arrive: Any = arrive) -> None:
            order.append(name)
            arrive(one_pass)

        rule.backend.on_pass = noted
    config = ServeConfig(sessions=1, chunk_tokens=16, turns=turns)
    pools = [SessionPool(partial(rule.load, config), config, lambda: None)
             for rule in (chat_model, editor_model)]  # fmt: skip
    for pool in pools:
        pool.start()
    wait_until(lambda: all(pool.ready for pool in pools))
    jobs = [
        Job(
            GenerationRequest(
                prompts=((70, 71),), sampling=Sampling(temperature=0), seed=1, rank=rank,
                max_tokens=tokens,
            ),
            Outbox(1 << 20, lambda: None),
        )
        for rank, tokens in ((1, 1500), (0, 30))
    ]  # fmt: skip
    order.clear()
    pools[0].submit(jobs[0])
    wait_until(lambda: len(order) > 50)
    pools[1].submit(jobs[1])
    wait_until(lambda: not pools[1].busy and "editor" in order)
    first = order.index("editor")
    last = len(order) - order[::-1].index("editor")
    # A chat rises a rank after 16 passes of the editor's.
    assert order[first:last].count("editor") >= 30
    assert order[first:last].count("chat") <= 3
    assert pools[0].busy
    for pool in pools:
        pool.stop()


# Long texts


@pytest.mark.slow
def test_long_texts_hold_up_no_ordinary_request(tiny: Server) -> None:
    texts = ["a" * (15 << 20), "x1+" * (5 << 20), "+" * (15 << 20), "a b1" * (3 << 20)] * 2
    waits: list[float] = []
    with ThreadPoolExecutor(len(texts)) as threads:
        long = [threads.submit(ask, tiny, "/tokenize", {"content": text}) for text in texts]
        while not all(future.done() for future in long):
            started = time.monotonic()
            assert ask(tiny, "/tokenize", {"content": "def f(x): return x"}).status == 200
            waits.append(time.monotonic() - started)
    assert [future.result().status for future in long] == [400] * len(texts)
    assert len(waits) > 3
    assert sorted(waits)[len(waits) // 2] < 1.0
    assert max(waits) < 10.0


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
        answers: list[dict[str, Any]] = reply["choices"]
        written = sum(len(choice["logprobs"]["tokens"]) for choice in answers)
        assert reply["usage"]["completion_tokens"] - written in range(count + 1)  # ends are hidden
        return answers

    with running(rule.load, sessions=1) as server:
        # 16 tokens of each of 4 fit the rows of a branch; 18 do not, and are written in turn.
        together, apart = choices(4, 16), choices(4, 18)
        letter = together[0]["text"][2]
        stopped = choices(4, 16, stop=[letter])
    assert len({choice["text"] for choice in together}) == 4
    assert [len(pass_rows[0]) for pass_rows in rule.backend.passes[1:16]] == [4] * 15
    for choice, longer in zip(together, apart, strict=True):
        assert longer["text"].startswith(choice["text"])
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            assert longer["logprobs"][key][:16] == choice["logprobs"][key]
    for choice, whole in zip(stopped, together, strict=True):
        assert choice["text"] == whole["text"].split(letter)[0]
        assert choice["finish_reason"] == ("stop" if letter in whole["text"] else "length")


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
