"""The routes over several models: which are served, and each request to the model that it names."""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvq import __version__
from kvq_apps.serve import ollama_api
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.fields import Fields, parse_object
from kvq_apps.serve.hosted_models import HostedModel, HostedModels, ModelSource
from kvq_apps.serve.http_app import (
    JsonAnswer,
    guarded_app,
    make_model_app,
    model_row,
    pool_metrics,
    read_body,
    request_metrics,
)
from kvq_apps.serve.ollama_api import OLLAMA
from kvq_apps.serve.page import PAGE_HEADERS, page
from kvq_apps.serve.prometheus import Metrics, prometheus_text
from kvq_apps.serve.responses_api import StoredResponses
from kvq_apps.serve.wire import Json
from kvq_apps.serve.workers import in_worker
from kvq_runtime.serving.request import shutdown_error


def host_models(
    sources: Sequence[ModelSource], config: ServeConfig, budget_bytes: int | None
) -> HostedModels:
    """Returns the models of `sources` with their application. Raises `UsageError`."""
    make = partial(make_model_app, stored=StoredResponses())
    models = HostedModels(sources, config, budget_bytes, make)
    routes = _Routes(models)
    rows = make_model_app(models.all[0].hosted.pool, config, StoredResponses()).routes
    table = [
        Route(row.path, routes.about_all.get(row.path, routes.forward), methods=row.methods)
        for row in rows
        if isinstance(row, Route)
    ]
    models.app = guarded_app(table, config, routes.status_counts)
    return models


class _Routes:
    """Holds the handlers of what concerns all models, and the one that passes requests on."""

    def __init__(self, models: HostedModels) -> None:
        self._models = models
        self._config = models.config
        self.status_counts: Counter[tuple[str, int]] = Counter()
        self.forward = _Forwarding(models)
        self.about_all = {
            **dict.fromkeys(("/v1/models", "/models"), self._list),
            "/v1/models/{name:path}": self._model,
            **dict.fromkeys(("/health", "/v1/health"), self._health),
            "/metrics": self._metrics,
            f"{OLLAMA}tags": self._tags,
            f"{OLLAMA}ps": self._loaded,
            f"{OLLAMA}version": self._version,
            "/": self._page,
        }

    async def _list(self, _: Request) -> Response:
        return JsonAnswer({"object": "list", "data": [*map(self._row, self._models.all)]})

    async def _model(self, request: Request) -> Response:
        return JsonAnswer(self._row(self._models.named(request.path_params["name"])))

    def _row(self, model: HostedModel) -> Json:
        source, served = model.source, model.served
        row: Json = {"object": "model", "created": self._models.began_at, "owned_by": "kvq"}
        row |= {"meta": source.meta} if served is None else model_row(served, source.config)
        return row | {
            "id": source.name,
            "aliases": sorted(source.names - {source.name}),
            "status": {"value": "unloaded" if served is None else "loaded"},
        }

    async def _health(self, _: Request) -> Response:
        if self._models.draining:
            raise shutdown_error()
        return JsonAnswer({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        metrics: dict[str, tuple[str, dict[str, float]]] = {}
        for model in self._models.all:
            label = f'model="{model.source.name.replace(chr(34), "")}"'
            rows = pool_metrics(model.hosted.pool) | {
                "kvq_model_loaded": ("Whether the model is in memory.", float(model.ready))
            }
            for name, (text, value) in rows.items():
                metrics.setdefault(name, (text, {}))[1][label] = value
        every: Metrics = {**metrics, **request_metrics(self.status_counts)}
        return PlainTextResponse(
            prometheus_text(every), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _tags(self, _: Request) -> Response:
        return JsonAnswer({"models": [*map(self._tag, self._models.all)]})

    def _tag(self, model: HostedModel) -> Json:
        if model.served is not None:
            (row,) = ollama_api.tags(model.served)["models"]
            return row | dict.fromkeys(("name", "model"), model.source.name)
        source = model.source
        return ollama_api.tag(
            source.name, self._models.began_at, source.weight_bytes, identity=source.name
        )

    async def _loaded(self, _: Request) -> Response:
        return JsonAnswer({"models": [*map(self._running, filter(_is_ready, self._models.all))]})

    def _running(self, model: HostedModel) -> Json:
        assert model.served is not None
        (row,) = ollama_api.running(model.served)["models"]
        left_s = model.expires_in_s
        if left_s is not None:
            row["expires_at"] = datetime.fromtimestamp(time.time() + left_s, UTC).isoformat()
        return row | dict.fromkeys(("name", "model"), model.source.name)

    async def _version(self, _: Request) -> Response:
        return JsonAnswer({"version": __version__})

    async def _page(self, request: Request) -> Response:
        url = f"http://{request.headers.get('host', '')}"
        row = next(map(self._row, filter(_is_ready, self._models.all)), None)
        names = ", ".join(model.source.name for model in self._models.all)
        text = page(
            url,
            row,
            keyed=self._config.api_key is not None,
            waiting=f"A request for one of these models loads it: {names}.",
        )
        return HTMLResponse(text, headers=PAGE_HEADERS)


def _is_ready(model: HostedModel) -> bool:
    return model.ready


class _Forwarding:
    """Passes a request on to the model that its `model` names, in the body or in the query."""

    def __init__(self, models: HostedModels) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI request."""
        request = Request(scope, receive)
        body, keep_s = b"", None
        name = request.query_params.get("model", "")
        if scope["method"] == "POST":
            body = await read_body(request, self._models.config)
            fields = await in_worker(request, parse_object, body)
            ollama = scope["path"].startswith(OLLAMA)
            name = fields.text("model") or (fields.text("name") if ollama else "")
            keep_s = ollama_api.keep_alive_s(fields) if ollama else None
            model = self._models.named(name)
            if keep_s == 0 and _only_unloads(scope["path"], fields):
                self._models.release(model)
                answer = JsonAnswer(ollama_api.unloaded(scope["path"], name))
                await answer(scope, receive, send)
                return
        async with self._models.use(self._models.named(name), request, keep_s) as app:
            await app(scope, _repeated(body, receive), send)


def _only_unloads(path: str, fields: Fields) -> bool:
    """Says whether a request with `keep_alive` 0 asks for nothing but that the model leaves."""
    texts = {f"{OLLAMA}chat": ("messages",), f"{OLLAMA}generate": ("prompt", "suffix")}
    return path in texts and not any(map(fields.get, texts[path]))


def _repeated(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body, which was read already, and then what follows."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
