"""The settings of an engine, a session and a sampler."""

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
    from kvq.cache import Arena

# Length of an answer by default.
DEFAULT_MAX_TOKENS = 256
_LARGEST_BIAS = 1e30
# Largest count of tokens.
_MOST = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Says how the next token is chosen.

    Penalties look at the last `repeat_window_tokens` tokens of the session, prompt included. A
    negative one asks for repetition.

    Args:
        temperature: 0 or more. 0 always takes the likeliest token.
        top_k: Only so many of the likeliest tokens may be chosen. 0: off.
        top_p: Only the likeliest tokens whose probabilities sum to this may be chosen, above 0 up
            to 1. 1: off.
        min_p: Only tokens at least this many times as likely as the likeliest one may be chosen,
            from 0 to below 1. 0: off.
        repeat_penalty: Divides positive logits of recent tokens and multiplies negative ones, above
            0. 1: off.
        repeat_window_tokens: How many tokens count as recent.
        presence_penalty: Subtracted from the logit of each recent token. 0: off.
        frequency_penalty: Subtracted from a token's logit for each time it is among the recent
            ones. 0: off.
        logit_bias: Maps token ids to numbers that are added to their logits. -inf forbids a token.
        infill_ends: Tokens that end an infilling. One of them is chosen where they are likely, or
            where no other token is likely enough. Empty: off.

    Raises:
        UsageError: For a value outside its range. The message names the possible ones.
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
    infill_ends: tuple[int, ...] = ()

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
            # A larger bias, or NaN, would make logits that are not finite.
            if not added <= _LARGEST_BIAS:
                raise UsageError(
                    f"a logit bias of {added} for token {token} is not possible: give a number up "
                    f"to {_LARGEST_BIAS:g}, or -inf to forbid the token"
                )

    @property
    def penalizes(self) -> bool:
        """Returns whether recent tokens become more or less likely."""
        return self.repeat_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def greedy(self) -> bool:
        """Returns whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def exact_rows(self) -> int:
        """Returns how many of the largest logits a choice depends on at most; 0: on all of them.

        A filter that only lowers tokens lets as many others move up. One that raises any may raise
        all.
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
    """Holds what a user asks of a session; the backend decides what is None or empty.

    `edits`: the text will be edited in the middle, so layers with a window keep tokens that have
    left it. `draft_head`: the model's draft head has a cache of its own within the budget.
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
        """Returns the widths asked for, else those of `default`, and no more sinks than it has."""
        sinks = default.sink_tokens
        if self.sink_tokens is not None:
            sinks = min(sinks, self.sink_tokens)
        return KvPlan(
            k_bits=default.k_bits if self.k_bits is None else self.k_bits,
            v_bits=default.v_bits if self.v_bits is None else self.v_bits,
            sink_tokens=sinks,
        )

    def whole(self, model_tokens: int) -> "SessionRequest":
        """Returns the request with the model's context, and room for all of it, as defaults."""
        context_tokens = model_tokens if self.context_tokens is None else self.context_tokens
        budget = Budget(tokens=context_tokens) if self.kv_budget == Budget() else self.kv_budget
        return replace(self, context_tokens=context_tokens, kv_budget=budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Says what one sequence holds: its cache plan, context limit and bytes, and what steps `read`.

    `evicts`: a full budget gives up old tokens. Otherwise the budget limits the context. Prompts go
    through the model `chunk_tokens` at a time, and a branch holds up to `draft_tokens` rows.
    Without a `seed` the session's sampler draws one. `arena` is the memory layout that all this
    comes from, where the cache is kvq's own. `draft_head` is what the model's draft head holds in
    the same budget, where one was asked for.
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
    arena: "Arena | None" = None
    draft_head: "SessionConfig | None" = None

    def __post_init__(self) -> None:
        _require("context_tokens", self.context_tokens, self.context_tokens >= 2, "2 or more")
        _require("chunk_tokens", self.chunk_tokens, self.chunk_tokens >= 1, "1 or more")
        if self.seed is not None:
            check_seed(self.seed)

    @property
    def budget_tokens(self) -> int:
        """Returns how many tokens fit at the plan's widths; a longer text loses something."""
        return self.context_tokens if self.arena is None else self.arena.whole_tokens

    @property
    def full_bits(self) -> tuple[int, int]:
        """Returns the K and V bits of old tokens in a full budget, before any token is given up."""
        plan_bits = self.plan.k_bits, self.plan.v_bits
        return plan_bits if self.arena is None else self.arena.fewest_bits

    @property
    def full_tokens(self) -> int:
        """Returns how many tokens fit at those bits; of a longer text some are given up."""
        return self.context_tokens if self.arena is None else self.arena.tokens_at(*self.full_bits)

    @property
    def limiting_arguments(self) -> str:
        """Names the arguments to raise for a longer context.

        A cache that evicts nothing needs bytes for it, too.
        """
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
