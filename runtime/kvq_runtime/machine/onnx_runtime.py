"""Imports ONNX Runtime, in this one place, so that it reports no runs to its makers.

From 1.32 on its wheels write a device's id and a database under the cache folder and send what
stands there. That begins with the import.
"""

from importlib import import_module
from typing import Any

from kvq import settings

PACKAGE = "onnxruntime"
_STATE = "onnxruntime.capi.onnxruntime_pybind11_state"


def onnx_runtime() -> Any:
    """Imports the package, which has no types. Raises `ImportError` where it is not installed."""
    settings.silence_onnx_runtime()
    package = import_module(PACKAGE)
    # The variable does not reach the event log of Windows.
    package.disable_telemetry_events()
    return package


def onnx_runtime_state() -> Any:
    """Imports its module of exceptions and of its operators' abilities."""
    onnx_runtime()
    return import_module(_STATE)
