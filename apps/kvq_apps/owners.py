"""Defaults and choices as help shows them, read from the components that own them.

An owner is written `module:NAME`, or `module:Class.field` for the default of a dataclass's field.
It may be slow to import, so it is looked up when the help is printed or a value is checked.
"""

import re
from argparse import Action, HelpFormatter
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import Any, get_args

from kvq.formats import format_bytes


def owned(owner: str) -> Any:
    """The value of `module:NAME`, or the default of the dataclass field `module:Class.field`."""
    module, _, path = owner.partition(":")
    name, _, row = path.partition(".")
    value = getattr(import_module(module), name)
    return value.__dataclass_fields__[row].default if row else value


class Owned(Collection[str]):
    """The choices that a component's table or `Literal` has, after some of our own."""

    def __init__(self, owner: str, *first: str) -> None:
        self._owner = owner
        self._first = first

    def _names(self) -> tuple[str, ...]:
        value = owned(self._owner)
        return (*self._first, *(get_args(value) or value))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names()


class HelpText(HelpFormatter):
    """Help whose `{owner}`s are looked up when it is printed."""

    def _get_help_string(self, action: Action) -> str:
        return filled(action.help or "")


def filled(text: str) -> str:
    """`text`, a help with `%%` for %, with what `owned` finds for each `{owner}`."""
    return re.sub(
        r"\{([\w.]+:[\w.]+)\}", lambda found: _shown(owned(found[1])).replace("%", "%%"), text
    )


def _shown(value: tuple[object, ...] | str | float | None) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    # As a flag takes it: 2GiB.
    return (
        format_bytes(value).replace(".00 ", "")
        if isinstance(value, int) and value >= 1 << 20
        else str(value)
    )
