"""How fast a machine or its device reads memory: the limit that a decode step is held against."""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np

from kvq import devices
from kvq_runtime import gpu

# More than any cache holds.
BUFFER_BYTES = 512 << 20
ROUNDS = 5


def read_bandwidth(threads: int, device: str = gpu.PROCESSOR) -> float:
    """Bytes a second that are read at most: by `threads` threads, each a part of one buffer.

    Of a device: bytes read and written by a copy, which it reads a little faster than.
    """
    if device != gpu.PROCESSOR:
        found = devices.opened(device)
        seconds = min(found.copy_seconds(BUFFER_BYTES, ROUNDS) for _ in range(ROUNDS))
        return 2 * BUFFER_BYTES / seconds
    # Written once: pages that were never written are all the same one.
    buffer = np.full(BUFFER_BYTES // 8, 1, np.int64)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        return buffer.nbytes / min(_seconds(pool, parts) for _ in range(ROUNDS))


def _seconds(pool: ThreadPoolExecutor, parts: list[np.ndarray]) -> float:
    """Of one pass. OR is the cheapest of numpy's reductions: it only waits for the bytes."""
    since = perf_counter()
    list(pool.map(np.bitwise_or.reduce, parts))
    return perf_counter() - since
