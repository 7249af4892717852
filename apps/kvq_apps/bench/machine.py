"""The machine that numbers were measured on: processor, memory, load, versions."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import kvq
from kvq import devices, native_library
from kvq_runtime.machine import device, gpu

PACKAGES = {
    "kvq": ("onnxruntime",),
    "transformers": ("transformers", "torch", "optimum-quanto", "hqq"),
    "llama.cpp": ("llama-cpp-python",),
}
BUSY_SHARE = 0.25


def describe(engines: Sequence[str], on_device: str = gpu.PROCESSOR) -> dict[str, Any]:
    """Describes the machine now, and the versions of all that runs on it."""
    packages = {package for name in engines for package in PACKAGES.get(name, ())}
    return {
        **asdict(device.probe()),
        "system": f"{platform.system()} {platform.release()}",
        "device_name": None if on_device == gpu.PROCESSOR else devices.opened(on_device).name,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "kernels": native_library.isa() if native_library.available() else "numpy",
        "versions": {
            "kvq": kvq.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in sorted(packages)},
        },
    }


def busy(machine: Mapping[str, Any]) -> bool:
    """Tells whether other programs used enough of the processor to spoil a measurement."""
    load = machine["load"]
    return load is not None and load > BUSY_SHARE * machine["cores"]


def version(package: str) -> str:
    """Returns the installed version of a package, or that there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
