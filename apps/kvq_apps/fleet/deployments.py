"""The parts of a fleet that Ray Serve runs: replicas, the gateway, and the router between them.

A replica is a process with the routes of `kvq serve` over its own `SessionPool`. Ray Serve starts,
watches, replaces, adds and removes replicas.
"""

import logging
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, redirect_stdout
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    RayServeException,
)
from ray.serve.request_router import RequestRouter
from starlette.types import Message

from kvq.errors import BackendError
from kvq_apps.fleet.gateway import ForwardedRequest, gateway, lost_replica_error
from kvq_apps.fleet.prefixes import Placements
from kvq_apps.fleet.replicas import Replicas, share_of
from kvq_apps.serve.config import ServeConfig
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.hosted_app import HostedApp, replies
from kvq_apps.serve.listening import listen
from kvq_apps.serve.loading import ServeRequest
from kvq_apps.serve.server import on_signals

logger = logging.getLogger(__name__)

NAME = "kvq"
# Requests that generate nothing, such as /health, may be at a replica besides those that wait.
_SPARE = 64
# So many requests may wait until there is a replica.
_WAITING = 256
# After its `--grace` a replica gets so long to write its sessions to the disk.
_SAVING_S = 30.0
_HEALTH_S = 5.0
# After so many failures to load the model, Ray gives up.
_STARTS = 2


class PrefixRouter(RequestRouter):
    """Sends a text to the replica that got its beginning before; see `Placements`."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Takes `request_router_kwargs`: the number of `sessions` of a replica."""
        self._placements: Placements[Any] = Placements(**kwargs)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Returns the replicas in the order in which they are tried until one has room."""
        if pending_request is not None:
            # Without this a request that no replica has room for is tried again without a pause.
            pending_request.routing_context.should_backoff = True
        loads = {
            replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for replica in candidate_replicas
        }
        rows = {replica.replica_id: replica for replica in candidate_replicas}
        return [
            [rows[replica_id]]
            for replica_id in self._placements.order(_chains(pending_request), loads)
        ]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self._placements.put(replica_id, _chains(pending_request))

    def update_replicas(self, replicas: list[Any]) -> None:
        self._placements.keep([replica.replica_id for replica in replicas])
        super().update_replicas(replicas)


def _chains(pending_request: Any) -> Sequence[Any]:
    args = () if pending_request is None else pending_request.args
    return args[0].chains if args and isinstance(args[0], ForwardedRequest) else ()


class Replica:
    """Holds one pool with its routes, in a process that Ray started."""

    async def __init__(self, request: ServeRequest) -> None:
        """Loads the model. Raises `KvqError`."""
        self._hosted = HostedApp(request.load, request.config)
        self._hosted.start()
        await self._hosted.ready()

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[list[Message]]:
        """Yields the ASGI messages that answer a request, as many at once as there are."""
        scope = {**request.scope, "root_path": ""}
        async with aclosing(replies(self._hosted.app, scope, request.body)) as batches:
            async for batch in batches:
                yield batch

    async def facts(self) -> Mapping[str, Any]:
        return (await self._hosted.ready()).facts

    def check_health(self) -> None:
        """Raises `RuntimeError` if the pool has ended, so that Ray replaces the replica."""
        if self._hosted.pool.ended:
            raise RuntimeError("the engine's thread has ended") from self._hosted.pool.error

    async def __del__(self) -> None:
        """Writes the sessions to the disk for other replicas when Ray removes this one."""
        await self._hosted.leave()


@serve.ingress()
class Gateway:
    """Runs the gateway in a process that Ray started beside its proxy."""

    def __init__(self, replicas: Any, config: ServeConfig) -> None:
        self._answer = replicas.options(stream=True).answer
        self._config = config

    def __serve_build_asgi_app__(self) -> Any:
        return gateway(self._forward, self._config)

    async def _forward(self, request: ForwardedRequest) -> AsyncGenerator[list[Message]]:
        response = self._answer.remote(request)
        try:
            async for messages in response:
                yield messages
        except BackPressureError as error:
            raise RequestError(
                "too many requests wait for a replica already; try again later, or serve with "
                "more --replicas",
                status=429,
                code="queue_full",
                retry_s=1,
            ) from error
        except (RayError, RayServeException) as error:
            logger.warning("a replica is lost: %s", type(error).__name__)
            raise lost_replica_error() from error
        finally:
            response.cancel()


def application(request: ServeRequest, replicas: Replicas) -> serve.Application:
    """Returns the Ray Serve application of a fleet.

    Raises `UsageError` where no machine has enough CPUs.
    """
    config = request.config
    cpus, threads = share_of(request.engine_options.get("threads"), replicas.most)
    replica = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=config.sessions + config.queue + _SPARE,
        max_queued_requests=_WAITING,
        health_check_period_s=_HEALTH_S,
        max_constructor_retry_count=_STARTS,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.grace_s + _SAVING_S,
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"sessions": config.sessions},
        },
        **replicas.options(config.sessions),
    ).bind(request.with_threads(threads))
    return serve.deployment(
        Gateway,
        name="gateway",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_WAITING + replicas.most * (config.connections + _SPARE),
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.grace_s + _SAVING_S,
    ).bind(replica, config)


def serve_until_signal(
    request: ServeRequest, replicas: Replicas, on_ready: Callable[[Mapping[str, Any], str], None]
) -> None:
    """Serves until SIGINT or SIGTERM.

    `on_ready` gets what is served and the URL. Raises `UsageError` for an address that cannot be
    used, `BackendError` where no replica can load the model.
    """
    host, port = request.config.host, request.config.port
    assert port is not None
    # Ray Serve has logs of its own.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    # Ray's proxy does not report an address that is in use, and cannot choose a free port.
    with listen(host, port) as free:
        port = free.getsockname()[1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        serve.start(http_options={"host": host, "port": port})
        try:
            serve.run(application(request, replicas), name=NAME)
        except RuntimeError as error:
            raise BackendError(f"the fleet did not start: {_failure_reason()}") from error
        facts = serve.get_deployment_handle("replica", NAME).facts.remote().result()
        stopped = threading.Event()
        # Before this, Ctrl-C ends the start.
        with on_signals(stopped.set):
            on_ready(facts, url)
            stopped.wait()
    finally:
        # Ray's remarks about its end do not belong on stdout.
        with redirect_stdout(sys.stderr):
            serve.shutdown()


def _failure_reason() -> str:
    """Returns the last error line of a replica, or Ray's message about the replicas."""
    said = serve.status().applications[NAME].deployments["replica"].message
    lines = [line.strip() for line in said.splitlines() if "Error: " in line]
    return lines[-1].partition("Error: ")[2] if lines else said
