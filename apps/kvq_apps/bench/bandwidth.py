"""How fast a machine or its device reads memory, the limit of a decode step."""

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np

from kvq import devices
from kvq_runtime.machine import gpu

# More than any cache holds.
BUFFER_BYTES = 512 << 20
ROUNDS = 5


def read_bandwidth(threads: int, device: str = gpu.PROCESSOR) -> float:
    """Measures the most bytes read per second by `threads` threads, each on a part of a buffer.

    On a device it counts the bytes that a copy reads and writes; reading alone is a little faster.
    """
    if device != gpu.PROCESSOR:
        gpu_device = devices.opened(device)
        seconds = min(gpu_device.copy_seconds(BUFFER_BYTES, ROUNDS) for _ in range(ROUNDS))
        return 2 * BUFFER_BYTES / seconds
    # Written once, because unwritten pages are all the same one.
    buffer = np.full(BUFFER_BYTES // 8, 1, np.int64)
    parts, seconds = np.array_split(buffer, threads), list[float]()
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            since = perf_counter()
            # The cheapest of numpy's reductions only waits for the bytes.
            list(pool.map(np.bitwise_or.reduce, parts))
            seconds.append(perf_counter() - since)
    return buffer.nbytes / min(seconds)
