"""Loads a model once and opens sessions on it. Knows backends by name only."""

import logging
from pathlib import Path

from kvq.config import Budget, parse_budget
from kvq.errors import BackendError, UsageError
from kvq_models.tokenizer import Tokenizer
from kvq_runtime import backends, device
from kvq_runtime.backends import ModelFacts, ModelFiles
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import SessionRequest
from kvq_runtime.generation import Vocabulary
from kvq_runtime.gguf_file import GgufFile
from kvq_runtime.gguf_format import is_gguf
from kvq_runtime.session import Session

logger = logging.getLogger(__name__)


class Engine:
    """One model's weights in memory, and the way to sessions on them."""

    def __init__(
        self, files: ModelFiles, *, threads: int | None = None, backend: str = "auto"
    ) -> None:
        self.threads = device.default_threads() if threads is None else threads
        if self.threads < 1:
            raise UsageError(f"--threads {self.threads} is not possible: give 1 or more")
        self.files = files
        self.backend = backends.open_backend(backend, files, threads=self.threads)
        self._tokenizer = self.backend.tokenizer()
        self._longest_context = self.model.context_length

    @classmethod
    def open(
        cls, path: Path | str, *, threads: int | None = None, backend: str = "auto"
    ) -> "Engine":
        """Opens and checks the bundle or GGUF file at `path`.

        `threads` None: the physical cores this process may use. `backend` auto: the fastest that
        runs here. Raises `BundleError`, `ModelError`, `BackendError` or `UsageError`.
        """
        return cls(open_files(path), threads=threads, backend=backend)

    @property
    def model(self) -> ModelFacts:
        """What may be known of the model."""
        return self.backend.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `BackendError` for a model that has none."""
        if self._tokenizer is None:
            raise BackendError(
                f"{self.files.path} has no tokenizer, it takes token ids only; export a "
                "checkpoint that has a tokenizer.json"
            )
        return self._tokenizer

    def session(
        self,
        *,
        kv_budget: Budget | str | int | None = None,
        k_bits: int | None = None,
        v_bits: int | None = None,
        context_tokens: int | None = None,
        policy: str | None = None,
        chunk_tokens: int = 256,
        seed: int | None = None,
    ) -> Session:
        """A new, empty sequence. What is None comes from the model and its backend.

        `kv_budget` is bytes, or text such as 64MiB, 4096tok or 25%; None: what 8192 tokens (or a
        shorter context) need. Raises `UsageError`, `BackendError` for what the backend cannot
        do, and `BudgetError` for a budget too small, naming the smallest that works.
        """
        budget = Budget() if kv_budget is None else kv_budget
        request = SessionRequest(
            kv_budget=budget if isinstance(budget, Budget) else parse_budget(budget),
            k_bits=k_bits,
            v_bits=v_bits,
            context_tokens=context_tokens,
            policy=policy,
            chunk_tokens=chunk_tokens,
            seed=seed,
        )
        config = self.backend.session_config(request)
        self._warn_beyond_training(config.context_tokens)
        return Session(
            backend=self.backend,
            config=config,
            vocabulary=Vocabulary.of(self._tokenizer, self.model.stop_ids),
        )

    def close(self) -> None:
        """Gives the weights' memory back; sessions of this engine end with it."""
        self.backend.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn_beyond_training(self, context_tokens: int) -> None:
        """Warns once per length of a context longer than the model knows."""
        if context_tokens > self._longest_context:
            self._longest_context = context_tokens
            logger.warning(
                "a context of %d tokens is more than the %d this model was made for; expect "
                "worse text beyond that",
                context_tokens,
                self.model.context_length,
            )


def open_files(path: Path | str) -> ModelFiles:
    """The checked bundle or GGUF file at `path`. Raises `BundleError` or `ModelError`."""
    return GgufFile.open(path) if is_gguf(path) else Bundle.open(path)
