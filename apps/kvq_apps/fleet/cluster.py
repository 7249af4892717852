"""Ray itself: the one that runs, or one that is started here and ends with this process."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout

from kvq.errors import UsageError
from kvq.settings import ray_address, silence_ray

# Only requests and answers go through Ray, and they are small.
OBJECT_STORE_BYTES = 100 << 20
_LOCAL = "local"


@contextmanager
def connected() -> Generator[None]:
    """While inside, Ray is there: that of `RAY_ADDRESS`, one that runs here, or one of our own.

    One of our own is on this machine alone: it listens on loopback. Nothing is reported to
    anybody. Raises `UsageError` where Ray cannot be reached, `ModuleNotFoundError` without it.
    """
    silence_ray()
    import ray

    try:
        _join()
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"Ray cannot be reached or started ({error}); see `ray status`, or unset RAY_ADDRESS "
            "to have one started here"
        ) from error
    try:
        yield
    finally:
        with redirect_stdout(sys.stderr):
            ray.shutdown()


def _join() -> None:
    import ray

    address = ray_address()
    if address != _LOCAL:
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError:
            if address is not None:
                raise
        else:
            return
    ray.init(
        address=_LOCAL,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
