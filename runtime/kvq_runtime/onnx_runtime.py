"""The only import of ONNX Runtime, which from here on tells nobody that it runs.

Its wheels report every run to their makers, from 1.32 on also on Linux: they write a device's id
and a database under the cache folder, and send what stands there. That begins with the import.
"""

from importlib import import_module
from typing import Any

from kvq import settings

PACKAGE = "onnxruntime"
_STATE = "onnxruntime.capi.onnxruntime_pybind11_state"


def onnx_runtime() -> Any:
    """The package, which comes without types. Raises `ImportError` where it is not installed."""
    settings.silence_onnx_runtime()
    package = import_module(PACKAGE)
    # Windows' own event log is not the variable's.
    package.disable_telemetry_events()
    return package


def onnx_runtime_state() -> Any:
    """Its module of exceptions and of what its operators can do."""
    onnx_runtime()
    return import_module(_STATE)
