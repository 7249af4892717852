"""`kvq serve --ray`: a fleet from its first replica until a signal."""

import logging
import signal
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from ray import serve  # pyright: ignore[reportMissingImports]

from kvq_apps.fleet.deployments import application, asked_for
from kvq_apps.serve.listening import listen

NAME = "kvq"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_until_told(
    arguments: Namespace, on_ready: Callable[[Mapping[str, Any], str, int], None]
) -> None:
    """Serves until SIGINT or SIGTERM; `on_ready` gets what is served, where, by how many replicas.

    Raises `UsageError` for an address that cannot be listened on.
    """
    fleet = asked_for(arguments)
    host, port = fleet.config.host, fleet.config.port
    assert port is not None
    # What Ray Serve does is in its own logs.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    told = threading.Event()
    before = {number: signal.signal(number, lambda *_: told.set()) for number in _SIGNALS}
    try:
        # Ray's proxy says nothing of an address that is taken, and knows no "any free one".
        with listen(host, port) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(fleet), name=NAME)
        facts = serve.get_deployment_handle("replica", NAME).facts.remote().result()
        on_ready(
            facts, f"http://{f'[{host}]' if ':' in host else host}:{port}", fleet.replicas.least
        )
        told.wait()
    finally:
        serve.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)
