"""Reads the JSON object of a request field by field and refuses wrong fields by name."""

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NoReturn, TypeGuard, TypeVar

from kvq.json_values import is_array, is_object
from kvq_apps.serve.errors import RequestError

Default = TypeVar("Default", int, None)


def parse_object(body: bytes) -> "Fields":
    """Returns the request's JSON object. Raises `RequestError` for anything else."""
    try:
        value: Any = json.loads(body, parse_constant=_refuse_constant)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else error
        raise RequestError(f"the request's body is not JSON: {reason}") from None
    if not is_object(value):
        raise RequestError("the request's body is not a JSON object; send one in braces")
    return Fields(value)


class Fields:
    """Holds one JSON object. A field that is null counts as absent.

    It keeps what was read: `kinds` are JSON schemas of fields, empty where any value is possible,
    `parts` are fields that are objects, and `rows` those that are lists of objects.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()
        self.kinds: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, Fields] = {}
        self.rows: dict[str, list[Fields]] = {}

    def get(self, name: str, **kind: Any) -> Any:
        """Returns the value as it came, None when absent; it should be of this `kind`."""
        self._read.add(name)
        if kind or name not in self.kinds:
            self.kinds[name] = kind
        return self._values.get(name)

    @property
    def values(self) -> Mapping[str, Any]:
        self._read |= self._values.keys()
        return self._values

    def ignore(self, name: str) -> None:
        """Counts a field as unread, since its value has no effect."""
        self._read.discard(name)

    def unread(self) -> frozenset[str]:
        """Returns the fields that nobody has read, also those inside objects that were read."""
        inside = (field for fields in self.parts.values() for field in fields.unread())
        sent = (name for name, value in self._values.items() if value is not None)
        return frozenset(inside) | {f"{self._prefix}{name}" for name in sent} - {
            f"{self._prefix}{name}" for name in self._read
        }

    def text(self, name: str, default: str = "", **kind: Any) -> str:
        value = self.get(name, type="string", default=default or None, **kind)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, type="boolean", default=default)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def choice(self, name: str, options: Iterable[str], default: str = "") -> str:
        """Returns one of `options`, or `default` when absent."""
        value = self.text(name, default, enum=[*options])
        if value != default and value not in options:
            self.refuse(name, f"one of {', '.join(options)}")
        return value

    def whole(self, name: str, low: int, high: int, default: Default) -> int | Default:
        value = self.get(name, type="integer", minimum=low, maximum=high, default=default)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.get(name, type="number", minimum=low, maximum=high, default=default)
        if value is None:
            return default
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not (numeric and low <= value <= high and isfinite(value)):
            self.refuse(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def objects(self, name: str) -> list["Fields"]:
        """Returns a list of objects, empty when absent."""
        rows: Any = [] if self.get(name) is None else self.get(name)
        if not (is_array(rows) and all(map(is_object, rows))):
            self.refuse(name, "a list of objects")
        prefix = f"{self._prefix}{name}"
        fields = [Fields(row, f"{prefix}[{place}].") for place, row in enumerate(rows)]
        self.rows.setdefault(name, []).extend(fields)
        return fields

    def object(self, name: str) -> "Fields":
        """Returns an object, an empty one when absent; always the same."""
        values: Any = {} if self.get(name) is None else self.get(name)
        if not is_object(values):
            self.refuse(name, "an object")
        return self.parts.setdefault(name, Fields(values, f"{self._prefix}{name}."))

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Returns a string, or a list of up to `most` strings, without empty ones."""
        text = {"type": "string"}
        several = {"type": "array", "items": text, "maxItems": most}
        value: Any = self.get(name, oneOf=[text, several])
        rows: Any = [] if value is None else [value] if isinstance(value, str) else value
        if not (is_array(rows) and len(rows) <= most and all(isinstance(row, str) for row in rows)):
            self.refuse(name, f"a string or a list of up to {most} strings")
        return tuple(filter(None, rows))

    def refuse(self, name: str, possible: str) -> NoReturn:
        """Raises a `RequestError` that says what `name` may be."""
        value = self._values.get(name)
        shown = json.dumps(value)[:40] if isinstance(value, int | float | bool) else _kind(value)
        self.refuse_with(name, f"{self._prefix}{name} is {shown}; give {possible}")

    def refuse_with(self, name: str, message: str, code: str | None = None) -> NoReturn:
        raise RequestError(message, param=f"{self._prefix}{name}", code=code)


def is_token(value: object, vocab_size: int) -> TypeGuard[int]:
    """Says whether `value` is the id of one of so many tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _kind(value: Any) -> str:
    if is_array(value):
        return f"a list of {len(value)}"
    return "a string" if isinstance(value, str) else "an object" if is_object(value) else "missing"


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the request's body is not JSON: {name} is not a JSON number")
