"""What a suite that opens sessions is given, and what it has. Measures nothing."""

from dataclasses import dataclass
from typing import Any, Protocol

from kvq_apps.output import Shown
from kvq_runtime import gpu
from kvq_runtime.backends import ModelFiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A model's files, arguments of `Engine.session`, threads, and who is told how far it is."""

    files: ModelFiles
    session_options: dict[str, Any]
    threads: int
    progress: Shown
    device: str = gpu.PROCESSOR


class Suite(Protocol):
    """A module of this package that measures one kind of use."""

    def measure(self, setup: Setup, job: Any, /) -> dict[str, Any]:
        """What `kvq bench --json` prints of it. Raises `KvqError`."""
        ...

    def print_report(self, data: dict[str, Any], /) -> None:
        """The same as a table."""
        ...
