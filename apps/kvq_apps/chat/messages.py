"""What a conversation is made of. Knows no screen, no file and no engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "user", "assistant")


@dataclass(kw_only=True, slots=True)
class Message:
    """One message of a chat's tree.

    `state` is done, streaming, stopped (by the user), length (its limit, or the context's, came
    first), failed or interrupted (the process died). `branch` of `branches` siblings share a
    parent. A note belongs to the screen only: it has no id.
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


def state_after(reason: str) -> str:
    """The state of a reply that ended for `reason`."""
    return {"cancelled": "stopped", "stop": "done"}.get(reason, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyStats:
    """What one reply cost, as the engine counted it. Bytes, tokens, milliseconds, tokens a second.

    Of `prompt_tokens` the cache held `cached_tokens`; `context_tokens` is what it holds now, in
    `kv_bytes` bytes at mean widths of `mean_k_bits` and `mean_v_bits` (0: not known), but for
    `evicted_share` of them; a model that reads prompts holds `auxiliary_bytes` beside.
    `predicted_tokens` of them were predicted and not computed. Of
    `drafted_tokens` that were guessed `accepted_tokens` were right. The reply was thought about
    for `thought_ms` in `thought_tokens`.
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
        """Prompt tokens that went through the model for this reply."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_pass(self) -> float:
        """New tokens that one pass brought on average; the first one comes of the prompt's."""
        passes = self.new_tokens - 1 - self.accepted_tokens
        return (self.new_tokens - 1) / passes if passes > 0 else 1.0
