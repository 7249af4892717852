"""Codes read back from a page's planes, the other way round than `kvq.reference.stored.planes`."""

import numpy as np

from kvq.config import PAGE_TOKENS
from kvq.formats import granule_bytes
from kvq.reference.stored import KEYS, Bytes


def codes_of(stored: Bytes, bits: int, side: int, head_dim: int) -> Bytes:
    """8-bit codes [64, D] from stored planes; bits that were dropped are 0."""

    def fields(plane: Bytes, width: int) -> Bytes:
        parts = [plane >> shift & (1 << width) - 1 for shift in range(0, 8, width)]
        return _untile(np.stack(parts, axis=-1), side, 8 // width, head_dim)

    if bits == 2:
        return fields(stored, 2) << 6
    high, low = np.split(stored, [2 * granule_bytes(head_dim)])
    codes = fields(high, 4) << 4
    if bits == 4:
        return codes
    return codes | (fields(low, 4) if bits == 8 else fields(low, 2) << 2)


def _untile(tiled: Bytes, side: int, parts: int, dim: int) -> Bytes:
    if side == KEYS:
        shaped = tiled.reshape(8, dim // (4 * parts), 8, 4, parts).transpose(0, 2, 1, 4, 3)
    else:
        shaped = tiled.reshape(dim // 8, PAGE_TOKENS // (4 * parts), 8, 4, parts)
        shaped = shaped.transpose(1, 4, 3, 0, 2)
    return np.ascontiguousarray(shaped).reshape(PAGE_TOKENS, dim)
