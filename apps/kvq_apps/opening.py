"""How a command opens an engine: what it takes to get the model's files is told on stderr."""

from pathlib import Path

from kvq_apps.model_path import model_files
from kvq_runtime import gpu
from kvq_runtime.named_engine import Engine


def open_engine(
    name: Path | str | None = None,
    *,
    threads: int | None = None,
    backend: str = "auto",
    device: str = gpu.PROCESSOR,
    weights_budget: str | int | None = None,
) -> Engine:
    """As `Engine.open`, with notes, progress and questions at the terminal."""
    files = model_files(None if name is None else str(name), backend)
    return Engine(
        files, threads=threads, backend=backend, device=device, weights_budget=weights_budget
    )
