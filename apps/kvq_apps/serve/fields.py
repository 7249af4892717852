"""Reads the JSON object of a request, field by field: what is wrong is refused by its name."""

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any, NoReturn, cast

from kvq.json_values import is_array, is_object
from kvq_apps.serve.errors import RequestError


def parse_object(body: bytes) -> "Fields":
    """The request's JSON object. Raises `RequestError` for anything else."""
    try:
        value: Any = json.loads(body, parse_constant=_refuse_constant)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else error
        raise RequestError(f"the request's body is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise RequestError("the request's body is not a JSON object; send one in braces")
    return Fields(cast(dict[str, Any], value))


class Fields:
    """One JSON object. A field that is null counts as absent; unknown fields are ignored."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The value as it came, None when absent."""
        self._read.add(name)
        return self._values.get(name)

    def unread(self) -> frozenset[str]:
        """The fields that were given and that nobody asked for."""
        return frozenset(self._values) - self._read

    def names(self) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(self._values)

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def whole(self, name: str, low: int, high: int, default: int) -> int:
        """A whole number from `low` to `high`."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number from `low` to `high`."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, f"a number from {low:g} to {high:g}")
        if not (low <= value <= high and isfinite(value)):
            self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def objects(self, name: str) -> list["Fields"]:
        """A list of objects; empty when absent."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, "a list of objects")
        rows = cast(list[Any], value)
        if not all(isinstance(row, dict) for row in rows):
            self.refuse(name, "a list of objects")
        return [Fields(row, f"{self._prefix}{name}[{place}].") for place, row in enumerate(rows)]

    def object(self, name: str) -> "Fields":
        """An object; an empty one when absent."""
        value = self.get(name)
        if value is None:
            return Fields({}, f"{self._prefix}{name}.")
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(cast(dict[str, Any], value), f"{self._prefix}{name}.")

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string or a list of up to `most` strings, none of them empty."""
        value = self.get(name)
        rows = [value] if isinstance(value, str) else value
        if rows is None:
            return ()
        possible = f"a string or a list of up to {most} strings, none empty"
        if not isinstance(rows, list) or len(cast(list[Any], rows)) > most:
            self.refuse(name, possible)
        if not all(isinstance(row, str) and row for row in cast(list[Any], rows)):
            self.refuse(name, possible)
        return tuple(cast(list[str], rows))

    def refuse(self, name: str, possible: str) -> NoReturn:
        """Raises the `RequestError` that says what `name` may be."""
        value = self._values.get(name)
        shown = json.dumps(value)[:40] if isinstance(value, int | float | bool) else _kind(value)
        self.refuse_with(name, f"{self._prefix}{name} is {shown}; give {possible}")

    def refuse_with(self, name: str, message: str, code: str | None = None) -> NoReturn:
        """Raises a `RequestError` about `name`."""
        raise RequestError(message, param=f"{self._prefix}{name}", code=code)


def _kind(value: Any) -> str:
    if is_array(value):
        return f"a list of {len(value)}"
    return "a string" if isinstance(value, str) else "an object" if is_object(value) else "missing"


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the request's body is not JSON: {name} is not a JSON number")
