"""Measures how far a bundle is from the checkpoint it came from, on short texts.

Owns the comparison of logits: mean and 99.9 % Kullback-Leibler divergence (nats per token) and how
often the likeliest token is the same. Three pairs are compared: the bundle with unquantised keys
and values and the checkpoint (what the weights cost), the default KV plan and those (what the cache
costs), and the default KV plan and the checkpoint (what everything costs). The engine that runs the
bundle is a callable.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvq.config import FLOAT_WIDTH, Budget, KvPlan
from kvq_export.fit.substitutes import Rows, Stack
from kvq_export.gguf.gguf_writer import file_logits, llama_missing
from kvq_export.phases import Progress
from kvq_export.read.checkpoint import Checkpoint
from kvq_models.config import ModelConfig
from kvq_models.family import WeightSource, is_stack
from kvq_models.reference import PlainAttention, forward
from kvq_runtime.backends.llama_cache import padded
from kvq_runtime.bundle.bundle import Bundle

Run = Callable[[KvPlan, np.ndarray], np.ndarray]
"""Runs the bundle: (plan of the cache, ids int64 [T]) -> logits float32 [T, V]."""

logger = logging.getLogger(__name__)

MAX_TOKENS = 384
# Three arrays of logits are in memory at a time, each of at most this many float32.
MAX_LOGITS = 1 << 26
# Tokens per forward pass of the bundle: few, so that most keys and values are read from pages
# and not from the unquantised tail.
CHUNK_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """Holds the unquantised checkpoint: what its config says and where its weights are."""

    config: ModelConfig
    sources: Mapping[str, WeightSource]
    checkpoint: Checkpoint

    def logits(
        self, ids: np.ndarray, *, rows: slice = slice(None), long_rope: bool = False
    ) -> np.ndarray:
        """Returns logits float32 [T, V] of `rows` of `ids` int64 [T].

        The weights are streamed from disk.
        """
        positions = np.arange(len(ids))

        def weight(name: str) -> np.ndarray:
            source = self.sources[name]
            if not source.quantised:
                return self.checkpoint.read(source)
            if is_stack(name):
                return cast(np.ndarray, Stack(partial(self.grouped, name)))
            read = partial(self.checkpoint.read_rows, source)
            return cast(np.ndarray, Rows(read, partial(self.product, name)))

        attend = PlainAttention()
        return forward(self.config, weight, ids, positions, attend, rows=rows, long_rope=long_rope)

    def product(self, name: str, x: np.ndarray) -> np.ndarray:
        """Multiplies `x` float32 [T, K] by a matrix, float32 [T, N]; a few rows are in memory."""
        source = self.sources[name]
        out = np.empty((len(x), source.shape[0]), np.float32)
        row = 0
        for chunk in self.checkpoint.chunks(source):
            out[:, row : row + len(chunk)] = x @ chunk.T
            row += len(chunk)
        return out

    def grouped(self, name: str, x: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Multiplies as `kvq_models.reference.grouped`; only experts with rows are read."""
        source = self.sources[name]
        height = source.shape[0] // len(counts)
        out = np.empty((len(x), height), np.float32)
        stops = np.cumsum(counts)
        for expert in np.flatnonzero(counts):
            rows = slice(stops[expert] - counts[expert], stops[expert])
            column = 0
            expert_rows = range(expert * height, (expert + 1) * height)
            for chunk in self.checkpoint.chunks(source, rows=expert_rows):
                out[rows, column : column + len(chunk)] = x[rows] @ chunk.T
                column += len(chunk)
        return out


class Comparison:
    """Compares the answers to many tokens with what was expected."""

    def __init__(self) -> None:
        self._nats: list[np.ndarray] = []
        self._same: list[np.ndarray] = []

    def add(self, expected: np.ndarray, actual: np.ndarray) -> None:
        """Adds log-probabilities of the same tokens, both float32 [T, V]."""
        self._nats.append(divergences(expected, actual))
        self._same.append(expected.argmax(axis=1) == actual.argmax(axis=1))

    @property
    def figures(self) -> dict[str, float]:
        """Returns the divergence over all tokens, and how often the likeliest is the same."""
        nats = np.concatenate(self._nats)
        return {
            "mean_kld": float(nats.mean()),
            "kld_99_9": float(np.quantile(nats, 0.999)),
            "top1_agreement": float(np.concatenate(self._same).mean()),
        }


def measure(
    original: Callable[[np.ndarray], np.ndarray],
    plan: KvPlan,
    run: Run,
    texts: np.ndarray,
    progress: Progress,
) -> dict[str, Any]:
    """Measures what the graph costs, on `texts` int64 [S, T].

    `original` gives the checkpoint's logits [T, V] of one text. `progress` gets how many texts are
    done.
    """
    float_plan = KvPlan(k_bits=FLOAT_WIDTH, v_bits=FLOAT_WIDTH, sink_tokens=plan.sink_tokens)
    weights, cache, both = Comparison(), Comparison(), Comparison()
    for index, ids in enumerate(texts):
        progress(index, len(texts), "")
        expected = log_softmax(original(ids))
        unquantized, quantized = (log_softmax(run(kv, ids)) for kv in (float_plan, plan))
        weights.add(expected, unquantized)
        cache.add(unquantized, quantized)
        both.add(expected, quantized)
    return {
        "weights": {"kv": kv_name(float_plan)} | weights.figures,
        "kv": {"kv": kv_name(plan)} | cache.figures,
        "weights_and_kv": {"kv": kv_name(plan)} | both.figures,
    }


def measure_gguf(original: Original, path: Path, ids: np.ndarray, threads: int) -> dict[str, Any]:
    """Measures what a GGUF file costs, run by llama.cpp with a float16 cache, on `ids` int64 [T].

    Without llama.cpp the entry says why nothing was measured.
    """
    reason = llama_missing()
    if reason is not None:
        return {"not_measured": reason}
    long_rope = original.config.needs_long_rope(padded(len(ids)))
    expected = log_softmax(original.logits(ids, long_rope=long_rope))
    logits = file_logits(path, ids, threads)
    return {"kv": "f16", "tokens": len(ids)} | compare(expected, log_softmax(logits))


def divergences(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Returns the nats of every token, float64 [T]; takes log-probabilities as `compare` does."""
    return np.array(
        [(np.exp(p) * (p - q)).sum(dtype=np.float64) for p, q in zip(expected, actual, strict=True)]
    )


def compare(expected: np.ndarray, actual: np.ndarray) -> dict[str, float]:
    """Compares log-probabilities `actual` with `expected`, both float32 [T, V]."""
    comparison = Comparison()
    comparison.add(expected, actual)
    return comparison.figures


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Turns logits float32 [T, V] into log-probabilities, in place over the last axis."""
    for index in range(len(logits)):
        logits[index] -= logits[index].max()
        logits[index] -= np.log(np.exp(logits[index]).sum(dtype=np.float64))
    return logits


def quality_text() -> str:
    """Returns a short text of prose and code."""
    return resources.files("kvq_export").joinpath("quality.txt").read_text(encoding="utf-8")


def token_limit(vocab_size: int) -> int:
    """Returns how many tokens of a text are measured with this vocabulary."""
    return min(MAX_TOKENS, MAX_LOGITS // vocab_size)


def kv_name(plan: KvPlan) -> str:
    """Returns `fp`, or widths as the command line writes them, `4:2`."""
    return f"{plan.k_bits}:{plan.v_bits}" if plan.quantized else "fp"


@contextmanager
def engine_run(bundle: Bundle, threads: int) -> Generator[Run, None, None]:
    """Yields a function that runs the graph of `bundle` as fast as this machine can.

    It reads `CHUNK_TOKENS` tokens at a time.
    """
    from kvq.cache import Cache, CacheSpec
    from kvq_runtime import backends
    from kvq_runtime.backends.paged import class_fields

    backend = backends.open_backend("onnx", bundle, threads=threads)

    def run(plan: KvPlan, ids: np.ndarray) -> np.ndarray:
        # Room for every token: nothing is demoted or evicted.
        spec = CacheSpec.of(
            *class_fields(bundle.config),
            plan=plan,
            context_tokens=len(ids),
            budget=Budget(tokens=len(ids)),
            chunk_tokens=CHUNK_TOKENS,
            threads=threads,
        )
        logits = np.empty((len(ids), bundle.config.vocab_size), np.float32)
        with closing(Cache(spec.resolved())) as cache:
            for first in range(0, len(ids), CHUNK_TOKENS):
                part = ids[first : first + CHUNK_TOKENS]
                logit_rows = np.arange(len(part))
                logits[first : first + len(part)] = backends.forward_chain(
                    backend, cache, part, logit_rows
                )
        return logits

    try:
        yield run
    finally:
        backend.close()
