"""Creates objects that are chosen by name with options, as for `--kv-policy` and `--draft`."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from kvq.errors import UsageError


def named(label: str, text: str, table: Mapping[str, str]) -> Any:
    """Creates what `NAME` or `NAME:option=value,...` names, from its `module:Class` in `table`.

    Options are the fields of the class, a dataclass. Raises `UsageError` for an unknown name or
    option; its message calls what takes the name `label`.
    """
    name, _, options = text.partition(":")
    if name not in table:
        raise UsageError(f"{label} {name!r} is unknown; possible: {', '.join(sorted(table))}")
    module, attribute = table[name].split(":")
    kind = getattr(import_module(module), attribute)
    return kind(**_options(f"{label} {text!r}", kind, options))


def require(holds: bool, about: str, value: str, possible: str) -> None:
    """Raises `UsageError` about an argument, its value and what is possible, unless it `holds`."""
    if not holds:
        raise UsageError(about=about, value=value, possible=possible)


def _options(label: str, kind: Any, options: str) -> dict[str, Any]:
    """Returns the options with the types of the dataclass's fields (int, float or str)."""
    known = {field.name: field.type for field in fields(kind) if field.init}
    values: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            possible = ", ".join(f"{key}=..." for key in known) or "none"
            raise UsageError(f"{label}: option {part!r}; possible: {possible}")
        parse = {"int": int, int: int, "float": float, float: float}.get(known[name], str)
        try:
            values[name] = parse(value)
        except ValueError:
            number = "a whole number" if parse is int else "a number"
            raise UsageError(f"{label}: {name} takes {number}, not {value!r}") from None
    return values
