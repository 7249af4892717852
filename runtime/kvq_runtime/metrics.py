"""The one place that measures a session. Knows times and bytes, no tokens and no model."""

from dataclasses import asdict, dataclass
from time import perf_counter

from kvq.cache import Holdings
from kvq_runtime.staleness import EditCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionStats:
    """What a session did so far. Rates are 0 where nothing was measured yet.

    `ttft_ms` is the time of the last prompt's prefill and the first token's sampling.
    Passes over generated tokens checked `drafted_tokens` guesses and kept `accepted_tokens` of
    them, `tokens_per_round` tokens each on average, 1 without drafts; of the time of these rounds
    `draft_ms` went into guessing, `pass_ms` into the model, `choose_ms` into choosing what is
    kept. `draft_bytes` is what the drafter holds beside the cache, `auxiliary_bytes` the cache of
    the model that reads prompts. `bandwidth_gb_s` is (weight bytes + KV bytes) read per decode step
    over its time. `kv_bytes` is what the cache uses now, `kv_bytes_peak` the most so far; for
    `mean_k_bits`, `mean_v_bits` and `evicted_share` see `kvq.cache.Holdings`, for `edits` and what
    follows `EditCounts`. `kv_read_share`: of the pages steps could see the share they read. Of
    `kv_bytes`, `kv_offloaded_bytes` lie in the host's memory behind a device, and the newest pass
    copied `kv_streamed_bytes` from there. `recomputed_tokens` were held and are computed again,
    since the cache could go back to a place before them only.
    """

    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    prefill_tok_s: float
    decode_tok_s: float
    drafted_tokens: int
    accepted_tokens: int
    tokens_per_round: float
    draft_ms: float
    pass_ms: float
    choose_ms: float
    draft_bytes: int
    auxiliary_bytes: int
    kv_bytes: int
    kv_bytes_peak: int
    kv_budget: int
    bytes_per_token: float
    bandwidth_gb_s: float
    mean_k_bits: float
    mean_v_bits: float
    evicted_share: float
    kv_read_share: float
    kv_offloaded_bytes: int
    kv_streamed_bytes: int
    edits: int
    edited_tokens: int
    recomputed_edits: int
    stale_tokens: int
    predicted_tokens: int
    recomputed_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """What passes over generated tokens came to: guesses, those kept, and the time by its parts."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_ms: float = 0.0
    pass_ms: float = 0.0
    choose_ms: float = 0.0

    def since(self, before: "Rounds") -> "Rounds":
        """What was added since it was `before`."""
        return Rounds(**{name: own - getattr(before, name) for name, own in asdict(self).items()})


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
        """Guesses and the time of all rounds so far."""
        return Rounds(
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            draft_ms=self._draft_s * 1e3,
            pass_ms=self._pass_s * 1e3,
            choose_ms=self._choose_s * 1e3,
        )

    def stats(
        self,
        *,
        kv_bytes: int,
        kv_bytes_peak: int,
        kv_budget: int,
        bytes_per_token: float,
        holdings: Holdings,
        edits: EditCounts,
        recomputed_tokens: int = 0,
        draft_bytes: int = 0,
        auxiliary_bytes: int = 0,
    ) -> SessionStats:
        """Everything measured so far, with the cache's own counts."""
        decode_s = self._draft_s + self._pass_s + self._choose_s
        return SessionStats(
            prompt_tokens=self._prompt_tokens,
            new_tokens=self._new_tokens,
            ttft_ms=self._ttft_s * 1e3,
            prefill_tok_s=_rate(self._prefilled_tokens, self._prefill_s),
            decode_tok_s=_rate(self._decoded_tokens, decode_s),
            **asdict(self.rounds),
            tokens_per_round=_rate(self._decoded_tokens, self._rounds),
            draft_bytes=draft_bytes,
            auxiliary_bytes=auxiliary_bytes,
            kv_bytes=kv_bytes,
            kv_bytes_peak=kv_bytes_peak,
            kv_budget=kv_budget,
            bytes_per_token=bytes_per_token,
            bandwidth_gb_s=_rate(self._decode_bytes, decode_s) / 1e9,
            mean_k_bits=holdings.mean_k_bits,
            mean_v_bits=holdings.mean_v_bits,
            evicted_share=holdings.evicted_share,
            kv_read_share=holdings.read_share,
            kv_offloaded_bytes=holdings.offloaded_bytes,
            kv_streamed_bytes=holdings.streamed_bytes,
            edits=edits.edits,
            edited_tokens=edits.edited_tokens,
            recomputed_edits=edits.recomputed_edits,
            stale_tokens=edits.stale_tokens,
            predicted_tokens=edits.predicted_tokens,
            recomputed_tokens=recomputed_tokens,
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
