"""kvq: a quantised KV cache in a hard byte budget, and the runtime around it.

Names load on first use, so that `import kvq` costs nothing and pulls in neither torch nor
ONNX Runtime. `__init__.pyi` says the same to type checkers.
"""

# The names load lazily, so that no checker can read them here: `__init__.pyi` lists them.
# pyright: reportUnsupportedDunderAll=false

from importlib import import_module
from typing import Any

_NAMES = {
    "AttentionParams": "kvq.config",
    "BackendError": "kvq.errors",
    "Budget": "kvq.config",
    "BudgetError": "kvq.errors",
    "BundleError": "kvq.errors",
    "Cache": "kvq.cache",
    "CacheError": "kvq.errors",
    "CacheShape": "kvq.config",
    "CacheSpec": "kvq.sizing",
    "CheckpointError": "kvq.errors",
    "Constraint": "kvq_runtime.constraint",
    "DataError": "kvq.errors",
    "Draft": "kvq_runtime.drafter",
    "Drafter": "kvq_runtime.drafter",
    "Engine": "kvq_runtime.named_engine",
    "Generation": "kvq_runtime.generation",
    "GenerationOptions": "kvq_runtime.generation",
    "KvPlan": "kvq.config",
    "KvqError": "kvq.errors",
    "ModelError": "kvq.errors",
    "Sampling": "kvq_runtime.config",
    "Session": "kvq_runtime.session",
    "SessionStats": "kvq_runtime.metrics",
    "SnapshotError": "kvq.errors",
    "Step": "kvq_runtime.generation",
    "TokenSequence": "kvq_runtime.sequence",
    "UnsupportedModelError": "kvq.errors",
    "UsageError": "kvq.errors",
    "Vocabulary": "kvq_runtime.generation",
    "heal": "kvq_runtime.healing",
}

__all__ = sorted(_NAMES)  # noqa: PLE0605  the table above, in the same order
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'kvq' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
