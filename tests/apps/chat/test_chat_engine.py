"""The chat on a real tiny model in this process, and on a server over HTTP."""

import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from textual.pilot import Pilot

from chat_pilot import meter, run, say, send, shown, until
from kvq import native_library
from kvq.errors import BackendError, BudgetError, ModelError, SnapshotError, UsageError
from kvq.formats import format_bytes
from kvq_apps.chat import threads
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import ContextFullError, EngineLostError, Stream, Turn
from kvq_apps.chat.history import History
from kvq_apps.chat.local import LocalClient
from kvq_apps.chat.messages import Message
from kvq_apps.chat.meter import kv_part
from kvq_apps.chat.plain import PlainChat
from kvq_apps.chat.remote import RemoteClient
from kvq_apps.terminal.output import storable
from kvq_export.export import export_model
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.answer.drafter import Draft, Drafter, Round
from kvq_runtime.config import Sampling
from serving import process
from shelf import EIGHT, PLAIN, Shelf
from tiny import CONTROL_TOKENS, make_llama_checkpoint

GREEDY = Sampling(temperature=0)
GREEDY_OVERRIDES = {"temperature": 0}
FLOATS = {"k_bits": 16, "v_bits": 16}


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(max_position_embeddings=1024, rope_theta=11000.0))


def local(bundle: str, **session: Any) -> LocalClient:
    return LocalClient(
        bundle,
        engine_options={"threads": 1, "backend": "float"},
        session_options={"k_bits": 4, "v_bits": 2, **session},
    )


def turn(*texts: str, max_tokens: int = 8, sampling: Sampling = GREEDY) -> Turn:
    roles = ("user", "assistant")
    rows = [Message(role=roles[index % 2], text=text) for index, text in enumerate(texts)]
    return Turn(messages=rows, sampling=sampling, max_tokens=max_tokens)


def answer(client: LocalClient, *texts: str, **options: Any) -> tuple[str, Any]:
    stream = Stream()
    client.reply(turn(*texts, **options), stream)
    update = stream.take()
    return update.text, update.stats


def test_a_resumed_chat_goes_on_as_if_never_closed(bundle: str, tmp_path: Path) -> None:
    question = "a long question about pages and plans " * 4
    open_all_along = local(bundle)
    open_all_along.open()
    first, _ = answer(open_all_along, question)
    saved = tmp_path / "x.kv"
    assert open_all_along.save(saved)
    second, kept = answer(open_all_along, question, first, "and now?")
    open_all_along.close()

    resumed = local(bundle)
    resumed.open()
    tokens = resumed.restore(saved).context_tokens
    again, stats = answer(resumed, question, first, "and now?")
    assert (again, stats.prompt_tokens) == (second, kept.prompt_tokens)
    assert stats.cached_tokens == kept.cached_tokens
    # The question is cached to its last token; what was answered may be cut into other tokens.
    prompt = tokens - 8
    assert stats.cached_tokens >= prompt
    assert stats.kv_bytes == kept.kv_bytes
    resumed.close()


def test_a_snapshot_of_other_settings_is_refused(bundle: str, shelf: Shelf, tmp_path: Path) -> None:
    client = local(bundle)
    client.open()
    answer(client, "hello")
    client.save(tmp_path / "x.kv")
    client.close()
    for other in ({"k_bits": 8}, {"v_bits": 4}, {"context_tokens": 512}, {"kv_budget": "2MiB"}):
        client = local(bundle, **other)
        client.open()
        with pytest.raises(SnapshotError, match="another"):
            client.restore(tmp_path / "x.kv")
        _, stats = answer(client, "hello")
        assert stats.cached_tokens == 0
        client.close()
    other = shelf.bundle(max_position_embeddings=1024, rope_theta=500_000.0)
    client = local(str(other))
    client.open()
    with pytest.raises(SnapshotError, match="another"):
        client.restore(tmp_path / "x.kv")
    client.close()
    client = local(bundle)
    client.open()
    damaged = bytearray((tmp_path / "x.kv").read_bytes())
    damaged[300] ^= 1
    (tmp_path / "x.kv").write_bytes(damaged)
    for path in (tmp_path / "x.kv", tmp_path / "missing.kv"):
        with pytest.raises(SnapshotError):
            client.restore(path)
    client.close()


def test_only_what_differs_is_encoded(bundle: str) -> None:
    client = local(bundle)
    client.open()
    first, stats = answer(client, "one two three four five")
    assert stats.cached_tokens == 0
    _, stats = answer(client, "one two three four five", first, "more")
    assert stats.cached_tokens > 10
    edited, stats = answer(client, "one two three four SIX")
    assert stats.cached_tokens >= 10
    fresh = local(bundle)
    fresh.open()
    assert answer(fresh, "one two three four SIX")[0] == edited
    client.begin()
    assert answer(client, "one two three four SIX")[1].cached_tokens == 0
    client.close()
    fresh.close()


def test_of_an_edited_message_only_the_change_is_encoded(bundle: str) -> None:
    """CHAT-16; and `/exact` makes the chat one that was never edited."""
    client, fresh = local(bundle, **FLOATS), local(bundle, **FLOATS)
    client.open()
    fresh.open()
    question = "one two three " + "four five six seven eight nine ten " * 8
    edited = question.replace("one", "ONE")
    first, _ = answer(client, question)
    answer(client, question, first, "more")
    stream = Stream()
    request = replace(turn(edited), edited=turn(question).messages)
    client.reply(request, stream)
    stats = stream.take().stats
    assert stats is not None
    assert 0 < stats.encoded_tokens < stats.prompt_tokens / 4
    session = client._session
    assert session is not None
    tokens_before = session.tokens
    assert client.reread(Stream()) > stats.prompt_tokens / 2
    assert client.reread(Stream()) == 0
    assert session.tokens == tokens_before
    text, _ = answer(client, edited)
    assert text == answer(fresh, edited)[0]
    client.close()
    fresh.close()


@pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
def test_exact_computes_what_was_predicted_of_a_prompt(shelf: Shelf) -> None:
    path = str(shelf.bundle(EIGHT, num_hidden_layers=4))
    options = {"predict": "50%", "kv": "8:8"}
    client = LocalClient(path, engine_options={"threads": 1}, session_options=options)
    client.open()
    _, stats = answer(client, "The quick brown fox. " * 20, max_tokens=4)
    assert stats.predicted_tokens > 50
    session = client._session
    assert session is not None
    assert client.reread(Stream()) > stats.predicted_tokens
    assert (session.stats().edits.predicted_tokens, session.exact) == (0, True)
    client.close()


def test_a_chat_is_sampled_as_the_model_asks(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source")
    asks = {"do_sample": True, "temperature": 0.6, "top_k": 9}
    (source / "generation_config.json").write_text(json.dumps(asks))
    path = str(export_model(source, tmp_path / "bundle", PLAIN).path)
    turns: list[Turn] = []

    class Watched(LocalClient):
        def reply(self, turn: Turn, stream: Stream) -> str:
            turns.append(turn)
            return super().reply(turn, stream)

    def client() -> Watched:
        return Watched(path, engine_options={"threads": 1}, session_options={})

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        assert app.controller.settings.lines()[0].startswith("temp 0.6, top-k 3, top-p 0.95, ")
        await say(app, pilot, "hi")
        await say(app, pilot, "/set temp 0.1")
        await say(app, pilot, "hi")

    # A flag comes before the model, and what /set says before both.
    run(script, client(), sampling_overrides={"top_k": 3}, max_tokens=2)
    actual = [(turn.sampling.temperature, turn.sampling.top_k) for turn in turns]
    assert actual == [(0.6, 3), (0.1, 3)]
    plain = PlainChat(client(), ChatSettings(max_tokens=2), lambda _: None, "")
    plain.answer("hi")
    plain.close()
    assert turns[-1].sampling == Sampling(temperature=0.6, top_k=9)


def test_the_statistics_are_the_sessions_own(bundle: str) -> None:
    client = local(bundle)
    facts = client.open()
    _, stats = answer(client, "hello there")
    session = client._session
    assert session is not None
    counted = session.stats()
    assert stats.ttft_ms == counted.ttft_ms
    assert stats.decode_tok_s == counted.decode_tok_s
    assert stats.kv_bytes == counted.kv_bytes <= facts.kv_budget == counted.kv_budget
    assert (stats.mean_k_bits, stats.mean_v_bits) == (16, 16)
    assert stats.evicted_share == counted.held.evicted_share == 0
    assert stats.context_tokens == len(session.tokens)
    assert stats.prompt_tokens == counted.prompt_tokens
    assert (facts.k_bits, facts.v_bits) == (4, 2)
    client.close()


def test_kv_settings_change_with_the_conversation_kept(bundle: str) -> None:
    client = local(bundle)
    client.open()
    first, _ = answer(client, "hello there")
    stream = Stream()
    facts = client.change_kv(8, 8, "3MiB", stream)
    assert (facts.k_bits, facts.v_bits, facts.kv_budget) == (8, 8, 3 << 20)
    assert stream.take().prefill_progress is not None
    _, stats = answer(client, "hello there", first, "more")
    assert stats.cached_tokens > 0
    with pytest.raises(BudgetError):
        client.change_kv(None, None, "1KiB", Stream())
    stopped = Stream()
    stopped.cancel()
    with pytest.raises(UsageError, match="stay as they were"):
        client.change_kv(4, 4, None, stopped)
    assert answer(client, "hello there")[1].cached_tokens > 0
    client.close()


def test_a_conversation_that_does_not_fit_is_refused_before_it_starts(bundle: str) -> None:
    client = local(bundle, context_tokens=64)
    client.open()
    with pytest.raises(ContextFullError) as refused:
        answer(client, "word " * 100)
    assert refused.value.limit == 64 < refused.value.needed
    endless = replace(GREEDY, logit_bias=dict.fromkeys(range(len(CONTROL_TOKENS)), -math.inf))
    _, stats = answer(client, "ho", max_tokens=200, sampling=endless)
    assert stats.context_tokens == 64
    client.close()


def test_the_whole_app_on_a_model(bundle: str, tmp_path: Path) -> None:
    texts: list[str] = []

    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hello")
        texts.append(app.controller.conversation.messages[-1].text)
        assert app.controller.engine.facts is not None
        assert f"/{format_bytes(app.controller.engine.facts.kv_budget)} K4V2" in meter(app)
        assert app.controller.engine.stats.kv_bytes > 0
        assert app.controller.engine.stats.encoded_tokens > 0

    options = {"sampling_overrides": GREEDY_OVERRIDES, "max_tokens": 6, "folder": tmp_path}
    run(first, local(bundle), **options)

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        (tokens,) = re.findall(r"KV cache restored: (\d+) tokens", shown(app))
        assert int(tokens) > 10
        stats = app.controller.engine.stats
        assert (stats.context_tokens, stats.prompt_tokens) == (int(tokens), 0)
        assert f"context {tokens}/1024" in meter(app)
        assert stats.kv_bytes > 0
        await say(app, pilot, "/retry")
        assert app.controller.conversation.messages[-1].text == texts[0]
        assert app.controller.engine.stats.encoded_tokens <= 1

    run(second, local(bundle), latest=True, **options)


def test_a_reply_that_was_cut_goes_on_as_if_it_was_not(bundle: str, tmp_path: Path) -> None:
    uncut = local(bundle)
    uncut.open()
    whole, _ = answer(uncut, "hello", max_tokens=12)
    # Random weights write bytes that are no characters: it is cut between two characters.
    shorter = {limit: answer(uncut, "hello", max_tokens=limit)[0] for limit in range(7, 2, -1)}
    limit = next(
        limit
        for limit, text in shorter.items()
        if whole.startswith(text) and not text.endswith("\ufffd")
    )
    uncut.close()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "/more")
        assert "there is no reply to go on with" in shown(app)
        await say(app, pilot, "hello")
        message = app.controller.conversation.messages[-1]
        assert (message.state, len(message.text) < len(whole)) == ("length", True)
        assert "the reply was cut at its limit of" in words(app)
        assert f"{limit} tokens; /more goes on with it" in words(app)
        await say(app, pilot, f"/set predict {12 - limit}")
        await say(app, pilot, "/more")
        assert app.controller.engine.stats.encoded_tokens <= 1
        assert message.text == storable(whole)
        assert app.controller.conversation.messages[-1] is message

    run(
        script,
        local(bundle),
        folder=tmp_path,
        sampling_overrides=GREEDY_OVERRIDES,
        max_tokens=limit,
    )
    history = History(tmp_path / "chats.sqlite3")
    _, reply = history.branch(history.chats()[0].id)
    assert (reply.text, reply.state) == (storable(whole), "length")
    history.close()


def words(app: ChatApp) -> str:
    return " ".join(shown(app).split())


def test_a_chat_opens_the_model_it_was_written_with(
    bundle: str, shelf: Shelf, tmp_path: Path
) -> None:
    other = str(shelf.bundle(max_position_embeddings=1024, rope_theta=500_000.0))
    made: list[str] = []

    def client_for(name: str) -> LocalClient:
        made.append(name)
        return local(name)

    async def talk(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hello")

    async def resume(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.controller.client_for = client_for
        await until(pilot, lambda: app.controller.idle)
        history = History(tmp_path / "chats.sqlite3")
        (chat,) = history.chats()
        history.close()
        assert chat.model == bundle
        app.controller.do(partial(app.controller.resume_chat, chat.id))
        await until(pilot, lambda: app.controller.idle)
        await say(app, pilot, "and now?")
        # At last: which model's cache was taken, and which one is remembered.
        facts = app.controller.engine.facts
        assert facts is not None
        assert app.controller.conversation.model == facts.lasting_name

    options = {"folder": tmp_path, "max_tokens": 4}
    run(talk, local(bundle), **options)
    app = run(resume, local(other), **options)
    assert made == [bundle]
    assert "KV cache restored" in shown(app)
    assert app.controller.conversation.model == bundle
    made.clear()
    app = run(resume, local(other), model_pinned=True, **options)
    assert made == []
    name = Path(bundle).name
    assert f"this chat was written with {name}; " in shown(app)
    assert app.controller.conversation.model == other


def test_a_chat_changed_live_is_resumed_as_it_was(bundle: str, tmp_path: Path) -> None:
    async def first(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hello")
        await say(app, pilot, "/kv 8:4")

    async def second(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        facts = app.controller.engine.facts
        assert facts is not None
        assert (facts.k_bits, facts.v_bits) == (8, 4)
        assert f"KV cache restored at 8:4 in {format_bytes(facts.kv_budget)}: " in shown(app)
        await say(app, pilot, "/retry")
        assert app.controller.engine.stats.encoded_tokens <= 1

    async def smaller(app: ChatApp, pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: app.controller.idle)
        (said,) = (message.text for message in app.transcript.messages if not message.id)
        assert said.startswith("the KV cache is not restored (")
        assert said.endswith("): the next reply encodes the chat again")
        assert "{" not in said
        assert str(tmp_path) not in said

    options = {"sampling_overrides": GREEDY_OVERRIDES, "max_tokens": 6, "folder": tmp_path}
    run(first, local(bundle), **options)
    run(second, local(bundle), latest=True, **options)
    run(smaller, local(bundle, context_tokens=512), latest=True, **options)


class Guesser(Drafter):
    """Guesses two tokens of the text it knows and a wrong one; notes what became of them."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.rounds: list[tuple[int, int, int]] = []
        self._tokens: list[int] = []

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self._tokens[kept:] = new

    def propose(self, room: int) -> Draft:
        right = self.text[len(self._tokens) : len(self._tokens) + 2]
        wrong = self.text[len(self._tokens) + len(right) :][:1]
        guessed = (*right, *(token ^ 1 for token in wrong))[:room]
        return Draft(ids=guessed if self._tokens == self.text[: len(self._tokens)] else ())

    def observe(self, outcome: Round) -> None:
        self.rounds.append((outcome.drafted, outcome.accepted, len(outcome.tokens)))


def never_ending(client: LocalClient) -> dict[int, float]:
    """Forbid the tokens that end an answer: where a random model ends differs among processors."""
    assert client._engine is not None
    return dict.fromkeys(client._engine.tokenizer.eos_ids, -math.inf)


def test_the_meter_says_what_the_drafter_was_good_for(bundle: str) -> None:
    plain = local(bundle)
    plain.open()
    greedy = GREEDY_OVERRIDES | {"logit_bias": never_ending(plain)}
    answer(plain, "hello there", max_tokens=20, sampling=Sampling(**greedy))
    assert plain._session is not None
    guesser = Guesser(list(plain._session.tokens))
    plain.close()

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await say(app, pilot, "hello there")
        assert app.controller.engine.stats.new_tokens == 20
        # The first token is the prompt's; then two guesses are right and the model adds one, six
        # times, and once more there is room for one guess.
        assert guesser.rounds == [(3, 2, 3)] * 6 + [(0, 0, 1)]
        assert "  drafts 12/18, 2.7 a pass  " in meter(app)
        # Another question's answer is not what the drafter knows.
        await say(app, pilot, "something else")
        assert "drafts" not in meter(app)

    client = local(bundle, draft=lambda: guesser)
    run(script, client, sampling_overrides=greedy, max_tokens=20, size=(160, 24))


def drafted(client: LocalClient, *texts: str, count: int, max_tokens: int) -> list[str]:
    """The drafts of a reply, drawn with a seed."""
    stream = Stream()
    bias = never_ending(client)
    sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, logit_bias=bias)
    request = replace(turn(*texts, max_tokens=max_tokens), sampling=sampling, seed=5)
    reasons = client.drafts(request, count, stream)
    assert set(reasons) <= {"stop", "length"}
    texts_of = stream.take().texts
    return [texts_of.get(number, "") for number in range(count)]


def test_drafts_differ_and_leave_nothing_in_the_next_answer(bundle: str) -> None:
    client = local(bundle)
    client.open()
    drafts = drafted(client, "hello there", count=2, max_tokens=40)
    assert len(set(drafts)) == 2
    text, stats = answer(client, "hello there")
    fresh = local(bundle)
    fresh.open()
    assert answer(fresh, "hello there")[0] == text
    assert stats.encoded_tokens <= 1
    fresh.close()
    client.close()


def test_a_model_without_a_chat_template_is_refused_at_the_start(bundle: str) -> None:
    says = "has no chat template, so it cannot chat; `kvq run -m .*` continues plain text, and `def"
    with pytest.MonkeyPatch.context() as patch:
        without = property(lambda tokenizer: None, lambda tokenizer, template: None)
        patch.setattr(Tokenizer, "chat_template", without, raising=False)
        with pytest.raises(ModelError, match=says):
            local(bundle).open()
    with server(b"") as (url, _), pytest.MonkeyPatch.context() as patch:
        rows = [{"id": "m", "meta": {"kbits": 4, "chat": False}}]
        patch.setitem(globals(), "MODELS", {"data": rows})
        with pytest.raises(ModelError, match="cannot chat; its /v1/completions continues"):
            RemoteClient(url).open()


# Over HTTP

MODELS = {"data": [{"id": "m", "meta": {"n_ctx": 512, "kbits": 4, "vbits": 2}}]}


def sse(*events: dict[str, Any] | str) -> bytes:
    rows = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
    return "".join(f"{row}\n\n" for row in rows).encode()


def delta(text: str | None, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


@contextmanager
def server(
    body: bytes, *, status: int = 200, stays: threading.Event | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server with one answer; with `stays` it keeps the connection open until then."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps(MODELS).encode())

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            requests.append(
                json.loads(self.rfile.read(length)) | {"key": self.headers["Authorization"]}
            )
            self._send(status, body)
            if stays is not None:
                stays.wait(300)

        def _send(self, code: int, content: bytes) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", requests
    finally:
        if stays is not None:
            stays.set()
        running.shutdown()
        running.server_close()
        thread.join()


def test_a_reply_over_http() -> None:
    usage = {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "timings": {"prompt_ms": 12.5, "predicted_per_second": 40.0},
        "x_kvq": {
            "kv_bytes": 1000,
            "auxiliary_bytes": 2048,
            "mean_k_bits": 6.5,
            "mean_v_bits": 4.25,
            "evicted_share": 0.125,
        },
    }  # fmt: skip
    body = sse(": ping", delta("Hel"), delta("lo 👋"), delta(None, "stop"), usage, "data: [DONE]")
    with server(body) as (url, requests):
        client = RemoteClient(f"{url}/v1", api_key="secret")
        facts = client.open()
        assert (facts.model, facts.context_tokens, facts.k_bits, facts.v_bits) == ("m", 512, 4, 2)
        stream = Stream()
        assert client.reply(turn("hi"), stream) == "stop"
        update = stream.take()
        assert update.text == "Hello 👋"
        assert update.stats is not None
        assert (update.stats.encoded_tokens, update.stats.cached_tokens) == (5, 4)
        assert kv_part(facts, update.stats).endswith("K4V2 + 2.0 KiB auxiliary")
        assert (update.stats.ttft_ms, update.stats.decode_tok_s, update.stats.kv_bytes) == (
            12.5,
            40,
            1000,
        )
        assert (update.stats.mean_k_bits, update.stats.mean_v_bits) == (6.5, 4.25)
        assert update.stats.evicted_share == 0.125
    assert requests[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert requests[0]["key"] == "Bearer secret"
    assert (requests[0]["model"], requests[0]["max_tokens"], requests[0]["stream"]) == (
        "m",
        8,
        True,
    )


def test_drafts_over_http() -> None:
    def of(draft: int, text: str | None, reason: str | None = None) -> dict[str, Any]:
        event = delta(text, reason)
        event["choices"][0]["index"] = draft
        return event

    body = sse(of(1, "two"), of(0, "o"), of(0, "ne"), of(0, None, "stop"), of(1, None, "length"))
    with server(body) as (url, requests):
        client = RemoteClient(url)
        client.open()
        stream = Stream()
        assert client.drafts(turn("hi"), 2, stream) == ["stop", "length"]
        assert stream.take().texts == {0: "one", 1: "two"}
        assert requests[0]["n"] == 2
        with pytest.raises(BackendError, match="wrote 2 of 3 drafts, it does not stream several"):
            client.drafts(turn("hi"), 3, Stream())


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (200, sse(delta("half")), EngineLostError, "too early"),
        (200, sse(delta("a"), {"error": {"message": "out of\nluck"}}), BackendError, "out of luck"),
        (500, b"<html>", BackendError, "status 500"),
        (200, b"data: {oops\n\n", BackendError, "no JSON"),
        (503, b'{"error": {"message": "loading"}}', EngineLostError, "not ready: loading"),
        (200, sse(delta("a"), {"error": {"message": "leaving", "type": "unavailable_error"}}),
         EngineLostError, "not ready: leaving"),
        (429, b'{"error": {"message": "busy", "code": null}}', BackendError, "busy"),
        (400, b'{"error": {"message": "x", "code": "context_length_exceeded"}}',
         ContextFullError, "begin a new chat"),
    ],
)  # fmt: skip
def test_faults_over_http(status: int, body: bytes, error: type[Exception], says: str) -> None:
    with server(body, status=status) as (url, _):
        client = RemoteClient(url)
        client.open()
        with pytest.raises(error, match=says) as raised:
            client.reply(turn("hi"), Stream())
        # Two lines of a usual terminal at most.
        assert len(str(raised.value)) < 160


def test_what_is_no_model_server_is_said() -> None:
    with server(b"") as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "MODELS", ["nothing"])
        with pytest.raises(BackendError, match="does not list its models"):
            RemoteClient(url).open()


def endless_bundle(folder: Path) -> str:
    """A model that answers to the end of a long context: control tokens never win."""
    checkpoint = make_llama_checkpoint(folder / "tiny", max_position_embeddings=65536)
    weights = load_file(checkpoint / "model.safetensors")
    weights["lm_head.weight"][: len(CONTROL_TOKENS)] = 0
    save_file(weights, checkpoint / "model.safetensors")
    return str(export_model(checkpoint, folder / "bundle", PLAIN).path)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real `kvq serve`: kill -9 while it answers, then another one on the same port."""
    monkeypatch.setattr(threads, "RETRY_S", (0.05, 0.1))
    bundle = endless_bundle(tmp_path)
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    with process(bundle, home) as first:
        url, port = first.address, first.address.rpartition(":")[2]

        async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
            await send(app, pilot, "go")
            await until(pilot, lambda: len(app.controller.conversation.messages[-1:]) == 1
                        and len(app.controller.conversation.messages[-1].text) > 20)  # fmt: skip
            first.process.kill()
            first.process.wait()
            await until(pilot, lambda: app.controller.engine.activity == "engine lost, retrying")
            answer = app.controller.conversation.messages[-1]
            partial = answer.text
            assert (answer.role, answer.state) == ("assistant", "failed")
            assert len(partial) > 20
            assert "engine lost, retrying" in meter(app)
            with process(bundle, home, "--port", port):
                await until(pilot, lambda: app.controller.idle)
                text = " ".join(shown(app).split())
                assert "the engine is back; Enter in the empty prompt asks again" in text
                assert "Traceback" not in text
                app.controller.settings.max_tokens = 5
                await pilot.press("enter")
                await until(
                    pilot,
                    lambda: (
                        app.controller.idle and answer not in app.controller.conversation.messages
                    ),
                )
                again = app.controller.conversation.messages[-1]
                assert (again.state, again.branch, again.branches) == ("length", 2, 2)
                await pilot.press("alt+p")
                await pilot.press("enter")
                await until(pilot, lambda: app.controller.conversation.messages[-1].text == partial)

        app = run(
            script,
            RemoteClient(url),
            folder=tmp_path,
            max_tokens=60000,
            sampling_overrides=GREEDY_OVERRIDES,
        )
    assert app.controller.conversation.messages[-1].state == "failed"


def test_a_server_that_is_silent_can_be_left() -> None:
    with server(sse(delta("wait")), stays=threading.Event()) as (url, _):
        client = RemoteClient(url)
        client.open()
        stream, ended = Stream(), []
        thread = threading.Thread(target=lambda: ended.append(client.reply(turn("hi"), stream)))
        thread.start()
        while not stream.take().text:
            pass
        stream.cancel()
        thread.join(20)
        assert ended == ["cancelled"]


def test_no_server_and_no_such_model() -> None:
    with server(b"") as (url, _):
        with pytest.raises(ModelError, match="serves m"):
            RemoteClient(url, model="other").open()
        gone = url
    with pytest.raises(EngineLostError, match="start it with `kvq serve`"):
        RemoteClient(gone).open()
    for bad in ("ftp://x", "http://", "", "http://host:port", "http://host:99999", "http://[::1"):
        with pytest.raises(UsageError, match="--server"):
            RemoteClient(bad)


def test_the_server_decides_its_kv() -> None:
    with pytest.raises(BackendError, match="kvq serve --kv"):
        RemoteClient("http://127.0.0.1:1").change_kv(4, 2, None, Stream())


def test_a_line_end_in_two_pieces_is_one_newline() -> None:
    stream, text = Stream(), ""
    for piece in ("a\r", "", "\nb\r", "c\n", "\nd\r\n", "\n"):
        stream.write(piece)
        stream.write("\n", draft=1)
        text += storable(stream.take().text)
    assert text == "a\nb\nc\n\nd\n\n"


def test_a_number_no_machine_counts_to_is_refused() -> None:
    settings = ChatSettings()
    with pytest.raises(
        UsageError, match=r"top_k 10+ is not possible: give 0 \(off\) to 2147483647"
    ):
        settings.change("top-k 1" + "0" * 400)
    assert settings.change("top-k 7") == "top-k is 7 from the next reply on"
