"""The engine of `import kvq`: opens a model by every name that the command line takes.

A name may mean a checkpoint, which is exported first, and drafters lie above the runtime as well:
it finds both by the names of their modules, when they are asked for.
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Self

from kvq_runtime import engine, gpu
from kvq_runtime.alternatives import Writer
from kvq_runtime.drafter import Drafter

# What finds the files of a model, a drafter and a writer of several drafts by name.
MODELS = "kvq_apps.model_path:library_files"
DRAFTERS = "kvq_specdraft:drafter_named"
WRITERS = "kvq_apps.ngram_file:writer_for"


class Engine(engine.Engine):
    """One model's weights in memory, and the way to sessions on them."""

    @classmethod
    def open(
        cls,
        path: Path | str | None = None,
        *,
        threads: int | None = None,
        backend: str = "auto",
        device: str = gpu.PROCESSOR,
        weights_budget: str | int | None = None,
    ) -> Self:
        """Opens the model called `path`: a bundle folder, GGUF file, checkpoint folder or hub id.

        Without one it is the model pulled last, else `default`, the embedded one, where it is
        installed; `nano` is a smaller one. A checkpoint is exported into the user's cache folder
        the first time, which the log says, and so is a GGUF file where `backend` is not
        llama.cpp; the hub is asked for an id that is not there yet. With the backend `float` a
        checkpoint folder is neither exported nor quantised. Nothing is printed. What else is
        given: as in the base class.
        Raises `ModelError`, `BundleError`, `BackendError` or `UsageError`.
        """
        files = _found(MODELS)(None if path is None else str(path), backend)
        return cls(
            files, threads=threads, backend=backend, device=device, weights_budget=weights_budget
        )

    def drafter(self) -> Drafter | None:
        """`auto`, where an answer with drafts is that without, bit for bit; elsewhere none."""
        exact = self.backend.takes_trees and self.backend.rows_agree
        return _found(DRAFTERS)("auto") if exact else None

    def writer(self, name: str) -> Writer:
        """The method of `Session.drafts` called `NAME` or `NAME:option=value,...`."""
        return _found(WRITERS)(name, self.tokenizer)


def _found(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
