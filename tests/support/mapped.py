"""What of a mapped file is in this process's memory, as the system tells it."""

from mmap import PAGESIZE

import numpy as np
from numpy.typing import NDArray

_IN_MEMORY = np.uint64(1 << 63)


def pages_in_memory(view: NDArray[np.uint8]) -> int:
    """Bytes of the pages with a part of `view` that are in memory, whole pages."""
    address = view.__array_interface__["data"][0]
    return bytes_in_memory(address, address + view.nbytes)


def bytes_in_memory(begin: int, end: int) -> int:
    """Likewise of a range of addresses."""
    first, last = begin // PAGESIZE, -(-end // PAGESIZE)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first)), np.uint64)
    return int(np.count_nonzero(entries & _IN_MEMORY)) * PAGESIZE
