"""kvq: a quantised KV cache in a hard byte budget, and the runtime around it.

Names load on first use, so that `import kvq` costs nothing and pulls in neither torch nor
ONNX Runtime. `__init__.pyi` lists them, for type checkers as for this module.
"""

# pyright: reportUnsupportedDunderAll=false

from importlib import import_module
from typing import Any

with open(f"{__file__}i", encoding="utf-8") as _stub:
    # Lines `from MODULE import NAME as NAME`; other lines of the stub are no imports.
    _MODULES = {line.split()[-1]: line.split()[1] for line in _stub if line.startswith("from ")}

__all__ = sorted(_MODULES)  # noqa: PLE0605  the stub's names
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvq' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
