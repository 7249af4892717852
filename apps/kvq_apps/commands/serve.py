"""`kvq serve`: answers clients of OpenAI, Anthropic, Ollama and llama-server over HTTP."""

import logging
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq import __version__
from kvq.errors import KvqError, UsageError
from kvq.formats import format_bytes
from kvq_apps.settings import flags, options
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_apps.serve.config import ServeConfig
    from kvq_apps.serve.instances import Instance
    from kvq_apps.serve.loading import ServeRequest
    from kvq_apps.serve.server import Server

logger = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvq serve`."""
    parser.add_argument("name", nargs="?", metavar="[MODEL]", help="the model to serve")
    flags.add_flags(parser, *flags.ENGINE_FLAGS, "draft", "draft-model", repeated=("model",))
    running = parser.add_argument_group("servers that run already").add_mutually_exclusive_group()
    running.add_argument("--status", action="store_true", help="list your servers and end")
    running.add_argument(
        "--stop",
        action="store_true",
        dest="stop_other",
        help="end your server, of several the one at --port or --socket: answers may end within "
        "its --grace, sessions are saved",
    )
    flags.add_flags(parser.add_argument_group("where"), *flags.SERVE_FLAGS)
    flags.add_flags(parser.add_argument_group("many machines"), "ray", "replicas", "autoscale")
    cache = parser.add_argument_group(
        "cache",
        "All sessions together hold exactly --sessions times --kv-budget bytes, taken at the "
        "start. More conversations than that take turns: the one unused for longest goes to disk "
        "and comes back without being read again.",
    )
    flags.add_flags(cache, "sessions", "sessions-disk", "sessions-folder")
    flags.add_flags(cache, "queue", "chunk-tokens", "ctx-size", "reuse")
    flags.add_flags(
        cache,
        *flags.KV_FLAGS,
        *flags.PREDICT_FLAGS,
        kv_budget="bytes of each session's cache: 64MiB, 4096tok, or 25%% of what the session's "
        "whole context (--ctx-size, or the model's) takes in fp16 "
        "(default: what {kvq.sizing:DEFAULT_TOKENS} tokens need)",
    )
    sampling = parser.add_argument_group(
        "sampling, where a request does not say", flags.SAMPLING_NOTE
    )
    flags.add_flags(sampling, *(flag for flag in flags.SAMPLING_FLAGS if flag != "seed"))


def run(arguments: Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C and returns the exit code."""
    if arguments.status:
        return _status(as_json=arguments.json)
    if arguments.stop_other:
        return _stop(arguments)
    if options.on_command_line(arguments, "models-budget") and (
        len(options.model_names(arguments)) == 1
    ):
        raise UsageError(
            "--models-budget is for several models, of which not all fit; give each with -m, or "
            "bound the one by --weights-budget and --kv-budget"
        )
    if arguments.ray:
        return _serve_on_ray(arguments)
    for name in ("replicas", "autoscale"):
        if options.on_command_line(arguments, name):
            raise UsageError(f"--{name} is for --ray, which runs several servers as one")
    if len(options.model_names(arguments)) > 1:
        return _serve_several(arguments)
    from kvq_apps.names.model_path import default_name, pull_missing
    from kvq_apps.serve.hosted_app import HostedApp
    from kvq_apps.serve.server import Server

    request = serve_request(arguments)
    config = request.config
    _warn_of_others(config)
    pull_missing(request.model)
    hosted = HostedApp(request.load, config)

    def announce(url: str) -> None:
        assert hosted.pool.served is not None
        facts = hosted.pool.served.facts
        logger.info("serving %s (KV %s) at %s", facts["model"], facts["kv"], url)
        _announce(facts, url, config.sessions, as_json=arguments.json)

    server = Server(hosted, config, announce)
    return _serve(server, config, request.model or default_name(), debug=arguments.debug)


def _serve_several(arguments: Namespace) -> int:
    """Serves several models, each loaded by its first request, and returns the exit code."""
    from kvq_apps.names.model_path import pull_missing
    from kvq_apps.serve.hosted_models import HostedModels, hosted_models
    from kvq_apps.serve.models_app import make_models_app
    from kvq_apps.serve.server import Server

    config = serve_config(arguments)
    budget_bytes = options.models_bytes(arguments)
    names = [name for name in options.model_names(arguments) if name is not None]
    _warn_of_others(config)
    for name in names:
        pull_missing(name)
    engine_options = options.engine_options(arguments)
    models = hosted_models(names, engine_options, options.session_options(arguments), config)
    hosted = HostedModels(models, config, budget_bytes)
    make_models_app(hosted)
    sizes = ", ".join(f"{model.name} ({format_bytes(model.num_bytes)})" for model in models)

    def announce(url: str) -> None:
        logger.info("serving %s at %s", sizes, url)
        if arguments.json:
            rows = [{"model": model.name, "bytes": model.num_bytes} for model in models]
            output.print_json({"url": url, "models": rows, "models_budget": budget_bytes})
        limit = "all may stay" if budget_bytes is None else f"{format_bytes(budget_bytes)} of them"
        output.print_note(
            f"serving {sizes} at {url}; a request loads its model, {limit} in memory; "
            f"{config.sessions} sessions of each"
        )

    server = Server(hosted, config, announce)
    return _serve(server, config, ", ".join(names), debug=arguments.debug)


def serve_request(arguments: Namespace) -> "ServeRequest":
    """Returns what the flags ask for, for one model. Raises `UsageError`."""
    from kvq_apps.serve.loading import ServeRequest

    return ServeRequest(
        model=options.model_name(arguments),
        config=serve_config(arguments),
        engine_options=options.engine_options(arguments),
        session_options=options.session_options(arguments),
    )


def serve_config(arguments: Namespace) -> "ServeConfig":
    """Returns the configuration that the flags ask for. Raises `UsageError`."""
    from kvq_apps.serve.config import ServeConfig

    return ServeConfig(
        sampling=options.sampling_fields(arguments),
        origins=tuple(arguments.origin or ()),
        aliases=("default", *(arguments.alias or ())),
        strict_model=bool(arguments.strict_model),
        **options.serve_options(arguments) | _socket(arguments),
    )


def _warn_of_others(config: "ServeConfig") -> None:
    if not config.loopback and config.api_key is None:
        output.print_note(
            f"warning: {config.host} lets other machines in and there is no --api-key; anyone who "
            "reaches this port can use the model"
        )


def _serve(server: "Server", config: "ServeConfig", model: str, *, debug: bool) -> int:
    """Runs `server` with a log, and lets other commands find it."""
    from kvq_apps.serve.instances import Instance, announce
    from kvq_apps.serve.log import log_path, logged
    from kvq_apps.serve.protocol import PROTOCOL

    path = log_path("socket" if config.port is None else str(config.port))
    instance = Instance(
        pid=os.getpid(),
        url=server.url,
        socket=config.socket_path and str(config.socket_path),
        model=model,
        version=__version__,
        protocol=PROTOCOL,
        started_at=time.time(),
        grace_s=config.grace_s,
        log=str(path),
    )
    with closing(server), logged(path, debug=debug), announce(instance):
        logger.info("kvq %s starts, protocol %d", __version__, PROTOCOL)
        try:
            server.run()
        except KvqError as error:
            logger.info("ended by an error: %s", error)
            raise
        logger.info("ended")
    return 0


def _serve_on_ray(arguments: Namespace) -> int:
    """Serves on Ray until SIGTERM or Ctrl-C."""
    from kvq_apps.fleet.cluster import connected
    from kvq_apps.fleet.replicas import Replicas
    from kvq_apps.names.model_path import pull_missing

    if arguments.socket is not None:
        raise UsageError("--ray listens on an address alone; leave out --socket")
    request, replicas = serve_request(arguments), Replicas.from_arguments(arguments)
    sessions = request.config.sessions * replicas.least
    _warn_of_others(request.config)
    pull_missing(request.model)
    with connected():
        from kvq_apps.fleet.deployments import serve_until_signal

        def announce(facts: Mapping[str, Any], url: str) -> None:
            _announce(facts, url, sessions, as_json=arguments.json)

        serve_until_signal(request, replicas, announce)
    return 0


def _status(*, as_json: bool) -> int:
    from dataclasses import asdict

    from kvq_apps.serve.instances import running

    rows = [(instance, _health(instance)) for instance in running()]
    if as_json:
        output.print_json(
            {"servers": [asdict(instance) | {"state": state} for instance, state in rows]}
        )
    elif not rows:
        output.print_note("no `kvq serve` of yours is running")
    else:
        cells = [
            (instance.pid, instance.address, instance.model, state,
             _age(time.time() - instance.started_at), instance.version)
            for instance, state in rows
        ]  # fmt: skip
        header = ("process", "address", "model", "state", "up", "kvq")
        output.print_table(cells, header=header)
    return 0


def _health(instance: "Instance") -> str:
    """Returns the state of a server: ready, loading, shutting_down, or silent without answer."""
    from kvq_apps.serve.server_connection import get_json

    try:
        answer = get_json(instance.url, instance.socket, "/health")
    except (OSError, ValueError):
        return "silent"
    return "ready" if "status" in answer else str(answer["error"]["code"])


def _age(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _stop(arguments: Namespace) -> int:
    """Ends one server and waits for it."""
    from kvq_apps.serve.instances import find_instance, stop

    on_command_line = options.on_command_line
    instance = find_instance(
        arguments.port if on_command_line(arguments, "port") else None,
        arguments.socket if on_command_line(arguments, "socket") else None,
    )
    stop(instance)
    if arguments.json:
        output.print_json({"stopped": {"pid": instance.pid, "address": instance.address}})
    output.print_note(f"stopped {instance.address} (process {instance.pid})")
    return 0


def _socket(arguments: Namespace) -> dict[str, Any]:
    """Returns `socket_path`, and no `port` unless a flag asks for an address too."""
    if arguments.socket is None:
        return {}
    values: dict[str, Any] = {"socket_path": Path(arguments.socket).absolute()}
    return (
        values if options.keywords(arguments, port="port", host="host") else values | {"port": None}
    )


def _announce(facts: Mapping[str, Any], url: str, sessions: int, *, as_json: bool) -> None:
    """Prints what is served where, once it is ready; `facts` are those of `ServedModel.facts`."""
    if as_json:
        output.print_json(
            {"url": url, **facts, "sessions": sessions,
             "kv_budget_total": facts["kv_budget"] * sessions}
        )  # fmt: skip
    output.print_note(
        f"serving {facts['model']} at {url}; {sessions} sessions of "
        f"{format_bytes(facts['kv_budget'])}, {format_bytes(facts['kv_budget'] * sessions)} "
        f"together; each holds {output.cache_sentence(facts)}"
    )
