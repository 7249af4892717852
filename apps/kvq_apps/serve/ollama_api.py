"""Ollama's API on top of the chat and completion routes.

A server of one model holds it for as long as it runs. So `keep_alive` has an effect only where
several are served. Options of how a model is loaded have none: the answer names them in
`x_kvq.ignored`.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from math import inf, isnan

import numpy as np
from numpy.typing import NDArray

from kvq_apps.serve.answer_blocks import AnswerBlock, BlockShape
from kvq_apps.serve.embeddings_api import embedding_of, prompts_request, texts_of
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.protocol import sampling_fields
from kvq_apps.serve.requests import AnswerRequest, chat_request, check_name, completion_request
from kvq_apps.serve.sampling import UNSUPPORTED
from kvq_apps.serve.thinking_fields import EFFORTS
from kvq_apps.serve.wire import Json, Translation, VectorRequest, chat_rows
from kvq_models.thinking import Thinking
from kvq_models.tools import tool_form
from kvq_runtime.serving.outbox import Report

# Every route of this API begins so.
OLLAMA = "/api/"
# Fields and options that mean the same in a chat completion.
_COPIED_FIELDS = (*("tools", "logprobs", "top_logprobs", "x_kvq", "images", "template", "context"),)
_COPIED_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", *UNSUPPORTED),
)
_MOST_TOKENS = 1 << 31
# A model that is served stays; clients read this as for ever.
_EXPIRES = "2318-01-01T00:00:00Z"
_UNITS_S = {"": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+|[+-]?\d+", re.ASCII)
_DURATION_PART = re.compile(r"([\d.]+)([a-zµ]*)", re.ASCII)
# A timer cannot be set for longer; nobody waits for its end.
_LONGEST_S = 1e8
_DETAILS = {
    **{"format": "kvq", "family": "kvq", "families": ["kvq"]},
    **dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), ""),
}


def chat(fields: Fields, served: ServedModel) -> Translation | Json:
    """Translates `POST /api/chat`; without messages it only loads the model, which is loaded."""
    rows = fields.objects("messages")
    body = _body(fields, served)
    if not rows:
        return _loaded(fields, served) | {"message": {"role": "assistant", "content": ""}}
    return Fields(body | {"messages": [*_conversation(rows)]}), chat_request, OllamaChatShape


def generate(fields: Fields, served: ServedModel) -> Translation | Json:
    """Translates `POST /api/generate` to a chat of one message, or to a completion.

    With `raw`, with a `suffix`, and for a model without a chat template the prompt is the whole
    text. Without a prompt it only loads the model, which is loaded.
    """
    body = _body(fields, served)
    prompt, system, suffix = (fields.text(name) for name in ("prompt", "system", "suffix"))
    whole = fields.flag("raw") or bool(suffix) or served.tokenizer.chat_template is None
    if not prompt and not suffix:
        return _loaded(fields, served) | {"response": ""}
    if whole:
        body |= {"prompt": prompt, "suffix": suffix}
        return Fields(body), completion_request, OllamaTextShape
    messages = [{"role": "system", "content": system}] if system else []
    body["messages"] = [*messages, {"role": "user", "content": prompt}]
    return Fields(body), chat_request, OllamaTextShape


def _body(fields: Fields, served: ServedModel) -> Json:
    """Returns what both routes have in common, as fields of a chat completion."""
    options = fields.object("options")
    body: Json = {name: options.get(name) for name in _COPIED_OPTIONS}
    body |= {name: fields.get(name) for name in _COPIED_FIELDS}
    body |= {
        "model": _name(fields, served),
        "stream": fields.flag("stream", True),
        "max_tokens": max(-1, options.whole("num_predict", -2, _MOST_TOKENS, -1)),
    }
    answer_form = fields.get("format")
    if answer_form == "json":
        body["response_format"] = {"type": "json_object"}
    elif isinstance(answer_form, dict):
        body["json_schema"] = answer_form
    elif answer_form not in (None, ""):
        fields.refuse("format", "json or a JSON schema, an object")
    return body | _thinking(fields, served)


def _thinking(fields: Fields, served: ServedModel) -> Json:
    """Returns how much to think; nothing leaves it to the model's template."""
    think = fields.get("think")
    if think is None:
        return {}
    if think is not True and think is not False and think not in EFFORTS:
        fields.refuse("think", f"true, false, {', '.join(EFFORTS)}")
    if think and Thinking.of(served.tokenizer) is None:
        fields.refuse_with("think", f"{served.name} does not support thinking; leave think out")
    return {"reasoning_effort": {"True": "medium", "False": "none"}.get(str(think), think)}


def _name(fields: Fields, served: ServedModel) -> str:
    """Returns the name of the model, without the tag that clients add to names without one."""
    name = fields.text("model") or fields.text("name") or served.name
    return name if name in served.names else name.removesuffix(":latest")


def _loaded(fields: Fields, served: ServedModel) -> Json:
    """Returns the answer to a request that only loads the model, or only unloads it: it stays."""
    name = _name(fields, served)
    check_name(name, served)
    return {"model": name, "created_at": _now(), "done": True, "done_reason": "load"}


def keep_alive_s(fields: Fields) -> float | None:
    """Returns for how many idle seconds the model stays, `inf` for ever; None: nothing is said.

    A text is a number of seconds, or a duration as Go writes it, such as `1h30m`.
    """
    value = fields.get("keep_alive")
    if value is None:
        return None
    if isinstance(value, str) and _DURATION.fullmatch(value):
        parts = _DURATION_PART.findall(value)
        value = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        value = -value if fields.text("keep_alive").startswith("-") else value
    if not isinstance(value, int | float) or isinstance(value, bool) or isnan(value):
        fields.refuse(
            "keep_alive",
            "seconds, or a duration such as 5m; with 0 the model leaves at once, with -1 it stays",
        )
    return inf if value < 0 or value > _LONGEST_S else float(value)


def is_empty(path: str, fields: Fields) -> bool:
    """Says whether a request asks for no text: it only loads the model, or lets it leave."""
    texts = {f"{OLLAMA}chat": ("messages",), f"{OLLAMA}generate": ("prompt", "suffix")}
    return path in texts and not any(map(fields.get, texts[path]))


def unloaded(path: str, name: str) -> Json:
    """Returns the answer to a request that only lets the model leave."""
    texts = {"message": {"role": "assistant", "content": ""}} if path == f"{OLLAMA}chat" else {}
    reason = {"done": True, "done_reason": "unload"}
    return {"model": name, "created_at": _now(), **(texts or {"response": ""}), **reason}


def _conversation(rows: Sequence[Fields]) -> Iterator[Json]:
    """Yields the messages of a chat. A result names its tool; in a chat it names the call."""
    numbers = count()
    unanswered: dict[str, str] = {}
    for row in rows:
        if row.get("images"):
            row.refuse_with("images", "images is not supported; send text only", "unsupported")
        message: Json = {"role": row.text("role"), "content": row.text("content")}
        if thought := row.text("thinking"):
            message["reasoning_content"] = thought
        if calls := row.objects("tool_calls"):
            # Mistral's templates require nine letters or digits.
            pairs = [(call.text("id") or f"{next(numbers):09}", call) for call in calls]
            message["tool_calls"] = [
                {"id": identity, "function": call.get("function")} for identity, call in pairs
            ]
            unanswered |= {
                identity: call.object("function").text("name") for identity, call in pairs
            }
        if message["role"] == "tool":
            name = row.text("tool_name")
            fitting = (key for key, tool in unanswered.items() if name in ("", tool))
            message["tool_call_id"] = row.text("tool_call_id") or next(fitting, "")
            unanswered.pop(message["tool_call_id"], None)
        yield message


class OllamaChatShape(BlockShape):
    """Shapes an answer of `/api/chat`: a stream of lines, each an object."""

    media_type = "application/x-ndjson"

    def __init__(self, served: ServedModel, request: AnswerRequest) -> None:
        super().__init__(served, request)
        self._began_ns = time.monotonic_ns()

    def frame(self, row: Json) -> str:
        return json.dumps(row) + "\n"

    def comment(self, text: str) -> str:
        """Returns nothing, since every line is an object."""
        return ""

    def failed(self, error: RequestError) -> Json:
        return ollama_error(error)

    def growth_events(self, block: AnswerBlock, text: str) -> Iterator[Json]:
        """Yields a line with some more thought or text; a call is written whole."""
        if block.kind != "call":
            yield self._line({block.kind: text}, [])

    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        if block.kind == "call":
            yield self._line({}, [self._call(block)])

    def closing(self, report: Report) -> Iterator[Json]:
        yield self._line({}, []) | self._ending(report)

    def answer(self, report: Report) -> Json:
        texts: dict[str, str] = {}
        for block in self.blocks:
            texts[block.kind] = texts.get(block.kind, "") + block.text
        calls = [self._call(block) for block in self.blocks if block.kind == "call"]
        return self._line(texts, calls) | self._ending(report)

    def _line(self, texts: Mapping[str, str], calls: list[Json]) -> Json:
        line = {"model": self.served.name, "created_at": _now(), **self._said(texts, calls)}
        if self.logs:
            line["logprobs"] = chat_rows(self.served.tokenizer, self.logs)
            self.logs = []
        return line | {"done": False}

    def _said(self, texts: Mapping[str, str], calls: list[Json]) -> Json:
        message: Json = {"role": "assistant", "content": texts.get("text", "")}
        message |= {"thinking": texts["thought"]} if "thought" in texts else {}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def _call(self, block: AnswerBlock) -> Json:
        """Returns a call, whose arguments are an object here."""
        index = sum(earlier.kind == "call" for earlier in self.blocks[: block.index])
        function = {"index": index, "name": block.name, "arguments": json.loads(block.text or "{}")}
        return {"id": block.call_id, "function": function}

    def _ending(self, report: Report) -> Json:
        return {
            "done": True,
            # A call ends an answer as a text does.
            "done_reason": "length" if self.reason == "length" else "stop",
            "total_duration": time.monotonic_ns() - self._began_ns,
            "load_duration": _nanoseconds(report.queued_ms),
            "prompt_eval_count": report.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(report.prompt_ms),
            "eval_count": report.new_tokens,
            "eval_duration": _nanoseconds(report.decode_ms),
            **self.measures(report),
        }


class OllamaTextShape(OllamaChatShape):
    """Shapes an answer of `/api/generate`."""

    def _said(self, texts: Mapping[str, str], calls: list[Json]) -> Json:
        thought = {"thinking": texts["thought"]} if "thought" in texts else {}
        return {"response": texts.get("text", ""), **thought}


def ollama_error(error: RequestError) -> Json:
    """Returns an error in the form of this API."""
    return {"error": error_body(error)["error"]["message"]}


def tags(served: ServedModel) -> Json:
    """Returns the answer of `/api/tags`: the served model; its size is what a step reads of it."""
    backend = served.backend
    row = tag(
        *(served.name, served.loaded_at, backend.weight_bytes_per_step),
        identity=backend.model.fingerprint,
    )
    return {"models": [row]}


def tag(name: str, modified_at: int, num_bytes: int, *, identity: str) -> Json:
    """Returns a row of `/api/tags`."""
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(modified_at, UTC).isoformat(),
        "size": num_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _DETAILS,
    }


def running(served: ServedModel) -> Json:
    """Returns the answer of `/api/ps`: the served model, which stays."""
    (row,) = tags(served)["models"]
    loaded = {"size_vram": 0, "context_length": served.context_tokens, "expires_at": _EXPIRES}
    return {"models": [row | loaded]}


def show(fields: Fields, served: ServedModel) -> Json:
    """Answers `POST /api/show` with what is known of the served model."""
    check_name(_name(fields, served), served)
    template = served.tokenizer.chat_template
    can = {
        "completion": True,
        "tools": tool_form(template) is not None,
        "insert": served.tokenizer.fim is not None,
        "embedding": served.embedding is not None,
        "thinking": Thinking.of(served.tokenizer) is not None,
    }
    sampling = sampling_fields(served.sampling)
    return {
        "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
        "template": template or "",
        "details": _DETAILS,
        "model_info": {
            "general.architecture": "kvq",
            "general.basename": served.name,
            "kvq.context_length": served.context_tokens,
            "kvq.vocab_size": served.vocab_size,
        },
        "capabilities": [name for name, holds in can.items() if holds],
    }


def embed(fields: Fields, served: ServedModel) -> VectorRequest | Json:
    """Answers `POST /api/embed`; without an input it only loads the model, which is loaded."""
    check_name(_name(fields, served), served)
    embedding, began_ns = embedding_of(served), time.monotonic_ns()
    cuts = fields.flag("truncate", True)
    dimensions = fields.whole("dimensions", 1, served.state_width, None)
    if fields.get("input") in (None, "", []):
        return {"model": served.name, "embeddings": []}

    def answer(rows: Sequence[NDArray[np.float32]], report: Report) -> Json:
        return {
            "model": served.name,
            "embeddings": [embedding.vector(row, dimensions).tolist() for row in rows],
            "total_duration": time.monotonic_ns() - began_ns,
            "load_duration": _nanoseconds(report.queued_ms),
            "prompt_eval_count": report.prompt_tokens,
        }

    prompts = texts_of(fields, "input", served, cuts=cuts)
    return VectorRequest(generation=prompts_request(fields, served, prompts), answer=answer)


def embed_one(fields: Fields, served: ServedModel) -> VectorRequest:
    """Answers `POST /api/embeddings`, the older form for one text."""
    check_name(_name(fields, served), served)
    embedding = embedding_of(served)
    prompts = texts_of(fields, "prompt", served, cuts=True)[:1]
    return VectorRequest(
        generation=prompts_request(fields, served, prompts),
        answer=lambda rows, _: {"embedding": embedding.vector(rows[0]).tolist()},
    )


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
