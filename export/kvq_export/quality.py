"""How far a bundle is from the checkpoint it came from, on short texts.

Owns the comparison of logits: mean and 99.9 % Kullback-Leibler divergence (nats per token) and
how often the likeliest token is the same: with unquantised keys and values (what the weights
cost), with the default KV plan against those (what the cache costs), and against the checkpoint
(what everything costs). The engine that runs the bundle is a callable.
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
from kvq_export.checkpoint import Checkpoint
from kvq_export.gguf_llama import context_tokens, file_logits, llama_missing
from kvq_export.stand_ins import Rows, Stack
from kvq_models.config import ModelConfig
from kvq_models.family import WeightSource, is_stack
from kvq_models.reference import PlainAttention, forward
from kvq_runtime.bundle import Bundle

Change = Callable[[np.ndarray], np.ndarray]
"""Rows of a matrix, float32 [n, K], as they were read -> as they are multiplied by."""

Run = Callable[[KvPlan, np.ndarray], np.ndarray]
"""(plan of the cache, ids int64 [T]) -> logits float32 [T, V] of the bundle."""

logger = logging.getLogger(__name__)

MAX_TOKENS = 384
# Three arrays of logits are held at a time, each of at most this many float32.
MAX_LOGITS = 1 << 26
# Tokens per forward pass of the bundle: few, so that most keys and values are read from pages
# and not from the unquantised tail.
CHUNK_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """The unquantised checkpoint: what its config says and where its weights are."""

    config: ModelConfig
    sources: Mapping[str, WeightSource]
    checkpoint: Checkpoint

    def logits(self, ids: np.ndarray, *, long_rope: bool = False) -> np.ndarray:
        """Logits float32 [T, V] for `ids` int64 [T]; the weights are streamed from disk."""
        positions = np.arange(len(ids))

        def weight(name: str) -> np.ndarray:
            source = self.sources[name]
            if not source.quantised:
                return self.checkpoint.read(source)
            if is_stack(name):
                return cast(np.ndarray, Stack(partial(self.grouped, name)))
            read = partial(self.checkpoint.read_rows, source)
            return cast(np.ndarray, Rows(read, partial(self.product, name)))

        return forward(self.config, weight, ids, positions, PlainAttention(), long_rope=long_rope)

    def product(self, name: str, x: np.ndarray, change: Change | None = None) -> np.ndarray:
        """`x` float32 [T, K] times a matrix, float32 [T, N]; a few of its rows are in memory."""
        source = self.sources[name]
        out = np.empty((len(x), source.shape[0]), np.float32)
        row = 0
        for chunk in self.checkpoint.chunks(source):
            used = chunk if change is None else change(chunk)
            out[:, row : row + len(chunk)] = x @ used.T
            row += len(chunk)
        return out

    def grouped(
        self, name: str, x: np.ndarray, counts: np.ndarray, change: Change | None = None
    ) -> np.ndarray:
        """As `kvq_models.reference.grouped`; of the experts only those with rows are read."""
        source = self.sources[name]
        height = source.shape[0] // len(counts)
        found = np.empty((len(x), height), np.float32)
        stops = np.cumsum(counts)
        for expert in np.flatnonzero(counts):
            rows = slice(stops[expert] - counts[expert], stops[expert])
            column = 0
            own = range(expert * height, (expert + 1) * height)
            for chunk in self.checkpoint.chunks(source, rows=own):
                used = chunk if change is None else change(chunk)
                found[rows, column : column + len(chunk)] = x[rows] @ used.T
                column += len(chunk)
        return found


class Comparison:
    """What was found of many tokens, beside what was expected."""

    def __init__(self) -> None:
        self._nats: list[np.ndarray] = []
        self._same: list[np.ndarray] = []

    def add(self, expected: np.ndarray, found: np.ndarray) -> None:
        """Log-probabilities of the same tokens, both float32 [T, V]."""
        self._nats.append(divergences(expected, found))
        self._same.append(expected.argmax(axis=1) == found.argmax(axis=1))

    @property
    def figures(self) -> dict[str, float]:
        """Divergence of all tokens together, and how often the likeliest one is the same."""
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
    step: Callable[[str], None],
    at_8_bits: Mapping[int, np.ndarray] | None = None,
) -> dict[str, Any]:
    """What the graph costs, on `texts` int64 [S, T]; `original` gives logits [T, V] of one.

    `step` hears what is computed next. `at_8_bits` has the likeliest tokens int64 [T] with
    weights of that width of some texts, by place (`eight_bits`): what those keep is told too.
    """
    exact = KvPlan(k_bits=FLOAT_WIDTH, v_bits=FLOAT_WIDTH, sink_tokens=plan.sink_tokens)
    weights, cache, both = Comparison(), Comparison(), Comparison()
    kept: list[np.ndarray] = []
    for index, ids in enumerate(texts):
        step(f"what was lost, text {index + 1} of {len(texts)}")
        expected = log_softmax(original(ids))
        unquantized, found = (log_softmax(run(kv, ids)) for kv in (exact, plan))
        weights.add(expected, unquantized)
        cache.add(unquantized, found)
        both.add(expected, found)
        if at_8_bits is not None and index in at_8_bits:
            kept.append(expected.argmax(axis=1) == at_8_bits[index])
    report: dict[str, Any] = {
        "weights": {"kv": kv_name(exact)} | weights.figures,
        "kv": {"kv": kv_name(plan)} | cache.figures,
        "weights_and_kv": {"kv": kv_name(plan)} | both.figures,
    }
    if kept:
        same = np.concatenate(kept)
        report["at_8_bits"] = {"tokens": same.size, "top1_agreement": float(same.mean())}
    return report


def measure_gguf(original: Original, path: Path, ids: np.ndarray, threads: int) -> dict[str, Any]:
    """What a GGUF file costs, run by llama.cpp with a float16 cache, for `ids` int64 [T].

    Without llama.cpp the entry says why nothing was measured.
    """
    reason = llama_missing()
    if reason is not None:
        return {"not_measured": reason}
    long_rope = original.config.needs_long_rope(context_tokens(len(ids)))
    expected = log_softmax(original.logits(ids, long_rope=long_rope))
    found = file_logits(path, ids, original.config.vocab_size, threads)
    return {"kv": "f16", "tokens": len(ids)} | compare(expected, log_softmax(found))


def divergences(expected: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Nats of every token, float64 [T]; of log-probabilities as `compare` takes them."""
    return np.array(
        [(np.exp(p) * (p - q)).sum(dtype=np.float64) for p, q in zip(expected, found, strict=True)]
    )


def compare(expected: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Divergence of log-probabilities `found` from `expected`, both float32 [T, V]."""
    comparison = Comparison()
    comparison.add(expected, found)
    return comparison.figures


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In place over the last axis, float32 [T, V]."""
    for index in range(len(logits)):
        logits[index] -= logits[index].max()
        logits[index] -= np.log(np.exp(logits[index]).sum(dtype=np.float64))
    return logits


def quality_text() -> str:
    """A short text of prose and code."""
    return resources.files("kvq_export").joinpath("quality.txt").read_text(encoding="utf-8")


def token_limit(vocab_size: int) -> int:
    """How many tokens of a text are measured with this vocabulary."""
    return min(MAX_TOKENS, MAX_LOGITS // vocab_size)


def kv_name(plan: KvPlan) -> str:
    """`fp` or widths as the command line writes them, `4:2`."""
    return f"{plan.k_bits}:{plan.v_bits}" if plan.quantized else "fp"


@contextmanager
def engine_run(bundle: Bundle, threads: int) -> Generator[Run, None, None]:
    """Runs the graph of `bundle` as fast as this machine can, in chunks of `CHUNK_TOKENS`."""
    from kvq.classes import open_cache, spec_of
    from kvq_runtime import backends
    from kvq_runtime.backends.paged import class_fields

    reason = backends.missing("onnx")
    if reason is not None:
        logger.warning(
            "the quality report, which can be left out, uses the slow reference backend: %s",
            reason,
        )
    name = "onnx" if reason is None else "reference"
    backend = backends.open_backend(name, bundle, threads=threads)

    def run(plan: KvPlan, ids: np.ndarray) -> np.ndarray:
        # Room for every token: nothing is demoted or evicted.
        spec = spec_of(
            class_fields(bundle.config),
            plan=plan,
            context_tokens=len(ids),
            budget=Budget(tokens=len(ids)),
            chunk_tokens=CHUNK_TOKENS,
            threads=threads,
        )
        logits = np.empty((len(ids), bundle.config.vocab_size), np.float32)
        with closing(open_cache(spec.resolved(), engine=backend.cache_kind)) as cache:
            for first in range(0, len(ids), CHUNK_TOKENS):
                part = ids[first : first + CHUNK_TOKENS]
                wanted = np.arange(len(part))
                logits[first : first + len(part)] = backends.forward_chain(
                    backend, cache, part, wanted
                )
        return logits

    try:
        yield run
    finally:
        backend.close()
