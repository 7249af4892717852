"""The cache in numpy: the oracle that the native cache is compared with."""

from kvq.devices import STORAGES as DEVICE_STORAGES
from kvq.native import NativeCache
from numpy_cache.cache import NumpyCache

STORAGES = {"native": NativeCache, "numpy": NumpyCache}


def storage_named(name: str) -> type[NativeCache]:
    """Returns the class of a storage that tests call `name`: native, numpy or a device."""
    return STORAGES.get(name) or DEVICE_STORAGES[name]  # type: ignore[return-value]
