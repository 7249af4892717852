"""Finds the suites and tasks that only a checkout has: the package `kvq_lab` of `apps/lab`.

Wheels do not contain it. Its modules `bench` and `eval` add flags to the commands of these names
(`add_flags`), refuse wrong ones (`check`), and run their suites or tasks by name (`RUNS`).
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

from kvq.errors import UsageError

PACKAGE = "kvq_lab"


class LabExtension(Protocol):
    """Describes what the laboratory adds to one command."""

    RUNS: Mapping[str, Callable[..., int]]

    def add_flags(self, parser: ArgumentParser, /) -> None:
        """Adds the flags that only its suites or tasks take."""
        ...

    def check(self, arguments: Namespace, /) -> None:
        """Raises `UsageError` for such a flag where it does not belong."""
        ...


class NoExtension:
    """Adds nothing, where there is no laboratory."""

    RUNS: Mapping[str, Callable[..., int]] = {}

    def add_flags(self, _: ArgumentParser, /) -> None:
        """Adds nothing."""

    def check(self, _: Namespace, /) -> None:
        """Refuses nothing."""


def extension(command: str) -> LabExtension:
    """Returns what the laboratory adds to `command`, which is bench or eval."""
    if find_spec(PACKAGE) is None:
        return NoExtension()
    return cast(LabExtension, import_module(f"{PACKAGE}.{command}"))


def peers() -> Mapping[str, str]:
    """Returns the other engines that only a checkout measures, as in `kvq_apps.bench.engines`."""
    return {} if find_spec(PACKAGE) is None else import_module(f"{PACKAGE}.peers").PEERS


def runner(command: str, name: str, flag: str) -> Callable[..., int]:
    """Returns the function that runs `name`.

    Raises a `UsageError` that names `flag` where there is no laboratory.
    """
    run: Any = extension(command).RUNS.get(name)
    if run is None:
        raise laboratory_missing(flag)
    return run


def laboratory_missing(flag: str) -> UsageError:
    """Returns the error that refuses `flag` where there is no laboratory."""
    return UsageError(
        f"{flag} belongs to the laboratory, which only a checkout of kvq has; get one and "
        "install it there with `pip install -e .`, or leave the flag out"
    )
