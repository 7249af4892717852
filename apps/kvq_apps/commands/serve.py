"""`kvq serve`: answer HTTP requests as OpenAI's and llama-server's clients make them."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from kvq.config import parse_budget
from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps import options, output

if TYPE_CHECKING:
    from kvq_apps.serve.engine_thread import Served


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `kvq serve`."""
    parser.add_argument("name", nargs="?", metavar="[MODEL]", help="the model to serve")
    options.add_flags(parser, *options.ENGINE_FLAGS)
    options.add_flags(parser.add_argument_group("where"), *options.SERVE_FLAGS)
    cache = parser.add_argument_group(
        "cache",
        "All sessions together hold exactly --sessions times --kv-budget bytes, taken at the "
        "start. More conversations than that take turns: the one unused for longest goes to disk "
        "and comes back without being read again.",
    )
    options.add_flags(cache, "sessions", "sessions-disk", "queue", "chunk-tokens", "ctx-size")
    options.add_flags(
        cache,
        *options.KV_FLAGS,
        kv_budget="bytes of each session's cache: 64MiB, 4096tok, or 25%% of its fp16 size "
        "(default: what 8192 tokens need)",
    )
    sampling = parser.add_argument_group("sampling, where a request does not say")
    options.add_flags(sampling, *(flag for flag in options.SAMPLING_FLAGS if flag != "seed"))


def run(arguments: Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C and returns the exit code."""
    if arguments.name is not None and options.written(arguments, "model"):
        raise UsageError("give the model once: as [MODEL] or with -m")
    try:
        from kvq_apps.serve.server import Server
    except ImportError as error:
        raise UsageError(
            f"`kvq serve` needs {error.name}; install it with `pip install kvq-runtime[apps]`"
        ) from error
    from kvq_apps.serve.config import ServeConfig
    from kvq_apps.serve.loading import load

    settings: dict[str, Any] = options.given(
        arguments,
        host="host",
        port="port",
        api_key="api-key",
        sessions="sessions",
        queue="queue",
        chunk_tokens="chunk-tokens",
        grace_s="grace",
    )
    settings |= _disk(arguments)
    config = ServeConfig(
        sampling=options.sampling(arguments),
        origins=tuple(arguments.origin or ()),
        aliases=("default", *(arguments.alias or ())),
        **settings,
    )
    engine_options = options.given(arguments, threads="threads", backend="backend")
    session_options = options.session_options(arguments)
    model = arguments.model if arguments.name is None else arguments.name
    if not config.loopback and config.api_key is None:
        output.print_note(
            f"warning: {config.host} lets other machines in and there is no --api-key; anyone who "
            "reaches this port can use the model"
        )

    def announce(served: "Served", url: str) -> None:
        _announce(served, url, config.sessions, as_json=arguments.json)

    Server(lambda: load(model, engine_options, session_options, config), config, announce).run()
    return 0


def _disk(arguments: Namespace) -> dict[str, int]:
    """`saved_bytes` as `--sessions-disk` says it; empty for the default."""
    text = arguments.sessions_disk
    if text is None:
        return {}
    num_bytes = 0 if text == "0" else parse_budget(text).num_bytes
    if num_bytes is None:
        raise UsageError(f"--sessions-disk {text} is not possible: give bytes such as 2GiB, or 0")
    return {"saved_bytes": num_bytes}


def _announce(served: "Served", url: str, sessions: int, *, as_json: bool) -> None:
    """Says what is served where, when it can be used."""
    if as_json:
        output.print_json(
            {
                "url": url,
                "model": served.name,
                "kv": served.kv,
                "context": served.context_tokens,
                "sessions": sessions,
                "kv_budget": served.arena_bytes,
                "kv_budget_total": served.arena_bytes * sessions,
            }
        )
    output.print_note(
        f"serving {served.name} at {url}/v1; {sessions} sessions of "
        f"{format_bytes(served.arena_bytes)} (KV {served.kv}), "
        f"{format_bytes(served.arena_bytes * sessions)} together"
    )
