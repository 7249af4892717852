"""The JSON of answers: OpenAI's chat and completions, and llama-server's own routes.

Each shape turns the same events into JSON objects, whole or streamed.

Every finished answer also has llama-server's `timings` and kvq's `x_kvq`. In a stream both come
with every chunk that has a `finish_reason`, and with the usage.
"""

import codecs
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.json_values import is_array, is_object
from kvq_apps.serve.answer_reader import AnswerReader
from kvq_apps.serve.errors import RequestError, error_body
from kvq_apps.serve.fields import Fields
from kvq_apps.serve.loading import ServedModel
from kvq_apps.serve.requests import AnswerRequest
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.serving.outbox import Delta, Finished, Report, TokenLog, steps_of
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.session.metrics import figures

Json = dict[str, Any]

# Figures of a report that `x_kvq` has under the same names.
REPORTED = (
    *("stats.kv_bytes", "stats.kv_bytes_peak", "stats.kv_budget", "stats.auxiliary_bytes"),
    *("stats.held.mean_k_bits", "stats.held.mean_v_bits", "stats.held.evicted_share"),
    *("prompt_tokens", "cached_tokens", "moved_tokens"),
    *("stats.edits.predicted_tokens", "new_tokens"),
    *("rounds.drafted_tokens", "rounds.accepted_tokens"),
    *("rounds.draft_ms", "rounds.pass_ms", "rounds.choose_ms", "context_tokens"),
    *("queued_ms", "ttft_ms", "prefill_tok_s", "decode_tok_s"),
)


@dataclass(kw_only=True, slots=True)
class Choice:
    """Holds one choice of an answer; its text arrives in `parts`."""

    parts: list[str] = field(default_factory=list[str])
    logs: list[TokenLog] = field(default_factory=list[TokenLog])
    reason: str = ""
    stop_string: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def mean_logprob(self) -> float:
        """Returns the mean over its tokens and those of a scored prompt, which choices share."""
        values = [log.logprob for log in self.logs if log.logprob is not None]
        return sum(values) / len(values) if values else 0.0


class Shape(ABC):
    """Turns the events of an answer into the JSON of one route.

    Each step of a stream is any number of objects. `last` ends a stream.
    """

    media_type = "text/event-stream; charset=utf-8"
    last = ""

    def __init__(self, served: ServedModel, request: AnswerRequest) -> None:
        self.served, self.request = served, request

    def opening(self, index: int) -> Iterable[Json]:
        """Returns what is sent before the first text of a choice."""
        return []

    @abstractmethod
    def delta(self, delta: Delta) -> Iterable[Json]:
        """Returns what is sent for some more text, which may be nothing yet."""

    @abstractmethod
    def finish(self, finished: Finished) -> Iterable[Json]:
        """Returns what is sent at the end of a choice."""

    def closing(self, report: Report) -> Iterable[Json]:
        """Returns what is sent after the last choice."""
        return []

    def failed(self, error: RequestError) -> Json:
        """Returns what ends a stream after an error."""
        return error_body(error)

    @abstractmethod
    def whole(self, choices: Sequence[Choice], report: Report) -> Any:
        """Returns the whole answer."""

    def frame(self, row: Json) -> str:
        """Returns an object of a stream as text, in ASCII: some parsers split at other signs."""
        return f"data: {json.dumps(row)}\n\n"

    def comment(self, text: str) -> str:
        """Returns a sign of life that clients skip, empty where the API has none."""
        return f": {text}\n\n"

    def measures(self, report: Report) -> Json:
        """Returns `timings` and `x_kvq` of an answer."""
        encoded = report.prompt_tokens - report.cached_tokens
        return {
            "timings": {
                "cache_n": report.cached_tokens,
                "prompt_n": encoded,
                "prompt_ms": report.prompt_ms,
                "prompt_per_token_ms": _share(report.prompt_ms, encoded),
                "prompt_per_second": report.prefill_tok_s,
                "predicted_n": report.new_tokens,
                "predicted_ms": report.decode_ms,
                "predicted_per_token_ms": _share(report.decode_ms, report.new_tokens),
                "predicted_per_second": report.decode_tok_s,
                "draft_n": report.rounds.drafted_tokens,
                "draft_n_accepted": report.rounds.accepted_tokens,
                "evicted_share": report.stats.held.evicted_share,
            },
            "x_kvq": {
                "kv": self.served.facts["kv"],
                "context_limit": self.served.context_tokens,
                "budget_tokens": self.served.facts["budget_tokens"],
                "edited": report.edited_tokens,
                "exact": report.stats.edits.stale_tokens == 0,
                "reconciled": self.request.generation.reconciled,
                **figures(report, REPORTED),
                **self.request.notes,
            },
        }


# The fields that the reader knows, the reader, and the shape of the answer.
MakeShape = Callable[[ServedModel, AnswerRequest], Shape]
Read = Callable[[Fields, ServedModel], AnswerRequest]
Translation = tuple[Fields, Read, MakeShape]


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorRequest:
    """Asks for numbers of prompts in place of texts; `answer` makes the body of them.

    It gets the numbers of each prompt and the report. `ignored` are fields without an effect.
    """

    generation: GenerationRequest
    answer: Callable[[Sequence[NDArray[np.float32]], Report], Json]
    ignored: Sequence[str] = ()


# Translates a request of one API, or answers it if that needs no model.
Wire = Callable[[Fields, ServedModel], Translation | VectorRequest | Json]


def chat_rows(tokenizer: Tokenizer, logs: Sequence[TokenLog], *, ids: bool = False) -> list[Json]:
    """Returns the form of OpenAI's chat: a row for each token, with its alternatives.

    With `ids` it is that of llama-server, whose rows also have the token's id.
    """

    def row(token: int, logprob: float | None) -> Json:
        content = tokenizer.token_bytes(token)
        return ({"id": token} if ids else {}) | {
            "token": content.decode("utf-8", errors="replace"),
            "logprob": logprob,
            "bytes": list(content),
        }

    return [
        row(log.token, log.logprob) | {"top_logprobs": [row(*pair) for pair in log.top]}
        for log in logs
    ]


class _OpenAiShape(Shape):
    """Shapes what OpenAI's chat and completions have in common: identity, usage, measures."""

    prefix = ""
    kind = ""
    chunk_kind = ""
    last = "data: [DONE]\n\n"

    def __init__(self, served: ServedModel, request: AnswerRequest) -> None:
        super().__init__(served, request)
        self._identity: Json = {
            "id": f"{self.prefix}-{token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }
        # A chunk without choices breaks clients that do not ask for it.
        self._usage_last = request.include_usage

    def closing(self, report: Report) -> list[Json]:
        if not self._usage_last:
            return []
        usage = {"usage": self._usage(report)}
        return [self._chunk(None) | usage | self.measures(report)]

    def whole(self, choices: Sequence[Choice], report: Report) -> Any:
        answer = {
            **self._identity,
            "object": self.kind,
            "choices": [self._complete(index, choice) for index, choice in enumerate(choices)],
            "usage": self._usage(report),
            **self.measures(report),
        }
        return _select_fields(answer, self.request.response_fields)

    def _chunk(self, choice: Json | None) -> Json:
        chunk: Json = {
            **self._identity,
            "object": self.chunk_kind,
            "choices": [] if choice is None else [choice],
        }
        # If the client asks for it, usage is null in every chunk but the last.
        return chunk | ({"usage": None} if self._usage_last else {})

    def _usage(self, report: Report) -> Json:
        return {
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": report.new_tokens,
            "total_tokens": report.prompt_tokens + report.new_tokens,
            "prompt_tokens_details": {"cached_tokens": report.cached_tokens},
            "evicted_share": report.stats.held.evicted_share,
        }

    @abstractmethod
    def _complete(self, index: int, choice: Choice) -> Json:
        """Returns a choice of a whole answer."""


class ChatShape(_OpenAiShape):
    """Shapes answers of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, served: ServedModel, request: AnswerRequest) -> None:
        super().__init__(served, request)
        self._readers = defaultdict[int, AnswerReader](
            lambda: AnswerReader(request.thoughts, request.tools)
        )

    def opening(self, index: int) -> list[Json]:
        return [self._chunk(self._choice(index, {"role": "assistant", "content": ""}, (), None))]

    def delta(self, delta: Delta) -> list[Json]:
        said = self._readers[delta.index].feed(delta.text)
        if not said and not delta.logs:
            return []
        return [self._chunk(self._choice(delta.index, said, delta.logs, None))]

    def finish(self, finished: Finished) -> list[Json]:
        reader = self._readers[finished.index]
        said = reader.flush(cut=finished.reason == "length")
        reason = reader.reason(finished.reason)
        chunk = self._chunk(self._choice(finished.index, said, (), reason))
        return [chunk | self.measures(finished.report)]

    def _usage(self, report: Report) -> Json:
        """Returns the usage with the tokens of thoughts, counted from their texts."""
        if self.request.thoughts is None:
            return super()._usage(report)
        encode = self.served.tokenizer.encode
        count = sum(len(encode(reader.thought)) for reader in self._readers.values())
        details = {"completion_tokens_details": {"reasoning_tokens": count}}
        return super()._usage(report) | details

    def _choice(
        self, index: int, delta: Json, logs: Sequence[TokenLog], reason: str | None
    ) -> Json:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(logs) if logs else None,
            "finish_reason": reason,
        }

    def _complete(self, index: int, choice: Choice) -> Json:
        reader = self._readers[index]
        message: Json = {"role": "assistant", "content": "", "refusal": None}
        message |= reader.whole(choice.text, cut=choice.reason == "length")
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logs) if self.request.logprobs else None,
            "finish_reason": reader.reason(choice.reason),
        }

    def _logprobs(self, logs: Sequence[TokenLog]) -> Json:
        return {"content": chat_rows(self.served.tokenizer, logs), "refusal": None}


class CompletionShape(_OpenAiShape):
    """Shapes answers of `/v1/completions`."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, served: ServedModel, request: AnswerRequest) -> None:
        super().__init__(served, request)
        self._columns: dict[int, _LogprobColumns] = {}
        # So many choices of each prompt are sent.
        self._choices = min(request.generation.choices_of_prompt, request.choices)

    def opening(self, index: int) -> list[Json]:
        prompt = self._prompt(index)
        return [self._chunk(self._piece(index, prompt, None, None))] if prompt else []

    def delta(self, delta: Delta) -> list[Json]:
        return [self._chunk(self._piece(delta.index, delta.text, delta.logs or None, None))]

    def finish(self, finished: Finished) -> list[Json]:
        chunk = self._chunk(self._piece(finished.index, "", None, finished.reason))
        return [chunk | self.measures(finished.report)]

    def whole(self, choices: Sequence[Choice], report: Report) -> Any:
        """Returns the answer as one object, with the likeliest choices of each prompt."""
        written, best = self.request.generation.choices_of_prompt, list[Choice]()
        for at in range(0, len(choices), written):
            group = choices[at : at + written]
            if written > self._choices:
                group = sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)
            best += group[: self._choices]
        return super().whole(best, report)

    def _prompt(self, index: int) -> str:
        if not self.request.echo:
            return ""
        ids, tokenizer = self._prompt_ids(index), self.served.tokenizer
        return tokenizer.decode(ids[_start_length(tokenizer, ids) :], special=True)

    def _prompt_ids(self, index: int) -> tuple[int, ...]:
        return self.request.generation.prompts[index // self._choices]

    def _piece(
        self, index: int, text: str, logs: Sequence[TokenLog] | None, reason: str | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": None if logs is None else self._logprobs(index, logs),
            "finish_reason": reason,
        }

    def _complete(self, index: int, choice: Choice) -> Json:
        logs = choice.logs if self.request.logprobs else None
        return self._piece(index, self._prompt(index) + choice.text, logs, choice.reason)

    def _logprobs(self, index: int, logs: Sequence[TokenLog]) -> Json:
        if index not in self._columns:
            prompt = self._prompt_ids(index) if self.request.generation.scored else ()
            self._columns[index] = _LogprobColumns(self.served.tokenizer, prompt)
        return self._columns[index].columns(logs)


def _start_length(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Returns how many control tokens begin a prompt before its text."""
    start = tokenizer.control.start
    return len(start) if tuple(ids[: len(start)]) == tuple(start) else 0


class _LogprobColumns:
    """Builds the form of OpenAI's completions for one choice: four lists, as its tokens arrive.

    `prompt` are the tokens of a prompt that is returned before the answer, with their
    log-probabilities. An offset says where the token's text begins in the text of the choice.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._start = _start_length(tokenizer, prompt) if prompt else 0
        self._prompt_tokens = len(prompt)
        self._tokens = self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def columns(self, logs: Sequence[TokenLog]) -> Json:
        """Returns the columns of the next tokens."""
        return {
            "tokens": [self._text(log.token) for log in logs],
            "token_logprobs": [log.logprob for log in logs],
            "top_logprobs": [None if log.logprob is None else self._top(log) for log in logs],
            "text_offset": [self._offset(log.token) for log in logs],
        }

    def _top(self, log: TokenLog) -> Json:
        """Returns the alternatives by their texts; of equal texts the likeliest."""
        return {self._text(token): logprob for token, logprob in reversed(log.top)}

    def _offset(self, token: int) -> int:
        """Returns where the next token begins, and moves on to its end."""
        before, place = self._place, self._tokens
        self._tokens += 1
        if place >= self._start:
            shown = place < self._prompt_tokens
            piece = self._tokenizer.token_bytes(token, special=shown)
            self._place += len(self._decoder.decode(piece))
        return before

    def _text(self, token: int) -> str:
        """Returns a token's text; parts of characters are bytes in hexadecimal, as in OpenAI's."""
        content = self._tokenizer.token_bytes(token)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class LlamaShape(Shape):
    """Shapes answers of llama-server's `/completion` and `/infill` as flat objects."""

    def delta(self, delta: Delta) -> list[Json]:
        text = {"index": delta.index, "content": delta.text, "stop": False}
        return [text | self._tokens(delta.logs)]

    def finish(self, finished: Finished) -> list[Json]:
        """Returns everything but the text."""
        choice = Choice(reason=finished.reason, stop_string=finished.stop_string)
        return [self._final(finished.index, choice, finished.report)]

    def whole(self, choices: Sequence[Choice], report: Report) -> Any:
        rows = [self._final(index, choice, report) for index, choice in enumerate(choices)]
        return rows[0] if len(rows) == 1 else rows

    def _final(self, index: int, choice: Choice, report: Report) -> Json:
        text, measures = choice.text, self.measures(report)
        if self.request.steps and choice.logs:
            measures["x_kvq"]["steps"] = steps_of(choice.logs, text)
        stop_type = {"stop": "eos", "length": "limit"}.get(choice.reason, "none")
        if choice.reason == "stop" and choice.stop_string is not None:
            stop_type = "word"
        final = {
            "index": index,
            "content": text,
            "id_slot": 0,
            "stop": True,
            "model": self.served.name,
            "tokens_predicted": report.new_tokens,
            "tokens_evaluated": report.prompt_tokens,
            "tokens_cached": report.cached_tokens,
            "truncated": self.request.generation.truncated,
            "stop_type": stop_type,
            "stopping_word": choice.stop_string or "",
            "has_new_line": "\n" in text,
            **self._tokens(choice.logs),
            **measures,
        }
        return _select_fields(final, self.request.response_fields)

    def _tokens(self, logs: Sequence[TokenLog]) -> Json:
        """Returns the tokens where they are known, and their log-probabilities if need be."""
        tokens: Json = {"tokens": [log.token for log in logs]}
        if not (logs and self.request.generation.top_logprobs):
            return tokens
        rows = chat_rows(self.served.tokenizer, logs, ids=True)
        return tokens | {"completion_probabilities": rows}


def _select_fields(answer: Json, names: Sequence[str] | None) -> Json:
    """Returns the fields that are asked for; a nested field keeps its path as its name."""
    if names is None:
        return answer
    picked: Json = {}
    for name in names:
        value: Any = answer
        for part in name.split("/"):
            value = _member(value, part)
        if value is not None:
            picked[name] = value
    return picked


def _member(value: Any, part: str) -> Any:
    if is_array(value):
        number = int(part) if part.isdecimal() and len(part) < 9 else len(value)
        return value[number] if number < len(value) else None
    return value.get(part) if is_object(value) else None


def _share(amount: float, parts: float) -> float:
    return amount / parts if parts else 0.0
