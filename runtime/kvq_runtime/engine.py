"""Loads a bundle once and opens sessions on it. Knows backends by name only."""

import hashlib
import logging
from pathlib import Path

from kvq.cache import Cache
from kvq.config import Budget, KvPlan, parse_budget
from kvq.errors import BackendError, UsageError
from kvq_models.config import ModelConfig
from kvq_models.tokenizer import IncrementalDetokenizer, Tokenizer
from kvq_runtime import backends, device
from kvq_runtime.budget import Sizing
from kvq_runtime.bundle import DATA_FILE, MODEL_FILE, Bundle
from kvq_runtime.config import SessionConfig
from kvq_runtime.session import NoText, Session, SessionModel

logger = logging.getLogger(__name__)


class Engine:
    """One bundle's weights in memory, and the way to sessions on them."""

    def __init__(
        self, bundle: Bundle, *, threads: int | None = None, backend: str = "auto"
    ) -> None:
        self.threads = device.default_threads() if threads is None else threads
        if self.threads < 1:
            raise UsageError(f"--threads {self.threads} is not possible: give 1 or more")
        self.bundle = bundle
        self.backend = backends.open_backend(backend, bundle, threads=self.threads)
        self._tokenizer = bundle.tokenizer()
        self._longest_context = self.config.context_length

    @classmethod
    def open(
        cls, path: Path | str, *, threads: int | None = None, backend: str = "auto"
    ) -> "Engine":
        """Opens and checks the bundle at `path`.

        `threads` None: the physical cores this process may use. `backend` auto: the fastest that
        runs here. Raises `BundleError`, `BackendError` or `UsageError`.
        """
        return cls(Bundle.open(path), threads=threads, backend=backend)

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        return self.bundle.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `BackendError` for a bundle that has none."""
        if self._tokenizer is None:
            raise BackendError(
                f"{self.bundle.path} has no tokenizer, it takes token ids only; export a "
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
        policy: str = "oldest",
        chunk_tokens: int = 256,
        seed: int | None = None,
    ) -> Session:
        """A new, empty sequence. What is None comes from the bundle and its model.

        `kv_budget` is bytes, or text such as 64MiB, 4096tok or 25%; None: what 8192 tokens (or a
        shorter context) need. Raises `UsageError`, and `BudgetError` for a budget too small,
        naming the smallest that works.
        """
        default = self.bundle.manifest.kv
        plan = KvPlan(
            k_bits=default.k_bits if k_bits is None else k_bits,
            v_bits=default.v_bits if v_bits is None else v_bits,
            sink_tokens=default.sink_tokens,
        )
        budget = Budget() if kv_budget is None else kv_budget
        budget = budget if isinstance(budget, Budget) else parse_budget(budget)
        sizing = Sizing(
            shape=self.config.cache_shape,
            plan=plan,
            model_tokens=self.config.context_length,
            chunk_tokens=chunk_tokens,
            threads=self.threads,
        )
        context_tokens, num_bytes = sizing.session(context_tokens, budget)
        return self._open_session(
            SessionConfig(
                plan=plan,
                context_tokens=context_tokens,
                budget_bytes=num_bytes,
                policy=policy,
                chunk_tokens=chunk_tokens,
                seed=seed,
            )
        )

    def close(self) -> None:
        """Gives the weights' memory back; sessions of this engine end with it."""
        self.backend.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_session(self, config: SessionConfig) -> Session:
        if config.context_tokens > self._longest_context:
            self._longest_context = config.context_tokens
            logger.warning(
                "a context of %d tokens is more than the %d this model was made for; expect "
                "worse text beyond that",
                config.context_tokens,
                self.config.context_length,
            )
        cache = Cache(
            self.config.cache_shape,
            config.plan,
            config.budget_bytes,
            config.context_tokens,
            chunk_tokens=config.chunk_tokens,
            policy=config.policy,
            threads=self.threads,
            windows=[layer.window_tokens for layer in self.config.layers],
            native=self.backend.native_cache,
        )
        return Session(
            backend=self.backend, cache=cache, model=self._session_model(config), config=config
        )

    def _session_model(self, config: SessionConfig) -> SessionModel:
        tokenizer = self._tokenizer
        return SessionModel(
            detokenizer=NoText if tokenizer is None else lambda: IncrementalDetokenizer(tokenizer),
            vocab_size=self.config.vocab_size,
            stop_ids=frozenset(self.bundle.manifest.eos_token_ids),
            fingerprint=self._fingerprint(),
            rope_long=self.config.needs_long_rope(config.context_tokens),
        )

    def _fingerprint(self) -> str:
        """Identifies graph and weights by the hashes in the manifest."""
        files = self.bundle.manifest.files
        return hashlib.sha256(
            "".join(files[name].sha256 for name in (MODEL_FILE, DATA_FILE)).encode()
        ).hexdigest()
