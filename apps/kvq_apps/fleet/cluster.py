"""Connects to the Ray at `RAY_ADDRESS`, or starts one that ends with this process."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout

from kvq.errors import UsageError
from kvq.settings import keep_others_from_ray, ray_address, silence_ray

# Only requests and answers pass through Ray, and they are small.
OBJECT_STORE_BYTES = 100 << 20
_LOCAL = "local"
_PROXY_MIDDLEWARES = "kvq_apps.fleet.gateway:proxy_middlewares"


@contextmanager
def connected() -> Generator[None]:
    """Connects to Ray while inside: to that of `RAY_ADDRESS`, else to a new one.

    A Ray that runs here without being named may be another user's. A new one runs on this machine
    only, listens on loopback and needs its token. It reports no usage. Raises `UsageError` where
    Ray cannot be reached, `ModuleNotFoundError` where it is not installed.
    """
    silence_ray()
    if ray_address() in (None, _LOCAL):
        keep_others_from_ray(_PROXY_MIDDLEWARES)
    import ray

    address = ray_address() or _LOCAL
    try:
        if address != _LOCAL:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address=_LOCAL,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
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
