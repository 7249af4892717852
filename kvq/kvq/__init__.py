"""kvq: a quantised KV cache in a hard byte budget, and the runtime around it.

Names load on first use, so that `import kvq` costs nothing and pulls in neither torch nor
ONNX Runtime.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "AttentionParams": "kvq.config",
    "Budget": "kvq.config",
    "Cache": "kvq.cache",
    "CacheShape": "kvq.config",
    "CacheSpec": "kvq.sizing",
    "Engine": "kvq_runtime.engine",
    "KvPlan": "kvq.config",
    "KvqError": "kvq.errors",
    "Sampling": "kvq_runtime.sampling",
    "Session": "kvq_runtime.session",
}

__all__ = [
    "AttentionParams",
    "Budget",
    "Cache",
    "CacheShape",
    "CacheSpec",
    "Engine",
    "KvPlan",
    "KvqError",
    "Sampling",
    "Session",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'kvq' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
