"""Memory that appears between two looks is moved to huge pages, and nothing else changes."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from kvq_runtime.machine import huge_pages

SIZE = 32 << 20


def huge_bytes(address: int) -> int:
    """Returns the bytes of huge pages in the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2 and not line.startswith(" ") and ":" not in bounds[0]:
            inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def test_fresh_memory_is_moved_and_keeps_its_contents() -> None:
    if huge_pages.state() not in ("always", "madvise"):
        pytest.skip(f"this system's huge pages are: {huge_pages.state()}")
    before = huge_pages.regions()
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        array = np.frombuffer(memory, np.uint8)
        writable = np.ndarray((SIZE,), np.uint8, memory)
        writable[:] = np.arange(SIZE) % 251
        address = array.__array_interface__["data"][0]
        assert any(begin <= address < end for begin, end in huge_pages.regions())
        huge_pages.advise_since(before).join(60)
        assert huge_bytes(address) >= SIZE // 2
        assert (array == np.arange(SIZE) % 251).all()
        del array, writable


def test_known_memory_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "kvq")
    known = huge_pages.regions()
    thread = huge_pages.advise_since(known)
    thread.join(60)
    assert not thread.is_alive()
    assert caplog.messages == ["0 MiB of weights moved to huge pages"]


def test_a_system_without_the_files_has_no_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "STATE_FILE", Path("/nowhere"))
    assert huge_pages.state() == "unknown"
    assert huge_pages.regions() == []
