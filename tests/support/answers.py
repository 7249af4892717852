"""Answers with drafts beside answers without: the same tokens, caches and distributions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq.class_cache import ClassCache
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.answer.generation import Vocabulary
from kvq_runtime.config import Sampling, SessionRequest
from kvq_runtime.engine import Engine
from kvq_runtime.session.session import Session

GREEDY = Sampling(temperature=0)
# Exceeded once in a thousand times by chi-square of so many degrees of freedom.
LIMITS = {7: 24.32, 15: 37.70, 63: 103.4}


def session(engine: Engine, drafter: Drafter | None, **request: Any) -> Session[Any]:
    """A session of `engine` with just what `SessionRequest` is asked for."""
    opened: Session[Any] = Session(
        backend=engine.backend,
        config=engine.backend.session_config(SessionRequest(**request)),
        vocabulary=Vocabulary.of(engine.tokenizer, engine.model.stop_ids),
    )
    opened.drafter = drafter
    return opened


def answered(opened: Session[Any], prompt: Sequence[int], count: int, **settings: Any) -> list[Any]:
    opened.align(prompt)
    opened.prefill()
    options: dict[str, Any] = {"sampling": GREEDY} | settings
    return list(opened.generate(count, **options))


def same_cache(actual: Cache, expected: Cache) -> None:
    """Compares the caches of two sequences, class by class."""
    for first, second in zip(actual.parts, expected.parts, strict=True):
        same_class_cache(first, second)


def same_class_cache(first: ClassCache, second: ClassCache) -> None:
    """Equal byte for byte; with probes, whose spare slots a draft may have used, all they tell."""
    for mine, theirs in zip(first.columns(), second.columns(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    if not first.arena.probes:
        assert first.state() == second.state()
        return
    seen = [cache.evidence().attention for cache in (first, second)]
    for name in ("mass", "mean_mass", "peak_weight", "key_error", "query_square", "output_square"):
        np.testing.assert_array_equal(*(getattr(attention, name) for attention in seen))


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
