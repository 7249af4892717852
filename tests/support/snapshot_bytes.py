"""Bytes of a cache's snapshot, and how tests damage them."""

import numpy as np

# What stands before the state of convolutions or delta nets.
HEADER = 144


def damaged(state: bytes, at: int, number: int | float) -> bytes:
    """`state` with another number, float32 or int32, at byte `at`."""
    kind = np.float32 if isinstance(number, float) else np.int32
    return state[:at] + np.array(number, kind).tobytes() + state[at + 4 :]
