"""What an answer looks like on the wire: OpenAI's chat and completions, llama-server's own.

Each shape turns the same events into JSON objects, whole or streamed. Knows no socket.

Every finished answer also carries llama-server's `timings` and our own `x_kvq`: `kv` are the K:V
widths pages are closed at; `kv_bytes` is what the session's arena holds now, `kv_bytes_peak` the
most it has held, never above `kv_budget`; `mean_k_bits`, `mean_v_bits` are over the tokens still
held (the newest at 16), `evicted_share` is what was given up of the tokens of all layers and
heads, in `timings` and the usage too; of `context_limit` tokens the budget holds `budget_tokens`
at those widths, beyond which bits or tokens are given up; `cached_tokens` of the prompt were held
already, `edited` are new ones in the middle of an editor's text whose rest was kept; `exact`: all
that the session holds was computed, in its order; of the `drafted_tokens` that a drafter guessed
`accepted_tokens` were right, `draft_n` and `draft_n_accepted` in the timings; `ttft_ms` counts
from the request's arrival. In a stream both come with every chunk that has a
`finish_reason`, and with the usage.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

from kvq.json_values import is_array, is_object
from kvq_apps.serve.reading import AnswerReader
from kvq_apps.serve.requests import Delivery
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.metrics import figures
from kvq_runtime.serving.outbox import Delta, Finished, Report, TokenLog
from kvq_runtime.serving.request import GenerationRequest

Json = dict[str, Any]

# What `x_kvq` tells of a report under the report's own names.
REPORTED = (
    *("stats.kv_bytes", "stats.kv_bytes_peak", "stats.kv_budget", "stats.auxiliary_bytes"),
    *("stats.held.mean_k_bits", "stats.held.mean_v_bits", "stats.held.evicted_share"),
    *("prompt_tokens", "cached_tokens", "stats.edits.predicted_tokens", "new_tokens"),
    *("rounds.drafted_tokens", "rounds.accepted_tokens"),
    *("rounds.draft_ms", "rounds.pass_ms", "rounds.choose_ms", "context_tokens"),
    *("queued_ms", "ttft_ms", "prefill_tok_s", "decode_tok_s"),
)


@dataclass(kw_only=True, slots=True)
class Choice:
    """One finished choice of an answer."""

    text: str = ""
    logs: list[TokenLog] = field(default_factory=list[TokenLog])
    reason: str = ""
    stop_string: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What every shape needs to know of the answer it shapes."""

    model: str
    tokenizer: Tokenizer
    request: GenerationRequest
    delivery: Delivery
    kv: str
    context_limit: int
    budget_tokens: int


class Shape(Protocol):
    """One route's way to say things; `last` ends a stream."""

    last: str | None

    def opening(self, index: int) -> Json | None:
        """Sent before the first text of a choice."""
        ...

    def delta(self, delta: Delta) -> Json | None:
        """Some more text, or nothing to be said yet."""
        ...

    def finish(self, finished: Finished) -> Json:
        """A choice ended."""
        ...

    def closing(self, report: Report) -> Json | None:
        """Sent after the last choice."""
        ...

    def whole(self, choices: Sequence[Choice], report: Report) -> Any:
        """The answer in one piece."""
        ...


class _OpenAiShape(ABC):
    """What chat and completions share: identity, usage, measures."""

    prefix = ""
    kind = ""
    chunk_kind = ""
    last: str | None = "[DONE]"

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._identity: Json = {
            "id": f"{self.prefix}-{token_hex(12)}",
            "created": int(time.time()),
            "model": answered.model,
        }
        # Only if asked for: a chunk without choices breaks clients that did not.
        self._usage_last = answered.delivery.include_usage
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Json | None:
        """Nothing, unless a role is due."""
        return None

    def delta(self, delta: Delta) -> Json | None:
        """A chunk with text."""
        return self._chunk(self._piece(delta.index, delta.text, delta.logs, None))

    def finish(self, finished: Finished) -> Json:
        """A chunk with a reason and no text."""
        chunk = self._chunk(self._piece(finished.index, None, (), finished.reason))
        return chunk | _measures(self._answered, finished.report)

    def closing(self, report: Report) -> Json | None:
        """The usage, for a client that asked."""
        if not self._usage_last:
            return None
        return (
            self._chunk(None) | {"usage": self._usage(report)} | _measures(self._answered, report)
        )

    def whole(self, choices: Sequence[Choice], report: Report) -> Any:
        """The answer as one object."""
        answer = {
            **self._identity,
            "object": self.kind,
            "choices": [self._complete(index, choice) for index, choice in enumerate(choices)],
            "usage": self._usage(report),
            **_measures(self._answered, report),
        }
        return _picked(answer, self._answered.delivery.response_fields)

    def _chunk(self, choice: Json | None) -> Json:
        chunk: Json = {
            **self._identity,
            "object": self.chunk_kind,
            "choices": [] if choice is None else [choice],
        }
        # Asked for, usage is null in every chunk but the last.
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
    def _piece(
        self, index: int, text: str | None, logs: Sequence[TokenLog], reason: str | None
    ) -> Json:
        """A choice of a chunk."""

    @abstractmethod
    def _complete(self, index: int, choice: Choice) -> Json:
        """A choice of a whole answer."""


class ChatShape(_OpenAiShape):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, answered: Answered) -> None:
        super().__init__(answered)
        self._readers: dict[int, AnswerReader] = {}

    def opening(self, index: int) -> Json | None:
        """The role comes first."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        )

    def delta(self, delta: Delta) -> Json | None:
        """A chunk with thought, text or calls; None while it is not known what it will be."""
        said = self._reader(delta.index).feed(delta.text)
        if not said and not delta.logs:
            return None
        return self._chunk(self._choice(delta.index, said, delta.logs, None))

    def finish(self, finished: Finished) -> Json:
        """A chunk with a reason, and what was held back until now."""
        reader = self._reader(finished.index)
        said = reader.flush(cut=finished.reason == "length")
        reason = reader.reason(finished.reason)
        chunk = self._chunk(self._choice(finished.index, said, (), reason))
        return chunk | _measures(self._answered, finished.report)

    def _reader(self, index: int) -> AnswerReader:
        delivery = self._answered.delivery
        return self._readers.setdefault(index, AnswerReader(delivery.thinks, delivery.tools))

    def _usage(self, report: Report) -> Json:
        """With the tokens that were thought, as far as the texts of the thoughts tell."""
        if self._answered.delivery.thinks is None:
            return super()._usage(report)
        encode = self._answered.tokenizer.encode
        count = sum(len(encode(reader.thought)) for reader in self._readers.values())
        details = {"completion_tokens_details": {"reasoning_tokens": count}}
        return super()._usage(report) | details

    def _piece(
        self, index: int, text: str | None, logs: Sequence[TokenLog], reason: str | None
    ) -> Json:
        return self._choice(index, {} if text is None else {"content": text}, logs, reason)

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
        asked, reason = self._answered.request.logprobs, choice.reason
        reader = self._reader(index)
        message: Json = {"role": "assistant", "content": "", "refusal": None}
        message |= reader.whole(choice.text, cut=reason == "length")
        reason = reader.reason(reason)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logs) if asked else None,
            "finish_reason": reason,
        }

    def _logprobs(self, logs: Sequence[TokenLog]) -> Json:
        return {"content": [self._row(log) for log in logs], "refusal": None}

    def _row(self, log: TokenLog) -> Json:
        top = [self._token(token, logprob) for token, logprob in log.top]
        return self._token(log.token, log.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        content = self._answered.tokenizer.token_bytes(token)
        return {
            "token": content.decode("utf-8", errors="replace"),
            "logprob": logprob,
            "bytes": list(content),
        }


class CompletionShape(_OpenAiShape):
    """`/v1/completions`."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def opening(self, index: int) -> Json | None:
        """The prompt, where it is to be repeated."""
        prompt = self._prompt(index)
        return self._chunk(self._piece(index, prompt, (), None)) if prompt else None

    def _prompt(self, index: int) -> str:
        if not self._answered.delivery.echo:
            return ""
        request = self._answered.request
        return self._answered.tokenizer.decode(request.prompts[index // request.choices])

    def _piece(
        self, index: int, text: str | None, logs: Sequence[TokenLog], reason: str | None
    ) -> Json:
        return {
            "index": index,
            "text": text or "",
            "logprobs": self._logprobs(index, logs) if logs else None,
            "finish_reason": reason,
        }

    def _complete(self, index: int, choice: Choice) -> Json:
        asked = self._answered.request.logprobs
        return {
            "index": index,
            "text": self._prompt(index) + choice.text,
            "logprobs": self._logprobs(index, choice.logs) if asked else None,
            "finish_reason": choice.reason,
        }

    def _logprobs(self, index: int, logs: Sequence[TokenLog]) -> Json:
        """Four lists side by side; an offset is where the token's text begins in the answer."""
        texts = [self._text(log.token) for log in logs]
        offsets: list[int] = []
        place = self._offsets.get(index, 0)
        for text in texts:
            offsets.append(place)
            place += len(text)
        self._offsets[index] = place
        return {
            "tokens": texts,
            "token_logprobs": [log.logprob for log in logs],
            "top_logprobs": [
                {self._text(token): logprob for token, logprob in reversed(log.top)} for log in logs
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        """A token's text; part of a character is its bytes in hexadecimal, as OpenAI has it."""
        content = self._answered.tokenizer.token_bytes(token)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


class LlamaShape:
    """llama-server's `/completion` and `/infill`: flat objects, `timings`, `response_fields`."""

    last: str | None = None

    def __init__(self, answered: Answered) -> None:
        self._answered = answered

    def opening(self, index: int) -> Json | None:
        """Nothing comes first."""
        return None

    def delta(self, delta: Delta) -> Json:
        """Some text."""
        return {"index": delta.index, "content": delta.text, "tokens": [], "stop": False}

    def finish(self, finished: Finished) -> Json:
        """Everything but the text."""
        choice = Choice(reason=finished.reason, stop_string=finished.stop_string)
        return self._picked(self._final(finished.index, choice, finished.report))

    def closing(self, report: Report) -> Json | None:
        """Nothing comes last."""
        return None

    def whole(self, choices: Sequence[Choice], report: Report) -> Any:
        """One object, or a list of several choices."""
        rows = [
            self._picked(self._final(index, choice, report)) for index, choice in enumerate(choices)
        ]
        return rows[0] if len(rows) == 1 else rows

    def _final(self, index: int, choice: Choice, report: Report) -> Json:
        return {
            "index": index,
            "content": choice.text,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self._answered.model,
            "tokens_predicted": report.new_tokens,
            "tokens_evaluated": report.prompt_tokens,
            "tokens_cached": report.cached_tokens,
            "truncated": self._answered.request.truncated,
            "stop_type": _stop_type(choice),
            "stopping_word": choice.stop_string or "",
            "has_new_line": "\n" in choice.text,
            **_measures(self._answered, report),
        }

    def _picked(self, final: Json) -> Json:
        return _picked(final, self._answered.delivery.response_fields)


def _stop_type(choice: Choice) -> str:
    """Why a choice ended, in llama-server's words."""
    if choice.reason == "stop" and choice.stop_string is not None:
        return "word"
    return {"stop": "eos", "length": "limit"}.get(choice.reason, "none")


def _picked(answer: Json, names: Sequence[str] | None) -> Json:
    """The fields asked for; one inside another keeps its path as its name."""
    if names is None:
        return answer
    picked: Json = {}
    for name in names:
        value: Any = answer
        for part in name.split("/"):
            value = _inside(value, part)
        if value is not None:
            picked[name] = value
    return picked


def _inside(value: Any, part: str) -> Any:
    if is_array(value):
        number = int(part) if part.isdecimal() and len(part) < 9 else len(value)
        return value[number] if number < len(value) else None
    return value.get(part) if is_object(value) else None


SHAPES: dict[str, Callable[[Answered], Shape]] = {
    "/v1/chat/completions": ChatShape,
    "/v1/completions": CompletionShape,
    "/completion": LlamaShape,
    "/infill": LlamaShape,
}


def _measures(answered: Answered, report: Report) -> Json:
    """`timings` and `x_kvq`."""
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
            "kv": answered.kv,
            "context_limit": answered.context_limit,
            "budget_tokens": answered.budget_tokens,
            "edited": report.edited_tokens,
            "exact": report.stats.edits.stale_tokens == 0,
            **figures(report, REPORTED),
        },
    }


def _share(amount: float, parts: float) -> float:
    return amount / parts if parts else 0.0
