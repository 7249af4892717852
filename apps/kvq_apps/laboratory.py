"""Where suites and tasks are that only a checkout has: the package `kvq_lab` of `apps/lab`.

Wheels do not bring it. Its modules `bench` and `eval` add flags to the commands of these names
(`add_flags`), refuse what does not fit them (`check`), and run what is named here (`RUNS`).
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvq.errors import UsageError

if TYPE_CHECKING:
    from kvq_apps.chat.client import ChatClient

PACKAGE = "kvq_lab"


class Part(Protocol):
    """What the laboratory adds to one command."""

    RUNS: Mapping[str, Callable[..., int]]

    def add_flags(self, parser: ArgumentParser, /) -> None:
        """The flags that only its suites or tasks take."""
        ...

    def check(self, arguments: Namespace, /) -> None:
        """Raises `UsageError` for such a flag where it does not belong."""
        ...


class Nothing:
    """The part where there is no laboratory."""

    RUNS: Mapping[str, Callable[..., int]] = {}

    def add_flags(self, _: ArgumentParser, /) -> None:
        """There are none."""

    def check(self, _: Namespace, /) -> None:
        """There is nothing to refuse."""


def part(command: str) -> Part:
    """What the laboratory has for `command`: bench, eval."""
    if find_spec(PACKAGE) is None:
        return Nothing()
    return cast(Part, import_module(f"{PACKAGE}.{command}"))


def peers() -> Mapping[str, str]:
    """Engines that only a checkout measures beside ours, as `kvq_apps.bench.engines` has them."""
    return {} if find_spec(PACKAGE) is None else import_module(f"{PACKAGE}.peers").PEERS


def scripted_chat(script: str) -> "ChatClient":
    """An engine without a model, for tests and pictures. Raises `UsageError` for the script."""
    if find_spec(PACKAGE) is None:
        raise only_there("--engine")
    return import_module(f"{PACKAGE}.fake_chat").scripted(script)


def runs(command: str, name: str, asked: str) -> Callable[..., int]:
    """What runs `name`. Raises `UsageError`, which names the flag `asked`, without a laboratory."""
    found: Any = part(command).RUNS.get(name)
    if found is None:
        raise only_there(asked)
    return found


def only_there(asked: str) -> UsageError:
    """What refuses `asked` where there is no laboratory."""
    return UsageError(
        f"{asked} belongs to the laboratory, which only a checkout of kvq has; get one and "
        "install it there with `pip install -e .`, or leave the flag out"
    )
