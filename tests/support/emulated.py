"""The device tests emulate: CUDA kernels as C++, on a grid of threads one processor plays."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from shelf import Shelf

SOURCE = Path(__file__).parents[2] / "kvq/csrc/cuda/kvq_cuda.cu"


def emulated_library(shelf: Shelf) -> Path:
    """Its library, built once per run; from then on the device `emulated` can be asked for."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")

    def build(path: Path) -> None:
        flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC")
        command = ["g++", *flags, "-shared", "-x", "c++", SOURCE, "-o", path]
        subprocess.run(command, check=True)

    headers = [
        *SOURCE.parent.iterdir(),
        SOURCE.parents[1] / "kvq.h",
        SOURCE.parents[1] / "format.h",
    ]
    contents = b"".join(path.read_bytes() for path in sorted(headers))
    path = shelf.once("libkvq_cuda_emulated.so", contents, build)
    os.environ["KVQ_EMULATED_LIBRARY"] = str(path)
    return path
