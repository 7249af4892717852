"""Things chosen by name with options, as `--kv-policy` and `--draft` do it. Knows no thing."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from kvq.errors import UsageError


def named(asked: str, text: str, table: Mapping[str, str]) -> Any:
    """What `NAME` or `NAME:option=value,...` says, made from its `module:Class` in `table`.

    `asked` is what takes the name, as messages call it. Options are the fields of the class, a
    dataclass. Raises `UsageError` naming what is possible.
    """
    name, _, options = text.partition(":")
    if name not in table:
        raise UsageError(f"{asked} {name!r} is unknown; possible: {', '.join(sorted(table))}")
    module, attribute = table[name].split(":")
    kind = getattr(import_module(module), attribute)
    return kind(**_options(f"{asked} {text!r}", kind, options))


def _options(asked: str, kind: Any, options: str) -> dict[str, Any]:
    """Option texts as the types of the dataclass's fields (int, float or str)."""
    known = {field.name: field.type for field in fields(kind)}
    given: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            possible = ", ".join(f"{key}=..." for key in known) or "none"
            raise UsageError(f"{asked}: option {part!r}; possible: {possible}")
        read = {"int": int, int: int, "float": float, float: float}.get(known[name], str)
        try:
            given[name] = read(value)
        except ValueError:
            number = "a whole number" if read is int else "a number"
            raise UsageError(f"{asked}: {name} takes {number}, not {value!r}") from None
    return given
