"""Describes the routes in the form of OpenAPI, from what their readers read.

Each reader reads a sample, and `Fields` keeps what it reads. So the description has every field
with its kind, its limits and its default, as they hold for the served model.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from kvq import __version__
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields
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
    sent = Fields(_SAMPLE)
    # The route reads it, before its reader.
    sent.text("cache_salt")
    translation = wire(sent, served)
    if isinstance(translation, dict | VectorRequest):
        return _schema(sent)
    fields, read, _ = translation
    read(fields, served)
    return _with_kinds(_schema(sent), _schema(fields)["properties"])


def _schema(fields: Fields) -> Json:
    """Returns the schema of an object with the fields that were read."""
    properties: Json = {
        name: {key: value for key, value in kind.items() if value is not None}
        for name, kind in fields.kinds.items()
    }
    for name, rows in fields.rows.items():
        members = [item for row in rows for item in _schema(row)["properties"].items()]
        # A kind that one of the rows knows replaces an empty one.
        items = dict(sorted(members, key=lambda item: bool(item[1])))
        properties[name] = {"type": "array", "items": {"type": "object", "properties": items}}
    properties |= {name: _schema(part) for name, part in fields.parts.items()}
    known = {name: row for name, row in properties.items() if name not in UNSUPPORTED}
    return {"type": "object", "properties": known}


def _with_kinds(schema: Json, known: Json) -> Json:
    """Returns a schema in which copied fields are of the kind that the last reader expects."""
    rows = {
        name: _with_kinds(row, known) if "properties" in row else row or known.get(name, {})
        for name, row in schema["properties"].items()
    }
    return schema | {"properties": rows}
