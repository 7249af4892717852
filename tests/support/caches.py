"""Caches and what they cost, asked for in one line; by default the policy is `oldest`."""

from typing import Any

from kvq.class_cache import ClassCache
from kvq.config import Budget, CacheShape, KvPlan
from kvq.geometry import DELTA_PLACES, Geometry
from kvq.sizing import ClassSpec
from numpy_cache import storage_named


def open_cache(
    shape: CacheShape,
    plan: KvPlan,
    budget_bytes: int,
    context_tokens: int,
    *,
    native: bool = True,
    feedback: Any = None,
    retrieval: Any = None,
    **options: Any,
) -> ClassCache:
    """An empty cache of so many bytes."""
    cache_spec = spec(shape, plan, context_tokens, budget=Budget(num_bytes=budget_bytes), **options)
    engine = "native" if native else "numpy"
    return ClassCache(
        cache_spec.resolved(), feedback=feedback, retrieval=retrieval, storage=storage_named(engine)
    )


def minimum_budget(shape: CacheShape, plan: KvPlan, context_tokens: int, **options: Any) -> int:
    """Smallest budget that opens a cache of this context."""
    return spec(shape, plan, context_tokens, **options).minimum_bytes


def budget_for_tokens(
    shape: CacheShape,
    plan: KvPlan,
    tokens: int,
    *,
    context_tokens: int | None = None,
    **options: Any,
) -> int:
    """Smallest budget that holds `tokens` tokens, by default the context, without losing a bit."""
    context_tokens = tokens if context_tokens is None else context_tokens
    return spec(shape, plan, context_tokens, **options).bytes_for_tokens(tokens)


def geometry(
    shape: CacheShape, plan: KvPlan, *, context_tokens: int, probes: bool = False, **options: Any
) -> Geometry:
    """What decides how the bytes of such a cache divide."""
    return spec(shape, plan, context_tokens, **options).geometry(
        tight=False, probes=probes, places=DELTA_PLACES
    )


def spec(
    shape: CacheShape,
    plan: KvPlan,
    context_tokens: int,
    *,
    policy: str = "oldest",
    windows: Any = (),
    **options: Any,
) -> ClassSpec:
    """What is asked of a cache."""
    return ClassSpec(
        shape=shape,
        plan=plan,
        context_tokens=context_tokens,
        policy=policy,
        windows=tuple(windows),
        **options,
    )
