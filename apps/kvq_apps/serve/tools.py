"""Reads OpenAI's `tools` for the chat template, and constrains answers to calls of them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvq.errors import UsageError
from kvq.json_values import is_object
from kvq_apps.serve.call_rules import CALL_FOLLOWER, CallRules
from kvq_apps.serve.fields import Fields
from kvq_models.tokenizer import Tokenizer
from kvq_models.tools import MARKS, Reader, ToolForm, reader_of, tool_form
from kvq_runtime.answer.constraint import Constraint, escaped, json_part, json_schema, spelled
from kvq_runtime.answer.schemas import JSON_FOLLOWER, held_schema

# An answer that must contain a call has at most so many.
MOST_CALLS = 16
# The text of all tools together; it may still be too long for the context.
_MOST_TOOL_BYTES = 1 << 20
_MOST_NAME_BYTES = 256
# The description of a skipped tool is cut to this length.
_SKIPPED_CHARACTERS = 80
_ID_CHARACTERS = 64
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
# Matches a template with a role for results of tools, as all have but Gemma 4's.
_TOOL_ROLE = re.compile(r"""['"]tool['"]""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """Holds the functions of a request, and the form in which the model calls them.

    They stand by the places of their parameters in the request, as JSON pointers. One of the
    `required` tools must be called, if there are any. With `many` an answer may have several calls.
    """

    form: ToolForm
    functions: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...] = ()
    many: bool = True

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns the tools as chat templates take them, without those that are deferred."""
        shown = (row for row in self.functions.values() if row.get("defer_loading") is not True)
        return [{"type": "function", "function": row} for row in shown]

    def reader(self) -> Reader:
        schemas: dict[str, dict[str, Any]] = {
            row["name"]: row.get("parameters") or {} for row in self.functions.values()
        }
        return reader_of(self.form, schemas, most=None if self.many else 1)

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Returns the control tokens that mark calls, of this model's family or another one."""
        form_marks = (self.form.opening, self.form.closing, *self.form.tokens)
        marks = {mark for pair in (*MARKS.items(), form_marks) for mark in pair if mark}
        ids = [tokenizer.token_id(mark) for mark in sorted(marks)]
        return frozenset(
            token for token in ids if token is not None and tokenizer.is_control(token)
        )

    def constraint(self, tokenizer: Tokenizer, text: Constraint | None) -> Constraint | None:
        """Returns the constraint on the answer: calls if one is required, else `text` or calls.

        Raises `UsageError` where no call of this model can follow a schema.
        """
        if not self.required and text is None:
            return None
        functions, unheld = self._callable_functions()
        calls = self._calls(tokenizer, functions)
        if self.required or text is None:
            return Constraint(f"start: calls\n{calls}", unheld)
        answer = text.lark.replace("start:", "answer:", 1)
        return Constraint(f"start: answer | calls\n{answer}{calls}", text.unheld + unheld)

    def _callable_functions(self) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """Returns the functions that may be called with the schemas that calls can follow.

        With them come the places of schemas that calls do not follow.
        """
        follower = JSON_FOLLOWER if self.form.calls is None else CALL_FOLLOWER
        functions: list[dict[str, Any]] = []
        unheld: tuple[str, ...] = ()
        for place, function in self.functions.items():
            if not self.required or function["name"] in self.required:
                schema = json_schema(function.get("parameters") or _NO_PARAMETERS)
                strict = function.get("strict") is True
                followed = held_schema(schema, follower, strict=strict, place=place)
                functions.append({**function, "parameters": followed.schema})
                unheld += followed.unheld
        return functions, unheld

    def _calls(self, tokenizer: Tokenizer, functions: Sequence[Mapping[str, Any]]) -> str:
        """Returns rules in Lark's notation for one or more calls of `functions`."""
        form = self.form
        marks = (form.opening, form.closing, *form.tokens)
        ids = {mark: tokenizer.token_id(mark) for mark in marks if mark}
        control = {
            mark: token
            for mark, token in ids.items()
            if token is not None and tokenizer.is_control(token)
        }
        opening, closing = spelled(form.opening, control), spelled(form.closing, control)
        gap, more = escaped(form.gap), f"{{0,{MOST_CALLS - 1}}}"
        if form.last:
            calls = f"{opening} call"
        elif form.listed:
            repeated = f"({escaped(', ')} call){more}" if self.many else ""
            calls = f"{opening} {escaped('[')} call {repeated} {escaped(']')} {closing}"
        elif form.opening:
            call_rule = f"{opening} {gap} call {gap} {closing}"
            calls = f"{call_rule} ({gap} {call_rule}){more}" if self.many else call_rule
        else:
            calls = "call"
        if form.calls is None:
            called, rules = [_object(function, form.arguments) for function in functions], ""
        else:
            call_rules = CallRules(form, form.calls, partial(spelled, ids=control))
            called = call_rules.calls(functions)
            if form.bare and form.calls.bare_head and called:
                bare_calls = " | ".join(call_rules.calls(functions, bare=True))
                calls += f" | {spelled(form.bare[0], control)} ({bare_calls})"
            rules = call_rules.lark
        if not called:
            names = ", ".join(function["name"] for function in functions)
            raise UsageError(
                f"this model's notation of calls cannot write one of {names[:200]} that "
                "fits its schema; begin its name with a letter, leave out what cannot be required, "
                "or let tool_choice be auto"
            )
        return f"calls: {calls}\ncall: {' | '.join(called)}\n{rules}"


def tools_of(fields: Fields, tokenizer: Tokenizer) -> tuple[Tools | None, tuple[str, ...]]:
    """Returns the tools that may be called, None for none, and the skipped tools with reasons."""
    form = tool_form(tokenizer.chat_template)
    functions, skipped = _offered_tools(fields, form)
    return _callable_tools(fields, functions, form), skipped


def _offered_tools(
    fields: Fields, form: ToolForm | None
) -> tuple[dict[str, Mapping[str, Any]], tuple[str, ...]]:
    """Returns the functions of a request, by the places of their parameters, and the skipped tools.

    A place is a JSON pointer. `functions` is the older name of `tools`. Tools that are not
    functions are skipped, and those with a name that no call of the model, which writes calls in
    `form`, can have.
    """
    if len(json.dumps([fields.get("tools"), fields.get("functions")])) > _MOST_TOOL_BYTES:
        fields.refuse("tools", f"tools of at most {_MOST_TOOL_BYTES} bytes together")
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
            short = name[:_SKIPPED_CHARACTERS]
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
        if len(name.encode()) > _MOST_NAME_BYTES:
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
    return f"{description[:_SKIPPED_CHARACTERS]}: no function"


def _callable_tools(
    fields: Fields, functions: Mapping[str, Mapping[str, Any]], form: ToolForm | None
) -> Tools | None:
    choice = _choice(fields)
    # After a required call no text may follow, and a small model may go on with more calls. So with
    # a required call several are possible only if the client asks for them.
    many = fields.flag("parallel_tool_calls", choice != "required")
    if not functions:
        if choice not in (None, "none", "auto"):
            fields.refuse_with(
                "tool_choice", "tool_choice asks for a call and tools has none that can be called"
            )
        return None
    names = [function["name"] for function in functions.values()]
    if len(set(names)) < len(names):
        fields.refuse_with("tools", "two tools have the same name; give each its own")
    if choice == "none":
        return None
    if form is None:
        fields.refuse_with(
            "tools",
            "this model's chat template asks for no form of tool calls that is known here; leave "
            "tools out, or serve a model that calls tools (Qwen, Llama 3, Phi 4, Mistral, Gemma 4, "
            "Granite, SmolLM 3, LFM 2, gpt-oss)",
            "unsupported",
        )
    called, single = _required_tools(fields, choice, names)
    return Tools(form=form, functions=functions, required=called, many=many and not single)


def _choice(fields: Fields) -> Any:
    """Returns `tool_choice` or its older form `function_call`: a word, or an object with a name."""
    choice = fields.get("tool_choice")
    if choice is None:
        choice = fields.get("function_call")
    kind = choice.get("type") if is_object(choice) else choice
    if kind == "any":
        return "required"
    return kind if kind in ("none", "auto", "required") else choice


def _required_tools(fields: Fields, choice: Any, names: list[str]) -> tuple[tuple[str, ...], bool]:
    """Returns the tools of which one must be called, and whether exactly one call is asked for."""
    if choice in (None, "auto"):
        return (), False
    if choice == "required":
        return tuple(names), False
    if not is_object(choice):
        fields.refuse("tool_choice", "none, auto, required, or a function of tools by its name")
    described = Fields(choice, "tool_choice.")
    name = described.object("function").text("name") or described.text("name")
    if name not in names:
        fields.refuse_with("tool_choice", f"tools has no function {name[:64]!r} to be called")
    return (name,), True


def _object(function: Mapping[str, Any], arguments: str) -> str:
    """Returns the rule of a call in JSON, as the templates write one."""
    head = f'{{"name": {json.dumps(function["name"])}, "{arguments}": '
    return f"({escaped(head)} {json_part(function['parameters'])} {escaped('}')})"


# Calls in a conversation


def attach_results(messages: list[dict[str, Any]], template: str | None) -> list[dict[str, Any]]:
    """Moves results of tools to where the template looks for them.

    Some templates have no role for tools. There the results are a part of the message with the
    calls, as objects if they are JSON objects.
    """
    if template is None or "tool_responses" not in template or _TOOL_ROLE.search(template):
        return messages
    merged: list[dict[str, Any]] = []
    for message in messages:
        previous = merged[-1] if merged else {}
        if message["role"] == "tool" and previous.get("tool_calls"):
            result = {"name": message["name"], "response": _result(message["content"])}
            responses = [*previous.get("tool_responses", ()), result]
            merged[-1] = {**previous, "tool_responses": responses}
        else:
            merged.append(message)
    return merged


def _result(text: str) -> Any:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if is_object(value) else text


def template_call(call: Fields) -> dict[str, Any]:
    """Returns a call of an assistant's as chat templates take it: its arguments as an object."""
    function = call.object("function")
    text = function.get("arguments")
    try:
        arguments: Any = json.loads(text) if isinstance(text, str) and text else text or {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        function.refuse_with("arguments", "a call's arguments are the text of a JSON object")
    name = function.text("name")
    if not name:
        function.refuse("name", "the name of the function that was called")
    identity = call.text("id")[:_ID_CHARACTERS]
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
