"""What a request says of the answer's form: OpenAI's `response_format`, llama-server's fields."""

from kvq.errors import UsageError
from kvq.json_values import is_object
from kvq_apps.serve.errors import RequestError
from kvq_apps.serve.fields import Fields
from kvq_runtime.constraint import Constraint

NAMES = ("response_format", "json_schema", "grammar", "regex")


def constraint_of(fields: Fields) -> Constraint | None:
    """What the answer has to look like; None: nothing is asked."""
    found = {name: one for name in NAMES if (one := _constraint(fields, name)) is not None}
    if len(found) > 1:
        fields.refuse_with(list(found)[1], f"{' and '.join(found)} exclude each other; give one")
    return next(iter(found.values()), None)


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


def _response_format(given: Fields) -> Constraint | None:
    match given.text("type", "text"):
        case "text":
            return None
        case "json_object":
            # llama-server's clients put a schema here too.
            schema = given.get("schema")
            return Constraint.json(None if schema is None else _schema(given, "schema"))
        case "json_schema":
            described = given.object("json_schema")
            described.text("name")
            described.text("description")
            described.flag("strict")
            return Constraint.json(_schema(described, "schema"))
        case _:
            given.refuse("type", "text, json_object or json_schema")


def _schema(fields: Fields, name: str) -> dict[str, object]:
    value = fields.get(name)
    if not is_object(value):
        fields.refuse(name, "a JSON schema, an object")
    return value
