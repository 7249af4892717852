"""`kvq serve` from outside: the official client, the wire, health and metrics, its command line."""

import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
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
from kvq_apps.serve.hosted_app import HostedApp
from kvq_apps.serve.http_app import prometheus_text
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.server import Server
from kvq_runtime.answer.drafter import DraftContext
from kvq_runtime.config import Sampling
from kvq_runtime.serving.saving import as_ids
from kvq_runtime.session.session import Session
from kvq_specdraft.lookup import Lookup
from serving import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    PATIENCE_S,
    Rule,
    ask,
    chat,
    client,
    data,
    loaded,
    metric,
    process,
    running,
    wait_until,
)
from shelf import Shelf
from tiny import make_llama_checkpoint

pytestmark = pytest.mark.usefixtures("own_state")


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
        completion = sdk.completions.create(prompt="The quick", logprobs=3, **settings)
        both = sdk.completions.create(prompt=["The quick", "hi"], **settings)
        ids = sdk.completions.create(prompt=[[70, 71], [72]], **settings)
        talk = sdk.chat.completions.create(
            **{**settings, **chat("hi")}, logprobs=True, top_logprobs=2
        )
    (choice,) = completion.choices
    assert [other.index for other in both.choices] == [0, 1]
    assert both.choices[0].text == choice.text
    assert ids.usage.prompt_tokens == 3
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
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
        ({"model": "bundle", "temperature": -1}, openai.BadRequestError),
        ({"model": "bundle", "prompt": "word " * 600}, openai.BadRequestError),
    ],
)
def test_errors_map_to_the_clients_classes(
    settings: dict[str, Any], error: type[openai.APIStatusError], tiny: Server
) -> None:
    with client(tiny) as sdk, pytest.raises(error) as raised:
        sdk.completions.create(**{"prompt": "hi"} | settings)
    assert raised.value.type == "invalid_request_error"


def test_a_model_answers_to_any_name_unless_the_server_is_strict(
    bundle: str, tmp_path: Path, home: dict[str, str]
) -> None:
    half = tmp_path / "half"
    half.symlink_to(bundle)
    names = ("half", str(half), "bundle", "default", "mine")
    request = {"prompt": "hi", "max_tokens": 2, **GREEDY}
    with (
        process(str(half), home, "--strict-model", "--alias", "mine") as server,
        client(server) as sdk,
    ):
        text = sdk.completions.create(model="half", **request).choices[0].text
        for name in names:
            completion = sdk.completions.create(model=name, **request)
            assert (completion.model, completion.choices[0].text) == ("bundle", text)
            assert sdk.models.retrieve(name).id == "bundle"
        (row,) = sdk.models.list().data
        assert {row.id, *row.aliases} >= set(names)
        for ask_for in (
            lambda: sdk.completions.create(model="other", **request),
            lambda: sdk.models.retrieve("other"),
        ):
            with pytest.raises(openai.NotFoundError) as raised:
                ask_for()
            assert (raised.value.code, raised.value.param) == ("model_not_found", "model")
            assert all(name in raised.value.message for name in names)
        chat = RemoteClient(server.address, model="mine")
        assert chat.open().model == "mine"
    with running(loaded(bundle, context_tokens=512), saved_bytes=0) as open_server:
        for name in ("other", "gpt-4o", "/a/path"):
            reply = ask(open_server, COMPLETIONS, request | {"model": name})
            assert (reply.json["model"], reply.json["choices"][0]["text"]) == ("bundle", text)
            assert ask(open_server, f"/v1/models/{name}").json["id"] == "bundle"


def test_a_path_that_is_not_there_is_told_those_that_are(tiny: Server) -> None:
    message = ask(tiny, "/v1/chat").json["error"]["message"]
    for route in ("POST /v1/chat/completions", "GET /v1/models/NAME", "GET /props", "POST /infill"):
        assert route in message


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/completion"])
def test_minus_one_means_as_much_as_fits(path: str, rule: Rule) -> None:
    rule.context_tokens = 90
    request = chat("ab", **GREEDY) if path == CHAT else {"prompt": "ab", **GREEDY}
    with running(rule.load, sessions=1) as server:
        prompt_tokens = len(ask(server, "/tokenize", {"content": "ab"}).json["tokens"])
        if path == CHAT:
            prompt = ask(server, "/apply-template", request).json["prompt"]
            row = {"content": prompt, "parse_special": True}
            prompt_tokens = len(ask(server, "/tokenize", row).json["tokens"])
        names = ["n_predict"] if path == "/completion" else ["max_tokens", "n_predict"]
        names += ["max_completion_tokens"] * (path == CHAT)
        for name in names:
            reply = ask(server, path, {**request, name: -1}).json
            # The last token that is written is not read any more.
            assert reply["timings"]["predicted_n"] in (90 - prompt_tokens, 91 - prompt_tokens)
            assert ask(server, path, {**request, name: 3}).json["timings"]["predicted_n"] == 3
        if path == CHAT:
            none = ask(server, path, {**request, "n_predict": 0}).json
            assert none["usage"]["completion_tokens"] == 0
            assert none["choices"][0]["finish_reason"] == "length"


def test_many_stop_strings_are_taken(rule: Rule) -> None:
    with running(rule.load, sessions=1) as server:
        text = rule.text("ab", 30)
        stops = [f"{number}~" for number in range(63)]
        body = {"prompt": "ab", "max_tokens": 30, **GREEDY}
        for path, field in ((COMPLETIONS, "max_tokens"), ("/completion", "n_predict")):
            request = {"prompt": "ab", field: 30, "stop": [*stops, text[7:9]], **GREEDY}
            reply = ask(server, path, request).json
            content = reply["content"] if "content" in reply else reply["choices"][0]["text"]
            assert content == text[: text.index(text[7:9])]
            over = ask(server, path, request | {"stop": [*stops, "x", "y"]})
            assert (over.status, over.json["error"]["param"]) == (400, "stop")
        assert ask(server, COMPLETIONS, body | {"stop": stops}).json["choices"][0]["text"] == text


def test_the_models_own_sampling_holds_where_nobody_says_otherwise(shelf: Shelf) -> None:
    said = {"do_sample": True, "temperature": 0.55, "top_k": 7, "repetition_penalty": 1.25}
    bundle = str(shelf.exported(generation(shelf, said)))
    sampling = {"temperature": 0.55, "top_k": 7, "top_p": 0.95, "repeat_penalty": 1.25}
    with running(loaded(bundle, context_tokens=512), saved_bytes=0) as server:
        props = ask(server, "/props").json["default_generation_settings"]
        assert props["params"].items() >= sampling.items()
        body = {"prompt": "The quick", "max_tokens": 24, "seed": 5}
        plain = ask(server, COMPLETIONS, body).json["choices"][0]["text"]
        same = ask(server, COMPLETIONS, body | sampling).json["choices"][0]["text"]
        kvqs = {"temperature": 0.8, "top_k": 40, "repeat_penalty": 1}
        other = ask(server, COMPLETIONS, body | kvqs).json["choices"][0]["text"]
        assert plain == same != other
        remote = RemoteClient(server.address)
        assert remote.open().sampling == Sampling(temperature=0.55, top_k=7, repeat_penalty=1.25)
    # A flag's value comes before the model's.
    flags = {"temperature": 0.8, "repeat_penalty": 1.0, "top_k": 40}
    with running(loaded(bundle, context_tokens=512), saved_bytes=0, sampling=flags) as server:
        assert ask(server, COMPLETIONS, body).json["choices"][0]["text"] == other
    greedy = str(shelf.exported(generation(shelf, {"do_sample": False, "temperature": 0.5})))
    with running(loaded(greedy, context_tokens=512), saved_bytes=0) as server:
        texts = {
            ask(server, COMPLETIONS, body | {"seed": seed}).json["choices"][0]["text"]
            for seed in range(4)
        }
        assert texts == {ask(server, COMPLETIONS, body | GREEDY).json["choices"][0]["text"]}


def generation(shelf: Shelf, said: dict[str, Any]) -> Path:
    """The tiny checkpoint with this generation_config.json."""

    def make(path: Path) -> None:
        make_llama_checkpoint(path)
        (path / "generation_config.json").write_text(json.dumps(said))

    return shelf.once("tiny", said, make)


def test_what_was_given_up_is_told(bundle: str) -> None:
    tight = loaded(bundle, context_tokens=2048, kv_budget="320KiB")
    request = {"model": "bundle", "prompt": "The quick brown fox. " * 120, "max_tokens": 4}
    with running(tight, saved_bytes=0, sessions=1) as server, client(server) as sdk:
        raw = sdk.completions.with_raw_response.create(**request)
        completion = raw.parse()
        share = completion.x_kvq["evicted_share"]
        assert 0.1 < share < 1
        assert raw.headers["x-kvq-evicted"] == f"{share:.4f}"
        assert completion.usage.evicted_share == completion.timings["evicted_share"] == share
        budget_tokens = completion.x_kvq["budget_tokens"]
        assert 64 < budget_tokens < completion.usage.prompt_tokens
        with sdk.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        ) as stream:
            *_, finish, usage = stream
        assert finish.timings["evicted_share"] == usage.usage.evicted_share > 0.1
        native = ask(server, "/completion", {"prompt": request["prompt"], "n_predict": 4})
        assert native.json["timings"]["evicted_share"] > 0.1
        assert float(native.headers["x-kvq-evicted"]) > 0.1
        assert ask(server, "/props").json["x_kvq"]["budget_tokens"] == budget_tokens
        assert sdk.models.retrieve("bundle").meta["budget_tokens"] == budget_tokens
    with running(loaded(bundle, context_tokens=512), saved_bytes=0) as server:
        reply = ask(server, COMPLETIONS, {"prompt": "hi", "max_tokens": 2})
        assert reply.headers["x-kvq-evicted"] == "0.0000"
        assert (reply.json["usage"]["evicted_share"], reply.json["x_kvq"]["budget_tokens"]) == (
            0,
            512,
        )


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
    usage = whole["x_kvq"]
    assert 0 < usage["kv_bytes"] <= usage["kv_bytes_peak"] <= usage["kv_budget"]
    assert (usage["mean_k_bits"], usage["mean_v_bits"], usage["evicted_share"]) == (16, 16, 0)


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


# Health and metrics: SRV-9


def test_health_waits_for_the_model(rule: Rule) -> None:
    loading = threading.Event()

    def load(config: ServeConfig) -> ServedModel:
        assert loading.wait(PATIENCE_S)
        return rule.load(config)

    config = ServeConfig(port=0, chunk_tokens=16, grace_s=0)
    server = Server(HostedApp(lambda: load(config), config), config, lambda _: None)
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

    config = ServeConfig(port=0)
    server = Server(HostedApp(load, config), config, lambda _: None)
    with pytest.raises(UsageError, match="no such model"):
        server.run()


def test_a_port_that_is_taken_is_refused(served: Server) -> None:
    port = int(served.address.rpartition(":")[2])
    with pytest.raises(UsageError, match=f"port {port}"):
        Server(None, ServeConfig(port=port), lambda _: None)  # type: ignore[arg-type]


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
    ask(served, "/props")
    after = values()
    assert all(after[name] >= value for name, value in before.items() if "total" in name)
    assert after["kvq_new_tokens_total"] - before["kvq_new_tokens_total"] == 5
    assert after['kvq_requests_total{path="other",status="404"}'] == 1
    assert after['kvq_requests_total{path="/props",status="200"}'] == 1
    assert after["kvq_kv_peak_bytes"] <= after["kvq_kv_budget_bytes"] == 1 << 20
    assert prometheus_text({}) == "\n"


def test_drafts_are_counted_and_change_no_answer(bundle: str) -> None:
    """Every session of a server has a drafter of its own; a request may do without."""
    made: list[Lookup] = []

    class Holding(Lookup):
        """Says that it holds something, as a model that drafts does."""

        held_bytes = 1000

        def open(self, backend: Any, config: Any) -> None:
            pass

        def close(self) -> None:
            pass

        def drafting(self, draft_context: DraftContext) -> Any:
            return self.propose(draft_context.room)
            yield

    def drafter() -> Lookup:
        made.append(Holding(min_ngram=1))
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
        running(loaded(bundle, context_tokens=512), saved_bytes=0, sessions=1) as plain,
        running(loaded(bundle, context_tokens=512, draft=drafter), saved_bytes=0) as drafts,
    ):
        expected = [ask(plain, COMPLETIONS, body).json for body in bodies]
        assert len({id(draft) for draft in made}) == len(made) > 1
        for off in ({}, {"x_kvq": {"draft": False}}):
            with ThreadPoolExecutor(len(bodies)) as threads:
                futures = [threads.submit(ask, drafts, COMPLETIONS, body | off) for body in bodies]
                answers = [future.result().json for future in futures]
            for answer, plain_answer in zip(answers, expected, strict=True):
                assert answer["choices"] == plain_answer["choices"]
                assert answer["usage"]["completion_tokens"] > 0
            guessed = [answer["timings"]["draft_n"] for answer in answers]
            right = [answer["x_kvq"]["accepted_tokens"] for answer in answers]
            assert (sum(guessed) > 0) is (not off)
            assert all(0 <= count <= most for count, most in zip(right, guessed, strict=True))
            if not off:
                # An answer is counted a moment after it is sent.
                total = sum(guessed)
                wait_until(lambda end=total: metric(drafts, "drafted_tokens_total") == end)
                metrics = ask(drafts, "/metrics").body.decode()
                assert f"kvq_drafted_tokens_total {total}\n" in metrics
                assert f"kvq_accepted_tokens_total {sum(right)}\n" in metrics
                sessions = re.search(r"\nkvq_sessions (\d+)\n", metrics)
                assert sessions
                assert f"kvq_draft_bytes {1000 * int(sessions[1])}\n" in metrics
                for part in ("draft", "pass", "choose"):
                    spent = re.search(rf"\nkvq_{part}_seconds_total (\S+)\n", metrics)
                    decode_ms = sum(answer["x_kvq"][f"{part}_ms"] for answer in answers)
                    assert spent
                    assert 0 < float(spent[1]) == pytest.approx(decode_ms / 1e3)
        named = ask(plain, COMPLETIONS, bodies[0] | {"x_kvq": {"draft": "recycle"}}).json
        assert named["choices"] == expected[0]["choices"]
        assert named["x_kvq"]["drafted_tokens"] > 0
        assert named["x_kvq"]["draft_ms"] > 0
        assert ask(plain, COMPLETIONS, bodies[0]).json["timings"]["draft_n"] == 0
        off = ask(drafts, COMPLETIONS, bodies[0] | {"x_kvq": {"draft": "none"}}).json
        assert (off["choices"], off["timings"]["draft_n"]) == (expected[0]["choices"], 0)
        for name in ("model", "suffix:most=9"):
            refused = ask(drafts, COMPLETIONS, bodies[0] | {"x_kvq": {"draft": name}})
            assert (refused.status, refused.json["error"]["param"]) == (400, "x_kvq.draft")


def test_what_reads_prompts_is_told_beside_the_budget(
    bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "auxiliary_bytes", 700)
    with running(loaded(bundle, context_tokens=64), saved_bytes=0, sessions=2) as server:
        answer = ask(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).json
        assert answer["x_kvq"]["auxiliary_bytes"] == 700
        assert metric(server, "auxiliary_bytes") == 1400


def test_a_predicted_prompt_is_never_the_beginning_of_an_exact_one(bundle: str) -> None:
    """A request asks for it, and says so; idle time makes what it left exact."""
    # One token: random weights turn the rounding of the first into another second.
    body = {"prompt": "The quick brown fox. " * 30, "max_tokens": 1, "temperature": 0}
    request_body = body | {"x_kvq": {"predict": "50%:tail=3"}}
    with running(loaded(bundle, context_tokens=512), saved_bytes=0, sessions=1) as server:
        exact = ask(server, COMPLETIONS, body | {"cache_prompt": False}).json
        assert (exact["x_kvq"]["predicted_tokens"], exact["x_kvq"]["exact"]) == (0, True)
        answer = ask(server, COMPLETIONS, request_body | {"cache_prompt": False}).json
        count = answer["usage"]["prompt_tokens"]
        assert answer["x_kvq"]["predicted_tokens"] > count - 12
        assert not answer["x_kvq"]["exact"]
        again = ask(server, COMPLETIONS, body).json
        assert again["choices"] == exact["choices"]
        assert again["x_kvq"]["exact"]
        ask(server, COMPLETIONS, request_body | {"cache_prompt": False})
        assert not ask(server, "/slots").json[0]["x_kvq"]["exact"]
        wait_until(lambda: ask(server, "/slots").json[0]["x_kvq"]["exact"], "for idle time")
        answer = ask(server, COMPLETIONS, request_body).json
        assert (answer["x_kvq"]["predicted_tokens"], answer["x_kvq"]["exact"]) == (0, True)
        refused = ask(server, COMPLETIONS, body | {"x_kvq": {"predict": "some"}})
        assert (refused.status, refused.json["error"]["param"]) == (400, "x_kvq.predict")
        assert refused.json["error"]["message"].startswith("x_kvq.predict 'some' is not possible")
        named = body | {"x_kvq": {"predict": "auxiliary:path=/etc"}}
        assert "names no model" in ask(server, COMPLETIONS, named).json["error"]["message"]


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sessions", "0"], "--sessions 0 is not possible"),
        (["--port", "70000"], "--port 70000 is not possible"),
        (["--sessions-disk", "10tok"], "--sessions-disk 10tok is not possible"),
        (["--sessions-disk", "lots"], "--sessions-disk lots is not possible"),
        (["--host", "127.0.0..1"], "cannot listen on 127.0.0..1 port 8012"),
        (
            ["/nowhere", "--origin", "http://good.example/"],
            "--origin http://good.example/ is not possible",
        ),
        (["/nowhere", "--origin", "good.example"], "--origin good.example is not possible"),
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
