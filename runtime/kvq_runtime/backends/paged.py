"""What the backends over a bundle's graph share: kvq's own cache, and what a bundle says.

Knows no engine.
"""

import hashlib

from kvq.cache import Cache
from kvq_models.config import ModelConfig
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.backends import ModelFacts, ModelFiles
from kvq_runtime.budget import Sizing
from kvq_runtime.bundle import DATA_FILE, MODEL_FILE, Bundle
from kvq_runtime.config import SessionConfig, SessionRequest


class PagedBackend:
    """A bundle's graph, whose sessions live in the paged, quantised cache."""

    native_cache: bool

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        self.model = _facts(bundle)
        self.cache_kind = "native" if self.native_cache else "numpy"
        self.weight_bytes_per_step = bundle.weight_bytes_per_step
        self._bundle = bundle
        self._threads = threads

    @staticmethod
    def reads(files: ModelFiles) -> bool:
        """Whether these files hold a graph."""
        return files.has_onnx

    def tokenizer(self) -> Tokenizer | None:
        """See `Backend.tokenizer`."""
        return self._bundle.tokenizer()

    def session_config(self, request: SessionRequest) -> SessionConfig:
        """See `Backend.session_config`."""
        plan = request.plan(self.model.kv)
        policy = self._bundle.manifest.policy if request.policy is None else request.policy
        sizing = Sizing(
            shape=self._bundle.config.cache_shape,
            plan=plan,
            model_tokens=self.model.context_length,
            chunk_tokens=request.chunk_tokens,
            threads=self._threads,
            policy=policy,
        )
        context_tokens, num_bytes = sizing.session(request.context_tokens, request.kv_budget)
        return SessionConfig(
            plan=plan,
            context_tokens=context_tokens,
            budget_bytes=num_bytes,
            policy=policy,
            evicts=plan.quantized,
            chunk_tokens=request.chunk_tokens,
            seed=request.seed,
        )

    def open_cache(self, config: SessionConfig) -> Cache:
        """See `Backend.open_cache`."""
        model = self._bundle.config
        return Cache(
            model.cache_shape,
            config.plan,
            config.budget_bytes,
            config.context_tokens,
            chunk_tokens=config.chunk_tokens,
            policy=config.policy,
            threads=self._threads,
            windows=[layer.window_tokens for layer in model.layers],
            sensitivity=self._bundle.manifest.sensitivity,
            native=self.native_cache,
        )


def _facts(bundle: Bundle) -> ModelFacts:
    config, manifest = bundle.config, bundle.manifest
    return ModelFacts(
        name=manifest.name,
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        stop_ids=frozenset(manifest.eos_token_ids),
        fingerprint=_fingerprint(bundle),
        kv=manifest.kv,
        short_rope_tokens=_short_rope_tokens(config),
    )


def _fingerprint(bundle: Bundle) -> str:
    """Identifies graph and weights by the hashes in the manifest."""
    hashes = (bundle.manifest.files[name].sha256 for name in (MODEL_FILE, DATA_FILE))
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _short_rope_tokens(config: ModelConfig) -> int | None:
    """The longest context of the first rotary table, if the model has a second one."""
    limits = [rope.original_context for rope in config.ropes if rope.long_inv_freq is not None]
    return min((limit for limit in limits if limit is not None), default=None)
