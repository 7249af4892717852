"""`kvq serve --ray`: runs a fleet until a signal."""

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
from kvq_apps.fleet.deployments import application, fleet_request
from kvq_apps.serve.listening import listen

NAME = "kvq"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve_until_signal(
    arguments: Namespace, on_ready: Callable[[Mapping[str, Any], str, int], None]
) -> None:
    """Serves until SIGINT or SIGTERM.

    `on_ready` gets what is served, the URL and the number of replicas. Raises `UsageError` for an
    address that cannot be used, `BackendError` where no replica can load the model.
    """
    fleet = fleet_request(arguments)
    host, port = fleet.config.host, fleet.config.port
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
            serve.run(application(fleet), name=NAME)
        except RuntimeError as error:
            raise BackendError(f"the fleet did not start: {_failure_reason()}") from error
        facts = serve.get_deployment_handle("replica", NAME).facts.remote().result()
        with _signal_waiter() as wait:
            on_ready(facts, url, fleet.replicas.least)
            wait()
    finally:
        # Ray's remarks about its end do not belong on stdout.
        with redirect_stdout(sys.stderr):
            serve.shutdown()


def _failure_reason() -> str:
    """Returns the last error line of a replica, or Ray's message about the replicas."""
    said = serve.status().applications[NAME].deployments["replica"].message
    lines = [line.strip() for line in said.splitlines() if "Error: " in line]
    return lines[-1].partition("Error: ")[2] if lines else said


@contextmanager
def _signal_waiter() -> Generator[Callable[[], object]]:
    """Yields a function that waits for SIGINT or SIGTERM; until then Ctrl-C ends the start."""
    received = threading.Event()

    def set_received(_number: int, _frame: object) -> None:
        received.set()

    previous = {number: signal.signal(number, set_received) for number in _SIGNALS}
    try:
        yield received.wait
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
