"""Measurements of a session: times, tokens and bytes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from operator import add, attrgetter, sub
from typing import Any

from kvq.class_cache import CacheUsage
from kvq_runtime.sequence.staleness import EditCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Sums up passes over generated tokens.

    Attributes:
        drafted_tokens: How many guesses they checked.
        accepted_tokens: How many of these were kept.
        draft_ms: Time for guessing, in milliseconds.
        pass_ms: Time in the model.
        choose_ms: Time for choosing tokens.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_ms: float = 0.0
    pass_ms: float = 0.0
    choose_ms: float = 0.0

    def __add__(self, more: "Rounds") -> "Rounds":
        return self._combined(add, more)

    def __sub__(self, before: "Rounds") -> "Rounds":
        return self._combined(sub, before)

    def _combined(self, combine: Callable[[Any, Any], Any], other: "Rounds") -> "Rounds":
        names = [field.name for field in fields(self)]
        return Rounds(
            **{name: combine(getattr(self, name), getattr(other, name)) for name in names}
        )


NO_ROUNDS = Rounds()


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStats:
    """Holds what a session did so far. A rate is 0 where nothing was measured yet.

    Attributes:
        prompt_tokens: Tokens of prompts.
        new_tokens: Generated tokens.
        ttft_ms: Time to first token: the last prompt's prefill and the first token's sampling.
        prefill_tok_s: Prompt tokens per second.
        decode_tok_s: Generated tokens per second.
        tokens_per_round: Average tokens of a round; 1 without drafts.
        draft_bytes: Bytes that the drafter holds beside the cache.
        auxiliary_bytes: Bytes of the cache of the model that reads prompts.
        kv_bytes: Bytes that the cache uses now.
        kv_bytes_peak: Most bytes that the cache has used.
        kv_budget: Bytes that the cache may use.
        bytes_per_token: Bytes of one more token in the cache.
        bandwidth_gb_s: Bytes of weights and cache that a decode step reads, over its time, in 1e9
            bytes per second.
        recomputed_tokens: Tokens that were computed again because the cache could only go back to a
            place before them.
        rounds: Sums over all rounds.
        held: How much of the text the cache holds, and where.
        edits: What edits made of the text.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    ttft_ms: float = 0.0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    tokens_per_round: float = 0.0
    draft_bytes: int = 0
    auxiliary_bytes: int = 0
    kv_bytes: int = 0
    kv_bytes_peak: int = 0
    kv_budget: int = 0
    bytes_per_token: float = 0.0
    bandwidth_gb_s: float = 0.0
    recomputed_tokens: int = 0
    rounds: Rounds = NO_ROUNDS
    held: CacheUsage = field(
        default_factory=partial(CacheUsage, mean_k_bits=0, mean_v_bits=0, evicted_share=0)
    )
    edits: EditCounts = field(default_factory=EditCounts)


def figures(record: object, paths: Iterable[str]) -> dict[str, Any]:
    """Returns the figures at paths such as `held.evicted_share`, by their last names."""
    return {path.rpartition(".")[2]: attrgetter(path)(record) for path in paths}


class SessionMeter:
    """Adds up the times of one session's prefill chunks and decode steps."""

    def __init__(self, weight_bytes: int) -> None:
        self._weight_bytes = weight_bytes
        self._prompt_tokens = 0
        self._new_tokens = 0
        self._prefilled_tokens = 0
        self._prefill_s = 0.0
        self._decoded_tokens = 0
        self._draft_s = 0.0
        self._pass_s = 0.0
        self._choose_s = 0.0
        self._decode_bytes = 0
        self._rounds = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0
        self._prompt_s = 0.0
        self._ttft_s = 0.0
        self._waiting = True

    def add_prompt(self, num_tokens: int) -> None:
        """Counts `num_tokens` of a new prompt, whose prefill counts towards the first token."""
        self._prompt_tokens += num_tokens
        self._waiting = True

    def add_prefill(self, num_tokens: int, seconds: float) -> None:
        """Counts a chunk of the prompt that went through the model."""
        self._prefilled_tokens += num_tokens
        self._prefill_s += seconds
        self._prompt_s += seconds

    def add_decode(self, num_tokens: int, seconds: float, kv_bytes: int) -> None:
        """Counts a pass over generated tokens that kept `num_tokens`.

        It read `kv_bytes` of the cache.
        """
        self._rounds += 1
        self._decoded_tokens += num_tokens
        self._pass_s += seconds
        self._decode_bytes += self._weight_bytes + kv_bytes

    def add_draft(self, num_tokens: int, num_accepted: int, seconds: float) -> None:
        """Counts a pass that checked `num_tokens` guesses and kept `num_accepted` of them.

        Finding them took `seconds`.
        """
        self._drafted_tokens += num_tokens
        self._accepted_tokens += num_accepted
        self._draft_s += seconds

    def add_choice(self, prompt_tokens: int, all_tokens: int, seconds: float) -> None:
        """Counts chosen tokens, the first `prompt_tokens` of which spell the end of the prompt."""
        self._prompt_tokens += prompt_tokens
        self._new_tokens += all_tokens - prompt_tokens
        if not self._waiting:
            self._choose_s += seconds
            return
        self._prompt_s += seconds
        if all_tokens > prompt_tokens:
            self._ttft_s, self._prompt_s, self._waiting = self._prompt_s, 0.0, False

    @property
    def rounds(self) -> Rounds:
        """Returns the sums over all rounds so far."""
        return Rounds(
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            draft_ms=self._draft_s * 1e3,
            pass_ms=self._pass_s * 1e3,
            choose_ms=self._choose_s * 1e3,
        )

    def stats(self, **cache_figures: Any) -> SessionStats:
        """Returns everything measured so far; `cache_figures` are fields that the caller counts."""
        decode_s = self._draft_s + self._pass_s + self._choose_s
        return SessionStats(
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_ms=self._ttft_s * 1e3,
            prefill_tok_s=_rate(self._prefilled_tokens, self._prefill_s),
            decode_tok_s=_rate(self._decoded_tokens, decode_s),
            rounds=self.rounds,
            tokens_per_round=_rate(self._decoded_tokens, self._rounds),
            bandwidth_gb_s=_rate(self._decode_bytes, decode_s) / 1e9,
            **cache_figures,
        )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
