"""Opens an engine for a command, with notes and progress on stderr."""

from pathlib import Path

from kvq_apps.names.engine import Engine
from kvq_apps.names.model_path import model_files
from kvq_runtime.machine import gpu


def open_engine(
    name: Path | str | None = None,
    *,
    threads: int | None = None,
    backend: str = "auto",
    device: str = gpu.PROCESSOR,
    weights_budget: str | int | None = None,
) -> Engine:
    """Opens an engine as `Engine.open` does, with notes and questions at the terminal."""
    files = model_files(None if name is None else str(name), backend)
    return Engine(
        files, threads=threads, backend=backend, device=device, weights_budget=weights_budget
    )
