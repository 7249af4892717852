"""How the texts of flags, variables and settings are read: by what their metavar is."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

AUTO = "auto"


def whole(text: str) -> int:
    """A whole number, as a flag's value."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def threads(text: str) -> int | str:
    """A whole number, or the word `auto`."""
    return text if text == AUTO else whole(text)


def number(text: str) -> float:
    """A number, as a flag's value."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None


def wholes(text: str) -> tuple[int, ...]:
    """`"64,4096"` -> (64, 4096)."""
    return tuple(whole(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """`"kld,fim"` -> ("kld", "fim")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def policies(text: str) -> tuple[str, ...]:
    """`"oldest,h2o:keep=1,recent=2"` -> ("oldest", "h2o:keep=1,recent=2")."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in part and ":" not in part.partition("=")[0] and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return tuple(found)


def shares(text: str) -> tuple[Fraction, ...]:
    """`"1/2,0.25,10%"` -> their fractions, each above 0."""
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
    """`"0,0.5,1"` -> (0.0, 0.5, 1.0)."""
    return tuple(number(part) for part in text.split(","))


# Values of any other metavar stay text.
READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "BITS"), whole),
    **dict.fromkeys(("T", "P", "X", "S"), number),
    "N|auto": threads,
    "N,..": wholes, "X,..": numbers, "SHARE,..": shares, "NAME,..": names, "POLICY,..": policies,
    "FILE.png": Path,
}  # fmt: skip
