"""Several models in one process: who answers, who is loaded, who leaves, who waits."""

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from kvq.errors import BackendError, UsageError
from kvq_apps.cli import main
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.hosted_models import HostedModel, HostedModels, hosted_models
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.models_app import make_models_app
from kvq_apps.serve.ollama_api import keep_alive_s
from kvq_apps.serve.server import Server
from serving import (
    CHAT,
    COMPLETIONS,
    GREEDY,
    PATIENCE_S,
    Reply,
    Rule,
    ask,
    chat,
    loaded,
    process,
    read_all,
    running,
    send,
    wait_until,
)
from shelf import Shelf

pytestmark = pytest.mark.usefixtures("own_state")

SIZE = 100


class Shop:
    """Models made of rules, of `SIZE` bytes each: `loads` are in order, `faults` end a load."""

    def __init__(self, *names: str) -> None:
        self.rules = {name: Rule() for name in names}
        self.loads: list[str] = []
        self.closed: list[str] = []
        self.faults: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()

    def models(self, config: ServeConfig) -> list[HostedModel]:
        return [
            HostedModel(
                name=name,
                names=frozenset({name, f"{name}.gguf"}),
                load=lambda name=name: self._load(name, config),
                config=config,
                weight_bytes=SIZE - 1,
                cache_bytes=1,
                meta={"n_ctx": 2000},
            )
            for name in self.rules
        ]

    def _load(self, name: str, config: ServeConfig) -> ServedModel:
        self.loads.append(name)
        assert self.gate.wait(PATIENCE_S)
        if name in self.faults:
            raise self.faults[name]
        served = self.rules[name].load(config)
        return replace(served, name=name, close=lambda: self.closed.append(name))


@contextmanager
def serving(
    models: Callable[[ServeConfig], list[HostedModel]], budget: int | None, **settings: Any
) -> Iterator[Server]:
    """A server of several models in a thread of this process."""
    config = ServeConfig(**{"port": 0, "chunk_tokens": 16, "grace_s": 0.0} | settings)
    hosted = HostedModels(models(config), config, budget)
    make_models_app(hosted)
    opened = threading.Event()
    server = Server(hosted, config, lambda _: opened.set())
    server.address, server.hosted = server.url, hosted  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert opened.wait(PATIENCE_S)
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def prompt(model: str | None, text: str = "abc", **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": text, "max_tokens": 4, **GREEDY, **more}


def complete(server: Any, model: str | None, **more: Any) -> Reply:
    return ask(server, COMPLETIONS, prompt(model, **more))


def finished(connection: socket) -> Reply:
    """The answer to what was sent on a connection."""
    with connection:
        return Reply(read_all(connection))


def in_memory(server: Any) -> list[str]:
    rows = ask(server, "/v1/models").json["data"]
    return [row["id"] for row in rows if row["status"]["value"] == "loaded"]


@pytest.fixture
def shop() -> Shop:
    return Shop("a", "b", "c")


def test_a_request_loads_its_model_and_the_one_unused_for_longest_leaves(shop: Shop) -> None:
    with serving(shop.models, 2 * SIZE) as server:
        assert in_memory(server) == []
        for name in "abac":
            assert complete(server, name).json["model"] == name
        assert (shop.loads, shop.closed) == (["a", "b", "c"], ["b"])
        assert in_memory(server) == ["a", "c"]
        assert complete(server, "b.gguf").json["model"] == "b"
        assert shop.closed == ["b", "a"]
        assert in_memory(server) == ["b", "c"]
    assert sorted(shop.closed) == ["a", "b", "b", "c"]


def test_nothing_of_a_model_that_has_left_stays_in_memory(shop: Shop) -> None:
    with serving(shop.models, SIZE) as server:
        complete(server, "a")
        host = weakref.ref(server.hosted.all[0].hosted)  # type: ignore[attr-defined]
        gc.disable()
        try:
            complete(server, "b")
            complete(server, "c")
            wait_until(lambda: host() is None)
        finally:
            gc.enable()


def test_without_a_budget_all_stay_and_no_name_means_the_first(shop: Shop) -> None:
    with serving(shop.models, None) as server:
        for name in "bc":
            complete(server, name)
        assert complete(server, None).json["model"] == "a"
        assert in_memory(server) == ["a", "b", "c"]
        assert shop.closed == []


def test_an_unknown_name_is_refused_with_those_that_are_served(shop: Shop) -> None:
    with serving(shop.models, None) as server:
        for path, body in ((COMPLETIONS, prompt("d")), ("/v1/models/d", None)):
            reply = ask(server, path, body)
            assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
            assert reply.json["error"]["message"].endswith("served here; these are: a, b, c")
        assert ask(server, "/api/chat", {"model": "d"}).json["error"].endswith("a, b, c")
        assert ask(server, COMPLETIONS, b"{").status == 400
        assert ask(server, "/nowhere").status == 404
        assert ask(server, COMPLETIONS, method="GET").status == 405
        assert shop.loads == []


def test_a_model_that_answers_stays_and_others_wait_for_it(shop: Shop) -> None:
    backend = shop.rules["a"].backend
    with serving(shop.models, SIZE, sessions=1) as server:
        complete(server, "a")
        backend.shut = True
        first = send(server, COMPLETIONS, prompt("a", "first"))
        wait_until(lambda: shop_busy(server, "a"))
        second = send(server, COMPLETIONS, prompt("b", "second"))
        wait_until(lambda: arrivals(server) == ["b"])
        # It came after the request for b, which must have its turn.
        third = send(server, COMPLETIONS, prompt("a", "third"))
        wait_until(lambda: arrivals(server) == ["a", "b"])
        assert (shop.loads, shop.closed) == (["a"], [])
        backend.open()
        assert finished(first).json["choices"][0]["text"] == shop.rules["a"].text("first", 4)
        assert finished(second).json["model"] == "b"
        assert finished(third).json["choices"][0]["text"] == shop.rules["a"].text("third", 4)
        assert (shop.loads, shop.closed) == (["a", "b", "a"], ["a", "b"])


def test_an_idle_model_leaves_before_one_that_answers(shop: Shop) -> None:
    backend = shop.rules["a"].backend
    with serving(shop.models, 2 * SIZE) as server:
        for name in "ab":
            complete(server, name)
        backend.shut = True
        stream = send(server, COMPLETIONS, prompt("a", stream=True))
        wait_until(lambda: shop_busy(server, "a"))
        complete(server, "b")
        assert complete(server, "c").json["model"] == "c"
        assert shop.closed == ["b"]
        backend.open()
        assert finished(stream).events[-1] == "data: [DONE]"


def test_a_request_waits_while_its_model_is_loaded(shop: Shop) -> None:
    with serving(shop.models, None, queue=2) as server:
        complete(server, "b")
        shop.gate.clear()
        waiting = [send(server, COMPLETIONS, prompt("a", text)) for text in ("one", "two")]
        wait_until(lambda: arrivals(server) == ["a", "a"])
        assert ask(server, "/health").json == {"status": "ok"}
        assert complete(server, "b").status == 200
        reply = complete(server, "a")
        assert (reply.status, reply.json["error"]["code"]) == (429, "queue_full")
        shop.gate.set()
        texts = [finished(sent).json["choices"][0]["text"] for sent in waiting]
        assert texts == [shop.rules["a"].text(text, 4) for text in ("one", "two")]
        assert shop.loads == ["b", "a"]


def test_a_client_that_leaves_does_not_hold_a_place(shop: Shop) -> None:
    backend = shop.rules["a"].backend
    with serving(shop.models, SIZE) as server:
        complete(server, "a")
        backend.shut = True
        first = send(server, COMPLETIONS, prompt("a"))
        wait_until(lambda: shop_busy(server, "a"))
        second = send(server, COMPLETIONS, prompt("b"))
        wait_until(lambda: arrivals(server) == ["b"])
        second.close()
        wait_until(lambda: arrivals(server) == [])
        third = send(server, COMPLETIONS, prompt("a", "third"))
        backend.open()
        for connection in (first, third):
            assert finished(connection).json["model"] == "a"
        assert (shop.loads, shop.closed) == (["a"], [])


def test_a_load_that_fails_is_an_error_of_its_requests_alone(shop: Shop) -> None:
    with serving(shop.models, 2 * SIZE) as server:
        complete(server, "b")
        shop.faults["a"] = BackendError("its file is damaged")
        reply = complete(server, "a")
        assert (reply.status, reply.json["error"]["code"]) == (500, "model_not_loaded")
        assert "the model a could not be loaded: its file is damaged" in reply.body.decode()
        assert complete(server, "b").status == 200
        shop.faults.clear()
        assert complete(server, "a").json["model"] == "a"


def test_a_model_must_fit_alone(shop: Shop) -> None:
    config = ServeConfig(port=0)
    with pytest.raises(
        UsageError, match=r"--models-budget.* cannot hold a, which takes"
    ) as refused:
        HostedModels(shop.models(config), config, SIZE - 1)
    assert "give 100 bytes or more" in str(refused.value)


def test_keep_alive_lets_a_model_leave(shop: Shop) -> None:
    with serving(shop.models, None) as server:
        body = {"model": "a:latest", "prompt": "abc", "raw": True, "stream": False}
        body["options"] = {"num_predict": 4}
        (row,) = _generate(server, body | {"keep_alive": "1h"})
        left_s = _expiry_s(row)
        assert 3500 < left_s < 3700
        # A request that does not say leaves it as it was; -1 is for ever.
        complete(server, "a", keep_alive=0)
        assert 3500 < _expiry_s(ask(server, "/api/ps").json["models"][0]) < 3700
        (row,) = _generate(server, body | {"keep_alive": -1})
        assert row["expires_at"] == "2318-01-01T00:00:00Z"
        ask(server, "/api/generate", body | {"keep_alive": "1ms"})
        wait_until(lambda: shop.closed == ["a"])
        assert ask(server, "/api/ps").json == {"models": []}
        # A model that comes back has no limit.
        complete(server, "a")
        assert ask(server, "/api/ps").json["models"][0]["expires_at"].startswith("2318")
        for path in ("chat", "generate", "generate"):
            reply = ask(server, f"/api/{path}", {"model": "a", "keep_alive": 0}).json
            assert (reply["model"], reply["done_reason"]) == ("a", "unload")
            wait_until(lambda: shop.closed == ["a", "a"])
        assert shop.loads == ["a", "a"]


def _generate(server: Any, body: dict[str, Any]) -> list[Any]:
    assert ask(server, "/api/generate", body).json["done"]
    return ask(server, "/api/ps").json["models"]


def _expiry_s(row: Any) -> float:
    return datetime.fromisoformat(row["expires_at"]).timestamp() - time.time()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((None, None), (90, 90.0), (0, 0.0), (0.5, 0.5), ("5m", 300.0), ("1h30m", 5400.0)),
        *(("1.5s", 1.5), ("300ms", 0.3), ("20", 20.0), (-1, float("inf")), ("-1m", float("inf"))),
    ],
)
def test_keep_alive_is_seconds_or_a_duration(value: Any, seconds: float | None) -> None:
    assert keep_alive_s(Fields({"keep_alive": value})) == seconds


@pytest.mark.parametrize("value", ["soon", "5 m", "", "5d", True, [], "m", "1..5s"])
def test_another_keep_alive_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=r"keep_alive is .* a duration such as 5m"):
        keep_alive_s(Fields({"keep_alive": value}))


def test_lists_and_metrics_are_of_all_models(shop: Shop) -> None:
    with serving(shop.models, None) as server:
        complete(server, "b")
        rows = ask(server, "/v1/models").json["data"]
        assert [(row["id"], row["status"]["value"]) for row in rows] == [
            *(("a", "unloaded"), ("b", "loaded"), ("c", "unloaded")),
        ]
        assert [row["meta"]["n_ctx"] for row in rows] == [2000] * 3
        assert ask(server, "/v1/models/b.gguf").json == rows[1]
        assert [row["name"] for row in ask(server, "/api/tags").json["models"]] == ["a", "b", "c"]
        assert [row["name"] for row in ask(server, "/api/ps").json["models"]] == ["b"]
        assert "version" in ask(server, "/api/version").json
        assert "loads it: a, b, c." in ask(server, "/").body.decode()
        text = ask(server, "/metrics").body.decode()
        for line in ('kvq_jobs_total{model="a"} 0', 'kvq_jobs_total{model="b"} 1'):
            assert line in text
        assert 'kvq_model_loaded{model="b"} 1' in text
        assert f'kvq_requests_total{{path="{COMPLETIONS}",status="200"}} 1' in text
        assert shop.loads == ["b"]
        assert ask(server, "/props?model=c").json["model_alias"] == "c"
        assert ask(server, "/openapi.json").json["openapi"] == "3.1.0"
        assert shop.loads == ["b", "c", "a"]


def test_the_key_is_asked_before_a_model_is_loaded(shop: Shop) -> None:
    with serving(shop.models, None, api_key="secret") as server:
        assert complete(server, "a").status == 401
        assert shop.loads == []
        reply = ask(server, COMPLETIONS, prompt("a"), {"Authorization": "Bearer secret"})
        assert reply.json["model"] == "a"


def test_the_end_of_the_server_refuses_those_that_wait(shop: Shop) -> None:
    shop.gate.clear()
    with serving(shop.models, None) as server:
        waiting = send(server, COMPLETIONS, prompt("a"))
        wait_until(lambda: arrivals(server) == ["a"])
        server.stop()
        reply = finished(waiting)
        assert (reply.status, reply.json["error"]["code"]) == (503, "shutting_down")
        shop.gate.set()


def arrivals(server: Any) -> list[str]:
    return [model.name for model in server.hosted.all for _ in model.arrivals]


def shop_busy(server: Any, name: str) -> bool:
    (model,) = (model for model in server.hosted.all if model.name == name)
    return model.requests > 0 and model.hosted.pool.busy


@pytest.fixture(scope="module")
def bundles(shelf: Shelf) -> list[str]:
    """Two models of other weights."""
    return [str(shelf.bundle(max_position_embeddings=4096, seed=seed)) for seed in (0, 1)]


def test_answers_are_those_of_servers_of_one_model(
    bundles: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also after a model has left and come back, with what it had read found on the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    turns = ["Hello", "It was a dark and stormy night, and the rain fell in torrents. " * 3]

    def answers(server: Any, model: str) -> list[Any]:
        bodies = [
            *((CHAT, chat(text, max_tokens=8, model=model, **GREEDY)) for text in turns),
            (COMPLETIONS, prompt(model, turns[1])),
            ("/tokenize", {"model": model, "content": turns[1]}),
        ]
        replies = [ask(server, path, body).json for path, body in bodies]
        return [reply.get("choices", reply) for reply in replies]

    expected = []
    for path in bundles:
        with running(loaded(path, context_tokens=512), saved_bytes=0) as server:
            expected.append(answers(server, "x"))

    def models(config: ServeConfig) -> list[HostedModel]:
        return hosted_models(bundles, {"threads": 1}, {"context_tokens": 512}, config)

    sizes = [model.num_bytes for model in models(ServeConfig(port=0))]
    with serving(models, max(sizes)) as server:
        first, second = (model.name for model in server.hosted.all)  # type: ignore[attr-defined]
        for name, texts in zip((first, second), expected, strict=True):
            assert answers(server, name) == texts, name
        model = server.hosted.all[1]  # type: ignore[attr-defined]
        assert 0.98 < model.served.slot_bytes * 4 / model.cache_bytes <= 1
        again = ask(server, CHAT, chat(turns[1], max_tokens=8, model=first, **GREEDY))
        assert again.json["choices"] == expected[0][1]
        assert again.cached_tokens > 32
        assert in_memory(server) == [first]


def test_one_model_twice_is_refused(bundles: list[str]) -> None:
    with pytest.raises(UsageError, match="is given twice; give each model once"):
        hosted_models([bundles[0]] * 2, {}, {}, ServeConfig(port=0))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("-m", "b", "--ray"), r"2 models are given \(a, b\) and this serves one"),
        (("--models-budget", "1GiB"), "--models-budget is for several models"),
        (("-m", "b", "--models-budget", "much"), "--models-budget 'much' is not possible"),
    ],
)
def test_what_the_command_refuses(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "-m", "a", *words]) == 2
    assert re.search(complaint, capsys.readouterr().err)


@pytest.mark.slow
def test_the_command_serves_several(bundles: list[str], home: dict[str, str]) -> None:
    words = ("-m", bundles[1], "--models-budget", "1GiB", "--ctx-size", "512")
    with process(bundles[0], home, *words) as server:
        names = [row["model"] for row in server.facts["models"]]
        assert len({*names}) == 2
        assert server.facts["models_budget"] == 1 << 30
        for path in bundles:
            assert complete(server, path).status == 200
        assert in_memory(server) == names
