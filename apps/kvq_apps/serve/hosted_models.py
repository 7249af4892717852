"""Several models in one process: a table of hosted models, of which as many are loaded as fit.

A request loads its model. When that does not fit, the model unused for longest leaves, with its
sessions on disk. One that answers stays; if only such are left, the one used least recently takes
no new requests, so that those for another model come to their turn. All of this runs in one event
loop, so it needs no lock but the one that lets models come and go one at a time.
"""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf, isfinite
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

from kvq.config import parse_kv
from kvq.errors import KvqError, UsageError, argument
from kvq.formats import format_bytes
from kvq_apps.names.model_path import model_files
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError, as_request_error
from kvq_apps.serve.hosted_app import Hosted, HostedApp, MakeApp
from kvq_apps.serve.http_app import SESSION_FACTS, make_model_app
from kvq_apps.serve.loading import DRAFT_TOKENS, ServedModel, ServeRequest, names_of
from kvq_apps.serve.responses_api import StoredResponses
from kvq_apps.serve.workers import gone, reclaim
from kvq_apps.terminal.estimate import estimate
from kvq_runtime.serving.request import PoolError, shutdown_error
from kvq_runtime.serving.scheduler import Turns

logger = logging.getLogger(__name__)

# Options that the bytes of a model and its sessions depend on.
_SIZE_OPTIONS = (
    *("k_bits", "v_bits", "kv_budget", "context_tokens", "policy", "threads", "weights_budget"),
)


@dataclass(kw_only=True, eq=False)
class HostedModel:
    """Holds one model of the table: how to `load` it with `config`, and what runs on it.

    Lists show it as `name`, and with `meta` before it is loaded. `requests` run on it, `arrivals`
    wait until it is loaded. `used` grows from use to use. It leaves once it was idle for `keep_s`.
    """

    name: str
    names: frozenset[str]
    load: Callable[[], ServedModel]
    config: ServeConfig
    weight_bytes: int
    cache_bytes: int
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    make: MakeApp = make_model_app
    requests: int = 0
    arrivals: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    loading: asyncio.Task[None] | None = None
    leaving: bool = False
    used: int = 0
    keep_s: float = inf
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.hosted = self.fresh()

    def fresh(self) -> HostedApp:
        """Returns a new host of the model, which has not begun to load it."""
        return HostedApp(self.load, self.config, self.make)

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    @property
    def served(self) -> ServedModel | None:
        ready = self.hosted.open and not self.hosted.ended
        return self.hosted.pool.served if ready else None

    @property
    def expires_at(self) -> float | None:
        """Returns when it leaves, as seconds since 1970; None: only for another model."""
        if not isfinite(self.keep_s):
            return None
        now = asyncio.get_running_loop().time()
        return time.time() + (self.keep_s if self.timer is None else self.timer.when() - now)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def hosted_models(
    names: Sequence[str],
    engine_options: Mapping[str, Any],
    session_options: Mapping[str, Any],
    config: ServeConfig,
) -> list[HostedModel]:
    """Returns the models called `names`; loads none. Raises `KvqError`.

    The first one has the aliases. A name that two of them have means the first of the two.
    """
    stored, turns = StoredResponses(), Turns()
    models: list[HostedModel] = []
    known: set[str] = set()
    options = {**session_options, **engine_options}
    for name in names:
        files = model_files(name, engine_options.get("backend", "auto"))
        shown = files.name if files.name not in known else name
        if shown in known:
            raise UsageError(f"the model {name} is given twice; give each model once")
        sizes = estimate(
            files,
            draft_tokens=DRAFT_TOKENS,
            **{option: options[option] for option in _SIZE_OPTIONS if option in options},
        )
        session = sizes["session"]
        k_bits, v_bits = parse_kv(sizes["kv"])
        aliases = () if models else config.aliases
        model_config = replace(config, strict_model=False, aliases=aliases, turns=turns)
        all_names = names_of(files, name) | {*aliases}
        models.append(
            HostedModel(
                name=shown,
                names=all_names - known,
                load=ServeRequest(
                    model=name,
                    engine_options=engine_options,
                    session_options=session_options,
                    config=model_config,
                ).load,
                config=model_config,
                weight_bytes=sizes["weight_bytes"],
                cache_bytes=session["kv_budget"] * config.sessions,
                meta={
                    **{"n_ctx": session["context"], "kbits": k_bits, "vbits": v_bits},
                    **{key: session[key] for key in SESSION_FACTS},
                },
                make=partial(make_model_app, stored=stored),
            )
        )
        known |= all_names
    return models


class HostedModels(Hosted):
    """Loads models as requests ask for them, within `budget_bytes`. None: all may stay.

    It is open from the start, and a fault of one model does not end the others.
    """

    app: ASGIApp
    open, ended = True, False
    error: BaseException | None = None

    def __init__(
        self, models: Sequence[HostedModel], config: ServeConfig, budget_bytes: int | None
    ) -> None:
        """Raises `UsageError` for a model that does not fit into the budget even alone."""
        super().__init__()
        for model in models:
            if budget_bytes is not None and model.num_bytes > budget_bytes:
                raise UsageError(
                    f"{argument('--models-budget')} {format_bytes(budget_bytes)} cannot hold "
                    f"{model.name}, which takes {format_bytes(model.weight_bytes)} of weights and "
                    f"{format_bytes(model.cache_bytes)} of caches; give "
                    f"{format_bytes(model.num_bytes)} or more, or smaller sessions"
                )
        self.all = models
        self.config = config
        self.draining = False
        self.began_at = int(time.time())
        self._budget_bytes = budget_bytes
        self._uses = count(1)
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def notify(self) -> None:
        super().notify()
        for model in self.all:
            model.hosted.notify()

    def named(self, name: str) -> HostedModel:
        """Returns the model called `name`, the first one for no name. Raises `RequestError`."""
        if not name:
            return self.all[0]
        for model in self.all:
            if {name, name.removesuffix(":latest")} & model.names:
                return model
        names = ", ".join(model.name for model in self.all)
        raise RequestError(
            f"the model {name[:80]!r} is not served here; these are: {names}",
            status=404,
            param="model",
            code="model_not_found",
        )

    @asynccontextmanager
    async def use(
        self, model: HostedModel, request: Request, keep_s: float | None = None
    ) -> AsyncGenerator[ASGIApp]:
        """Loads `model` if it is not and keeps it while inside; afterwards `keep_s`, if given.

        Raises `RequestError` where it cannot be loaded, `PoolError` where too many wait,
        `ClientDisconnect` when the client of `request` leaves while it waits.
        """
        if self.draining:
            raise shutdown_error()
        if model.served and not model.leaving:
            model.requests += 1
        else:
            await self._arrive(model, request)
        model.stop_timer()
        model.used = next(self._uses)
        if keep_s is not None:
            model.keep_s = keep_s
        try:
            yield model.hosted.app
        finally:
            model.requests -= 1
            model.used = next(self._uses)
            self._rest(model)

    def release(self, model: HostedModel) -> None:
        """Lets `model` leave as soon as it is idle."""
        model.keep_s = 0.0
        self._rest(model)

    async def leave(self, hurried: Callable[[], bool] = lambda: False) -> None:
        self._refuse_arrivals()
        await asyncio.gather(*(model.hosted.leave(hurried) for model in self.all if model.served))
        await self.stop()

    async def stop(self) -> None:
        self._refuse_arrivals()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.hosted.stop() for model in self.all))

    def _refuse_arrivals(self) -> None:
        self.draining = True
        for task in self._tasks:
            task.cancel()
        for model in self.all:
            model.stop_timer()
            self._admit(model, shutdown_error())

    async def _arrive(self, model: HostedModel, request: Request) -> None:
        """Waits until `model` is loaded, with the request counted."""
        if sum(len(other.arrivals) for other in self.all) >= self.config.queue:
            raise PoolError(
                f"{self.config.queue} requests wait for models already; try again later, or serve "
                f"with a larger {argument('queue')} or {argument('--models-budget')}",
                code="queue_full",
                retry_s=1,
            )
        arrival = asyncio.get_running_loop().create_future()
        model.arrivals.append(arrival)
        if model.loading is None:
            model.loading = self._begin(self._bring(model))
        disconnect = asyncio.create_task(gone(request.receive))
        try:
            await asyncio.wait((arrival, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            if arrival.cancel():  # False once it is done
                model.arrivals.remove(arrival)
                self._changed.set()
        if arrival.cancelled():
            raise ClientDisconnect
        arrival.result()

    def _admit(self, model: HostedModel, error: Exception | None = None) -> None:
        """Lets every request that waits for `model` run, or fail with `error`."""
        arrivals, model.arrivals = model.arrivals, []
        for arrival in arrivals:
            if error is not None:
                arrival.set_exception(error)
            else:
                model.requests += 1
                arrival.set_result(None)

    async def _bring(self, model: HostedModel) -> None:
        """Loads `model` for the requests that wait for it, after others have made room."""
        error: Exception | None = None
        try:
            async with self._changing:
                if not model.served:
                    await self._make_room(model)
                    if model.arrivals:
                        await self._load(model)
        except Exception as caught:  # noqa: BLE001  the requests that wait for it are told
            error = caught
        model.loading = None
        self._admit(model, error)

    async def _load(self, model: HostedModel) -> None:
        name = model.name
        model.hosted, model.keep_s = model.fresh(), inf
        started = time.perf_counter()
        model.hosted.start()
        try:
            await model.hosted.ready()
        except Exception as error:
            if not isinstance(error, KvqError):
                logger.error("loading %s failed", name, exc_info=error)
            raise RequestError(
                f"the model {name} could not be loaded: {as_request_error(error)}; the other "
                "models are served, and the next request for this one tries again",
                status=500,
                code="model_not_loaded",
            ) from error
        logger.info("%s was loaded in %.1f s", name, time.perf_counter() - started)

    async def _make_room(self, model: HostedModel) -> None:
        """Lets models leave until `model` fits, or until no request waits for it any more."""
        try:
            while model.arrivals and not self._fits(model):
                loaded = sorted(
                    (other for other in self.all if other.served), key=lambda other: other.used
                )
                idle = [other for other in loaded if not other.requests]
                if idle:
                    await self._unload(idle[0])
                    continue
                loaded[0].leaving = True
                await self.until(
                    lambda loaded=loaded: (
                        not model.arrivals or not all(other.requests for other in loaded)
                    )
                )
        finally:
            for other in self.all:
                other.leaving = False

    def _fits(self, model: HostedModel) -> bool:
        loaded = (other.num_bytes for other in self.all if other.served)
        return self._budget_bytes is None or (sum(loaded) + model.num_bytes <= self._budget_bytes)

    async def _unload(self, model: HostedModel) -> None:
        """Saves the sessions of `model` and frees it; requests that come meanwhile load it anew."""
        model.stop_timer()
        hosted, model.hosted = model.hosted, model.fresh()
        await hosted.stop()
        del hosted
        # What a model leaves refers to itself, so only a collection frees it.
        await asyncio.to_thread(gc.collect)
        await asyncio.to_thread(reclaim)
        logger.info("%s has left the memory", model.name)

    def _rest(self, model: HostedModel) -> None:
        """Notes that `model` may be idle now, and measures how long it stays so."""
        self._changed.set()
        idle = not model.requests and not self.draining
        if idle and model.served and isfinite(model.keep_s):
            model.stop_timer()
            model.timer = asyncio.get_running_loop().call_later(
                model.keep_s, lambda: self._begin(self._expire(model))
            )

    async def _expire(self, model: HostedModel) -> None:
        async with self._changing:
            if model.timer is not None and model.served and not model.requests:
                await self._unload(model)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` until its end, or until the server stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
