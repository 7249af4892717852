"""Reads the values of flags, variables and settings, and shows those of components in help.

The metavar of a flag decides how its value is read. A reference to a component's value is
`module:NAME`, or `module:Class.field` for the default of a dataclass's field. The module may be
slow to import, so it is imported when the help is printed or a value is checked.
"""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, get_args

from kvq.errors import UsageError
from kvq.formats import format_bytes

AUTO = "auto"


def check_range(least: int, most: float = inf, **values: int | None) -> None:
    """Raises `UsageError` for a value of a flag out of a range: `check_range(1, max_tokens=0)`.

    None is a flag without a value.
    """
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            possible = f"give {least} or more" if most == inf else f"give {least} to {most}"
            raise UsageError(about=f"--{name.replace('_', '-')}", value=value, possible=possible)


def whole(text: str) -> int:
    """Reads a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


# Cache types of llama.cpp.
_CACHE_TYPES = {"q8_0": 8, "q4_0": 4}
_UNQUANTIZED = ("f32", "f16", "bf16")


def bits(text: str) -> int:
    """Reads the bits of a cache, or a cache type of llama.cpp with as many bits."""
    if text.lower() in _UNQUANTIZED:
        raise ArgumentTypeError(f"{text!r} is not quantised; say --kv fp for an unquantised cache")
    return _CACHE_TYPES.get(text.lower()) or whole(text)


def threads(text: str) -> int | str:
    """Reads a whole number, or the word `auto`."""
    return text if text == AUTO else whole(text)


def number(text: str) -> float:
    """Reads a number."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None


def wholes(text: str) -> tuple[int, ...]:
    """Reads whole numbers: `"64,4096"` -> (64, 4096)."""
    return tuple(whole(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Reads names: `"kld,fim"` -> ("kld", "fim")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def policies(text: str) -> tuple[str, ...]:
    """Reads policies: `"oldest,h2o:keep=1,recent=2"` -> ("oldest", "h2o:keep=1,recent=2")."""
    entries: list[str] = []
    for part in text.split(","):
        if "=" in part and ":" not in part.partition("=")[0] and entries:
            entries[-1] += f",{part}"
        else:
            entries.append(part)
    return tuple(entries)


def shares(text: str) -> tuple[Fraction, ...]:
    """Reads shares above 0: `"1/2,0.25,10%"` -> fractions."""
    return tuple(_share(part.strip()) for part in text.split(","))


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if share <= 0:
        raise ArgumentTypeError(f"{text!r} is not a share above 0, such as 1/4, 0.25 or 25%")
    return share


def numbers(text: str) -> tuple[float, ...]:
    """Reads numbers: `"0,0.5,1"` -> (0.0, 0.5, 1.0)."""
    return tuple(number(part) for part in text.split(","))


# A value with any other metavar stays a text.
READERS: dict[str, Callable[[str], Any]] = {
    "N": whole,
    "BITS": bits,
    **dict.fromkeys(("T", "P", "X", "S"), number),
    "N|auto": threads,
    "N,..": wholes, "X,..": numbers, "SHARE,..": shares, "NAME,..": names, "POLICY,..": policies,
    "FILE.png": Path,
}  # fmt: skip


def component_value(reference: str) -> Any:
    """Returns the value that a reference names."""
    module, _, path = reference.partition(":")
    name, _, row = path.partition(".")
    value = getattr(import_module(module), name)
    return value.__dataclass_fields__[row].default if row else value


class ComponentChoices(Collection[str]):
    """Lists the names of a component's table or `Literal`, after the names `first`."""

    def __init__(self, reference: str, *first: str) -> None:
        self._reference = reference
        self._first = first

    def _names(self) -> tuple[str, ...]:
        value = component_value(self._reference)
        return (*self._first, *(get_args(value) or value))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names()


def with_component_values(text: str) -> str:
    """Returns a help text with a value for each `{reference}`; a % in it is written `%%`."""
    return re.sub(
        r"\{([\w.]+:[\w.]+)\}",
        lambda match: _format_value(component_value(match[1])).replace("%", "%%"),
        text,
    )


def _format_value(value: Mapping[str, object] | tuple[object, ...] | str | float | None) -> str:
    if isinstance(value, Mapping):
        return ", ".join(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    # Sizes are written as flags take them: 2GiB.
    return (
        format_bytes(value).replace(".00 ", "")
        if isinstance(value, int) and value >= 1 << 20
        else str(value)
    )
