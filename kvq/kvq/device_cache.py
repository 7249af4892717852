"""The native cache with its pages and floating-point rows in a device's memory."""

from kvq import devices
from kvq.errors import BackendError, argument
from kvq.native import HOST, NativeCache


class DeviceCache(NativeCache):
    """Decides as `NativeCache` does, and computes with the kernels of `device`'s library."""

    def _device_number(self) -> int:
        if self.arena.conv is not None or self.arena.delta is not None:
            mixers = "delta nets" if self.arena.delta else "convolutions"
            raise BackendError(
                f"{mixers} have no kernel on the device {self.device!r}; use "
                f"{argument('device', 'cpu')}"
            )
        opened, heads = devices.opened(self.device), self.arena.shape.head_dim
        if heads not in opened.head_dims:
            raise BackendError(
                f"heads of {heads} channels have no kernel on the device {self.device!r}, which "
                f"has those of {', '.join(map(str, opened.head_dims))}; use "
                f"{argument('device', 'cpu')}"
            )
        return opened.number


class CudaCache(DeviceCache):
    """Holds pages and rows in a GPU's memory."""

    device = "cuda"


STORAGES: dict[str, type[NativeCache]] = {HOST: NativeCache, CudaCache.device: CudaCache}


def storage_on(device: str) -> type[NativeCache]:
    """Returns the class whose caches lie in the memory of `device`, a row of `STORAGES`."""
    return STORAGES[device]
