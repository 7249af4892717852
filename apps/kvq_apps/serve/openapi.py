"""Describes the routes in the form of OpenAPI, from what their readers read.

Each reader reads a sample through a recorder. So the description has every field with its kind, its
limits and its default, as they hold for the served model.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from kvq import __version__
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Default, Fields
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.sampling import UNSUPPORTED
from kvq_apps.serve.wire import Json, VectorRequest, Wire

# Each reader finds what it needs in here.
_SAMPLE: Json = {
    "messages": [{"role": "user", "content": "Hello"}],
    **dict.fromkeys(("input", "prompt", "content"), "Hello"),
    "tokens": [0],
    "query": "Hello",
    "documents": ["Hello"],
}
_ANSWER = {"responses": {"200": {"description": "the answer"}}}


class _Recorder(Fields):
    """Records the fields that are read, as JSON schemas."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        super().__init__(values, prefix)
        self._schemas: Json = {}
        self._rows: dict[str, list[_Recorder]] = {}

    def schema(self) -> Json:
        """Returns the schema of an object with the fields that were read."""
        rows = {
            name: {
                "type": "array",
                "items": {"type": "object", "properties": _merged(row.schema() for row in rows)},
            }
            for name, rows in self._rows.items()
        }
        objects = {name: cast(_Recorder, row).schema() for name, row in self._objects.items()}
        properties = {**self._schemas, **rows, **objects}
        known = {name: row for name, row in properties.items() if name not in UNSUPPORTED}
        return {"type": "object", "properties": known}

    def get(self, name: str) -> Any:
        self._schemas.setdefault(name, {})
        return super().get(name)

    def text(self, name: str, default: str = "") -> str:
        self._schemas[name] = {"type": "string", **({"default": default} if default else {})}
        return super().text(name, default)

    def choice(self, name: str, options: Iterable[str], default: str = "") -> str:
        choice = super().choice(name, options, default)
        self._schemas[name]["enum"] = [*options]
        return choice

    def flag(self, name: str, default: bool = False) -> bool:
        self._schemas[name] = {"type": "boolean", "default": default}
        return super().flag(name, default)

    def whole(self, name: str, low: int, high: int, default: Default) -> int | Default:
        self._schemas[name] = _bounded("integer", low, high, default)
        return super().whole(name, low, high, default)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        self._schemas[name] = _bounded("number", low, high, default)
        return super().number(name, low, high, default)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        rows = {"type": "array", "items": {"type": "string"}, "maxItems": most}
        self._schemas[name] = {"oneOf": [{"type": "string"}, rows]}
        return super().texts(name, most)

    def objects(self, name: str) -> list[Fields]:
        rows = super().objects(name)
        self._rows.setdefault(name, []).extend(cast(list[_Recorder], rows))
        return rows


def openapi(wires: Mapping[str, Wire], pages: Iterable[str], served: ServedModel) -> Json:
    """Returns the description of `wires`, and of the routes `pages` that read no body.

    Routes that the model cannot answer are left out.
    """
    paths: Json = {path: {"get": _ANSWER} for path in pages}
    for path, wire in wires.items():
        with suppress(RequestError):
            schema = _schema_of(wire, served)
            example = {name: _SAMPLE[name] for name in _SAMPLE if name in schema["properties"]}
            body = {"content": {"application/json": {"schema": schema, "example": example}}}
            paths[path] = {"post": {"requestBody": body, **_ANSWER}}
    info = {"title": "kvq", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _schema_of(wire: Wire, served: ServedModel) -> Json:
    """Returns the schema of the bodies that a route reads."""
    sent = _Recorder(_SAMPLE)
    # The route reads it, before its reader.
    sent.text("cache_salt")
    translation = wire(sent, served)
    if isinstance(translation, dict | VectorRequest):
        return sent.schema()
    fields, read, _ = translation
    reader = fields if isinstance(fields, _Recorder) else _Recorder(fields.values)
    read(reader, served)
    return _with_kinds(sent.schema(), reader.schema()["properties"])


def _with_kinds(schema: Json, known: Json) -> Json:
    """Returns a schema in which copied fields are of the kind that the last reader expects."""
    rows = {
        name: _with_kinds(row, known) if "properties" in row else row or known.get(name, {})
        for name, row in schema["properties"].items()
    }
    return schema | {"properties": rows}


def _merged(schemas: Iterable[Json]) -> Json:
    """Returns the properties of all schemas; a kind that one of them knows is kept."""
    rows = [item for schema in schemas for item in schema["properties"].items()]
    return dict(sorted(rows, key=lambda item: bool(item[1])))


def _bounded(kind: str, low: float, high: float, default: float | None) -> Json:
    row: Json = {"type": kind, "minimum": low, "maximum": high}
    return row if default is None else row | {"default": default}
