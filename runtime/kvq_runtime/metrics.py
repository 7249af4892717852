"""The one place that measures a session. Knows times and bytes, no tokens and no model."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any

from kvq.cache import Holdings
from kvq_runtime.staleness import EditCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """What passes over generated tokens came to: guesses, those kept, and the time by its parts.

    They checked `drafted_tokens` guesses and kept `accepted_tokens` of them. `draft_ms` went into
    guessing, `pass_ms` into the model, `choose_ms` into choosing what is kept.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_ms: float = 0.0
    pass_ms: float = 0.0
    choose_ms: float = 0.0

    def __add__(self, more: "Rounds") -> "Rounds":
        return Rounds(**{name: own + getattr(more, name) for name, own in asdict(self).items()})

    def __sub__(self, before: "Rounds") -> "Rounds":
        return Rounds(**{name: own - getattr(before, name) for name, own in asdict(self).items()})


NO_ROUNDS = Rounds()


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStats:
    """What a session did so far. Rates are 0 where nothing was measured yet.

    `ttft_ms` is the time of the last prompt's prefill and the first token's sampling; of `rounds`
    each brought `tokens_per_round` tokens on average, 1 without drafts. `draft_bytes` is what the
    drafter holds beside the cache, `auxiliary_bytes` the cache of the model that reads prompts.
    `bandwidth_gb_s` is (weight bytes + KV bytes) read per decode step over its time. `kv_bytes` is
    what the cache uses now, `kv_bytes_peak` the most so far; `held` says how much of the text and
    where. `recomputed_tokens` were held and are computed again, since the cache could go back to a
    place before them only; what edits made of the text `edits` says.
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
    held: Holdings = field(
        default_factory=partial(Holdings, mean_k_bits=0, mean_v_bits=0, evicted_share=0)
    )
    edits: EditCounts = field(default_factory=EditCounts)


def figures(record: object, paths: Iterable[str]) -> dict[str, Any]:
    """What a record of figures says at such paths, as `held.evicted_share`, by their last names."""
    return {path.rpartition(".")[2]: attrgetter(path)(record) for path in paths}


class Meter:
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

    def prompt(self, num_tokens: int) -> None:
        """`num_tokens` of a prompt arrived; their prefill counts towards the first token."""
        self._prompt_tokens += num_tokens
        self._waiting = True

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A chunk of the prompt went through the model."""
        self._prefilled_tokens += num_tokens
        self._prefill_s += seconds
        self._prompt_s += seconds

    def decoded(self, num_tokens: int, seconds: float, kv_bytes: int) -> None:
        """A pass over generated tokens, of which it kept so many, read `kv_bytes` of the cache."""
        self._rounds += 1
        self._decoded_tokens += num_tokens
        self._pass_s += seconds
        self._decode_bytes += self._weight_bytes + kv_bytes

    def drafted(self, num_tokens: int, num_accepted: int, seconds: float) -> None:
        """A pass checked so many guesses, found in `seconds`, and kept so many of them."""
        self._drafted_tokens += num_tokens
        self._accepted_tokens += num_accepted
        self._draft_s += seconds

    def chose(self, prompt_tokens: int, all_tokens: int, seconds: float) -> None:
        """Tokens were chosen, the first `prompt_tokens` of which spell the end of the prompt."""
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
        """What passes over generated tokens came to so far."""
        return Rounds(
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            draft_ms=self._draft_s * 1e3,
            pass_ms=self._pass_s * 1e3,
            choose_ms=self._choose_s * 1e3,
        )

    def stats(self, **held: Any) -> SessionStats:
        """Everything measured so far; `held` are the fields that somebody else counts."""
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
            **held,
        )


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._since = perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap; the next one starts now."""
        now = perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
