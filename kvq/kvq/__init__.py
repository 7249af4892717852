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
    "CacheSpec": "kvq.cache",
    "CheckpointError": "kvq.errors",
    "Constraint": "kvq_runtime.answer.constraint",
    "DataError": "kvq.errors",
    "Draft": "kvq_runtime.answer.drafter",
    "Drafter": "kvq_runtime.answer.drafter",
    "Engine": "kvq_apps.names.engine",
    "Generation": "kvq_runtime.answer.generation",
    "GenerationOptions": "kvq_runtime.answer.generation",
    "KvPlan": "kvq.config",
    "KvqError": "kvq.errors",
    "ModelError": "kvq.errors",
    "Sampling": "kvq_runtime.config",
    "Session": "kvq_runtime.session.session",
    "SessionStats": "kvq_runtime.session.metrics",
    "SnapshotError": "kvq.errors",
    "Step": "kvq_runtime.answer.generation",
    "TokenSequence": "kvq_runtime.sequence.sequence",
    "UnsupportedModelError": "kvq.errors",
    "UsageError": "kvq.errors",
    "Vocabulary": "kvq_runtime.answer.generation",
    "heal": "kvq_runtime.answer.healing",
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
