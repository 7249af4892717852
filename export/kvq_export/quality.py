"""How far a bundle is from the checkpoint it came from, on one short text.

Owns the comparison of logits: mean and 99.9 % Kullback-Leibler divergence (nats per token) and
how often the likeliest token is the same, once with unquantised keys and values (what the weights
cost) and once with the default KV plan (what everything costs). The engine that runs the bundle
is a callable.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

import numpy as np

from kvq.config import FLOAT_WIDTH, KvPlan
from kvq_export.checkpoint import Checkpoint
from kvq_models.config import ModelConfig
from kvq_models.family import WeightSource
from kvq_models.reference import forward, plain_attention
from kvq_runtime.bundle import Bundle

Run = Callable[[KvPlan, np.ndarray], np.ndarray]
"""(plan of the cache, ids int64 [T]) -> logits float32 [T, V] of the bundle."""

logger = logging.getLogger(__name__)

MAX_TOKENS = 384
# Two arrays of logits are held at a time, each of at most this many float32.
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

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Logits float32 [T, V] for `ids` int64 [T]; the weights are streamed from disk."""
        return forward(self.config, self._weight, ids, np.arange(len(ids)), plain_attention())

    def _weight(self, name: str) -> np.ndarray:
        source = self.sources[name]
        if len(source.shape) == 1:
            return self.checkpoint.read(source)
        return cast(np.ndarray, _StreamedMatrix(self.checkpoint, source))


def measure(
    original: Original, plan: KvPlan, run: Run, ids: np.ndarray, step: Callable[[str], None]
) -> dict[str, Any]:
    """The manifest's quality entry for `ids`, int64 [T]; `step` hears what is computed next."""
    step("the checkpoint's answers")
    expected = log_softmax(original.logits(ids))
    exact = KvPlan(k_bits=FLOAT_WIDTH, v_bits=FLOAT_WIDTH, sink_tokens=plan.sink_tokens)
    report: dict[str, Any] = {"text": "quality.txt", "tokens": len(ids)}
    for name, kv in (("weights", exact), ("weights_and_kv", plan)):
        step(f"the bundle's answers, kv {kv_name(kv)}")
        report[name] = {"kv": kv_name(kv)} | compare(expected, log_softmax(run(kv, ids)))
    return report


def compare(expected: np.ndarray, found: np.ndarray) -> dict[str, float]:
    """Divergence of log-probabilities `found` from `expected`, both float32 [T, V]."""
    divergence = np.array(
        [(np.exp(p) * (p - q)).sum(dtype=np.float64) for p, q in zip(expected, found, strict=True)]
    )
    same = expected.argmax(axis=1) == found.argmax(axis=1)
    return {
        "mean_kld": float(divergence.mean()),
        "kld_99_9": float(np.quantile(divergence, 0.999)),
        "top1_agreement": float(same.mean()),
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In place over the last axis, float32 [T, V]."""
    for index in range(len(logits)):
        logits[index] -= logits[index].max()
        logits[index] -= np.log(np.exp(logits[index]).sum(dtype=np.float64))
    return logits


def quality_text() -> str:
    """The text every bundle is measured on."""
    return resources.files("kvq_export").joinpath("quality.txt").read_text(encoding="utf-8")


def token_limit(vocab_size: int) -> int:
    """How many tokens of the text are used with this vocabulary."""
    return min(MAX_TOKENS, MAX_LOGITS // vocab_size)


def kv_name(plan: KvPlan) -> str:
    """`fp` or widths as the command line writes them, `4:2`."""
    return f"{plan.k_bits}:{plan.v_bits}" if plan.quantized else "fp"


@contextmanager
def engine_run(bundle: Bundle, threads: int) -> Generator[Run, None, None]:
    """Runs `bundle` with the fastest backend of this machine, in chunks of `CHUNK_TOKENS`."""
    from kvq.cache import Cache, budget_for_tokens
    from kvq_runtime import backends

    backend = backends.open_backend("auto", bundle, threads=threads)
    fastest = backends.PREFERENCE[0]
    if backend.name != fastest:
        logger.warning(
            "the quality report uses the slow %s backend: %s; --no-quality leaves it out",
            backend.name,
            backends.missing(fastest),
        )
    shape = bundle.config.cache_shape

    def run(plan: KvPlan, ids: np.ndarray) -> np.ndarray:
        # Room for every token: nothing is demoted or evicted.
        budget_bytes = budget_for_tokens(
            shape, plan, len(ids), chunk_tokens=CHUNK_TOKENS, threads=threads
        )
        cache = Cache(
            shape,
            plan,
            budget_bytes,
            len(ids),
            chunk_tokens=CHUNK_TOKENS,
            threads=threads,
            native=backend.native_cache,
        )
        logits = np.empty((len(ids), bundle.config.vocab_size), np.float32)
        try:
            for first in range(0, len(ids), CHUNK_TOKENS):
                part = ids[first : first + CHUNK_TOKENS]
                cache.begin(len(part))
                inputs = backends.plain_input(part, first, np.arange(len(part)), rope_long=False)
                logits[first : first + len(part)] = backend.forward(cache, inputs)
                cache.commit(len(part))
        finally:
            cache.close()
        return logits

    try:
        yield run
    finally:
        backend.close()


class _StreamedMatrix:
    """Stands in for a float32 matrix in `forward`: rows by index, and `x @ matrix.T`.

    Only a few row chunks of it are ever in memory.
    """

    # Makes `array @ self` call `__rmatmul__` here instead of treating self as a scalar.
    __array_ufunc__ = None

    def __init__(self, checkpoint: Checkpoint, source: WeightSource) -> None:
        self._checkpoint = checkpoint
        self._source = source

    @property
    def T(self) -> "_StreamedMatrix":  # noqa: N802  numpy's name
        """Only `x @ matrix.T` is possible, so nothing has to be turned."""
        return self

    def __getitem__(self, ids: np.ndarray) -> np.ndarray:
        return self._checkpoint.read_rows(self._source, ids)

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), self._source.shape[0]), np.float32)
        column = 0
        for chunk in self._checkpoint.chunks(self._source):
            out[:, column : column + len(chunk)] = x @ chunk.T
            column += len(chunk)
        return out
