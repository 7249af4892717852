"""Ours: the bundle's graph over the quantised cache, through the backend that `kvq run` uses.

Knows how to fill a cache without weights; measures nothing.
"""

from collections.abc import Sequence as Many
from dataclasses import replace
from time import perf_counter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache, budget_bytes, budget_for_tokens
from kvq.config import DEFAULT_POLICY, KvPlan, parse_budget, parse_kv
from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps.bench.engines import Setting
from kvq_models.config import ModelConfig
from kvq_runtime.backends import Backend, Pass, Rows, missing, open_backend
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import SessionConfig


class KvqEngine:
    """Our engine; its settings are those the user asks for, widths as `--kv` writes them."""

    name = "kvq"

    def __init__(self, bundle: Bundle, *, threads: int, settings: Many[Setting]) -> None:
        self.settings = tuple(settings)
        self._bundle = bundle
        self._threads = threads
        name = "onnx" if missing("onnx") is None else "reference"
        self._backend = open_backend(name, bundle, threads=threads)

    @staticmethod
    def missing() -> str | None:
        """Why it cannot run here: never, as a slower backend always can."""
        return None

    def sequence(self, setting: Setting, depth: int, room: int) -> "KvqSequence":
        """See `Engine.sequence`."""
        tokens = depth + room
        config = SessionConfig(
            plan=self._plan(setting.kv),
            context_tokens=tokens,
            budget_bytes=self.cache_bytes(setting, tokens),
            policy=setting.policy or DEFAULT_POLICY,
        )
        if setting.policy is not None:
            self._check_pressure(setting, config, depth)
        # Over a graph every backend opens the paged cache.
        cache = cast(Cache, self._backend.open_cache(config))
        fill(cache, self._bundle.config, depth)
        return KvqSequence(self._backend, cache, self._bundle.config)

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        """See `Engine.cache_bytes`; without a policy what keeps every bit of `tokens`."""
        shape, plan = self._bundle.config.cache_shape, self._plan(setting.kv)
        if setting.budget is None:
            return budget_for_tokens(shape, plan, tokens, threads=self._threads)
        budget = parse_budget(setting.budget)
        policy = DEFAULT_POLICY if setting.policy is None else setting.policy
        return budget_bytes(budget, shape, plan, tokens, threads=self._threads, policy=policy)

    def close(self) -> None:
        """See `Engine.close`."""
        self._backend.close()

    def _check_pressure(self, setting: Setting, config: SessionConfig, depth: int) -> None:
        """Raises `UsageError` where a page can close without anything giving way."""
        shape = self._bundle.config.cache_shape
        needed = budget_for_tokens(
            shape,
            config.plan,
            depth,
            context_tokens=config.context_tokens,
            threads=self._threads,
            policy=config.policy,
        )
        if config.budget_bytes >= needed:
            raise UsageError(
                f"--kv-budget {setting.budget} is {format_bytes(config.budget_bytes)}, and "
                f"{depth} tokens at {setting.kv} need {format_bytes(needed)}: --kv-policy would "
                "have nothing to do; lower the budget or raise --context"
            )

    def _plan(self, kv: str) -> KvPlan:
        k_bits, v_bits = parse_kv(kv)
        return replace(self._bundle.manifest.kv, k_bits=k_bits, v_bits=v_bits)


class KvqSequence:
    """A cache, and a snapshot of what it began with."""

    def __init__(self, backend: Backend[Cache], cache: Cache, config: ModelConfig) -> None:
        self._backend = backend
        self._cache = cache
        self._rope_long = config.needs_long_rope(cache.context_tokens)
        self._layers = _Layers(config, long_rope=self._rope_long)
        self._beginning = cache.state()
        self.kv_bytes = cache.used_bytes
        self.relief_s = 0.0

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Sequence.forward`; a long input goes through in chunks, as in a session."""
        logits = np.zeros((1, 0), np.float32)
        for start in range(0, len(ids), self._cache.chunk_tokens):
            chunk = ids[start : start + self._cache.chunk_tokens]
            last = np.array([len(chunk) - 1])
            since = perf_counter()
            # Where nothing must give way this takes microseconds.
            self._cache.begin(len(chunk))
            self.relief_s += perf_counter() - since
            rows = Rows.plain(self._cache, chunk, last)
            logits = self._backend.forward(Pass(rows=(rows,), rope_long=self._rope_long))[0]
            self._cache.commit(range(len(chunk)))
        return logits[0]

    def rollback(self) -> None:
        """See `Sequence.rollback`; trimming would not reopen the pages closed since."""
        self._cache.load_state(self._beginning)

    def attend(self, rows: int) -> bool:
        """See `Sequence.attend`."""
        qkv = self._layers.random_rows(rows)
        positions = np.arange(self._cache.tokens, self._cache.tokens + rows)
        self._cache.begin(rows)
        for params, frequencies, norm in self._layers.attention:
            self._cache.attend(params, qkv, positions, frequencies, norm, norm)
        self._cache.commit(())
        return True

    def close(self) -> None:
        """See `Sequence.close`."""
        self._cache.close()
        self._beginning = b""


class _Layers:
    """What attention is called with, made once: building it would be timed otherwise."""

    def __init__(self, config: ModelConfig, *, long_rope: bool = False) -> None:
        norm = np.ones(config.head_dim, np.float32) if config.qk_norm else None
        self.attention = tuple(
            (config.attention(layer), config.inv_freq(layer, long_rope=long_rope), norm)
            for layer in range(config.num_layers)
        )
        self._width = config.qkv_width
        self._rows: dict[int, NDArray[np.float32]] = {}

    def random_rows(self, rows: int) -> NDArray[np.float32]:
        """Queries, keys and values float32 [rows, width], the same at every call."""
        if rows not in self._rows:
            random = np.random.default_rng(rows)
            self._rows[rows] = random.standard_normal((rows, self._width), np.float32)
        return self._rows[rows]


def fill(cache: Cache, config: ModelConfig, tokens: int, *, window_tokens: int = 1) -> None:
    """Gives `cache` the keys and values of `tokens` random tokens.

    A token sees `window_tokens`, by default only itself: what is stored does not depend on what
    was seen, and pages out of sight cost nothing, so the time grows with `tokens` and not with
    its square.
    """
    layers = _Layers(config, long_rope=config.needs_long_rope(cache.context_tokens))
    qkv = layers.random_rows(cache.chunk_tokens)
    for start in range(0, tokens, cache.chunk_tokens):
        count = min(cache.chunk_tokens, tokens - start)
        positions = np.arange(start, start + count)
        cache.begin(count)
        for params, frequencies, norm in layers.attention:
            narrow = replace(params, window_tokens=window_tokens)
            cache.attend(narrow, qkv[:count], positions, frequencies, norm, norm)
        cache.commit(range(count))
