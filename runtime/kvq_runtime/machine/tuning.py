"""What `kvq bench --tune` measured on this machine: threads, and how weights are fetched.

It is kept in a file, which this module owns. It changes only speed, no result.
"""

import ctypes
import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from kvq import native_library
from kvq.abi import NativeBuiltIn, NativeProcessor
from kvq.errors import BackendError, DataError, reason_of
from kvq.files import read_regular, replace_file
from kvq.json_values import is_object
from kvq.settings import cache_folder
from kvq_runtime.machine import device

# Most bytes that the library fetches ahead: `KVQ_MOST_AHEAD` of `kvq.h`.
MOST_AHEAD_BYTES = 1 << 20
_MOST_BYTES = 1 << 16

log = logging.getLogger("kvq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Says what is fastest on a processor with so many hardware threads.

    `threads` is how many threads to use. `second_level`: one row's weights are fetched into the
    second-level cache alone. `ahead_bytes` is how far ahead of their use weights are fetched.
    None and 0 stand for what is built in.
    """

    processor: str
    hardware_threads: int
    threads: int | None = None
    second_level: bool | None = None
    ahead_bytes: int = 0


def processor() -> NativeProcessor:
    """Returns this machine's processor."""
    here = NativeProcessor()
    native_library.library().kvq_processor_of(ctypes.byref(here))
    return here


def built_in_of(processor: NativeProcessor) -> NativeBuiltIn:
    """Returns what is built in for a processor, this machine's or another."""
    values = NativeBuiltIn()
    native_library.library().kvq_built_in_of(ctypes.byref(processor), ctypes.byref(values))
    return values


def reason(processor: NativeProcessor) -> str:
    """Explains in words why that is built in."""
    maker = processor.maker.decode() or "a maker that it does not name"
    alone = "into the second-level cache alone, which pays on AMD's design"
    both = "into both caches, since only on AMD's design another way was measured to be faster"
    cache = f"the second-level cache holds {processor.level2_bytes >> 10} KiB"
    return (
        f"the processor is of {maker}: one row's weights are fetched "
        f"{alone if built_in_of(processor).second_level else both}; "
        f"{cache if processor.level2_bytes else 'the size of the second-level cache is not known'}"
    )


def tuning_path() -> Path:
    """Returns the file; without it what is built in holds."""
    return cache_folder() / "tuning.json"


def built_in() -> Tuning:
    """Returns what this machine does where nobody has measured."""
    machine = device.probe()
    return Tuning(processor=machine.processor, hardware_threads=machine.hardware_threads)


def load_tuning() -> Tuning | None:
    """Reads what was measured on this machine, with as many hardware threads as now.

    None where that was never done, and for a file of another machine, as in a home folder that
    several share. Raises `DataError` for a file that `save_tuning` has not written.
    """
    path = tuning_path()
    try:
        tuning = _read(json.loads(read_regular(path, _MOST_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, DataError) as error:
        raise DataError(
            f"{path} cannot be used: {reason_of(error)}; remove it, or write it anew: "
            "kvq bench --tune"
        ) from error
    here = built_in()
    same = (tuning.processor, tuning.hardware_threads) == (here.processor, here.hardware_threads)
    return tuning if same else None


def save_tuning(tuning: Tuning) -> None:
    """Writes the file. Raises `DataError` where that is not possible."""
    path = tuning_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as stream:
            stream.write(json.dumps(asdict(tuning), indent=1).encode() + b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; free its place") from error


def default_threads() -> int:
    """Returns the threads to use by default: as was measured, else the physical cores."""
    tuning = _usable()
    return device.physical_cores() if tuning is None or tuning.threads is None else tuning.threads


def apply() -> None:
    """Makes products fetch weights as was measured on this machine, or as is built in."""
    set_prefetching(_usable() or built_in())


def set_prefetching(tuning: Tuning) -> None:
    """Sets how products of this process fetch weights; raises `BackendError` if impossible."""
    level = -1 if tuning.second_level is None else int(tuning.second_level)
    if native_library.library().kvq_tune(level, tuning.ahead_bytes):
        raise BackendError(
            f"weights cannot be fetched {tuning.ahead_bytes} bytes ahead: at most "
            f"{MOST_AHEAD_BYTES} are possible"
        )


def _usable() -> Tuning | None:
    """Reads the tuning as `load_tuning` does, but only warns of a file that cannot be used."""
    try:
        return load_tuning()
    except DataError as error:
        log.warning("%s", error)
        return None


def _read(content: Any) -> Tuning:
    values = content if is_object(content) else {}
    names = {field.name for field in fields(Tuning)}
    if values.keys() != names:
        raise ValueError(f"it must give {', '.join(sorted(names))} and nothing else")
    threads, most = values["threads"], values["hardware_threads"]
    if type(values["processor"]) is not str or type(most) is not int:
        raise ValueError("it names no machine")
    if threads is not None and not _within(threads, 1, most):
        raise ValueError(f"{threads!r} threads are none of {most}")
    if type(values["second_level"]) not in (bool, NoneType):
        raise ValueError("second_level is true, false or null")
    if not _within(values["ahead_bytes"], 0, MOST_AHEAD_BYTES):
        raise ValueError(f"ahead_bytes is 0 to {MOST_AHEAD_BYTES}")
    return Tuning(**values)


def _within(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
