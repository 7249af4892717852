"""The HTTP routes: turn a request into a job, and the job's events into a response.

They run in the event loop and never touch the model. The slow parts of a request, JSON and
tokenizing, run in a worker thread. The engine's output comes through the job's outbox.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvq import __version__
from kvq.errors import KvqError, UsageError
from kvq.json_values import is_array
from kvq_apps.serve import embeddings_api, messages_api, ollama_api, requests
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError, as_request_error, error_body
from kvq_apps.serve.fields import Fields, is_token, parse_object
from kvq_apps.serve.guard import Guard, owner_of, too_large
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.messages_api import MESSAGES, messages_error
from kvq_apps.serve.ollama_api import OLLAMA, ollama_error
from kvq_apps.serve.openapi import openapi
from kvq_apps.serve.page import PAGE_HEADERS, docs_page, page
from kvq_apps.serve.protocol import EVICTED_HEADER, PROTOCOL, sampling_fields
from kvq_apps.serve.raw_prompts import reads_control_tokens
from kvq_apps.serve.requests import AnswerRequest
from kvq_apps.serve.rerank_api import rerank
from kvq_apps.serve.responses_api import StoredResponses
from kvq_apps.serve.streams import (
    EventStream,
    JobEvents,
    cancel_when_gone,
    chunks,
    measured_prompts,
    whole_answer,
)
from kvq_apps.serve.tracing import tracer
from kvq_apps.serve.wire import (
    ChatShape,
    CompletionShape,
    Json,
    LlamaShape,
    MakeShape,
    Read,
    Shape,
    Translation,
    VectorRequest,
    Wire,
)
from kvq_apps.serve.workers import LARGE_BYTES, in_worker, reclaim
from kvq_models.tokenizer import Tokenizer
from kvq_models.tools import tool_form
from kvq_runtime.answer.constraint import Constraint, Grammar
from kvq_runtime.serving.outbox import Failed
from kvq_runtime.serving.pool import SessionPool
from kvq_runtime.serving.request import GenerationRequest, shutdown_error

logger = logging.getLogger(__name__)

# What lists of models say of a session.
SESSION_FACTS = ("kv_budget", "budget_tokens", "full_kv", "full_tokens")
# What a metric says and its values by their labels, by its name. A counter's name ends with _total.
Metrics = Mapping[str, tuple[str, Mapping[str, float]]]
# A stream's headers wait this long for a first event, so that an early error keeps its status.
_FIRST_EVENT_S = 1.0
# More ids would delay other requests for too long.
_MOST_TOKENIZED = 1 << 18
# Fields that say something about a request and ask for nothing.
_LABELS = {
    *("metadata", "prediction", "prompt_cache_key", "safety_identifier", "service_tier", "store"),
    *("user", "keep_alive"),
}
# Requests with a larger body are read in threads of their own, so that others do not wait for them.
_LONG_BODY_BYTES = 1 << 18
_LONG_BODY_THREADS = 2
# Large schemas and grammars are read in threads of their own, so that others do not wait for them.
_GRAMMAR_THREADS = 2
# So a client that invents fields cannot fill the log or an answer.
_MOST_IGNORED, _NAME_CHARACTERS = 100, 80


def _wires(stored: StoredResponses) -> dict[str, Wire]:
    """Returns the routes that read a body: those that generate text, and those of the tokenizer."""
    chat = _untranslated(requests.chat_request, ChatShape)
    native = _untranslated(requests.native_request, LlamaShape)
    return {
        "/v1/chat/completions": chat,
        "/chat/completions": chat,
        "/v1/responses": stored.translate,
        MESSAGES: messages_api.translate,
        "/v1/completions": _untranslated(requests.completion_request, CompletionShape),
        "/completion": native,
        "/completions": native,
        "/infill": _untranslated(requests.infill_request, LlamaShape),
        f"{OLLAMA}chat": ollama_api.chat,
        f"{OLLAMA}generate": ollama_api.generate,
        f"{OLLAMA}show": ollama_api.show,
        f"{OLLAMA}embed": ollama_api.embed,
        f"{OLLAMA}embeddings": ollama_api.embed_one,
        "/v1/embeddings": embeddings_api.embed,
        **dict.fromkeys(("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"), rerank),
        "/v1/responses/input_tokens": _counting(stored.translate, object="response.input_tokens"),
        f"{MESSAGES}/count_tokens": _counting(messages_api.translate),
        "/tokenize": _tokenize,
        "/detokenize": _detokenize,
        "/apply-template": _apply_template,
    }


def _untranslated(read: Read, shape: MakeShape) -> Wire:
    return lambda fields, _: (fields, read, shape)


def make_app(pool: SessionPool[ServedModel], config: ServeConfig) -> Starlette:
    """Returns the ASGI application over a started pool."""
    routes = _Routes(pool, config, _wires(StoredResponses()))
    return guarded_app(routes.table(), config, routes.status_counts)


def make_model_app(
    pool: SessionPool[ServedModel], config: ServeConfig, stored: StoredResponses | None = None
) -> Starlette:
    """Returns the routes over a pool alone, for an application that guards and counts requests."""
    routes = _Routes(pool, config, _wires(stored or StoredResponses()))
    return Starlette(routes=routes.table(), exception_handlers=_HANDLERS)


def guarded_app(
    table: Sequence[Route], config: ServeConfig, status_counts: Counter[tuple[str, int]]
) -> Starlette:
    """Returns the routes of `table` behind what guards and counts requests."""
    known = frozenset(route.path for route in table)
    return Starlette(
        routes=table,
        middleware=[
            Middleware(_Counting, status_counts=status_counts, known=known),
            Middleware(Guard, config=config, refuse=error_response),
        ],
        exception_handlers=_HANDLERS,
    )


class JsonAnswer(JSONResponse):
    """Writes JSON in ASCII only, since what clients and models write may not be valid Unicode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: RequestError, path: str = "") -> Response:
    """Returns the response to `error` in the form of the API at `path`; OpenAI's by default."""
    headers = {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    forms = {MESSAGES: messages_error, OLLAMA: ollama_error}
    form = next((form for start, form in forms.items() if path.startswith(start)), error_body)
    return JsonAnswer(form(error), error.status, headers)


class _Routes:
    """Holds the handlers of all routes over one pool."""

    def __init__(
        self, pool: SessionPool[ServedModel], config: ServeConfig, wires: Mapping[str, Wire]
    ) -> None:
        self._wires = wires
        self.status_counts: Counter[tuple[str, int]] = Counter()
        self._pool = pool
        self._config = config
        self._ignored: set[str] = set()
        self._begin_span = tracer(config.traces)
        self._readers = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammars")
        self._long_bodies = ThreadPoolExecutor(_LONG_BODY_THREADS, "long-bodies")

    def table(self) -> list[Route]:
        return [
            *(
                Route(path, self.answer(wire), methods=["POST"])
                for path, wire in self._wires.items()
            ),
            Route("/v1/models", self.describe(self.models)),
            Route("/models", self.describe(self.models)),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/v1/health", self.health),
            Route("/metrics", self.metrics),
            Route("/props", self.describe(self.props)),
            Route("/slots", self.describe(_slots)),
            Route(f"{OLLAMA}tags", self.describe(ollama_api.tags)),
            Route(f"{OLLAMA}ps", self.describe(ollama_api.running)),
            Route(f"{OLLAMA}version", self.describe(lambda _: {"version": __version__})),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            Route("/", self.page),
        ]

    def answer(self, wire: Wire) -> Callable[[Request], Any]:
        """Returns the handler of a route that reads a body."""

        async def handle(request: Request) -> Response:
            served = self._served()
            body = await read_body(request, self._config)
            try:
                reading = await in_worker(
                    request,
                    *(self._read_request, body, request.headers, served, wire),
                    executor=self._long_bodies if len(body) > _LONG_BODY_BYTES else None,
                )
            finally:
                if len(body) >= LARGE_BYTES:
                    asyncio.get_running_loop().run_in_executor(None, reclaim)
            if isinstance(reading, dict):
                return JsonAnswer(reading)
            if isinstance(reading, VectorRequest):
                return await self._measured(request, reading)
            answer, make_shape = reading
            if answer.answer_format is not None:
                grammar = await self._grammar(request, served, *answer.answer_format)
                answer = replace(answer, generation=replace(answer.generation, grammar=grammar))
            return await self._answer(request, make_shape(served, answer))

        return handle

    def describe(self, description: Callable[[ServedModel], Any]) -> Callable[[Request], Any]:
        """Returns the handler of a route that describes the served model."""

        async def handle(_: Request) -> Response:
            return JsonAnswer(description(self._served()))

        return handle

    def models(self, served: ServedModel) -> Json:
        return {"object": "list", "data": [model_row(served)]}

    async def model(self, request: Request) -> Response:
        served = self._served()
        requests.check_name(request.path_params["name"], served)
        return JsonAnswer(model_row(served))

    async def health(self, _: Request) -> Response:
        """Answers `GET /health`: 503 until the model is loaded, and during shutdown."""
        self._served()
        if self._pool.draining:
            raise shutdown_error()
        return JsonAnswer({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        pool_rows = pool_metrics(self._pool)
        rows = {name: (help_text, {"": value}) for name, (help_text, value) in pool_rows.items()}
        text = prometheus_text({**rows, **request_metrics(self.status_counts)})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def props(self, served: ServedModel) -> Json:
        """Returns the answer of `GET /props`: what llama-server's clients look up."""
        return {
            "default_generation_settings": {
                "n_ctx": served.context_tokens,
                "params": sampling_fields(served.sampling),
            },
            "total_slots": self._config.sessions,
            "model_alias": served.name,
            "chat_template": served.tokenizer.chat_template or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"kvq {__version__}",
            "x_kvq": {
                "version": __version__,
                "protocol": PROTOCOL,
                **{name: served.facts[name] for name in ("kv", "kv_budget", "budget_tokens")},
                "sessions": self._config.sessions,
            },
        }

    async def openapi(self, request: Request) -> Response:
        return JsonAnswer(await self._openapi(request))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(docs_page(await self._openapi(request)), headers=PAGE_HEADERS)

    async def _openapi(self, request: Request) -> Json:
        # The sample is nobody's, so it must not touch what clients left.
        served = replace(self._served(), owner="/openapi.json")
        routes = (route for route in request.app.routes if "GET" in (route.methods or ()))
        return await in_worker(
            request, openapi, self._wires, [route.path for route in routes], served
        )

    async def page(self, request: Request) -> Response:
        url = f"http://{request.headers.get('host', '')}"
        model = self._pool.served if self._pool.ready else None
        row = None if model is None else model_row(model)
        text = page(url, row, keyed=self._config.api_key is not None)
        return HTMLResponse(text, headers=PAGE_HEADERS)

    def _served(self) -> ServedModel:
        """Returns the loaded model. Raises `RequestError` while it is still being loaded."""
        if self._pool.served is None or not self._pool.ready:
            raise RequestError(
                "the model is still being loaded; ask again soon",
                status=503,
                code="loading",
                retry_s=1,
            )
        return self._pool.served

    def _read_request(
        self, body: bytes, headers: Mapping[str, str], served: ServedModel, wire: Wire
    ) -> tuple[AnswerRequest, MakeShape] | VectorRequest | Json:
        sent = parse_object(body)
        keyed = self._config.api_key is not None
        owner = owner_of(headers, sent.text("cache_salt"), keyed=keyed)
        served = replace(served, owner=owner)
        translation = wire(sent, served)
        if isinstance(translation, dict):
            self._ignored_fields(sent)
            return translation
        if isinstance(translation, VectorRequest):
            return replace(translation, ignored=self._ignored_fields(sent))
        fields, read, make_shape = translation
        answer = read(fields, served)
        ignored = self._ignored_fields(sent, fields)
        notes = {**answer.notes, **({"ignored": ignored} if ignored else {})}
        return replace(answer, notes=notes), make_shape

    async def _grammar(
        self, request: Request, served: ServedModel, constraint: Constraint, param: str
    ) -> Grammar:
        """Returns a constraint's grammar; one that may be slow waits only for other slow ones."""
        finished = Event()
        executor = None if constraint.small else self._readers
        arguments = (served.grammar, constraint, finished.is_set)
        try:
            return await in_worker(request, *arguments, executor=executor)
        except UsageError as error:
            raise RequestError(str(error), param=param) from error
        finally:
            finished.set()

    def _ignored_fields(self, *bodies: Fields) -> list[str]:
        """Returns the names of fields that nobody has read, and logs each of them once."""
        unread = frozenset[str]().union(*(fields.unread() for fields in bodies)) - _LABELS
        names = [name[:_NAME_CHARACTERS] for name in sorted(unread)[:_MOST_IGNORED]]
        for name in names:
            if name not in self._ignored and len(self._ignored) < _MOST_IGNORED:
                self._ignored.add(name)
                logger.warning("the field %r of a request has no effect here", name)
        return names

    def _events(self, request: Request, generation: GenerationRequest) -> JobEvents:
        report_end = self._begin_span(request.url.path, self._served().name, request.headers)
        return JobEvents(self._pool, self._config, generation, report_end)

    async def _measured(self, request: Request, vectors: VectorRequest) -> Response:
        events = self._events(request, vectors.generation)
        watcher = asyncio.create_task(cancel_when_gone(request.receive, events))
        try:
            body = await asyncio.to_thread(vectors.answer, *await measured_prompts(events))
        except BaseException:
            events.cancel()
            raise
        finally:
            watcher.cancel()
        notes = {"x_kvq": {"ignored": vectors.ignored}} if vectors.ignored else {}
        return await asyncio.to_thread(JsonAnswer, body | notes)

    async def _answer(self, request: Request, shape: Shape) -> Response:
        events = self._events(request, shape.request.generation)
        watcher = asyncio.create_task(cancel_when_gone(request.receive, events))
        try:
            if shape.request.stream:
                first = await events.next(_FIRST_EVENT_S)
                if isinstance(first, Failed):
                    raise as_request_error(first.error) from first.error
                parts = chunks(events, first, shape, self._config.ping_s)
                return EventStream(parts, shape.media_type, events)
            body, report = await whole_answer(events, shape)
            headers = {EVICTED_HEADER: f"{report.stats.held.evicted_share:.4f}"}
            return await asyncio.to_thread(JsonAnswer, body, headers=headers)
        except BaseException:
            events.cancel()
            raise
        finally:
            watcher.cancel()


async def read_body(request: Request, config: ServeConfig) -> bytes:
    """Returns the request's body, bounded in bytes and time."""
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(config.upload_s):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > config.body_bytes:
                    raise too_large(config.body_bytes)
                parts.append(part)
    except TimeoutError:
        raise RequestError("the request's body did not arrive in time", status=408) from None
    return b"".join(parts)


def model_row(served: ServedModel) -> Json:
    """Returns the row of a model in the answer of `GET /v1/models`."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.loaded_at,
        "owned_by": "kvq",
        "aliases": sorted(served.names - {served.name}),
        "meta": {
            "n_ctx": served.context_tokens,
            "n_vocab": served.vocab_size,
            "kbits": served.k_bits,
            "vbits": served.v_bits,
            **{name: served.facts[name] for name in SESSION_FACTS},
            "chat": served.tokenizer.chat_template is not None,
            "infill": served.tokenizer.fim is not None,
            "tools": tool_form(served.tokenizer.chat_template) is not None,
            "sampling": sampling_fields(served.sampling),
        },
    }


class _Counting:
    """Counts requests by path and status; paths that are not `known` count together."""

    def __init__(
        self, app: Any, status_counts: Counter[tuple[str, int]], known: frozenset[str]
    ) -> None:
        self._app = app
        self._answered = status_counts
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # An unknown path can be any text, so it must not become a label.
        path = scope["path"] if scope["path"] in self._known else "other"

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._answered[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


async def _handle_error(request: Request, error: Exception) -> Response:
    return error_response(as_request_error(error), request.url.path)


async def _handle_disconnect(_: Request, __: Exception) -> Response:
    """Returns a response that nobody reads; its status is for the counts."""
    return Response(status_code=499)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path[:80]} here; there are {_routes_of(request.app)}",
        405: f"{request.method} is not possible here",
    }.get(error.status_code, error.detail)
    refusal = RequestError(message, status=error.status_code)
    response = error_response(refusal, request.url.path)
    response.headers.update(error.headers or {})
    return response


_HANDLERS = {
    KvqError: _handle_error,
    ClientDisconnect: _handle_disconnect,
    HTTPException: _handle_http_error,
    Exception: _handle_error,
}


def _routes_of(app: Starlette) -> str:
    """Returns every route in words: `POST /v1/completions, ...`."""
    rows = (route for route in app.routes if isinstance(route, Route))
    return ", ".join(
        f"{'POST' if 'POST' in (row.methods or ()) else 'GET'} "
        f"{row.path.replace('{name:path}', 'NAME')}"
        for row in rows
    )


def _slots(served: ServedModel) -> list[Json]:
    """Returns the answer of `GET /slots`: each session's state, without its text."""
    return [
        {
            "id": number,
            "n_ctx": served.context_tokens,
            "is_processing": slot.busy,
            "n_past": len(slot.tokens),
            "x_kvq": {
                "kv_bytes_peak": slot.session.kv_bytes_peak,
                "exact": slot.session.exact,
            },
        }
        for number, slot in enumerate(served.slots.all)
    ]


def _tokenize(fields: Fields, served: ServedModel) -> dict[str, Any]:
    """Returns the answer of `/tokenize`: ids, or each id with its piece."""
    tokenizer = served.tokenizer
    ids = tokenizer.encode(
        fields.text("content"),
        special=reads_control_tokens(fields),
        start=fields.flag("add_special"),
        most=_MOST_TOKENIZED,
    )
    if len(ids) > _MOST_TOKENIZED:
        fields.refuse_with("content", f"content has more than {_MOST_TOKENIZED} tokens; split it")
    if not fields.flag("with_pieces"):
        return {"tokens": ids}
    return {"tokens": [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]}


def _detokenize(fields: Fields, served: ServedModel) -> dict[str, Any]:
    """Returns the answer of `/detokenize`."""
    ids = fields.get("tokens")
    if (
        not is_array(ids)
        or len(ids) > _MOST_TOKENIZED
        or not all(is_token(token, served.vocab_size) for token in ids)
    ):
        possible = f"a list of up to {_MOST_TOKENIZED} token ids from 0 to {served.vocab_size - 1}"
        fields.refuse("tokens", possible)
    return {"content": served.tokenizer.decode(ids, special=True)}


def _counting(
    translate: Callable[[Fields, ServedModel], Translation], **constants: str
) -> Callable[[Fields, ServedModel], Json]:
    """Returns a route that counts the tokens of the prompt that `translate` makes."""

    def count(sent: Fields, served: ServedModel) -> Json:
        fields, read, _ = translate(sent, served)
        (prompt,) = read(fields, served).generation.prompts
        return {**constants, "input_tokens": len(prompt)}

    return count


def _apply_template(fields: Fields, served: ServedModel) -> dict[str, Any]:
    """Returns the answer of `/apply-template`."""
    chat = requests.chat_request(fields, served).generation
    return {"prompt": served.tokenizer.decode(chat.prompts[0], special=True)}


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Returns a token's text, or its bytes when these are not whole characters."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return list(content)


def prometheus_text(metrics: Metrics) -> str:
    """Returns the metrics in the exposition format, version 0.0.4."""
    lines: list[str] = []
    for name, (text, values) in metrics.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [
            f"{name}{f'{{{labels}}}' if labels else ''} {value:.10g}"
            for labels, value in values.items()
        ]
    return "\n".join(lines) + "\n"


def request_metrics(status_counts: Counter[tuple[str, int]]) -> Metrics:
    """Returns the counts of requests by path and status."""
    by_status = {
        f'path="{path}",status="{status}"': count
        for (path, status), count in sorted(status_counts.items())
    }
    return {"kvq_requests_total": ("HTTP requests.", by_status)}


def pool_metrics(pool: SessionPool[ServedModel]) -> dict[str, tuple[str, float]]:
    """Returns help and value of all that is known of a pool and its model, by the metric's name."""
    counts, rounds, (waiting, running) = pool.counts, pool.counts.rounds, pool.queue
    rows: dict[str, tuple[str, float]] = {
        "jobs_total": ("Jobs that ended, however they did.", counts.finished),
        "jobs_failed_total": ("Jobs that ended with an error.", counts.failed),
        "jobs_cancelled_total": ("Jobs whose client left.", counts.cancelled),
        "jobs_refused_total": ("Jobs refused because the queue was full.", counts.refused),
        "steps_total": ("Steps of the pool.", counts.steps),
        "queued_seconds_total": ("Seconds that jobs waited for a session.", counts.queued_s),
        "busy_seconds_total": ("Seconds the model was computing.", counts.busy_s),
        "prompt_tokens_total": ("Tokens of prompts.", counts.prompt_tokens),
        "cached_tokens_total": ("Tokens of prompts found in a session.", counts.cached_tokens),
        "moved_tokens_total": ("Of these, encoded before a change.", counts.moved_tokens),
        "new_tokens_total": ("Tokens written.", counts.new_tokens),
        "drafted_tokens_total": ("Tokens guessed by drafters.", rounds.drafted_tokens),
        "accepted_tokens_total": ("Guessed tokens that were right.", rounds.accepted_tokens),
        "draft_seconds_total": ("Seconds spent on guessing.", rounds.draft_ms / 1e3),
        "pass_seconds_total": ("Seconds of passes over written tokens.", rounds.pass_ms / 1e3),
        "choose_seconds_total": ("Seconds spent on choosing tokens.", rounds.choose_ms / 1e3),
        "decode_seconds_total": ("Seconds of answers after their first token.", counts.decode_s),
        "jobs_running": ("Jobs that hold a session.", running),
        "jobs_waiting": ("Jobs that wait for one.", waiting),
    }
    if pool.served is not None:
        rows |= _model_metrics(pool.served)
    return {f"kvq_{name}": row for name, row in rows.items()}


def _model_metrics(served: ServedModel) -> dict[str, tuple[str, float]]:
    """Returns help and value of what a model's sessions hold, and its experts with a budget."""
    slots, experts = served.slots, served.backend.resident()
    saved, count = slots.saved, len(slots.all)
    used = sum(slot.session.kv_bytes_peak for slot in slots.all)
    drafters = sum(slot.session.draft_bytes for slot in slots.all)
    auxiliaries = sum(slot.session.auxiliary_bytes for slot in slots.all)
    rows: dict[str, tuple[str, float]] = {
        "sessions": ("Sessions, each of the KV budget.", count),
        "kv_budget_bytes": ("Bytes of all sessions together.", served.slot_bytes * count),
        "kv_peak_bytes": ("Most bytes ever used in them.", used),
        "draft_bytes": ("Bytes that their drafters hold beside.", drafters),
        "auxiliary_bytes": ("Bytes that models reading their prompts hold beside.", auxiliaries),
        "sessions_saved_total": ("Sessions written to disk.", saved.saved),
        "sessions_restored_total": ("Sessions read from disk.", saved.restored),
        "session_files_failed_total": (
            "Sessions that could not be written or read.", saved.failures,
        ),
    }  # fmt: skip
    if experts is not None:
        rows |= {
            "expert_budget_bytes": (
                "Bytes of experts that may be in memory.",
                experts.budget_bytes,
            ),
            "expert_bytes": ("Bytes of experts that are in memory.", experts.held_bytes),
            "experts_chosen_total": ("Experts that passes chose, by layer.", experts.chosen),
            "experts_fetched_total": ("Of these, not in memory.", experts.fetched),
        }
    return rows
