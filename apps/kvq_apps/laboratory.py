"""Finds the suites and tasks that only a checkout has: the package `kvq_lab` of `apps/lab`.

Wheels do not contain it. Its modules `bench` and `eval` add flags to the commands of these names
(`add_flags`), refuse wrong ones (`check`), and run their suites or tasks by name (`RUNS`).
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from kvq.errors import UsageError

PACKAGE = "kvq_lab"


def extension(command: str) -> Any:
    """Returns the laboratory's module of `command`, which is bench or eval.

    Where there is no laboratory it is one that adds and refuses nothing.
    """
    if find_spec(PACKAGE) is None:
        return SimpleNamespace(add_flags=_nothing, check=_nothing, RUNS={})
    return import_module(f"{PACKAGE}.{command}")


def _nothing(_: object) -> None:
    pass


def peers() -> Mapping[str, str]:
    """Returns the other engines that only a checkout measures, as in `kvq_apps.bench.engines`."""
    return {} if find_spec(PACKAGE) is None else import_module(f"{PACKAGE}.peers").PEERS


def runner(command: str, name: str, flag: str) -> Callable[..., int]:
    """Returns the function that runs `name`.

    Raises a `UsageError` that names `flag` where there is no laboratory.
    """
    run = extension(command).RUNS.get(name)
    if run is None:
        raise laboratory_missing(flag)
    return run


def laboratory_missing(flag: str) -> UsageError:
    """Returns the error that refuses `flag` where there is no laboratory."""
    return UsageError(
        f"{flag} belongs to the laboratory, which only a checkout of kvq has; get one and "
        "install it there with `pip install -e .`, or leave the flag out"
    )
