"""What an engine, a session and a sampler are asked to be. Knows no file and no array."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING

from kvq.config import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_DRAFT_TOKENS,
    DEFAULT_POLICY,
    DEFAULT_READ,
    Budget,
    KvPlan,
)
from kvq.errors import UsageError, argument

if TYPE_CHECKING:
    from kvq.classes import ClassedArena
    from kvq.sizing import Arena

# Of an answer whose length nobody said.
DEFAULT_MAX_TOKENS = 256
_LARGEST_BIAS = 1e30
# Tokens that a count may name.
_MOST = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repeat_penalty` 1 and 0 for the
    other penalties switch their filter off. Penalties look at the last `repeat_window_tokens`
    tokens of the session, prompt included; a negative one asks for repetition. `logit_bias` maps
    token ids to what is added to their logits, -inf: forbidden.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_window_tokens: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more")
        _require("top_k", self.top_k, 0 <= self.top_k <= _MOST, f"0 (off) to {_MOST}")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and up to 1 (off)")
        _require("min_p", self.min_p, 0 <= self.min_p < 1, "0 (off) up to, not including, 1")
        _require("repeat_penalty", self.repeat_penalty, self.repeat_penalty > 0, "above 0 (1: off)")
        window = self.repeat_window_tokens
        _require("repeat_window_tokens", window, 0 <= window <= _MOST, f"0 to {_MOST}")

        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(name, penalty, isfinite(penalty), "a finite number (0: off)")
        for token, added in self.logit_bias.items():
            # A larger one and NaN would make logits that are not finite.
            if not added <= _LARGEST_BIAS:
                raise UsageError(
                    f"a logit bias of {added} for token {token} is not possible: give a number up "
                    f"to {_LARGEST_BIAS:g}, or -inf to forbid the token"
                )

    @property
    def penalizes(self) -> bool:
        """Whether recent tokens become less likely, or more."""
        return self.repeat_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def exact_rows(self) -> int:
        """How many of the largest logits a choice depends on at most; 0: on all of them.

        What only lowers some tokens lets as many others move up; what raises any may raise all.
        """
        kept = 1 if self.greedy else self.top_k
        raises = (
            self.repeat_penalty < 1
            or min(self.presence_penalty, self.frequency_penalty) < 0
            or any(added > 0 for added in self.logit_bias.values())
        )
        if kept == 0 or raises:
            return 0
        return kept + len(self.logit_bias) + self.repeat_window_tokens * self.penalizes


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRequest:
    """What a user asks of a session; what is None or empty the backend decides.

    `edits`: its text will be edited in the middle, so layers with a window keep what it has passed.
    `draft_head`: the model's draft head has a cache of its own within the budget.
    """

    kv_budget: Budget = field(default_factory=Budget)
    k_bits: int | None = None
    v_bits: int | None = None
    context_tokens: int | None = None
    policy: str | None = None
    read: str | None = None
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    seed: int | None = None
    sink_tokens: int | None = None
    offload_bytes: int = 0
    edits: bool = False
    draft_head: bool = False

    def plan(self, default: KvPlan) -> KvPlan:
        """The widths asked for, or those of `default`; no more sinks than `default` has."""
        sinks = default.sink_tokens
        if self.sink_tokens is not None:
            sinks = min(sinks, self.sink_tokens)
        return KvPlan(
            k_bits=default.k_bits if self.k_bits is None else self.k_bits,
            v_bits=default.v_bits if self.v_bits is None else self.v_bits,
            sink_tokens=sinks,
        )

    def whole(self, model_tokens: int) -> "SessionRequest":
        """With the model's context and room for all of it, where nothing else is asked for."""
        context_tokens = model_tokens if self.context_tokens is None else self.context_tokens
        budget = Budget(tokens=context_tokens) if self.kv_budget == Budget() else self.kv_budget
        return replace(self, context_tokens=context_tokens, kv_budget=budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """What one sequence holds: its cache plan, its context limit, its bytes; what steps `read`.

    `evicts`: a full budget gives up old tokens; otherwise it is what limits the context. Prompts
    go through the model `chunk_tokens` at a time, and a branch holds up to `draft_tokens` rows.
    Without a `seed` the session's sampler draws its own. `arena`: the memory all this was read
    from, where the cache is ours. `draft_head`: what the model's draft head holds beside that, of
    the same budget, where it was asked for.
    """

    plan: KvPlan
    context_tokens: int
    budget_bytes: int
    policy: str = DEFAULT_POLICY
    read: str = DEFAULT_READ
    evicts: bool = True
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    draft_tokens: int = DEFAULT_DRAFT_TOKENS
    seed: int | None = None
    arena: "Arena | ClassedArena | None" = None
    draft_head: "SessionConfig | None" = None

    def __post_init__(self) -> None:
        _require("context_tokens", self.context_tokens, self.context_tokens >= 2, "2 or more")
        _require("chunk_tokens", self.chunk_tokens, self.chunk_tokens >= 1, "1 or more")
        if self.seed is not None:
            check_seed(self.seed)

    @property
    def budget_tokens(self) -> int:
        """Tokens the budget holds at the plan's widths; of a longer text it gives something up."""
        return self.context_tokens if self.arena is None else self.arena.whole_tokens

    @property
    def what_limits(self) -> str:
        """What to raise for a longer context: a cache that evicts nothing needs bytes for it."""
        return (
            argument("context_tokens")
            if self.evicts
            else f"{argument('context_tokens')} and {argument('kv_budget')}"
        )


def check_seed(seed: int) -> None:
    """Raises `UsageError` for a seed that no generator takes."""
    _require("seed", seed, seed >= 0, "0 or more")


def _require(name: str, value: float, holds: bool, possible: str) -> None:
    """Raises `UsageError` about argument `name` unless `holds` and `value` is finite."""
    if not (holds and isfinite(value)):
        raise UsageError(about=name, value=value, possible=f"give {possible}")
