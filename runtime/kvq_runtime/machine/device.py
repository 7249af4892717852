"""What this machine has: cores, memory, instruction sets."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_NAMED_FEATURES = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni",
    "amx_int8", "neon", "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Describes the processor and memory that this process may use. Unknown sizes are 0."""

    machine: str
    processor: str
    cores: int
    hardware_threads: int
    features: tuple[str, ...]
    memory_bytes: int
    memory_free_bytes: int


def probe() -> Host:
    """Reads the machine; a source that this system lacks leaves its field empty."""
    cpuinfo = _processors()
    first = cpuinfo[0] if cpuinfo else {}
    flags = _instructions(cpuinfo)
    memory = _memory()
    return Host(
        machine=platform.machine(),
        processor=first.get("model name") or platform.processor() or platform.machine(),
        cores=_cores(cpuinfo),
        hardware_threads=_allowed(),
        features=tuple(name for name in _NAMED_FEATURES if name in flags),
        memory_bytes=memory.get("MemTotal", 0),
        memory_free_bytes=memory.get("MemAvailable", 0),
    )


def physical_cores() -> int:
    """Returns how many cores this process may use: a second thread on a core slows both down."""
    return _cores(_processors())


def _allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _instructions(cpuinfo: list[dict[str, str]]) -> frozenset[str]:
    first = cpuinfo[0] if cpuinfo else {}
    return frozenset((first.get("flags") or first.get("Features") or "").split())


def _cores(cpuinfo: list[dict[str, str]]) -> int:
    named = {
        (processor["physical id"], processor["core id"])
        for processor in cpuinfo
        if "core id" in processor
    }
    return max(1, min(len(named) or _allowed(), _allowed()))


def _processors() -> list[dict[str, str]]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return []
    blocks = path.read_text(errors="replace").strip().split("\n\n")
    return [
        {key.strip(): value.strip() for key, _, value in (row.partition(":") for row in rows)}
        for rows in (block.splitlines() for block in blocks)
    ]


def _memory() -> dict[str, int]:
    """Returns the rows of /proc/meminfo in bytes."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return {}
    rows = (row.split() for row in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}
