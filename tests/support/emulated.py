"""The device tests emulate: CUDA kernels as C++, on a grid of threads one processor plays.

What is proved on it is proved on a GPU as well, where there is one: `DEVICES` are a fixture's
parameters, of which `-m gpu` takes the second.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvq import devices
from kvq.devices import DeviceCache
from shelf import Shelf

DEVICES = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
CSRC = Path(__file__).parents[2] / "kvq/csrc"
SOURCE = CSRC / "cuda/kvq_cuda.cu"
EMULATOR = Path(__file__).with_name("cuda_emulator.h")


class EmulatedCache(DeviceCache):
    """In the memory of the device that tests emulate."""

    device = "emulated"


def ready(device: str, shelf: Shelf) -> None:
    """Makes the device, one of `DEVICES`, usable, or skips the test."""
    if device == "emulated":
        emulated_library(shelf)
    if reason := devices.why_not(device):
        pytest.skip(reason)


def emulated_library(shelf: Shelf) -> Path:
    """Its library, built once per run; from then on the device `emulated` can be asked for."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")

    def build(path: Path) -> None:
        flags = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC")
        folders = ("-I", EMULATOR.parent, "-I", CSRC)
        command = ["g++", *flags, *folders, "-shared", "-x", "c++", SOURCE, "-o", path]
        subprocess.run(command, check=True)

    headers = [
        *SOURCE.parent.iterdir(),
        *(CSRC / name for name in ("kvq.h", "format.h", "parallel.h", "linear/linear.h")),
        EMULATOR,
    ]
    contents = b"".join(path.read_bytes() for path in sorted(headers))
    path = shelf.once("libkvq_cuda_emulated.so", contents, build)
    devices.LIBRARIES["emulated"] = str(path)
    devices.STORAGES["emulated"] = EmulatedCache
    return path
