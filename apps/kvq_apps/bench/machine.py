"""What the numbers were measured on: processor, memory, load, versions. Measures no speed."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import kvq
from kvq import devices, native
from kvq_runtime import device, gpu

PACKAGES = {
    "kvq": ("onnxruntime",),
    "onnxruntime": ("onnxruntime",),
    "transformers": ("transformers", "torch", "optimum-quanto", "hqq"),
    "llama.cpp": ("llama-cpp-python",),
}
BUSY_SHARE = 0.25


def describe(engines: Sequence[str], on_device: str = gpu.PROCESSOR) -> dict[str, Any]:
    """The machine now, and the versions of everything that runs on it; `device_name` of a GPU."""
    packages = {package for name in engines for package in PACKAGES.get(name, ())}
    return {
        **asdict(device.probe()),
        "system": f"{platform.system()} {platform.release()}",
        "device_name": None if on_device == gpu.PROCESSOR else devices.opened(on_device).name,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "kernels": native.isa() if native.available() else "numpy",
        "versions": {
            "kvq": kvq.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in sorted(packages)},
        },
    }


def busy(machine: Mapping[str, Any]) -> bool:
    """Whether others used enough of the processor before the start to spoil a measurement."""
    load = machine["load"]
    return load is not None and load > BUSY_SHARE * machine["cores"]


def version(package: str) -> str:
    """The installed version of a package, or that there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
