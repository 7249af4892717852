"""What `kvq bench --tune` found out about this machine: threads, and how weights are fetched.

Owns the file it is kept in. No result depends on it, only speed. Measures nothing.
"""

import ctypes
import json
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from kvq import abi, native
from kvq.errors import BackendError, DataError
from kvq.files import replace_file
from kvq.json_values import is_object
from kvq.settings import cache_folder
from kvq_runtime import device

# The furthest that the library fetches ahead: `KVQ_MOST_AHEAD` of `kvq.h`.
MOST_AHEAD_BYTES = 1 << 20

log = logging.getLogger("kvq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What is fastest on the processor of that name with so many hardware threads.

    None and 0 stand for what is built in. `past_caches`: whether one row's weights, which are read
    once, are fetched past the larger caches. `ahead_bytes`: how far ahead of their use weights are
    fetched.
    """

    processor: str
    hardware_threads: int
    threads: int | None = None
    past_caches: bool | None = None
    ahead_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """What a processor says of itself: its maker, as CPUID spells it, and its second-level cache.

    Empty and 0 where it does not say.
    """

    maker: str
    level2_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltIn:
    """What products do on a processor where nobody has measured.

    `past_caches` as in `Tuning`; weights are fetched `ahead_bytes` before their use, but of panels
    up to `panel_bytes` the same place of the next one; of a prompt's rounded rows so many are
    multiplied at once that they fill `row_bytes`.
    """

    past_caches: bool
    ahead_bytes: int
    panel_bytes: int
    row_bytes: int


def processor() -> Processor:
    """This machine's."""
    here = abi.Processor()
    native.library().kvq_processor_of(ctypes.byref(here))
    return Processor(maker=here.maker.decode(), level2_bytes=here.level2_bytes)


def built_in_of(processor: Processor) -> BuiltIn:
    """What is built in for a processor, this machine's or another."""
    given, found = abi.Processor(processor.maker.encode(), processor.level2_bytes), abi.BuiltIn()
    native.library().kvq_built_in_of(ctypes.byref(given), ctypes.byref(found))
    return BuiltIn(
        past_caches=bool(found.past_caches),
        ahead_bytes=found.ahead_bytes,
        panel_bytes=found.panel_bytes,
        row_bytes=found.row_bytes,
    )


def reason(processor: Processor) -> str:
    """Why that is built in for it, in words."""
    maker = processor.maker or "a maker that it does not name"
    past = "past the larger caches, which pays on AMD's design"
    into = "into all caches, since only on AMD's design it pays to fetch them past the larger ones"
    cache = f"the second-level cache holds {processor.level2_bytes >> 10} KiB"
    return (
        f"the processor is of {maker}: one row's weights are fetched "
        f"{past if built_in_of(processor).past_caches else into}; "
        f"{cache if processor.level2_bytes else 'the size of the second-level cache is not known'}"
    )


def tuning_path() -> Path:
    """The file; to remove it is to go back to what is built in."""
    return cache_folder() / "tuning.json"


def built_in() -> Tuning:
    """What this machine does that nobody has measured."""
    found = device.probe()
    return Tuning(processor=found.processor, hardware_threads=found.hardware_threads)


def kept() -> Tuning | None:
    """What was measured on this machine with as many hardware threads as this process may use.

    None where that was never done; a file of another machine is none, such as in a home folder that
    several share. Raises `DataError` for a file that `keep` has not written.
    """
    path = tuning_path()
    try:
        found = _read(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be used: {error}; remove it, or write it anew: kvq bench --tune"
        ) from error
    here = built_in()
    same = (found.processor, found.hardware_threads) == (here.processor, here.hardware_threads)
    return found if same else None


def keep(tuning: Tuning) -> None:
    """Writes the file. Raises `DataError` where that is not possible."""
    path = tuning_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as stream:
            stream.write(json.dumps(asdict(tuning), indent=1).encode() + b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; free its place") from error


def default_threads() -> int:
    """Threads where no number is given: as was measured, else the physical cores."""
    found = _usable()
    return device.physical_cores() if found is None or found.threads is None else found.threads


def apply() -> None:
    """From now on products fetch weights as was measured on this machine, or as is built in."""
    set_prefetching(_usable() or built_in())


def set_prefetching(tuning: Tuning) -> None:
    """How products of this process fetch weights. Raises `BackendError` where it is impossible."""
    past = -1 if tuning.past_caches is None else int(tuning.past_caches)
    if native.library().kvq_tune(past, tuning.ahead_bytes):
        raise BackendError(
            f"weights cannot be fetched {tuning.ahead_bytes} bytes ahead: at most "
            f"{MOST_AHEAD_BYTES} are possible"
        )


def _usable() -> Tuning | None:
    """As `kept`, but a file that cannot be used costs speed and no answer."""
    try:
        return kept()
    except DataError as error:
        log.warning("%s", error)
        return None


def _read(content: Any) -> Tuning:
    found = content if is_object(content) else {}
    names = {field.name for field in fields(Tuning)}
    if found.keys() != names:
        raise ValueError(f"it must give {', '.join(sorted(names))} and nothing else")
    threads, most = found["threads"], found["hardware_threads"]
    if type(found["processor"]) is not str or type(most) is not int:
        raise ValueError("it names no machine")
    if threads is not None and not _within(threads, 1, most):
        raise ValueError(f"{threads!r} threads are none of {most}")
    if type(found["past_caches"]) not in (bool, NoneType):
        raise ValueError("past_caches is true, false or null")
    if not _within(found["ahead_bytes"], 0, MOST_AHEAD_BYTES):
        raise ValueError(f"ahead_bytes is 0 to {MOST_AHEAD_BYTES}")
    return Tuning(**found)


def _within(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most
