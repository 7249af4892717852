"""The engine of `import kvq`, which opens a model by every name that the command line takes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvq_apps.names.model_path import model_files
from kvq_apps.terminal.output import LOG
from kvq_runtime import engine
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.machine import gpu
from kvq_specdraft import drafter_named

if TYPE_CHECKING:
    from kvq_runtime.answer.alternatives import Writer


class Engine(engine.Engine):
    """Holds one model's weights in memory and opens sessions on them.

    `complete` and `chat` answer once; `session` opens a text that grows. Any thread may call them,
    also several at once. Call `close` when no thread uses the engine.
    """

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
        """Opens a model by its path or its name.

        A checkpoint is exported into the user's cache folder the first time, which the log says. So
        is a GGUF file where `backend` is not `llama.cpp`. The hub is asked for an id that is not
        there yet. Nothing is printed.

        Args:
            path: A bundle folder, GGUF file, checkpoint folder or hub id; or `default`, the
                embedded model, or `nano`, a smaller one. None: the model that was pulled last, else
                `default` where it is installed.
            threads: Threads of the processor. None: what `kvq bench --tune` measured, else the
                number of physical cores.
            backend: Name of a backend. `auto`: the fastest that runs here. With `float` a
                checkpoint folder is neither exported nor quantised.
            device: `cpu`, `cuda` or `auto`: a GPU where one can be used; where not, the log says
                why.
            weights_budget: Bytes of a model's experts that may be in memory, or a text such as
                `4GiB`; those that are chosen most stay. None: no limit. `resident` reports on them.

        Returns:
            The engine.

        Raises:
            ModelError: For a damaged, unsupported or unknown model.
            BundleError: For a damaged or incomplete bundle.
            BackendError: Where the backend or device cannot run here.
            UsageError: For an argument that is not possible.
        """
        files = model_files(None if path is None else str(path), backend, LOG)
        return cls(
            files, threads=threads, backend=backend, device=device, weights_budget=weights_budget
        )

    def drafter(self) -> Drafter | None:
        """Returns the drafter `auto` where drafts change no answer by a bit, else None."""
        exact = self.backend.takes_trees and self.backend.rows_agree
        return drafter_named("auto") if exact else None

    def writer(self, name: str) -> "Writer":
        """Returns the method of `Session.drafts` called `NAME` or `NAME:option=value,...`."""
        from kvq_apps.names.ngram_file import writer_for

        return writer_for(name, self.tokenizer)


def open_engine(name: str | None = None, *, backend: str = "auto", **options: Any) -> Engine:
    """Opens an engine as `Engine.open` does, with notes and questions at the terminal."""
    return Engine(model_files(name, backend), backend=backend, **options)
