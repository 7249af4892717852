"""Backs a model's weights by 2 MiB pages, as decoding reads all of them for every token.

With 4 KiB pages the processor walks page tables for every few thousand codes it multiplies, which
slows decoding down. Allocators do not ask for huge pages by themselves, so memory that appeared
while the weights were loaded is advised afterwards. The advice changes only speed: whatever the
system refuses stays as it was.
"""

import ctypes
import logging
import re
from pathlib import Path
from threading import Thread

PAGE_BYTES = 2 << 20
SMALLEST_BYTES = 2 * PAGE_BYTES
# The system locks the address space during a call, so calls are short.
STEP_BYTES = 16 * PAGE_BYTES
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25

_MAPS = Path("/proc/self/maps")
STATE_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.. \S+ \S+ 0\s*(\[(heap|anon).*\])?$")

log = logging.getLogger("kvq")

Region = tuple[int, int]


def state() -> str:
    """Returns what the system allows: `always`, `madvise`, `never`, or `unknown`."""
    match = re.search(r"\[(\w+)\]", STATE_FILE.read_text()) if STATE_FILE.is_file() else None
    return match[1] if match else "unknown"


def regions() -> list[Region]:
    """Returns large writable anonymous regions (begin, end) of this process, or nothing."""
    if state() not in ("always", "madvise") or not _MAPS.is_file():
        return []
    matches = map(_LINE.match, _MAPS.read_text().splitlines())
    bounds = [(int(match[1], 16), int(match[2], 16)) for match in matches if match]
    return [(begin, end) for begin, end in bounds if end - begin >= SMALLEST_BYTES]


def advise_since(before: list[Region]) -> Thread:
    """Starts moving regions that are not in `before` to huge pages, in the background.

    The first tokens need not wait for it. The returned thread ends when it is done.
    """
    fresh = [region for region in regions() if not _inside(region, before)]
    thread = Thread(target=_advise, args=(fresh,), name="kvq-huge-pages", daemon=True)
    thread.start()
    return thread


def _inside(region: Region, outer: list[Region]) -> bool:
    return any(begin <= region[0] and region[1] <= end for begin, end in outer)


def _advise(fresh: list[Region]) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for begin, end in fresh:
        first = -(-begin // PAGE_BYTES) * PAGE_BYTES
        for start in range(first, end - PAGE_BYTES + 1, STEP_BYTES):
            size = min(STEP_BYTES, (end - start) // PAGE_BYTES * PAGE_BYTES)
            if madvise(start, size, MADV_HUGEPAGE) == 0:
                moved += size * (madvise(start, size, MADV_COLLAPSE) == 0)
    log.debug("%d MiB of weights moved to huge pages", moved >> 20)
