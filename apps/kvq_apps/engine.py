"""The engine of `import kvq`: one that takes every name of a model the command line takes.

It lives up here because a name may mean a checkpoint, which is exported first, and the runtime
knows no exporter: it opens what an export left.
"""

from pathlib import Path
from typing import Self

from kvq_apps.model_path import model_files
from kvq_apps.ngram_file import ngram_file
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import engine, gpu
from kvq_runtime.alternatives import Writer
from kvq_runtime.drafter import Drafter
from kvq_specdraft import drafter_named, writer_named


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
    ) -> Self:
        """Opens the model called `path`: a bundle folder, GGUF file, checkpoint folder or hub id.

        Without one it is the model pulled last, else `default`, the embedded one, where it is
        installed; `nano` is a smaller one. A checkpoint is exported into the user's cache folder
        the first time, with a note on stderr, and so is a GGUF file where `backend` is not
        llama.cpp; the hub is asked for an id that is not there yet. With the backend `float` a
        checkpoint folder is neither exported nor quantised. What else is given: as in the base
        class.
        Raises `ModelError`, `BundleError`, `BackendError` or `UsageError`.
        """
        files = model_files(None if path is None else str(path), backend)
        return cls(files, threads=threads, backend=backend, device=device)

    def drafter(self) -> Drafter | None:
        """`auto`, where an answer with drafts is that without, bit for bit; elsewhere none."""
        exact = self.backend.takes_trees and self.backend.rows_agree
        return drafter_named("auto") if exact else None

    def writer(self, name: str) -> Writer:
        """The method of `Session.drafts` called `NAME` or `NAME:option=value,...`."""
        return writer_for(name, self.tokenizer)


def writer_for(name: str, tokenizer: Tokenizer) -> Writer:
    """The method `NAME` or `NAME:option=value,...`. Raises `UsageError`.

    Superposed Decoding chooses by the n-grams of `kvq ngrams build` where they are there.
    """
    kind, _, given = name.partition(":")
    file = ngram_file(tokenizer)
    if kind in ("superposed", "spliced") and "ngrams=" not in given and file.exists():
        return writer_named(f"{kind}:{','.join(filter(None, (given, f'ngrams={file}')))}")
    return writer_named(name)
