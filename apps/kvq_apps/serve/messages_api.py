"""Anthropic's Messages API on top of the chat route.

A thought is a block without a signature. Marks for caching have no effect, since every prompt is
cached; the usage says how much of it was.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvq_apps.serve.answer_blocks import AnswerBlock, BlockShape
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.requests import chat_request, left_out
from kvq_apps.serve.wire import Json, Translation
from kvq_runtime.serving.outbox import Report

MESSAGES = "/v1/messages"
# Fields that mean the same in both APIs.
_COPIED_FIELDS = (
    *("model", "stream", "temperature", "top_p", "top_k", "seed", "x_kvq", "chat_template_kwargs"),
)
# Says whom a request is billed to. It differs with every conversation, so a prompt that began with
# it would share nothing with another.
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def translate(fields: Fields, _: ServedModel) -> Translation:
    """Translates `POST /v1/messages` to an equal chat completion."""
    return Fields(chat_body(fields)), chat_request, MessagesShape


def chat_body(fields: Fields) -> Json:
    """Returns the body of an equal chat completion. Raises `RequestError`."""
    body: Json = {name: fields.get(name) for name in _COPIED_FIELDS}
    system = _ATTRIBUTION.sub("", _text(fields, "system"))
    body["messages"] = [{"role": "system", "content": system}] if system else []
    body["messages"] += _system_first([*_conversation(fields)])
    body["max_tokens"] = fields.whole("max_tokens", 1, 1 << 31, 1 << 31)
    body["stop"] = [*fields.texts("stop_sequences", 64)]
    thinking, output = fields.object("thinking"), fields.object("output_config")
    budget, effort = thinking.whole("budget_tokens", 0, 1 << 31, None), output.get("effort")
    if kind := thinking.text("type"):
        body["reasoning_effort"] = "none" if kind == "disabled" else effort or "medium"
        body["reasoning_budget_tokens"] = budget
    body["response_format"] = output.get("format")
    return body | _tools(fields)


def _conversation(fields: Fields) -> Iterator[Json]:
    rows = fields.objects("messages")
    # These are shown only where a result refers to them.
    tools = fields.objects("tools")
    deferred = {row.text("name"): row for row in tools if row.flag("defer_loading")}
    if not rows:
        fields.refuse("messages", "a list with at least one message")
    for row in rows:
        role = row.text("role")
        if role not in ("user", "assistant", "system"):
            row.refuse_with("role", f"the role {role[:40]!r} is not known; use user or assistant")
        if isinstance(text := row.get("content"), str):
            yield {"role": role, "content": text}
        elif role == "assistant":
            yield _assistant(row)
        else:
            yield from _user(row, role, deferred)


def _system_first(messages: list[Json]) -> list[Json]:
    """Moves the system's messages before the first answer to the front.

    The user's question differs with every conversation, so what stands behind it is found in no
    other one's cache. Claude Code sends the environment there.
    """
    roles = [message["role"] for message in messages]
    start = roles.index("assistant") if "assistant" in roles else len(messages)
    opening = sorted(messages[:start], key=lambda message: message["role"] != "system")
    return opening + messages[start:]


def _assistant(row: Fields) -> Json:
    """Returns an assistant's message: its text, its thoughts and its calls."""
    message: Json = {"role": "assistant", "content": ""}
    for block in row.objects("content"):
        match kind := block.text("type"):
            case "text":
                message["content"] += block.text("text")
            case "thinking":
                message["reasoning_content"] = block.text("thinking")
            case "redacted_thinking":
                pass
            case "tool_use":
                call: Json = {"name": block.text("name"), "arguments": block.get("input") or {}}
                calls = message.setdefault("tool_calls", [])
                calls.append({"id": block.text("id"), "function": call})
            case _:
                _refuse_kind(block, kind)
    return message


def _user(row: Fields, role: str, deferred: Mapping[str, Fields]) -> Iterator[Json]:
    """Yields the results of tools in a message, and then its text."""
    texts: list[str] = []
    for block in row.objects("content"):
        match kind := block.text("type"):
            case "text":
                texts.append(block.text("text"))
            case "tool_result":
                identity = block.text("tool_use_id")
                result = _result(block, deferred)
                yield {"role": "tool", "tool_call_id": identity, "content": result}
            case _:
                _refuse_kind(block, kind)
    if texts:
        yield {"role": role, "content": "\n\n".join(texts)}


def _result(block: Fields, deferred: Mapping[str, Fields]) -> str:
    """Returns the result of a tool; a reference to a deferred tool becomes its definition."""
    start = "Error: " if block.flag("is_error") else ""
    if isinstance(text := block.get("content") or "", str):
        return start + text
    parts = (_result_part(part, deferred) for part in block.objects("content"))
    return start + "\n\n".join(parts)


def _result_part(part: Fields, deferred: Mapping[str, Fields]) -> str:
    if (kind := part.text("type")) == "text":
        return part.text("text")
    tool = deferred.get(part.text("tool_name"))
    # Clients tell the model that definitions come in this form.
    return left_out(kind) if tool is None else f"<function>{json.dumps(_function(tool))}</function>"


def _text(fields: Fields, name: str) -> str:
    """Returns a field that is a text, a list of blocks of text, or absent."""
    if isinstance(text := fields.get(name) or "", str):
        return text
    blocks = fields.objects(name)
    for block in blocks:
        if (kind := block.text("type", "text")) != "text":
            _refuse_kind(block, kind)
    return "\n\n".join(block.text("text") for block in blocks)


def _refuse_kind(block: Fields, kind: str) -> None:
    block.refuse_with("type", f"content of type {kind[:40]!r} is not supported; send text only")


def _tools(fields: Fields) -> Json:
    """Returns a chat's tools and which of them may be called."""
    choice = fields.object("tool_choice")
    kind = choice.choice("type", (*_CHOICES, "tool"), "auto")
    body: Json = {"tools": [*map(_tool, fields.objects("tools"))]}
    if choice.flag("disable_parallel_tool_use"):
        body["parallel_tool_calls"] = False
    if not body["tools"]:
        return {}
    named = {"type": "function", "name": choice.text("name")}
    return body | {"tool_choice": named if kind == "tool" else _CHOICES[kind]}


def _tool(row: Fields) -> Json:
    """Returns a tool of a chat; the chat route skips a tool that is not a function."""
    if (kind := row.text("type", "custom")) != "custom":
        return {"type": kind}
    return _function(row) | ({"defer_loading": True} if row.flag("defer_loading") else {})


def _function(row: Fields) -> Json:
    schema = row.object("input_schema").values
    function = {"name": row.text("name"), "description": row.text("description")}
    return {**function, "parameters": schema} if schema else function


def messages_error(error: RequestError) -> Json:
    """Returns an error in the form of this API."""
    details = error_body(error)["error"]
    kind, message = _ERRORS.get(error.status, "api_error"), details["message"]
    if error.code == "context_length_exceeded":
        # By these words clients know that they have to shorten the conversation.
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesShape(BlockShape):
    """Shapes an answer for `/v1/messages`."""

    def failed(self, error: RequestError) -> Json:
        return messages_error(error)

    def opening(self, index: int) -> Iterator[Json]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], None, usage)}
        yield {"type": "ping"}

    def open_events(self, block: AnswerBlock) -> Iterator[Json]:
        content = _content(block)
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def growth_events(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        delta = {
            "thought": {"type": "thinking_delta", "thinking": text},
            "text": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": delta}

    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        yield {"type": "content_block_stop", "index": block.index}

    def closing(self, report: Report) -> Iterator[Json]:
        ending = {"stop_reason": self._stop_reason, "stop_sequence": self.stop_string}
        usage, cost = _usage(report), self.measures(report)
        yield {"type": "message_delta", "delta": ending, "usage": usage, **cost}
        yield {"type": "message_stop"}

    def answer(self, report: Report) -> Json:
        content = [_content(block) for block in self.blocks]
        message = self._message(content, self._stop_reason, _usage(report))
        return message | self.measures(report)

    @property
    def _stop_reason(self) -> str:
        return "stop_sequence" if self.stop_string else _REASONS.get(self.reason, "end_turn")

    def _message(self, content: list[Json], reason: str | None, usage: Json) -> Json:
        return {
            "id": f"msg_{self.identity}",
            "type": "message",
            "role": "assistant",
            "model": self.served.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None if reason is None else self.stop_string,
            "usage": usage,
        }


def _content(block: AnswerBlock) -> Json:
    """Returns a block of a message."""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments: Any = json.loads(block.text) if block.text else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _usage(report: Report) -> Json:
    """Returns how many tokens were computed, found in the cache and written."""
    return {
        "input_tokens": report.prompt_tokens - report.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": report.cached_tokens,
        "output_tokens": report.new_tokens,
    }
