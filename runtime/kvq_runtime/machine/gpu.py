"""Chooses the device that a model runs on, and says why a device cannot be used."""

import logging
from importlib.util import find_spec

from kvq import devices
from kvq.errors import BackendError, UsageError, argument
from kvq_runtime.machine.onnx_runtime import onnx_runtime

logger = logging.getLogger(__name__)

PROCESSOR = "cpu"
DEVICES = (PROCESSOR, "cuda", "auto")
PROVIDER = "CUDAExecutionProvider"
# Both packages write the same folder, and only the one that is written last is complete. So the
# order matters.
INSTALL = (
    "pip uninstall -y onnxruntime onnxruntime-gpu && "
    'pip install "onnxruntime-gpu[cuda,cudnn]>=1.27,<2"'
)


def usable_device(device: str) -> str:
    """Returns `cpu`, or the name of a device that can be used; `auto` takes a GPU if there is one.

    Raises `UsageError` for an unknown name and `BackendError` with the reason for a device that was
    named and cannot be used.
    """
    if device == PROCESSOR:
        return PROCESSOR
    if device not in (*DEVICES, *devices.LIBRARIES):
        raise UsageError(
            f"{argument('device')} {device!r} is not known; choose {', '.join(DEVICES)}"
        )
    name = "cuda" if device == "auto" else device
    reason = why_not(name)
    if not reason:
        return name
    if device != "auto":
        raise BackendError(f"{reason}; {argument('device', 'cpu')} runs on the processor")
    # A machine without a GPU needs no warning; one whose GPU stays idle does.
    level = logging.WARNING if not devices.driver_missing() else logging.INFO
    logger.log(level, "running on the processor: %s", reason)
    return PROCESSOR


def why_not(name: str = "cuda") -> str:
    """Returns why models cannot run on the device; empty if they can."""
    reason = _why_no_provider() if name == "cuda" else ""
    return devices.why_not(name) or (reason and f"the device {name!r} cannot be used: {reason}")


def _why_no_provider() -> str:
    if find_spec("onnxruntime") is None:
        return f"onnxruntime is not installed; {INSTALL}"
    package = onnx_runtime()
    if PROVIDER in package.get_available_providers():
        return ""
    return f"onnxruntime {package.__version__} here knows no CUDA; {INSTALL}"
