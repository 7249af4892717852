"""The native cache with its pages and floating-point rows in a device's memory."""

from kvq import devices
from kvq.errors import BackendError, argument
from kvq.native import NativeCache
from kvq.selectors import ReadRule


class DeviceCache(NativeCache):
    """The same decisions as on the processor; the kernels are those of `device`'s library."""

    def _device_number(self) -> int:
        if self.arena.conv is not None or self.arena.delta is not None:
            others = "delta nets" if self.arena.delta else "convolutions"
            raise BackendError(
                f"{others} have no kernel on the device {self.device!r}; use "
                f"{argument('device', 'cpu')}"
            )
        found, heads = devices.opened(self.device), self.arena.shape.head_dim
        if heads not in found.head_dims:
            raise BackendError(
                f"heads of {heads} channels have no kernel on the device {self.device!r}, which "
                f"has those of {', '.join(map(str, found.head_dims))}; use "
                f"{argument('device', 'cpu')}"
            )
        return found.number

    def read_by(self, rule: ReadRule) -> None:
        if rule.channels:
            raise BackendError(
                f"the device {self.device!r} ranks pages by all channels of a query: "
                f"{argument('kv_read')} double-sparsity needs {argument('device', 'cpu')}"
            )
        super().read_by(rule)


class CudaCache(DeviceCache):
    """In a GPU's memory."""

    device = "cuda"
