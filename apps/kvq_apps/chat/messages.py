"""The messages of a conversation and the numbers of a reply. Knows no screen, file or engine.

A reply begins with its thought, between the marks of `kvq_models.thinking.KEPT`, whichever model
wrote it. The transcript folds the thought away. The model gets both parts again, and its template
keeps or drops the first.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvq.json_values import is_object
from kvq_models.thinking import split

ROLES = ("system", "user", "assistant")

# What the model reads in place of a result that never came.
NO_RESULT = "error: this call did not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """Holds a call of a tool. `arguments` is a JSON text as the model wrote it, perhaps wrong."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any] | None:
        """Returns the arguments; None where they are no JSON object that can be sent."""
        try:
            values: Any = json.loads(self.arguments)
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return None
        return values if is_object(values) else None

    def row(self, arguments: Any) -> dict[str, Any]:
        """Returns the call as OpenAI's API and chat templates have it, with these `arguments`."""
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(kw_only=True, slots=True)
class Message:
    """Holds one message of a chat's tree.

    `state` is done, streaming, stopped (by the user), length (the reply's limit or the context's
    end came first), failed or interrupted (the process died). `branch` of `branches` siblings share
    a parent. A note belongs to the screen only and has no id. A reply may end with `calls`. Each
    message of the role `tool` after it is the result of the next of these.
    """

    role: str
    text: str
    id: str = ""
    parent_id: str | None = None
    state: str = "done"
    created_s: float = 0.0
    branch: int = 1
    branches: int = 1
    stats: Mapping[str, Any] = field(default_factory=dict[str, Any])
    calls: Sequence[ToolCall] = ()


def with_results(messages: Sequence[Message]) -> Iterator[tuple[Message, ToolCall | None]]:
    """Yields each message, and with a result its call.

    A call without a result gets one that says so, and a result without a call is left out.
    """
    waiting: list[ToolCall] = []
    for message in messages:
        if message.role != "tool":
            yield from _unanswered(waiting)
            waiting = [*message.calls]
            yield message, None
        elif waiting:
            yield message, waiting.pop(0)
    yield from _unanswered(waiting)


def _unanswered(calls: Sequence[ToolCall]) -> Iterator[tuple[Message, ToolCall]]:
    return ((Message(role="tool", text=NO_RESULT), call) for call in calls)


def state_after(reason: str) -> str:
    """Returns the state of a reply that ended for `reason`."""
    return {"cancelled": "stopped", "stop": "done", "tool_calls": "done"}.get(reason, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyStats:
    """Holds what one reply cost, as the engine counted it: bytes, tokens, milliseconds, tok/s.

    The cache had `cached_tokens` of the `prompt_tokens`. It now holds `context_tokens` in
    `kv_bytes` bytes, at mean widths of `mean_k_bits` and `mean_v_bits` (0: not known);
    `evicted_share` of the tokens was given up, and `predicted_tokens` were predicted and not
    computed. A model that reads prompts holds `auxiliary_bytes` beside. `accepted_tokens` of
    `drafted_tokens` guesses were right. The model thought for `thought_ms` in `thought_tokens`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ttft_ms: float = 0.0
    decode_tok_s: float = 0.0
    context_tokens: int = 0
    kv_bytes: int = 0
    auxiliary_bytes: int = 0
    mean_k_bits: float = 0.0
    mean_v_bits: float = 0.0
    evicted_share: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    predicted_tokens: int = 0
    thought_tokens: int = 0
    thought_ms: float = 0.0

    @property
    def encoded_tokens(self) -> int:
        """Counts the prompt tokens that went through the model for this reply."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_pass(self) -> float:
        """Returns the mean number of new tokens per pass; the first is of the prompt's pass."""
        passes = self.new_tokens - 1 - self.accepted_tokens
        return (self.new_tokens - 1) / passes if passes > 0 else 1.0


def answer_text(message: Message) -> str:
    """Returns what a message says; of a reply without its thought."""
    return split(message.text)[1] if message.role == "assistant" else message.text


def thought_line(stats: ReplyStats) -> str:
    """Describes a folded thought: `thought for 3.2 s, 120 tokens`."""
    seconds = f" for {stats.thought_ms / 1e3:.1f} s" if stats.thought_ms else ""
    tokens = f", {stats.thought_tokens} tokens" if stats.thought_tokens else ""
    return f"thought{seconds}{tokens}"
