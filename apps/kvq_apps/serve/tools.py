"""OpenAI's `tools`: what a request says of them, for the chat template and the answer's form."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvq.errors import UsageError
from kvq.json_values import is_object
from kvq_apps.serve.call_rules import CallRules
from kvq_apps.serve.fields import Fields
from kvq_models.tokenizer import Tokenizer
from kvq_models.tools import MARKS, Reader, ToolForm, reader_of, tool_form
from kvq_runtime.constraint import Constraint, escaped, json_part

MOST_TOOLS = 128
# An answer that has to call something calls at most so many at once.
MOST_CALLS = 16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ID_CHARACTERS = 64
# A template that has a word for messages of tools, as all but Gemma 4's have.
_TOOL_ROLE = re.compile(r"""['"]tool['"]""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """The tools of a request, `rows` as they came, and the form in which this model calls them.

    `called` is what must be called: nothing, one of several, or the one of that name; `many`: more
    than one call is welcome.
    """

    form: ToolForm
    rows: tuple[Mapping[str, Any], ...]
    called: tuple[str, ...] = ()
    many: bool = True

    def reader(self) -> Reader:
        """Tells the calls in one answer."""
        schemas: dict[str, dict[str, Any]] = {
            row["function"]["name"]: row["function"].get("parameters") or {} for row in self.rows
        }
        return reader_of(self.form, schemas, most=None if self.many else 1)

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The control tokens that are marks of calls, the model's own or another family's."""
        own = (self.form.opening, self.form.closing, *self.form.tokens)
        marks = {mark for pair in (*MARKS.items(), own) for mark in pair if mark}
        ids = [tokenizer.token_id(mark) for mark in sorted(marks)]
        return frozenset(one for one in ids if one is not None and tokenizer.is_control(one))

    def constraint(self, tokenizer: Tokenizer, text: Constraint | None) -> Constraint | None:
        """What the answer has to look like: calls, where one must be, or `text`, or either.

        Raises `UsageError` where no call of this model's can be held to a schema.
        """
        if not self.called:
            return text if text is None else _either(text, self._calls(tokenizer, self._names))
        return Constraint(f"start: calls\n{self._calls(tokenizer, self.called)}")

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(row["function"]["name"] for row in self.rows)

    def _calls(self, tokenizer: Tokenizer, names: Sequence[str]) -> str:
        """Lark rules of one or more calls of `names`."""
        form = self.form

        def spelled(text: str) -> str:
            return _spelled(tokenizer, text, (form.opening, form.closing, *form.tokens))

        opening, closing = spelled(form.opening), spelled(form.closing)
        gap, more = escaped(form.gap), f"{{0,{MOST_CALLS - 1}}}"
        if form.last:
            calls = f"{opening} call"
        elif form.listed:
            others = f"({escaped(', ')} call){more}" if self.many else ""
            calls = f"{opening} {escaped('[')} call {others} {escaped(']')} {closing}"
        elif form.opening:
            one = f"{opening} {gap} call {gap} {closing}"
            calls = f"{one} ({gap} {one}){more}" if self.many else one
        else:
            calls = "call"
        rows = {row["function"]["name"]: row["function"] for row in self.rows}
        functions = [rows[name] for name in names]
        if form.calls is None:
            called, rules = [_object(one, form.arguments) for one in functions], ""
        else:
            made = CallRules(form, form.calls, spelled)
            called = made.calls(functions)
            if form.bare and form.calls.bare_head and called:
                others = " | ".join(made.calls(functions, bare=True))
                calls += f" | {spelled(form.bare[0])} ({others})"
            rules = made.lark
        if not called:
            raise UsageError(
                f"this model's notation of calls cannot write one of {', '.join(names)[:200]} that "
                "fits its schema; begin its name with a letter, leave out what cannot be required, "
                "or let tool_choice be auto"
            )
        return f"calls: {calls}\ncall: {' | '.join(called)}\n{rules}"


def tools_of(fields: Fields, tokenizer: Tokenizer) -> Tools | None:
    """The tools a request may call; None: it has none, or may call none."""
    rows = fields.objects("tools")
    choice = fields.get("tool_choice")
    # Where a call must be, no free text may follow it, and a small model only ends by chance: there
    # several calls are for those who ask for them.
    many = fields.flag("parallel_tool_calls", choice != "required")
    if not rows:
        if choice not in (None, "none", "auto"):
            fields.refuse_with("tool_choice", "tool_choice asks for a call and tools has none")
        return None
    if len(rows) > MOST_TOOLS:
        fields.refuse("tools", f"at most {MOST_TOOLS} tools")
    names = [_checked(row) for row in rows]
    if len(set(names)) < len(names):
        fields.refuse_with("tools", "two tools have the same name; give each its own")
    form = tool_form(tokenizer.chat_template)
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
    called, one = _called(fields, choice, names)
    given = tuple(cast(list[Mapping[str, Any]], fields.get("tools")))
    return Tools(form=form, rows=given, called=called, many=many and not one)


def _checked(row: Fields) -> str:
    """The name of a tool that is described well enough."""
    if row.text("type") != "function":
        row.refuse("type", "function")
    function = row.object("function")
    name = function.text("name")
    if not _NAME.fullmatch(name):
        function.refuse_with("name", "a tool's name is 1 to 64 letters, digits, _, . or -")
    function.text("description")
    function.object("parameters")
    return name


def _called(fields: Fields, choice: Any, names: list[str]) -> tuple[tuple[str, ...], bool]:
    """The tools of which one must be called, and whether that is exactly one."""
    if choice in (None, "auto"):
        return (), False
    if choice == "required":
        return tuple(names), False
    if not isinstance(choice, dict):
        fields.refuse("tool_choice", "none, auto, required, or a function of tools by its name")
    name = fields.object("tool_choice").object("function").text("name")
    if name not in names:
        fields.refuse_with("tool_choice", f"tools has no function {name[:64]!r} to be called")
    return (name,), True


def _object(function: Mapping[str, Any], arguments: str) -> str:
    """A call as the templates write one."""
    head = f'{{"name": {json.dumps(function["name"])}, "{arguments}": '
    schema: dict[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
    return f"({escaped(head)} {json_part(schema)} {escaped('}')})"


def _spelled(tokenizer: Tokenizer, text: str, marks: Iterable[str]) -> str:
    """`text` in Lark: `marks` that are control tokens by their ids, since text is none of them."""
    ids = {mark: tokenizer.token_id(mark) for mark in marks if mark}
    control = {
        mark: one for mark, one in ids.items() if one is not None and tokenizer.is_control(one)
    }
    parts = re.split(f"({'|'.join(map(re.escape, control))})", text) if control else [text]
    rows = (f"<[{control[part]}]>" if part in control else escaped(part) for part in parts if part)
    return " ".join(rows) or '""'


def _either(text: Constraint, calls: str) -> Constraint:
    return Constraint(f"start: answer | calls\n{text.lark.replace('start:', 'answer:', 1)}{calls}")


# What a conversation says of calls


def calls_of(message: Fields) -> list[dict[str, Any]]:
    """`tool_calls` of an assistant's message as chat templates take them: arguments as objects."""
    return [_said(call) for call in message.objects("tool_calls")]


def answered_calls(messages: list[dict[str, Any]], template: str | None) -> list[dict[str, Any]]:
    """`messages` with results where the template looks for them: some know no role of tools.

    There the results belong to the message with the calls, as objects where they are any.
    """
    if template is None or "tool_responses" not in template or _TOOL_ROLE.search(template):
        return messages
    found: list[dict[str, Any]] = []
    for message in messages:
        before = found[-1] if found else {}
        if message["role"] == "tool" and before.get("tool_calls"):
            result = {"name": message["name"], "response": _result(message["content"])}
            told = [*before.get("tool_responses", ()), result]
            found[-1] = {**before, "tool_responses": told}
        else:
            found.append(message)
    return found


def _result(text: str) -> Any:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if is_object(found) else text


def _said(call: Fields) -> dict[str, Any]:
    function = call.object("function")
    given = function.get("arguments")
    try:
        arguments: Any = json.loads(given) if isinstance(given, str) and given else given or {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        function.refuse_with("arguments", "a call's arguments are the text of a JSON object")
    name = function.text("name")
    if not name:
        function.refuse("name", "the name of the function that was called")
    identity = call.text("id")[:_ID_CHARACTERS]
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
