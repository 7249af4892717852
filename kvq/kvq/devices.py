"""Devices beside the processor: what is there, caches in its memory, and why not.

`kvq/csrc/device_library.h` loads the library. Knows no model and no backend.
"""

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvq import native, native_library
from kvq.abi import NativeDevice
from kvq.errors import BackendError, CacheError, argument

# Files beside the native library, or paths.
LIBRARIES = {"cuda": "libkvq_cuda.so"}
DRIVER = "libcuda.so.1"
# The CUDA that the library and onnxruntime-gpu are made with, in a driver's own numbering.
OLDEST_DRIVER = 13_000
OLDEST_CAPABILITY = 80  # of the GPUs that the library has code for, as in CMakeLists.txt
MOST_BEST = 256  # logits of a row that `best` finds, as in csrc/cuda/best.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Describes an opened device; the native library names it by `number`.

    `stream` is the CUDA stream that all its work is queued on, `capability` 90 for sm_90. Bytes are
    those when it was opened. Its cache has kernels for heads of `head_dims` channels.
    """

    number: int
    library: Path
    name: str
    memory_bytes: int
    free_bytes: int
    capability: int
    stream: int
    head_dims: tuple[int, ...]

    def copy_seconds(self, num_bytes: int, times: int) -> float:
        """Measures the seconds of a copy of `num_bytes` on the device, as a mean of `times`.

        Each byte is read and written. Raises `BackendError` where there is no room for two buffers.
        """
        library, stream = ctypes.CDLL(str(self.library)), c_void_p(self.stream)
        buffers = c_void_p(), c_void_p()
        size = c_int64(num_bytes)
        try:
            for buffer in buffers:
                if library.kvq_cuda_allocate(size, ctypes.byref(buffer)):
                    raise BackendError(f"{self.name} has no {num_bytes} bytes left to copy")
                library.kvq_cuda_clear(buffer, size, stream)
            library.kvq_cuda_wait(stream)
            since = perf_counter()
            for _ in range(times):
                library.kvq_cuda_copy(buffers[0], size, buffers[1], size, size, c_int64(1), stream)
            library.kvq_cuda_wait(stream)
            return (perf_counter() - since) / times
        finally:
            for buffer in buffers:
                if buffer:
                    library.kvq_cuda_free(buffer)


@cache
def opened(name: str) -> Device:
    """Opens the device called `name`, one of `LIBRARIES`, on first use and for good.

    Raises `BackendError` with the reason if it cannot be used.
    """
    reason = native_library.why_not() or (driver_missing() if name == "cuda" else "")
    path = _library_path(name)
    if not reason and path is None:
        reason = (
            f"{LIBRARIES[name]} was not built: reinstall kvq-runtime with KVQ_CUDA=1 in the "
            "environment, which brings NVIDIA's compiler along"
        )
    if reason:
        raise _unusable(name, reason)
    assert path is not None
    number, facts = c_int32(), NativeDevice()
    arguments = str(path).encode(), ctypes.byref(number), ctypes.byref(facts)
    if native_library.library().kvq_device_open(*arguments):
        raise _unusable(name, f"{path}: {facts.reason.decode(errors='replace')}")
    shown = facts.name.decode(errors="replace")
    if facts.capability < OLDEST_CAPABILITY:
        raise _unusable(
            name,
            f"{shown} has compute capability {facts.capability / 10}, kvq needs "
            f"{OLDEST_CAPABILITY / 10} or newer (Ampere)",
        )
    return Device(
        number=number.value,
        library=path,
        name=shown,
        memory_bytes=facts.memory_bytes,
        free_bytes=facts.free_bytes,
        capability=facts.capability,
        stream=facts.stream,
        head_dims=tuple(dim for dim in facts.head_dims if dim),
    )


class DeviceCache(native.NativeCache):
    """Decides as `NativeCache` does, and computes with the kernels of `device`'s library."""

    def _device_number(self) -> int:
        if self.arena.conv is not None or self.arena.delta is not None:
            mixers = "delta nets" if self.arena.delta else "convolutions"
            raise BackendError(
                f"{mixers} have no kernel on the device {self.device!r}; use "
                f"{argument('device', 'cpu')}"
            )
        device, heads = opened(self.device), self.arena.shape.head_dim
        if heads not in device.head_dims:
            raise BackendError(
                f"heads of {heads} channels have no kernel on the device {self.device!r}, which "
                f"has those of {', '.join(map(str, device.head_dims))}; use "
                f"{argument('device', 'cpu')}"
            )
        return device.number


class CudaCache(DeviceCache):
    """Holds pages and floating-point rows in a GPU's memory."""

    device = "cuda"


STORAGES: dict[str, type[native.NativeCache]] = {
    native.HOST: native.NativeCache,
    CudaCache.device: CudaCache,
}


def storage_on(device: str) -> type[native.NativeCache]:
    """Returns the class whose caches lie in the memory of `device`, a row of `STORAGES`."""
    return STORAGES[device]


def best(
    device: Device, address: int, shape: tuple[int, int], count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns places and values [R, count] of each row's `count` largest numbers, largest first.

    `address` is where float32 rows of `shape` [R, V] lie on the device, R at least 1; what its
    stream was given before is done first. Of equal numbers the first are taken, and what is not a
    number counts as the largest. `count` is 1 to `MOST_BEST`, at most V. Raises `CacheError`.
    """
    places = np.empty((shape[0], count), np.int32)
    values = np.empty((shape[0], count), np.float32)
    pointers = native.pointer(places), native.pointer(values)
    library = native_library.library()
    if status := library.kvq_device_best(device.number, address, *shape, count, *pointers):
        reason = library.kvq_status_text(status).decode()
        raise CacheError(f"the device gave no best logits: {reason}")
    return places, values


def why_not(name: str) -> str:
    """Returns why the device cannot be used; empty if it can."""
    try:
        opened(name)
    except BackendError as error:
        return str(error)
    return ""


def driver_missing() -> str:
    """Asks CUDA's driver itself and returns why it finds no GPU here; empty if it does."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return f"no NVIDIA driver: {DRIVER} is not on this system"
    if status := driver.cuInit(0):
        return f"the NVIDIA driver finds no GPU: {_driver_text(driver, status)}"
    count, version = c_int32(), c_int32()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < OLDEST_DRIVER:
        return (
            f"the NVIDIA driver is too old: it runs CUDA {_shown(version.value)}, kvq needs "
            f"{_shown(OLDEST_DRIVER)} or newer; update the driver"
        )
    return ""


def _driver_text(driver: ctypes.CDLL, status: int) -> str:
    text = c_char_p()
    driver.cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"").decode(errors="replace") or f"error {status}"


def _shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _library_path(name: str) -> Path | None:
    path = native_library.library_path()
    path = path.parent / LIBRARIES[name] if path else None
    return path if path and path.is_file() else None


def _unusable(name: str, reason: str) -> BackendError:
    return BackendError(f"the device {name!r} cannot be used: {reason}")
