"""The routes over several models: which are served, and each request to the model that it names."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvq import __version__
from kvq_apps.serve import ollama_api
from kvq_apps.serve.fields import parse_object
from kvq_apps.serve.hosted_app import repeated
from kvq_apps.serve.hosted_models import HostedModel, HostedModels
from kvq_apps.serve.http_app import (
    JsonAnswer,
    guarded_app,
    make_model_app,
    model_row,
    pool_metrics,
    prometheus_text,
    read_body,
    request_metrics,
)
from kvq_apps.serve.ollama_api import OLLAMA
from kvq_apps.serve.page import PAGE_HEADERS, page
from kvq_apps.serve.wire import Json
from kvq_apps.serve.workers import in_worker
from kvq_runtime.serving.request import shutdown_error


def make_models_app(models: HostedModels) -> None:
    """Gives `models` its application: the routes of one model, those about all answered here."""
    status_counts: Counter[tuple[str, int]] = Counter()

    async def health(_: Request) -> Response:
        if models.draining:
            raise shutdown_error()
        return JsonAnswer({"status": "ok"})

    async def metrics(_: Request) -> Response:
        text = prometheus_text({**_metrics(models), **request_metrics(status_counts)})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def model(request: Request) -> Response:
        return JsonAnswer(_row(models.named(request.path_params["name"]), models))

    async def front(request: Request) -> Response:
        first, names = models.all[0], ", ".join(model.name for model in models.all)
        text = page(
            f"http://{request.headers.get('host', '')}",
            _row(first, models) if first.served else None,
            keyed=models.config.api_key is not None,
            waiting=f"A request for one of these models loads it: {names}.",
        )
        return HTMLResponse(text, headers=PAGE_HEADERS)

    def listed(rows: Callable[[], Json]) -> Callable[[Request], Any]:
        async def handle(_: Request) -> Response:
            return JsonAnswer(rows())

        return handle

    def rows() -> Json:
        return {"object": "list", "data": [_row(model, models) for model in models.all]}

    handlers = {
        **dict.fromkeys(("/v1/models", "/models"), listed(rows)),
        "/v1/models/{name:path}": model,
        **dict.fromkeys(("/health", "/v1/health"), health),
        "/metrics": metrics,
        f"{OLLAMA}tags": listed(lambda: {"models": [_tag(model, models) for model in models.all]}),
        f"{OLLAMA}ps": listed(lambda: {"models": [*filter(None, map(_running, models.all))]}),
        f"{OLLAMA}version": listed(lambda: {"version": __version__}),
        "/": front,
    }
    forward = _Forwarding(models)
    table = [
        Route(row.path, handlers.get(row.path, forward), methods=row.methods)
        for row in make_model_app(models.all[0].hosted.pool, models.config).routes
        if isinstance(row, Route)
    ]
    models.app = guarded_app(table, models.config, status_counts)


def _row(model: HostedModel, models: HostedModels) -> Json:
    """Returns the row of a model in the answer of `GET /v1/models`."""
    row: Json = {"object": "model", "created": models.began_at, "owned_by": "kvq"}
    row |= {"meta": model.meta} if model.served is None else model_row(model.served)
    return row | {
        "id": model.name,
        "aliases": sorted(model.names - {model.name}),
        "status": {"value": "loaded" if model.served else "unloaded"},
    }


def _tag(model: HostedModel, models: HostedModels) -> Json:
    """Returns the row of a model in the answer of `/api/tags`."""
    if model.served is None:
        return ollama_api.tag(model.name, models.began_at, model.weight_bytes, identity=model.name)
    (row,) = ollama_api.tags(model.served)["models"]
    return row | {"name": model.name, "model": model.name}


def _running(model: HostedModel) -> Json | None:
    """Returns the row of a loaded model in the answer of `/api/ps`."""
    if model.served is None:
        return None
    (row,) = ollama_api.running(model.served)["models"]
    if model.expires_at is not None:
        row["expires_at"] = datetime.fromtimestamp(model.expires_at, UTC).isoformat()
    return row | {"name": model.name, "model": model.name}


def _metrics(models: HostedModels) -> dict[str, tuple[str, dict[str, float]]]:
    """Returns the metrics of every model, by its name."""
    metrics: dict[str, tuple[str, dict[str, float]]] = {}
    for model in models.all:
        loaded = "Whether the model is in memory.", float(model.served is not None)
        rows = pool_metrics(model.hosted.pool) | {"kvq_model_loaded": loaded}
        label = model.name.replace("\\", "\\\\").replace('"', '\\"')
        for name, (text, value) in rows.items():
            metrics.setdefault(name, (text, {}))[1][f'model="{label}"'] = value
    return metrics


class _Forwarding:
    """Passes a request on to the model that its `model` names, in the body or in the query."""

    def __init__(self, models: HostedModels) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, path = Request(scope, receive), scope["path"]
        name, body, keep_s = request.query_params.get("model", ""), b"", None
        if scope["method"] == "POST":
            body = await read_body(request, self._models.config)
            fields = await in_worker(request, parse_object, body)
            name = fields.text("model")
            if path.startswith(OLLAMA):
                name = name or fields.text("name")
                keep_s = ollama_api.keep_alive_s(fields)
            if keep_s == 0 and ollama_api.is_empty(path, fields):
                self._models.release(self._models.named(name))
                await JsonAnswer(ollama_api.unloaded(path, name))(scope, receive, send)
                return
        async with self._models.use(self._models.named(name), request, keep_s) as app:
            await app(scope, repeated(body, receive), send)
