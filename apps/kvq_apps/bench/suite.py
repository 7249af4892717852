"""What a suite that opens sessions gets. Measures nothing."""

from dataclasses import dataclass
from typing import Any

from kvq_apps.terminal.output import ShowProgress
from kvq_runtime.backends import ModelFiles
from kvq_runtime.machine import gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Holds a model's files, arguments of `Engine.session`, threads, and the progress callback."""

    files: ModelFiles
    session_options: dict[str, Any]
    threads: int
    progress: ShowProgress
    device: str = gpu.PROCESSOR
