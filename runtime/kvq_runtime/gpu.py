"""Which device a model runs on, and why none but the processor: what `--device` asks for."""

import logging
from importlib.util import find_spec

from kvq import devices
from kvq.errors import BackendError, UsageError, argument
from kvq_runtime.onnx_runtime import onnx_runtime

logger = logging.getLogger(__name__)

PROCESSOR = "cpu"
DEVICES = (PROCESSOR, "cuda", "auto")
PROVIDER = "CUDAExecutionProvider"
# Both packages are one folder, of which the one written last is whole: only in this order.
INSTALL = (
    "pip uninstall -y onnxruntime onnxruntime-gpu && "
    'pip install "onnxruntime-gpu[cuda,cudnn]>=1.27,<2"'
)


def chosen(asked: str) -> str:
    """`cpu` or a device that can be used, as `asked`; `auto` takes a GPU where there is one.

    Raises `UsageError` for an unknown name and `BackendError` with the reason for a device that
    was named and cannot be used.
    """
    if asked == PROCESSOR:
        return PROCESSOR
    if asked not in (*DEVICES, *devices.LIBRARIES):
        raise UsageError(
            f"{argument('device')} {asked!r} is not known; choose {', '.join(DEVICES)}"
        )
    name = "cuda" if asked == "auto" else asked
    reason = why_not(name)
    if not reason:
        return name
    if asked != "auto":
        raise BackendError(f"{reason}; {argument('device', 'cpu')} runs on the processor")
    # A machine without a GPU is nothing to be warned of, one whose GPU stays idle is.
    level = logging.WARNING if not devices.driver_missing() else logging.INFO
    logger.log(level, "running on the processor: %s", reason)
    return PROCESSOR


def why_not(name: str = "cuda") -> str:
    """Why models cannot run on the device; empty if they can."""
    reason = _why_no_provider() if name == "cuda" else ""
    return devices.why_not(name) or (reason and f"the device {name!r} cannot be used: {reason}")


def _why_no_provider() -> str:
    if find_spec("onnxruntime") is None:
        return f"onnxruntime is not installed; {INSTALL}"
    package = onnx_runtime()
    if PROVIDER in package.get_available_providers():
        return ""
    return f"onnxruntime {package.__version__} here knows no CUDA; {INSTALL}"
