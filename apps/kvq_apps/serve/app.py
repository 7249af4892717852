"""The routes: from an HTTP request to a job, from its events to a response.

Runs in the event loop, touches no model: what is slow about a request (JSON, tokenizing) happens
in a worker thread, what the engine does comes back through the job's outbox.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
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
from kvq.residency import Resident
from kvq_apps.serve import requests
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError, as_request_error, error_body
from kvq_apps.serve.fields import Fields, parse_object
from kvq_apps.serve.guard import Guard, owner_of, too_large
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.page import PAGE_HEADERS, page
from kvq_apps.serve.prometheus import Metric, prometheus_text
from kvq_apps.serve.protocol import EVICTED_HEADER, PROTOCOL, sampling_fields
from kvq_apps.serve.reclaim import Reclaiming
from kvq_apps.serve.requests import Form, ModelView
from kvq_apps.serve.shapes import SHAPES, Answered, Shape
from kvq_apps.serve.streams import (
    Events,
    EventStream,
    cancel_when_gone,
    chunks,
    whole_answer,
)
from kvq_apps.serve.thinking import thinks_of
from kvq_apps.serve.tools import tools_of
from kvq_apps.serve.workers import in_worker
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.config import Sampling
from kvq_runtime.constraint import Grammar
from kvq_runtime.serving.outbox import Failed
from kvq_runtime.serving.pool import Counts, SessionPool
from kvq_runtime.serving.request import GenerationRequest, leaving
from kvq_runtime.serving.slots import Slots

logger = logging.getLogger(__name__)

# A stream's headers wait this long for a first event, so that an early error keeps its status.
_FIRST_EVENT_S = 1.0
# More ids than this would hold up others for too long.
_MOST_TOKENIZED = 1 << 18
# Fields that change no answer.
_MEANT_FOR_OTHERS = {
    *("id_slot", "metadata", "prompt_cache_key", "safety_identifier", "samplers", "service_tier"),
    *("store", "t_max_prompt_ms", "timings_per_token", "user"),
}
# Large schemas and grammars are read in threads of their own: others wait for none of them.
_GRAMMAR_THREADS = 2
# Whoever invents names does not fill the log.
_MOST_UNREAD = 100

Read = Callable[[Fields, ModelView], GenerationRequest]

_GENERATE: dict[str, Read] = {
    "/v1/chat/completions": requests.chat_request,
    "/v1/completions": requests.completion_request,
    "/completion": requests.native_request,
    "/infill": requests.infill_request,
}


def make_app(pool: SessionPool[ServedModel], config: ServeConfig) -> Starlette:
    """The ASGI application over a started engine thread."""
    routes = _Routes(pool, config)
    generating = [
        Route(path, routes.generating(path, read), methods=["POST"])
        for path, read in _GENERATE.items()
    ]
    table = [
        *generating,
        Route("/v1/models", routes.models),
        Route("/v1/models/{name:path}", routes.one_model),
        Route("/tokenize", routes.tokenize, methods=["POST"]),
        Route("/detokenize", routes.detokenize, methods=["POST"]),
        Route("/apply-template", routes.apply_template, methods=["POST"]),
        Route("/health", routes.health),
        Route("/metrics", routes.metrics),
        Route("/props", routes.props),
        Route("/slots", routes.slots),
        Route("/", routes.page),
    ]
    known = frozenset(route.path for route in table)
    return Starlette(
        routes=table,
        middleware=[
            Middleware(Reclaiming),
            Middleware(_Counting, answered=routes.answered, known=known),
            Middleware(Guard, config=config, refuse=error_response),
        ],
        exception_handlers={
            KvqError: _handled,
            ClientDisconnect: _handled_gone,
            HTTPException: _handled_http,
            Exception: _handled,
        },
    )


class JsonAnswer(JSONResponse):
    """ASCII only: not all that a client or a model writes is Unicode text."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def error_response(error: RequestError) -> Response:
    """`error` in OpenAI's shape."""
    headers = {} if error.retry_s is None else {"Retry-After": str(error.retry_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JsonAnswer(error_body(error), error.status, headers)


class _Routes:
    """The handlers, over one pool."""

    def __init__(self, pool: SessionPool[ServedModel], config: ServeConfig) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()
        self._pool = pool
        self._config = config
        self._unread: set[str] = set()
        self._readers = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammars")

    def generating(self, path: str, read: Read) -> Callable[[Request], Any]:
        """The handler of a route that makes the model write."""

        async def handle(request: Request) -> Response:
            served = self._served()
            body = await self._body(request)
            asked, delivery, form = await in_worker(
                request, self._understood, body, request.headers, served, read
            )
            if form is not None:
                asked = replace(asked, grammar=await self._grammar(request, served, form))
            answered = Answered(
                model=served.name,
                tokenizer=served.tokenizer,
                request=asked,
                delivery=delivery,
                kv=served.kv,
                context_limit=served.context_tokens,
                budget_tokens=served.budget_tokens,
            )
            return await self._answer(request, SHAPES[path](answered), answered)

        return handle

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`."""
        return JsonAnswer({"object": "list", "data": [self._model_row(self._served())]})

    async def one_model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        served = self._served()
        requests.check_name(request.path_params["name"], self._view(served))
        return JsonAnswer(self._model_row(served))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: ids of `content`."""
        tokenizer, fields = await self._plain(request)
        return JsonAnswer({"tokens": await in_worker(request, _tokens, tokenizer, fields)})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of `tokens`."""
        tokenizer, fields = await self._plain(request)
        size = self._served().vocab_size
        return JsonAnswer({"content": await in_worker(request, _text, tokenizer, fields, size)})

    async def apply_template(self, request: Request) -> Response:
        """`POST /apply-template`: the prompt that `messages` become."""
        _, fields = await self._plain(request)
        view = self._view(self._served())
        return JsonAnswer({"prompt": await in_worker(request, _templated, fields, view)})

    async def health(self, _: Request) -> Response:
        """`GET /health`: 503 until the model is loaded, and while the server is leaving."""
        self._served()
        if self._pool.draining:
            raise leaving()
        return JsonAnswer({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """`GET /metrics`: Prometheus' text."""
        return PlainTextResponse(
            prometheus_text(_metrics(self._pool, self.answered)),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def props(self, _: Request) -> Response:
        """`GET /props`: what llama-server's clients look up."""
        served = self._served()
        return JsonAnswer(
            {
                "default_generation_settings": {
                    "n_ctx": served.context_tokens,
                    "params": sampling_fields(self._sampling(served)),
                },
                "total_slots": self._config.sessions,
                "model_alias": served.name,
                "chat_template": served.tokenizer.chat_template or "",
                "modalities": {"vision": False, "audio": False},
                "build_info": f"kvq {__version__}",
                "x_kvq": {
                    "version": __version__,
                    "protocol": PROTOCOL,
                    "kv": served.kv,
                    "kv_budget": served.slot_bytes,
                    "budget_tokens": served.budget_tokens,
                    "sessions": self._config.sessions,
                },
            }
        )

    async def slots(self, _: Request) -> Response:
        """`GET /slots`: what each session holds, as llama-server's clients look it up; no text."""
        served = self._served()
        rows = [
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
        return JsonAnswer(rows)

    async def page(self, request: Request) -> Response:
        """`GET /`: for a person with a browser."""
        url = f"http://{request.headers.get('host', '')}"
        model = self._pool.served if self._pool.ready else None
        row = None if model is None else self._model_row(model)
        text = page(url, row, keyed=self._config.api_key is not None)
        return HTMLResponse(text, headers=PAGE_HEADERS)

    def _served(self) -> ServedModel:
        """The loaded model. Raises `RequestError` while it is still being loaded."""
        if self._pool.served is None or not self._pool.ready:
            raise RequestError(
                "the model is still being loaded; ask again soon",
                status=503,
                code="loading",
                retry_s=1,
            )
        return self._pool.served

    def _view(self, served: ServedModel, owner: str = "") -> ModelView:
        return ModelView(
            name=served.name,
            names=served.names | {*self._config.aliases},
            strict=self._config.strict_model,
            tokenizer=served.tokenizer,
            gaps=served.gaps.of(owner),
            vocab_size=served.vocab_size,
            context_tokens=served.context_tokens,
            sampling=self._sampling(served),
        )

    def _sampling(self, served: ServedModel) -> Sampling:
        """What holds where a request does not say: the flags', then the model's."""
        return replace(served.sampling, **self._config.sampling)

    def _model_row(self, served: ServedModel) -> dict[str, Any]:
        return {
            "id": served.name,
            "object": "model",
            "created": served.loaded_at,
            "owned_by": "kvq",
            "aliases": sorted(self._view(served).names - {served.name}),
            "meta": {
                "n_ctx": served.context_tokens,
                "n_vocab": served.vocab_size,
                "kbits": served.k_bits,
                "vbits": served.v_bits,
                "kv_budget": served.slot_bytes,
                "budget_tokens": served.budget_tokens,
                "chat": served.tokenizer.chat_template is not None,
                "infill": served.tokenizer.fim is not None,
                "sampling": sampling_fields(self._sampling(served)),
            },
        }

    async def _body(self, request: Request) -> bytes:
        """The request's body, bounded in bytes and time."""
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._config.upload_s):
                async for part in request.stream():
                    num_bytes += len(part)
                    if num_bytes > self._config.body_bytes:
                        raise too_large(self._config.body_bytes)
                    parts.append(part)
        except TimeoutError:
            raise RequestError("the request's body did not arrive in time", status=408) from None
        return b"".join(parts)

    def _understood(
        self, body: bytes, headers: Mapping[str, str], served: ServedModel, read: Read
    ) -> tuple[GenerationRequest, requests.Delivery, Form | None]:
        fields = parse_object(body)
        keyed = self._config.api_key is not None
        owner = owner_of(headers, fields.text("cache_salt"), keyed=keyed)
        view = self._view(served, owner)
        asked = replace(read(fields, view), owner=owner)
        tools = thinks = None
        if read is requests.chat_request:
            tools = tools_of(fields, served.tokenizer)
            thinks = thinks_of(fields, served.tokenizer, asked.prompts[0])
        form = requests.form_of(fields, served.tokenizer, tools, thinks)
        found = asked, requests.delivery(fields, tools, thinks), form
        self._name_unread(fields)
        return found

    async def _grammar(self, request: Request, served: ServedModel, form: Form) -> Grammar:
        """`form` read for the model. One that may be much work waits for others that are, only."""
        left = Event()
        executor = None if form.constraint.small else self._readers
        try:
            return await in_worker(
                request, served.grammar, form.constraint, left.is_set, executor=executor
            )
        except UsageError as error:
            raise RequestError(str(error), param=form.param) from error
        finally:
            left.set()

    def _name_unread(self, fields: Fields) -> None:
        """Says once of each field that nothing read it: a client may believe it was heard."""
        for name in fields.unread() - _MEANT_FOR_OTHERS:
            if name not in self._unread and len(self._unread) < _MOST_UNREAD:
                self._unread.add(name)
                logger.warning("the field %r of a request is not known here: ignored", name[:80])

    async def _plain(self, request: Request) -> tuple[Tokenizer, Fields]:
        """What the routes need that ask the tokenizer only."""
        served = self._served()
        body = await self._body(request)
        return served.tokenizer, await in_worker(request, parse_object, body)

    async def _answer(self, request: Request, shape: Shape, answered: Answered) -> Response:
        events = Events(self._pool, self._config, answered.request)
        watcher = asyncio.create_task(cancel_when_gone(request.receive, events))
        try:
            if answered.delivery.stream:
                first = await events.next(_FIRST_EVENT_S)
                if isinstance(first, Failed):
                    raise as_request_error(first.error) from first.error
                return EventStream(chunks(events, first, shape, self._config.ping_s), events)
            body, report = await whole_answer(events, shape, answered)
            return JsonAnswer(
                body, headers={EVICTED_HEADER: f"{report.stats.held.evicted_share:.4f}"}
            )
        except BaseException:
            events.cancel()
            raise
        finally:
            watcher.cancel()


class _Counting:
    """Counts requests by path, where it is a `known` one, and status."""

    def __init__(self, app: Any, answered: Counter[tuple[str, int]], known: frozenset[str]) -> None:
        self._app = app
        self._answered = answered
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            return
        # An unknown path is any text; it must not become a label.
        path = scope["path"] if scope["path"] in self._known else "other"

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._answered[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


async def _handled(_: Request, error: Exception) -> Response:
    return error_response(as_request_error(error))


async def _handled_gone(_: Request, __: Exception) -> Response:
    """Nobody reads this; the status is for the counts."""
    return Response(status_code=499)


async def _handled_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path[:80]} here; there are {_routes_of(request.app)}",
        405: f"{request.method} is not possible here",
    }.get(error.status_code, error.detail)
    response = error_response(RequestError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


def _routes_of(app: Starlette) -> str:
    """Every route as people write it: `POST /v1/completions, ...`."""
    rows = (route for route in app.routes if isinstance(route, Route))
    return ", ".join(
        f"{'POST' if 'POST' in (row.methods or ()) else 'GET'} "
        f"{row.path.replace('{name:path}', 'NAME')}"
        for row in rows
    )


def _tokens(tokenizer: Tokenizer, fields: Fields) -> list[Any]:
    """What `/tokenize` is asked for: ids, or each with its piece."""
    ids = tokenizer.encode(
        fields.text("content"),
        special=fields.flag("parse_special"),
        start=fields.flag("add_special"),
        most=_MOST_TOKENIZED,
    )
    if len(ids) > _MOST_TOKENIZED:
        fields.refuse_with("content", f"content has more than {_MOST_TOKENIZED} tokens; split it")
    if not fields.flag("with_pieces"):
        return ids
    return [{"id": token, "piece": _piece(tokenizer, token)} for token in ids]


def _text(tokenizer: Tokenizer, fields: Fields, vocab_size: int) -> str:
    """What `/detokenize` is asked for."""
    ids = fields.get("tokens")
    if (
        not is_array(ids)
        or len(ids) > _MOST_TOKENIZED
        or not all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
            for token in ids
        )
    ):
        possible = f"a list of up to {_MOST_TOKENIZED} token ids from 0 to {vocab_size - 1}"
        fields.refuse("tokens", possible)
    return tokenizer.decode(ids, special=True)


def _templated(fields: Fields, view: ModelView) -> str:
    """What `/apply-template` is asked for."""
    chat = requests.chat_request(fields, view)
    return view.tokenizer.decode(chat.prompts[0], special=True)


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """A token's text, or its bytes when these are not whole characters."""
    content = tokenizer.token_bytes(token)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return list(content)


def _metrics(pool: SessionPool[ServedModel], answered: Counter[tuple[str, int]]) -> list[Metric]:
    """Everything `/metrics` tells."""
    waiting, running = pool.queue
    rows = _count_metrics(pool.counts) | {
        "jobs_running": ("Jobs that hold a session.", running),
        "jobs_waiting": ("Jobs that wait for one.", waiting),
    }
    if pool.served is not None:
        rows |= _session_metrics(pool.served.slots, pool.served.slot_bytes)
        rows |= _expert_metrics(pool.served.backend.resident())
    metrics = [
        Metric(
            name=f"kvq_{name}",
            kind="counter" if name.endswith("_total") else "gauge",
            help=text,
            values={"": value},
        )
        for name, (text, value) in rows.items()
    ]
    by_status = {
        f'path="{path}",status="{status}"': count
        for (path, status), count in sorted(answered.items())
    }
    requests_total = Metric(
        name="kvq_requests_total", kind="counter", help="HTTP requests.", values=by_status
    )
    return [*metrics, requests_total]


def _count_metrics(counts: Counts) -> dict[str, tuple[str, float]]:
    """Help and value of what the pool has done so far, by the metric's name."""
    rounds = counts.rounds
    return {
        "jobs_total": ("Jobs that ended, however they did.", counts.finished),
        "jobs_failed_total": ("Jobs that ended with an error.", counts.failed),
        "jobs_cancelled_total": ("Jobs whose client left.", counts.cancelled),
        "jobs_refused_total": ("Jobs refused because the queue was full.", counts.refused),
        "steps_total": ("Steps of the pool.", counts.steps),
        "busy_seconds_total": ("Seconds the model was computing.", counts.busy_s),
        "prompt_tokens_total": ("Tokens of prompts.", counts.prompt_tokens),
        "cached_tokens_total": ("Tokens of prompts found in a session.", counts.cached_tokens),
        "new_tokens_total": ("Tokens written.", counts.new_tokens),
        "drafted_tokens_total": ("Tokens guessed by drafters.", rounds.drafted_tokens),
        "accepted_tokens_total": ("Guessed tokens that were right.", rounds.accepted_tokens),
        "draft_seconds_total": ("Seconds spent on guessing.", rounds.draft_ms / 1e3),
        "pass_seconds_total": ("Seconds of passes over written tokens.", rounds.pass_ms / 1e3),
        "choose_seconds_total": ("Seconds spent on choosing tokens.", rounds.choose_ms / 1e3),
        "decode_seconds_total": ("Seconds of answers after their first token.", counts.decode_s),
    }


def _expert_metrics(resident: Resident | None) -> dict[str, tuple[str, float]]:
    """Those of a model whose experts have a budget."""
    if resident is None:
        return {}
    return {
        "expert_budget_bytes": ("Bytes of experts that may be in memory.", resident.budget_bytes),
        "expert_bytes": ("Bytes of experts that are in memory.", resident.held_bytes),
        "experts_chosen_total": ("Experts that passes chose, by layer.", resident.chosen),
        "experts_fetched_total": ("Of these, not in memory.", resident.fetched),
    }


def _session_metrics(slots: Slots, slot_bytes: int) -> dict[str, tuple[str, float]]:
    """Help and value of what the sessions of a loaded model hold, by the metric's name."""
    saved, count = slots.saved, len(slots.all)
    used = sum(slot.session.kv_bytes_peak for slot in slots.all)
    drafters = sum(slot.session.draft_bytes for slot in slots.all)
    auxiliaries = sum(slot.session.auxiliary_bytes for slot in slots.all)
    return {
        "sessions": ("Sessions, each of the KV budget.", count),
        "kv_budget_bytes": ("Bytes of all sessions together.", slot_bytes * count),
        "kv_peak_bytes": ("Most bytes ever used in them.", used),
        "draft_bytes": ("Bytes that their drafters hold beside.", drafters),
        "auxiliary_bytes": ("Bytes that models reading their prompts hold beside.", auxiliaries),
        "sessions_saved_total": ("Sessions written to disk.", saved.saved),
        "sessions_restored_total": ("Sessions read from disk.", saved.restored),
        "session_files_failed_total": (
            "Sessions that could not be written or read.", saved.failures,
        ),
    }  # fmt: skip
