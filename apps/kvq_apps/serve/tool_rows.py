"""Reads the list of tools in a request: which ones the model gets, which are skipped, and why."""

import json
from collections.abc import Mapping
from typing import Any

from kvq.json_values import is_object
from kvq_apps.serve.fields import Fields
from kvq_models.tools import ToolForm

# The text of all tools together; it may still be too long for the context.
MOST_TOOL_BYTES = 1 << 20
MOST_NAME_BYTES = 256
# The description of a skipped tool is cut to this length.
_SHOWN_CHARACTERS = 80


def offered_tools(
    fields: Fields, form: ToolForm | None
) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
    """Returns the functions of a request, by the places of their parameters, and the skipped tools.

    A place is a JSON pointer. `functions` is the older name of `tools`. Tools that are not
    functions are skipped, and those with a name that no call of the model, which writes calls in
    `form`, can have.
    """
    if len(json.dumps([fields.get("tools"), fields.get("functions")])) > MOST_TOOL_BYTES:
        fields.refuse("tools", f"tools of at most {MOST_TOOL_BYTES} bytes together")
    functions: dict[str, Mapping[str, Any]] = {}
    skipped: list[str] = []
    names = ("tools", "functions")
    rows = ((f"/{name}/{number}", row) for name in names
            for number, row in enumerate(fields.objects(name)))  # fmt: skip
    for place, row in rows:
        if row.text("type", "function") != "function":
            skipped.append(_describe_skipped(row))
            continue
        named = row.get("name") is not None or place.startswith("/functions")
        bare = named and row.get("function") is None
        function = row if bare else row.object("function")
        name = _checked(function)
        if _can_be_called(name, form):
            body = {key: value for key, value in function.values.items() if key != "type"}
            functions[f"{place}{'' if bare else '/function'}/parameters"] = body
        else:
            short = name[:_SHOWN_CHARACTERS]
            skipped.append(f"{short}: no call of this model's can have that name")
    return functions, tuple(skipped)


def _checked(function: Fields) -> str:
    """Returns the name of a function, after checking its description and its parameters."""
    name = function.text("name")
    if not name:
        function.refuse("name", "the name of the function")
    function.text("description")
    function.object("parameters")
    return name


def _can_be_called(name: str, form: ToolForm | None) -> bool:
    """Says whether a call of this name can be written and read."""
    try:
        if len(name.encode()) > MOST_NAME_BYTES:
            return False
    except UnicodeEncodeError:
        return False
    return form is None or form.calls is None or form.calls.writes(name)


def _describe_skipped(row: Fields) -> str:
    """Describes a tool that is no function: its type, and its name if it has one."""
    kind = row.text("type")
    described = row.get(kind)
    name = described.get("name") if is_object(described) else row.get("name")
    description = f"{kind} {name}" if isinstance(name, str) else kind
    return f"{description[:_SHOWN_CHARACTERS]}: no function"
