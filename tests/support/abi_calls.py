"""The C ABI as fuzzers call it: every status is checked and counted, arguments come of one draw."""

import ctypes
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq import abi, native, native_library

HEADER = Path(__file__).parents[2] / "kvq" / "csrc" / "kvq.h"
NUMBERS = (0, 1, -1, 2, 3, 8, 9, 40, 63, 64, 65, 128, 160, 2**31 - 1, -(2**31))
WILD = (np.nan, np.inf, -1e30, 70000.0)
OK, BAD_ARGUMENT, CLOSED, NOT_MAPPED = 0, 2, 7, 9
STATUSES = range(10)
USUALLY_WILD = 0.15
PRODUCTS = ("linear", "embed", "experts")
# What gives a number or a text in place of a status.
NO_STATUS = {
    "kvq_abi", "kvq_cache_page", "kvq_cache_state_bytes", "kvq_isa", "kvq_isa_available",
    "kvq_isa_refused", "kvq_status_text", "kvq_weight_bytes_read",
}  # fmt: skip


def declared() -> set[str]:
    """Every call that `kvq.h` declares."""
    return set(re.findall(r"^KVQ_EXPORT .*?\b(kvq_\w+)\(", HEADER.read_text("utf-8"), re.MULTILINE))


class Library:
    """The library, whose calls must end with a status that `kvq.h` has; counts those that do."""

    def __init__(self) -> None:
        self._library = native_library.library()
        self.done: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if name in NO_STATUS:
                self.done[name] += 1
                return result
            assert result in STATUSES, (name, result)
            self.done[name] += result == OK
            return result

        return call


class Draw:
    """Random arguments: mostly what makes sense, by the share `wild` what does not."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.wild = USUALLY_WILD

    def goes_wild(self, times: float = 1) -> bool:
        """With the share `wild`, or that by `times`."""
        return self.chance.random() * times < self.wild

    def one_in(self, count: float) -> bool:
        return self.chance.random() * count < 1

    def choice(self, values: Sequence[Any]) -> Any:
        return self.chance.choice(values)

    def number(self, usual: int) -> int:
        """Mostly 0 to `usual`, now and then anything."""
        if self.goes_wild():
            return self.chance.choice(NUMBERS)
        return self.chance.randint(0, max(0, usual))

    def floats(self, *shape: int) -> NDArray[np.float32]:
        """Standard normal numbers, now and then one that no cache takes."""
        drawn = self.numbers.standard_normal(shape).astype(np.float32)
        if drawn.size and self.goes_wild(4):
            drawn.flat[self.chance.randrange(drawn.size)] = self.chance.choice(WILD)
        return drawn

    def optional(self, drawn: NDArray[Any], share: float = 0.5) -> Any:
        """A pointer to it, or none, which the header allows there."""
        return native.pointer(drawn) if self.chance.random() < share else None


def open_library(path: str) -> Library:
    """The library at `path`, which everything of `kvq.native` calls from now on."""
    native_library.library_path = lambda: Path(path)  # type: ignore[assignment]
    library = Library()
    extra: dict[str, tuple[Any, tuple[Any, ...]]] = {
        **{f"kvq_{name}_run": (ctypes.c_int32, (ctypes.c_void_p,)) for name in PRODUCTS},
        "kvq_weight_bytes_read": (ctypes.c_int64, ()),
    }
    for name, (result, arguments) in extra.items():
        function = getattr(native_library.library(), name)
        function.restype, function.argtypes = result, arguments
    assert library.kvq_abi() == abi.ABI
    assert declared() == {*abi.SIGNATURES, *extra}
    return library
