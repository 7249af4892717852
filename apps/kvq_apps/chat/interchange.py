"""Chats as files: writes JSON lines and Markdown; reads those and ChatGPT's JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq.errors import DataError, argument, reason_of
from kvq.files import replace_file
from kvq.json_values import is_array, is_object
from kvq_apps.chat.messages import ROLES, Message, ToolCall
from kvq_apps.terminal import text_input
from kvq_apps.terminal.output import storable

_ROLES = (*ROLES, "tool")
_HEADING = re.compile(r"^## (system|user|assistant)$", re.MULTILINE)


def export_chat(path: Path, messages: Sequence[Message]) -> None:
    """Writes a whole file or none: Markdown for `.md`, else JSON lines. Raises `DataError`."""
    as_text = _markdown if path.suffix.lower() in (".md", ".markdown") else as_lines
    content = as_text(messages)
    try:
        with replace_file(path) as stream:
            stream.write(content.encode())
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from error


def import_chat(path: Path) -> list[Message]:
    """Reads the messages of a file. Raises `DataError` for a file without a chat."""
    text = text_input.read_text(str(path))
    if path.suffix.lower() in (".md", ".markdown"):
        messages = _from_markdown(text)
    else:
        messages = _from_json(path, text)
    messages = [row for row in messages if row.text or row.calls or row.role == "tool"]
    if not messages:
        raise DataError(
            f"{path} holds no messages; give JSON lines with role and content, Markdown made by "
            f"{argument('--export')}, or ChatGPT's conversations.json"
        )
    return messages


def as_lines(messages: Sequence[Message]) -> str:
    """Returns a chat as JSON lines."""
    rows = [
        {
            "role": message.role,
            "content": message.text,
            "ts": message.created_s,
            "stats": dict(message.stats),
            **({"tool_calls": _call_rows(message.calls)} if message.calls else {}),
        }
        for message in messages
        if message.role in _ROLES
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _markdown(messages: Sequence[Message]) -> str:
    # A line that looks like one of our headings must not become one when the file is read again.
    parts = [
        f"## {message.role}\n\n" + _HEADING.sub(r"\\\g<0>", message.text)
        for message in messages
        if message.role in ROLES and (message.text or not message.calls)
    ]
    return "\n\n".join(parts) + "\n"


def _from_markdown(text: str) -> list[Message]:
    _, *parts = _HEADING.split(storable(text))
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [
        Message(role=role, text=re.sub(r"^\\(## )", r"\1", body.strip("\n"), flags=re.MULTILINE))
        for role, body in pairs
    ]


def _from_json(path: Path, text: str) -> list[Message]:
    try:
        value: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is neither JSON lines nor JSON: {reason_of(error)}") from None
    rows = value if is_array(value) else [value]
    if len(rows) == 1 and is_array(rows[0]):
        rows = rows[0]
    if rows and is_object(rows[0]) and "mapping" in rows[0]:
        try:
            return _from_chatgpt(rows[0])
        except (AttributeError, TypeError):
            raise DataError(f"{path} is not as ChatGPT writes its conversations.json") from None
    return [_message(path, row) for row in rows]


def _message(path: Path, row: Any) -> Message:
    role, content = (row.get("role"), row.get("content")) if is_object(row) else (None, None)
    if role not in _ROLES or not isinstance(content, str):
        raise DataError(f"{path}: each row needs a role ({', '.join(_ROLES)}) and its content")
    try:
        calls = [*map(_call, row.get("tool_calls") or ())] if role == "assistant" else []
    except (AttributeError, KeyError, TypeError):
        raise DataError(f"{path}: tool_calls are not as OpenAI's API writes them") from None
    return Message(role=role, text=storable(content), calls=calls)


def _call_rows(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [call.row(call.arguments) for call in calls]


def _call(row: Mapping[str, Any]) -> ToolCall:
    function = row["function"]
    texts = row["id"], function["name"], function["arguments"]
    identity, name, arguments = map(storable, texts)
    return ToolCall(id=identity, name=name, arguments=arguments)


def _from_chatgpt(chat: Mapping[str, Any]) -> list[Message]:
    """Reads the branch that was shown last, from its end to its root."""
    nodes: Mapping[str, Any] = chat["mapping"]
    current = chat.get("current_node")
    messages: list[Message] = []
    seen: set[str] = set()
    while isinstance(current, str) and current in nodes and current not in seen:
        seen.add(current)
        node = nodes[current]
        message: dict[str, Any] = node.get("message") or {}
        content: dict[str, Any] = message.get("content") or {}
        author: dict[str, Any] = message.get("author") or {}
        parts: list[object] = content.get("parts") or []
        role = author.get("role")
        text = "\n".join(part for part in parts if isinstance(part, str))
        if role in ROLES and text:
            messages.append(Message(role=role, text=storable(text)))
        current = node.get("parent")
    return messages[::-1]
