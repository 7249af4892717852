"""Answers with drafts beside answers without: the same tokens, caches and distributions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.cache import Cache
from kvq_runtime.config import Sampling, SessionRequest
from kvq_runtime.drafter import Drafter
from kvq_runtime.engine import Engine
from kvq_runtime.generation import Vocabulary
from kvq_runtime.session import Session

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
    asked: dict[str, Any] = {"sampling": GREEDY} | settings
    return list(opened.generate(count, **asked))


def same_cache(one: Cache, other: Cache) -> None:
    """Equal byte for byte; with probes, whose spare slots a draft may have used, all they tell."""
    for mine, theirs in zip(one.columns(), other.columns(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    if not one.arena.probes:
        assert one.state() == other.state()
        return
    seen = [cache.evidence().attention for cache in (one, other)]
    for name in ("mass", "mean_mass", "peak_weight", "key_error", "query_square", "output_square"):
        np.testing.assert_array_equal(*(getattr(attention, name) for attention in seen))


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
