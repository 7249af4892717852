"""Ours: the bundle's graph over the quantised cache, through the backend that `kvq run` uses.

Knows how to fill a cache without weights; measures nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvq import native
from kvq.cache import Cache
from kvq.classes import ClassedArena, ClassedSpec, spec_of
from kvq.config import DEFAULT_POLICY, AttentionParams, Budget, parse_budget, parse_kv
from kvq.errors import UsageError, argument
from kvq.formats import format_bytes, page_bytes
from kvq.native_linear import weight_bytes_read
from kvq.reference_delta import DeltaWeights
from kvq.sizing import Arena, CacheSpec
from kvq_apps.bench.attention_graph import AttentionGraph
from kvq_apps.bench.engines import (
    OURS,
    OURS_ON_HALVES,
    OURS_ON_ORT,
    InProcess,
    Setting,
    draft_ids,
    wanted_rows,
)
from kvq_apps.bench.ort_twin import ort_twin
from kvq_models.config import ModelConfig
from kvq_runtime.backends import WHOLE, Backend, Mode, Pass, missing, open_backend, sequence_pass
from kvq_runtime.backends.paged import PagedCache, class_fields
from kvq_runtime.bundle import Bundle
from kvq_runtime.config import Sampling


class KvqEngine:
    """Our engine; its settings are those the user asks for, widths as `--kv` writes them."""

    name = OURS
    _mode = WHOLE

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
        self._device = device
        self._onnx = missing("onnx") is None
        name = "onnx" if self._onnx else "reference"
        self._backend = open_backend(
            name, bundle, threads=threads, device=device, weights_budget=weights_budget
        )
        self._attention: AttentionGraph | None = None
        # A graph of attention alone is one of layers that are alike, whatever is between them.
        classes = bundle.config.cache_classes
        self._alike = self._onnx and len(classes) == 1 and not classes[0].readers
        if self._alike:
            self._attention = AttentionGraph(bundle, threads=threads, device=device)

    def sequence(self, setting: Setting, depth: int, room: int) -> "KvqSequence":
        return KvqSequence(
            self._backend,
            self._filled(setting, depth, room),
            self._bundle.config,
            self._attention,
            threads=self._threads,
            pressed=setting.policy is not None,
            mode=self._mode,
        )

    def batch(self, setting: Setting, depth: int, room: int, count: int) -> "KvqBatch | None":
        """See `BenchEngine.batch`; only ONNX Runtime's threads are shared by sequences."""
        if not self._alike:
            return None
        graph = AttentionGraph(
            self._bundle, threads=self._threads, device=self._device, several=True
        )
        caches = [self._filled(setting, depth, room) for _ in range(count)]
        return KvqBatch(graph, caches, self._bundle.config)

    def cache_bytes(self, setting: Setting, tokens: int) -> int:
        """See `BenchEngine.cache_bytes`; without a policy what keeps every bit of `tokens`."""
        return self._spec(setting, tokens).budget_bytes

    def close(self) -> None:
        self._backend.close()

    def _filled(self, setting: Setting, depth: int, room: int) -> PagedCache:
        arena = self._spec(setting, depth + room).resolved()
        if setting.policy is not None:
            _check_pressure(setting, arena, depth)
        assert self._backend.paged is not None
        cache = self._backend.paged.cache_in(arena)
        fill(cache, self._bundle.config, depth)
        return cache

    def _spec(self, setting: Setting, tokens: int) -> CacheSpec | ClassedSpec:
        model, (k_bits, v_bits) = self._bundle.config, parse_kv(setting.kv)
        whole = Budget(tokens=tokens)
        return spec_of(
            class_fields(model),
            plan=replace(self._bundle.manifest.kv, k_bits=k_bits, v_bits=v_bits),
            context_tokens=tokens,
            draft_tokens=setting.draft_tokens,
            budget=whole if setting.budget is None else parse_budget(setting.budget),
            threads=self._threads,
            policy=setting.policy or DEFAULT_POLICY,
            read=setting.read,
        )


class KvqOnOrtEngine(KvqEngine):
    """The same over the same weights, multiplied by ONNX Runtime's MatMulNBits."""

    name = OURS_ON_ORT

    def __init__(self, bundle: Bundle, **options: Any) -> None:
        super().__init__(ort_twin(bundle), **options)


class KvqOnHalvesEngine(KvqEngine):
    """The same, reading of 8-bit weights their upper nibbles; of the cache all."""

    name = OURS_ON_HALVES
    _mode = Mode(view="hi")

    def __init__(self, bundle: Bundle, **options: Any) -> None:
        super().__init__(bundle, **options)
        self._backend.check_mode(self._mode)


def _check_pressure(setting: Setting, arena: Arena | ClassedArena, depth: int) -> None:
    """Raises `UsageError` where a page can close without anything giving way."""
    needed = arena.spec.bytes_for_tokens(depth)
    if arena.num_bytes >= needed:
        raise UsageError(
            f"{argument('--kv-budget')} {setting.budget} is {format_bytes(arena.num_bytes)}, and "
            f"{depth} tokens at {setting.kv} need {format_bytes(needed)}: "
            f"{argument('--kv-policy')} would "
            f"have nothing to do; lower the budget or raise {argument('--context')}"
        )


class KvqSequence(InProcess):
    """A cache, and a snapshot of what it began with."""

    def __init__(
        self,
        backend: Backend[PagedCache],
        cache: PagedCache,
        config: ModelConfig,
        attention: AttentionGraph | None,
        *,
        threads: int,
        pressed: bool,
        mode: Mode,
    ) -> None:
        self._pressed = pressed
        self._mode = mode
        self._backend = backend
        self._attention = attention
        self._threads = threads
        self._mixed = config.conv_shape is not None or config.delta_shape is not None
        self._cache = cache
        self._rope_long = config.needs_long_rope(cache.context_tokens)
        self._layers = _Layers(config, long_rope=self._rope_long)
        self._beginning = cache.state()
        self._changed = False
        self.kv_bytes = cache.used_bytes
        self.relief_s = 0.0

    def forward(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `BenchSequence.forward`; a long input goes through in chunks, as in a session."""
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
        self._run(draft_ids(rows), wanted_rows(rows))
        self._forget(rows)
        return True

    def rollback(self) -> None:
        """See `BenchSequence.rollback`; trimming would not reopen the pages closed since."""
        if self._changed:
            self._cache.load_state(self._beginning)
        self._changed = False

    def attend(self, rows: int) -> bool:
        # Rows that are kept need those of every layer, and without a graph there is one thread,
        # whose times are none of the pass's.
        most = self._cache.arena.draft_tokens if self._mixed else self._cache.chunk_tokens
        if rows > most or (self._attention is None and self._threads > 1):
            return False
        qkv = self._layers.random_rows(rows)
        self._begin(rows)
        if self._attention is not None:
            self._attention.run([self._cache], qkv, rope_long=self._rope_long)
        else:
            positions = np.arange(self._cache.tokens, self._cache.tokens + rows)
            self._layers.attend(self._cache, qkv, positions)
        self._forget(rows)
        return True

    def step_bytes(self) -> tuple[int, int]:
        """See `BenchSequence.step_bytes`: what our products count, else what the graph stores."""
        before = weight_bytes_read() if native.available() else 0
        held = _held_bytes(self._cache)
        self.verify(1)
        self.rollback()
        counted = weight_bytes_read() - before if native.available() else 0
        return counted or self._backend.weight_bytes_per_step, held

    def _begin(self, rows: int) -> None:
        since = perf_counter()
        # Where nothing must give way this takes microseconds.
        self._cache.begin(rows)
        self.relief_s += perf_counter() - since
        self._changed |= self._pressed

    def _run(self, ids: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        """A pass as a session asks for it that samples as it does by default."""
        rows = replace(
            sequence_pass(self._cache, ids, wanted),
            exact_rows=Sampling().exact_rows,
            mode=self._mode,
        )
        return self._backend.forward(Pass(rows=(rows,), rope_long=self._rope_long))[0]

    def _forget(self, rows: int) -> None:
        """Ends a branch; a piece of a prompt, which is kept whole, goes with `rollback`."""
        drafted = rows <= self._cache.arena.draft_tokens
        self._cache.commit(() if drafted else range(rows))
        self._changed |= not drafted

    def close(self) -> None:
        self._cache.close()
        self._beginning = b""


class KvqBatch:
    """Caches of one depth, whose attention is computed in the same calls."""

    def __init__(
        self, graph: AttentionGraph, caches: Sequence[PagedCache], config: ModelConfig
    ) -> None:
        self._graph = graph
        self._caches = tuple(caches)
        self._rope_long = config.needs_long_rope(caches[0].context_tokens)
        self._qkv = _Layers(config).random_rows(len(caches))

    def attend(self, rows: int) -> bool:
        """See `BenchBatch.attend`."""
        if rows != 1:
            return False
        for cache in self._caches:
            cache.begin(1)
        self._graph.run(self._caches, self._qkv, rope_long=self._rope_long)
        for cache in self._caches:
            cache.commit(())
        return True

    def close(self) -> None:
        for cache in self._caches:
            cache.close()


def _held_bytes(cache: PagedCache) -> int:
    """Of all pages and floating-point rows: what a step's attention reads, without windows."""
    return sum(_held_bytes_of(part) for part in cache.parts)


def _held_bytes_of(cache: Cache) -> int:
    widths = cache.columns()[1].reshape(-1, 2).tolist()
    pages = sum(page_bytes(cache.shape.head_dim, k, v) for k, v in widths if k)
    return pages + len(cache.tail(0, 0)[0]) * cache.shape.float_bytes_per_token


class _LayerCall(NamedTuple):
    """What one layer's attention is called with."""

    params: AttentionParams
    inv_freq: NDArray[np.float32]
    norm: NDArray[np.float32] | None
    width: int
    shared: bool


class _Layers:
    """What attention is called with, made once: building it would be timed otherwise."""

    def __init__(self, config: ModelConfig, *, long_rope: bool = False) -> None:
        attending = [index for index, own in enumerate(config.layers) if own.attends]
        normed = config.layers[attending[0]].attention.qk_norm == "heads"
        self._layers = tuple(
            _LayerCall(
                params=config.attention(layer),
                inv_freq=config.inv_freq(layer, long_rope=long_rope),
                norm=np.ones(own.head_dim, np.float32) if normed else None,
                width=own.qkv_width,
                shared=own.kv_from is not None,
            )
            for layer, own in ((layer, config.layers[layer].attention) for layer in attending)
        )
        self._width = max(one.width for one in self._layers)
        self._rows: dict[int, NDArray[np.float32]] = {}

    def random_rows(self, rows: int) -> NDArray[np.float32]:
        """Queries, keys and values float32 [rows, width], the same at every call."""
        if rows not in self._rows:
            random = np.random.default_rng(rows)
            self._rows[rows] = random.standard_normal((rows, self._width), np.float32)
        return self._rows[rows]

    def attend(
        self,
        cache: PagedCache,
        rows: NDArray[np.float32],
        positions: NDArray[np.int64],
        *,
        window_tokens: int | None = None,
        stored_alone: bool = False,
    ) -> None:
        """All layers, or all that store; a token sees so many, by default what the layer's does."""
        for layer in self._layers:
            if stored_alone and layer.shared:
                continue
            window = layer.params.window_tokens if window_tokens is None else window_tokens
            params, own = replace(layer.params, window_tokens=window), rows[:, : layer.width]
            norm, freq = layer.norm, layer.inv_freq
            cache.attend(params, own, positions, freq, norm, norm, shared=layer.shared)


def _others(config: ModelConfig, most: int) -> Callable[[PagedCache, int], None]:
    """What gives a cache so many rows, up to `most`, of the layers that do not attend."""
    if (conv := config.conv_shape) is not None:
        bcx = np.ones((most, 3 * conv.width), np.float32)
        weight = np.ones((conv.width, conv.taps), np.float32)

        def convolve(cache: PagedCache, count: int) -> None:
            for layer in range(conv.num_layers):
                cache.convolve(layer, bcx[:count], weight)

        return convolve
    if (delta := config.delta_shape) is not None:
        heads = np.zeros(delta.value_heads, np.float32)
        weights = DeltaWeights(
            conv=np.ones((delta.conv_width, delta.taps), np.float32),
            decay=heads,
            dt_bias=heads,
            scale=np.ones(delta.value_dim, np.float32),
            key_heads=delta.key_heads,
            norm_eps=config.norm_eps,
        )
        rows = np.ones((most, delta.conv_width + delta.value_width), np.float32)
        gates = np.ones((most, 2 * delta.value_heads), np.float32)

        def recur(cache: PagedCache, count: int) -> None:
            for layer in range(delta.num_layers):
                cache.recur(layer, rows[:count], gates[:count], weights)

        return recur
    return lambda cache, count: None


def fill(cache: PagedCache, config: ModelConfig, tokens: int, *, window_tokens: int = 1) -> None:
    """Gives `cache` the keys and values of `tokens` random tokens.

    A token sees `window_tokens`, by default only itself: what is stored does not depend on what
    was seen, and pages out of sight cost nothing, so the time grows with `tokens` and not with
    its square.
    """
    layers = _Layers(config, long_rope=config.needs_long_rope(cache.context_tokens))
    qkv = layers.random_rows(cache.chunk_tokens)
    others = _others(config, cache.chunk_tokens)
    for start in range(0, tokens, cache.chunk_tokens):
        count = min(cache.chunk_tokens, tokens - start)
        positions = np.arange(start, start + count)
        cache.begin(count)
        layers.attend(cache, qkv[:count], positions, window_tokens=window_tokens, stored_alone=True)
        others(cache, count)
        cache.commit(range(count))
