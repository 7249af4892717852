"""`kvq serve --ray`: a fleet from its first replica until a signal."""

import logging
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from ray import serve

from kvq.errors import BackendError
from kvq_apps.fleet.deployments import application, asked_for
from kvq_apps.serve.listening import listen

NAME = "kvq"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_until_told(
    arguments: Namespace, on_ready: Callable[[Mapping[str, Any], str, int], None]
) -> None:
    """Serves until SIGINT or SIGTERM; `on_ready` gets what is served, where, by how many replicas.

    Raises `UsageError` for an address that cannot be listened on, `BackendError` where no replica
    can load the model.
    """
    fleet = asked_for(arguments)
    host, port = fleet.config.host, fleet.config.port
    assert port is not None
    # What Ray Serve does is in its own logs.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    # Ray's proxy says nothing of an address that is taken, and knows no "any free one".
    with listen(host, port) as free:
        port = free.getsockname()[1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        serve.start(http_options={"host": host, "port": port})
        try:
            serve.run(application(fleet), name=NAME)
        except RuntimeError as error:
            raise BackendError(f"the fleet did not start: {_why()}") from error
        facts = serve.get_deployment_handle("replica", NAME).facts.remote().result()
        with _until_told() as wait:
            on_ready(facts, url, fleet.replicas.least)
            wait()
    finally:
        # What Ray remarks about its end is no data.
        with redirect_stdout(sys.stderr):
            serve.shutdown()


def _why() -> str:
    """What Ray says of the replicas: the last line of what one of them raised."""
    said = serve.status().applications[NAME].deployments["replica"].message
    lines = [line.strip() for line in said.splitlines() if "Error: " in line]
    return lines[-1].partition("Error: ")[2] if lines else said


@contextmanager
def _until_told() -> Generator[Callable[[], object]]:
    """Gives a wait for SIGINT or SIGTERM. Before, Ctrl-C ends the start."""
    told = threading.Event()

    def tell(_number: int, _frame: object) -> None:
        told.set()

    before = {number: signal.signal(number, tell) for number in _SIGNALS}
    try:
        yield told.wait
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
