"""Reads the format of the answer: OpenAI's `response_format` and llama-server's fields."""

from kvq.errors import UsageError
from kvq.json_values import is_object
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields
from kvq_runtime.answer.constraint import Constraint

NAMES = ("response_format", "json_schema", "grammar", "regex")


def constraint_of(fields: Fields) -> Constraint | None:
    """Returns the constraint that the request asks for, if any."""
    constraints = {
        name: constraint for name in NAMES if (constraint := _constraint(fields, name)) is not None
    }
    if len(constraints) > 1:
        fields.refuse_with(
            list(constraints)[1], f"{' and '.join(constraints)} exclude each other; give one"
        )
    return next(iter(constraints.values()), None)


def _constraint(fields: Fields, name: str) -> Constraint | None:
    try:
        if name == "response_format":
            return _response_format(fields.object(name))
        if name == "json_schema":
            return Constraint.json(_schema(fields, name)) if fields.get(name) is not None else None
        text = fields.text(name)
        make = Constraint.grammar if name == "grammar" else Constraint.regex
        return make(text) if text else None
    except UsageError as error:
        raise RequestError(str(error), param=name) from error


def _response_format(options: Fields) -> Constraint | None:
    match options.text("type", "text"):
        case "text":
            return None
        case "json_object":
            # llama-server's clients put a schema here too.
            schema = options.get("schema")
            return Constraint.json(None if schema is None else _schema(options, "schema"))
        case "json_schema":
            # llama-server's clients leave out the object around it.
            bare = options.get("json_schema") is None and options.get("schema") is not None
            described = options if bare else options.object("json_schema")
            described.text("name")
            described.text("description")
            strict = described.flag("strict")
            return Constraint.json(_schema(described, "schema"), strict=strict)
        case _:
            options.refuse("type", "text, json_object or json_schema")


def _schema(fields: Fields, name: str) -> dict[str, object]:
    value = fields.get(name)
    if not is_object(value):
        fields.refuse(name, "a JSON schema, an object")
    return value
