"""kvq: the bundle's graph over the quantised cache, through the backend that `kvq run` uses.

Knows how to fill a cache without weights; measures nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvq import native_library
from kvq.cache import Arena, Cache, CacheSpec
from kvq.class_cache import ClassCache
from kvq.config import DEFAULT_POLICY, Budget, parse_budget, parse_kv
from kvq.errors import UsageError, argument
from kvq.formats import format_bytes, page_bytes
from kvq.native_linear import weight_bytes_read
from kvq.reference.delta import DeltaWeights
from kvq_apps.bench.attention_graph import AttentionGraph
from kvq_apps.bench.engines import KVQ, BenchSequence, Setting, draft_ids, logit_rows
from kvq_models.config import ModelConfig
from kvq_runtime.backends import Backend, missing, open_backend, sequence_pass
from kvq_runtime.backends.paged import class_fields
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.config import Sampling


class KvqEngine:
    """Runs kvq with the settings the user asks for; widths are written as for `--kv`."""

    name = KVQ

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int,
        settings: Sequence[Setting],
        device: str,
        weights_budget: int | None,
    ) -> None:
        self.settings = tuple(settings)
        self._bundle = bundle
        self._threads = threads
        onnx = missing("onnx") is None
        self._backend = open_backend(
            "onnx" if onnx else "float",
            bundle,
            threads=threads,
            device=device,
            weights_budget=weights_budget,
        )
        self._attention: AttentionGraph | None = None
        # A graph of attention alone needs layers that are alike, whatever is between them.
        classes = bundle.config.cache_classes
        if onnx and len(classes) == 1 and not classes[0].kv_shared_layers:
            self._attention = AttentionGraph(bundle, threads=threads, device=device)

    def sequence(self, setting: Setting, depth: int, room: int) -> "KvqSequence":
        """Makes a sequence; its cache is filled without running the model."""
        arena = self._spec(setting, depth + room).resolved()
        if setting.policy is not None:
            _check_pressure(setting, arena, depth)
        assert self._backend.paged is not None
        filled = self._backend.paged.cache_in(arena)
        config, pressed = self._bundle.config, setting.policy is not None
        fill(filled, config, depth)
        return KvqSequence(self._backend, filled, config, self._attention, pressed=pressed)

    def close(self) -> None:
        self._backend.close()

    def _spec(self, setting: Setting, tokens: int) -> CacheSpec:
        model, (k_bits, v_bits) = self._bundle.config, parse_kv(setting.kv)
        whole = Budget(tokens=tokens)
        return CacheSpec.of(
            *class_fields(model),
            plan=replace(self._bundle.manifest.kv, k_bits=k_bits, v_bits=v_bits),
            context_tokens=tokens,
            draft_tokens=setting.draft_tokens,
            budget=whole if setting.budget is None else parse_budget(setting.budget),
            threads=self._threads,
            policy=setting.policy or DEFAULT_POLICY,
            read=setting.read,
        )


def _check_pressure(setting: Setting, arena: Arena, depth: int) -> None:
    """Raises `UsageError` where a page can close without anything given up."""
    needed = arena.spec.bytes_for_tokens(depth)
    if arena.num_bytes >= needed:
        raise UsageError(
            f"{argument('--kv-budget')} {setting.budget} is {format_bytes(arena.num_bytes)}, and "
            f"{depth} tokens at {setting.kv} need {format_bytes(needed)}: "
            f"{argument('--kv-policy')} would "
            f"have nothing to do; lower the budget or raise {argument('--context')}"
        )


class KvqSequence(BenchSequence):
    """Holds a cache, and a snapshot of its beginning."""

    def __init__(
        self,
        backend: Backend[Cache],
        cache: Cache,
        config: ModelConfig,
        attention: AttentionGraph | None,
        *,
        pressed: bool,
    ) -> None:
        self._pressed = pressed
        self._backend = backend
        self._attention = attention
        self._mixed = config.conv_shape is not None or config.delta_shape is not None
        self._cache = cache
        self._rope_long = config.needs_long_rope(cache.context_tokens)
        self._qkv_width = config.first_attention.qkv_width
        self._beginning = cache.state()
        self._changed = False
        self.kv_bytes = cache.used_bytes
        self.relief_s = 0.0

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Runs a long input in chunks, as a session does."""
        logits = np.zeros((1, 0), np.float32)
        for start in range(0, len(ids), self._cache.chunk_tokens):
            chunk = ids[start : start + self._cache.chunk_tokens]
            self._begin(len(chunk))
            logits = self._run(chunk, np.array([len(chunk) - 1]))
            self._cache.commit(range(len(chunk)))
            self._changed = True
        return logits[0]

    def verify(self, rows: int) -> bool:
        if rows > self._cache.chunk_tokens:
            return False
        self._begin(rows)
        self._run(draft_ids(rows), logit_rows(rows))
        self._forget(rows)
        return True

    def rollback(self) -> None:
        """Loads the snapshot; trimming would not reopen the pages closed since."""
        if self._changed:
            self._cache.load_state(self._beginning)
        self._changed = False

    def attend(self, rows: int) -> bool:
        # A state needs the rows of every layer.
        most = self._cache.arena.draft_tokens if self._mixed else self._cache.chunk_tokens
        if rows > most or self._attention is None:
            return False
        self._begin(rows)
        qkv = random_rows(rows, self._qkv_width)
        self._attention.run(self._cache, qkv, rope_long=self._rope_long)
        self._forget(rows)
        return True

    def step_bytes(self) -> tuple[int, int]:
        """Counts the weight bytes that the products read, else those that the graph stores."""
        cache_bytes = sum(map(_cache_bytes_read, self._cache.parts))
        if not native_library.available():
            return self._backend.weight_bytes_per_step, cache_bytes
        before = weight_bytes_read()
        self.verify(1)
        self.rollback()
        return weight_bytes_read() - before or self._backend.weight_bytes_per_step, cache_bytes

    def _begin(self, rows: int) -> None:
        since = perf_counter()
        # This takes microseconds where nothing must be given up.
        self._cache.begin(rows)
        self.relief_s += perf_counter() - since
        self._changed |= self._pressed

    def _run(
        self, ids: NDArray[np.int64], rows_with_logits: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Runs a pass as a session does that samples by default."""
        rows = sequence_pass(self._cache, ids, rows_with_logits)
        rows = replace(rows, exact_rows=Sampling().exact_rows)
        return self._backend.forward((rows,), rope_long=self._rope_long)[0]

    def _forget(self, rows: int) -> None:
        """Ends a branch; a piece of a prompt is kept until `rollback`."""
        drafted = rows <= self._cache.arena.draft_tokens
        self._cache.commit(() if drafted else range(rows))
        self._changed |= not drafted

    def close(self) -> None:
        self._cache.close()
        self._beginning = b""


def _cache_bytes_read(cache: ClassCache) -> int:
    """Counts the bytes of pages and floating-point rows that a step's attention reads."""
    widths = cache.columns()[1].reshape(-1, 2).tolist()
    pages = sum(page_bytes(cache.shape.head_dim, k, v) for k, v in widths if k)
    return pages + len(cache.tail(0, 0)[0]) * cache.shape.float_bytes_per_token


@lru_cache
def random_rows(rows: int, width: int) -> NDArray[np.float32]:
    """Returns queries, keys and values float32 [rows, width], made once: that is not timed."""
    return np.random.default_rng(rows).standard_normal((rows, width), np.float32)


def _fill_states(cache: Cache, config: ModelConfig, count: int) -> None:
    """Gives `cache` `count` rows of the layers without attention."""

    def ones(*shape: int) -> NDArray[np.float32]:
        return np.ones(shape, np.float32)

    if (conv := config.conv_shape) is not None:
        for layer in range(conv.num_layers):
            cache.convolve(layer, ones(count, 3 * conv.width), ones(conv.width, conv.taps))
    if (delta := config.delta_shape) is not None:
        weights = DeltaWeights(
            conv=ones(delta.conv_width, delta.taps),
            decay=0 * ones(delta.value_heads),
            dt_bias=0 * ones(delta.value_heads),
            scale=ones(delta.value_dim),
            key_heads=delta.key_heads,
            norm_eps=config.norm_eps,
        )
        rows = ones(count, delta.conv_width + delta.value_width)
        for layer in range(delta.num_layers):
            cache.recur(layer, rows, ones(count, 2 * delta.value_heads), weights)


def fill(cache: Cache, config: ModelConfig, tokens: int, *, window_tokens: int = 1) -> None:
    """Gives `cache` the keys and values of `tokens` random tokens.

    A token sees `window_tokens`, by default only itself. What is stored does not depend on it, and
    pages out of sight cost nothing, so the time grows with `tokens` and not with its square.
    """
    long_rope = config.needs_long_rope(cache.context_tokens)
    storing = [
        (index, layer.attention)
        for index, layer in enumerate(config.layers)
        if layer.attends and layer.attention.kv_from is None
    ]
    calls = [
        (
            replace(config.attention(index), window_tokens=window_tokens),
            config.inv_freq(index, long_rope=long_rope),
            np.ones(attention.head_dim, np.float32) if attention.qk_norm == "heads" else None,
            attention.qkv_width,
        )
        for index, attention in storing
    ]
    qkv = random_rows(cache.chunk_tokens, max(attention.qkv_width for _, attention in storing))
    for start in range(0, tokens, cache.chunk_tokens):
        count = min(cache.chunk_tokens, tokens - start)
        positions = np.arange(start, start + count)
        cache.begin(count)
        for params, freq, norm, width in calls:
            cache.attend(params, qkv[:count, :width], positions, freq, norm, norm)
        _fill_states(cache, config, count)
        cache.commit(range(count))
