"""OpenAI's Responses API on top of the chat route.

It keeps the conversations that a later request may continue (`previous_response_id`). The chat
route skips tools that are not functions and says so.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from threading import Lock
from typing import Any

from kvq_apps.serve.answer_blocks import AnswerBlock, BlockShape
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.requests import AnswerRequest, chat_request
from kvq_apps.serve.wire import Json, Translation
from kvq_runtime.serving.outbox import Report

# Fields that mean the same in both APIs.
_COPIED_FIELDS = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "x_kvq"),
    *("parallel_tool_calls", "chat_template_kwargs", "tools", "tool_choice"),
)
# Fields that an answer repeats, and their values where the request has none.
_REPEATED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
}
_MOST_STORED, _MOST_STORED_CHARACTERS = 256, 16 << 20


class StoredResponses:
    """Keeps the conversations of the last responses in memory; any thread may use it.

    A conversation is found only by the id of its response together with its owner. The oldest are
    dropped when there are more than 256, or more than 16 million characters.
    """

    def __init__(self) -> None:
        # Each with its characters.
        self._stored: OrderedDict[tuple[str, str], tuple[list[Json], int]] = OrderedDict()
        self._lock = Lock()

    def translate(self, fields: Fields, served: ServedModel) -> Translation:
        """Translates `POST /v1/responses` to an equal chat completion. Raises `RequestError`."""
        body, messages = chat_body(fields, self, served.owner)
        repeated = {
            name: default if fields.get(name) is None else fields.get(name)
            for name, default in _REPEATED.items()
        }
        stored = self if fields.flag("store", True) else None
        shape = partial(ResponsesShape, messages=messages, repeated=repeated, stored=stored)
        return Fields(body), chat_request, shape

    def put(self, owner: str, identity: str, messages: list[Json]) -> None:
        """Keeps the messages up to and including a response."""
        size = sum(len(str(message)) for message in messages)
        with self._lock:
            self._stored[owner, identity] = messages, size
            while len(self._stored) > 1 and (
                len(self._stored) > _MOST_STORED
                or sum(size for _, size in self._stored.values()) > _MOST_STORED_CHARACTERS
            ):
                self._stored.popitem(last=False)

    def get(self, owner: str, identity: str) -> list[Json]:
        """Returns the messages up to and including a response. Raises `RequestError` for none."""
        with self._lock:
            messages, _ = self._stored.get((owner, identity), (None, 0))
        if messages is None:
            raise RequestError(
                f"there is no response {identity[:80]!r} here (they are kept while the server "
                "runs, the last 256 of them); send the whole conversation as input",
                status=404,
                param="previous_response_id",
                code="response_not_found",
            )
        return messages


def chat_body(fields: Fields, stored: StoredResponses, owner: str) -> tuple[Json, list[Json]]:
    """Returns the body of an equal chat completion, and its messages without the instructions.

    Raises `RequestError` for a field that cannot be read, or a response that is not stored.
    """
    previous, instructions = (
        fields.text(name) for name in ("previous_response_id", "instructions")
    )
    messages = [*(stored.get(owner, previous) if previous else ()), *_input(fields)]
    system: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if fields.text("truncation", "disabled") != "disabled":
        fields.ignore("truncation")
    answer_form = fields.object("text").get("format")
    body: Json = {name: fields.get(name) for name in _COPIED_FIELDS} | {
        "messages": [*system, *messages],
        "max_completion_tokens": fields.get("max_output_tokens"),
        "reasoning_effort": fields.object("reasoning").get("effort"),
        "response_format": answer_form,
    }
    choice = body["tool_choice"]
    if isinstance(choice, dict) and not fields.object("tool_choice").text("name"):
        # A choice of a tool that is not a function.
        body["tool_choice"] = "auto"
    return body, messages


def _input(fields: Fields) -> list[Json]:
    """Returns the messages of `input`, which is a text or a list of items."""
    if isinstance(text := fields.get("input"), str):
        return [{"role": "user", "content": text}]
    messages: list[Json] = []
    for item in fields.objects("input"):
        match kind := item.text("type", "message"):
            case "message":
                messages.append({"role": item.text("role"), "content": item.get("content")})
            case "function_call":
                _call(item, messages)
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item.text("call_id")}
                messages.append(result | {"content": item.get("output")})
            case "reasoning":
                parts = (part for name in ("content", "summary") for part in item.objects(name))
                thought = "".join(part.text("text") for part in parts)
                messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
            case _:
                item.refuse_with("type", f"an item of type {kind[:40]!r} is not supported here")
    if not messages:
        fields.refuse("input", "a text or a list with at least one item")
    return _merge_thoughts(messages)


def _call(item: Fields, messages: list[Json]) -> None:
    """Adds a call to the assistant's message before it, or to a new one."""
    function = {"name": item.text("name"), "arguments": item.get("arguments") or "{}"}
    call = {"id": item.text("call_id"), "type": "function", "function": function}
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _merge_thoughts(messages: list[Json]) -> list[Json]:
    """Moves each thought into the assistant's message after it."""
    joined: list[Json] = []
    for message in messages:
        last = joined[-1] if joined else {}
        thought_alone = "reasoning_content" in last and not (
            last["content"] or last.get("tool_calls")
        )
        if thought_alone and message["role"] == "assistant":
            joined[-1] = {**last, **message}
        else:
            joined.append(message)
    return joined


class ResponsesShape(BlockShape):
    """Shapes an answer for `/v1/responses`, and keeps its conversation if the client asks so."""

    def __init__(
        self,
        served: ServedModel,
        request: AnswerRequest,
        messages: list[Json],
        repeated: Json,
        stored: StoredResponses | None,
    ) -> None:
        super().__init__(served, request)
        self._messages, self._repeated, self._stored = messages, repeated, stored
        self._identity = f"resp_{self.identity}"
        self._created_s = int(time.time())
        self._number = 0

    def failed(self, error: RequestError) -> Json:
        details = error_body(error)["error"]
        failure = {"code": details["code"] or "server_error", "message": details["message"]}
        response = self._response("failed", None) | {"error": failure}
        return self._event("response.failed", response=response)

    def opening(self, index: int) -> Iterator[Json]:
        """Yields the response without output, twice, as clients expect, unless `comment` did."""
        if self._number == 0:
            yield self._event("response.created", response=self._response("in_progress", None))
            yield self._in_progress()

    def comment(self, text: str) -> str:
        """Returns a comment and an event: Codex leaves a stream that has long had comments only."""
        rows = [self._in_progress()] if self._number else self.opening(0)
        return super().comment(text) + "".join(map(self.frame, rows))

    def open_events(self, block: AnswerBlock) -> Iterator[Json]:
        item = _item(block, "in_progress")
        yield self._item_event("added", block, item)
        if block.kind != "call":
            yield self._part_event("added", block, "")

    def growth_events(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        yield self._text_event("delta", block, delta=text)

    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        if block.kind == "call":
            yield self._text_event("done", block, name=block.name, arguments=block.text)
        else:
            yield self._text_event("done", block, text=block.text)
            yield self._part_event("done", block, block.text)
        yield self._item_event("done", block, _item(block, "completed"))

    def closing(self, report: Report) -> Iterator[Json]:
        status = "incomplete" if self.reason == "length" else "completed"
        yield self._event(f"response.{status}", response=self.answer(report))

    def answer(self, report: Report) -> Json:
        if self._stored is not None:
            messages = [*self._messages, _message(self.blocks)]
            self._stored.put(self.request.generation.owner, self._identity, messages)
        cut = self.reason == "length"
        response = self._response("incomplete" if cut else "completed", report)
        response |= self.measures(report)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def _response(self, status: str, report: Report | None) -> Json:
        return {
            "id": self._identity,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.served.name,
            "output": [_item(block, "completed") for block in self.blocks],
            "reasoning": {"effort": None, "summary": None},
            "usage": None if report is None else self._usage(report),
            **self._repeated,
        }

    def _usage(self, report: Report) -> Json:
        encode = self.served.tokenizer.encode
        thought = sum(len(encode(block.text)) for block in self.blocks if block.kind == "thought")
        return {
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.cached_tokens},
            "output_tokens": report.new_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": report.prompt_tokens + report.new_tokens,
        }

    def _in_progress(self) -> Json:
        return self._event("response.in_progress", response=self._response("in_progress", None))

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _item_event(self, step: str, block: AnswerBlock, item: Json) -> Json:
        return self._event(f"response.output_item.{step}", output_index=block.index, item=item)

    def _part_event(self, step: str, block: AnswerBlock, text: str) -> Json:
        place = {"item_id": _identity_of(block), "output_index": block.index, "content_index": 0}
        return self._event(f"response.content_part.{step}", **place, part=_part(block.kind, text))

    def _text_event(self, step: str, block: AnswerBlock, **fields: str) -> Json:
        kind = {
            "thought": "reasoning_text",
            "text": "output_text",
            "call": "function_call_arguments",
        }
        place: Json = {"item_id": _identity_of(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        if block.kind == "text":
            place["logprobs"] = []
        return self._event(f"response.{kind[block.kind]}.{step}", **place, **fields)


def _identity_of(block: AnswerBlock) -> str:
    return {"thought": "rs", "text": "msg", "call": "fc"}[block.kind] + f"_{block.identity}"


def _part(kind: str, text: str) -> Json:
    if kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: AnswerBlock, status: str) -> Json:
    """Returns a block as an item of the output; a block that begins has no content yet."""
    item: Json = {"id": _identity_of(block), "status": status}
    if block.kind == "call":
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return item | {"type": "function_call", **call}
    content = [_part(block.kind, block.text)] if status == "completed" else []
    if block.kind == "thought":
        return item | {"type": "reasoning", "summary": [], "content": content}
    return item | {"type": "message", "role": "assistant", "content": content}


def _message(blocks: list[AnswerBlock]) -> Json:
    """Returns an answer as a message for the conversation after it."""
    texts = {kind: "".join(block.text for block in blocks if block.kind == kind)
             for kind in ("thought", "text")}  # fmt: skip
    message: Json = {"role": "assistant", "content": texts["text"]}
    if texts["thought"]:
        message["reasoning_content"] = texts["thought"]
    calls = [
        {
            "id": block.call_id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.text},
        }
        for block in blocks
        if block.kind == "call"
    ]
    return message | ({"tool_calls": calls} if calls else {})
