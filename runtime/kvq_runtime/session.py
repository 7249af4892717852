"""One sequence: its tokens, its cache, its sampler. Knows no graph and no file format of weights.

The tokens a session holds and the tokens its cache holds differ by a pending end: what was given
or sampled but has not been through the model. Every step forwards that end first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvq.errors import KvqError, UsageError
from kvq_models.piece_index import PieceIndex
from kvq_runtime import snapshot
from kvq_runtime.backends import Backend, SequenceCache, plain_input
from kvq_runtime.config import Sampling, SessionConfig, check_seed
from kvq_runtime.healing import Beginning
from kvq_runtime.metrics import Meter, SessionStats, Stopwatch
from kvq_runtime.sampling import log_probability, sample
from kvq_runtime.stop_strings import StopStrings

Cancel = Callable[[], bool]
Progress = Callable[[int, int], None]


def never() -> bool:
    """The cancel that does not."""
    return False


def unseen(done: int, total: int) -> None:
    """The progress nobody watches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One generated token, the text it completed, and its natural log-probability.

    `text` may be empty: a character can span tokens, and text that may begin a stop string is
    held back. `logprob` is the model's own, before sampling filters, and None unless asked for.
    `finish_reason` is None until the last step, then stop, length or cancelled.
    """

    token: int
    text: str
    logprob: float | None
    finish_reason: str | None = None


class Detokenizer(Protocol):
    """Turns token ids, one by one, into whole characters."""

    def skip(self, num_bytes: int) -> None:
        """Leaves out the first `num_bytes` of what comes: they are the prompt's."""
        ...

    def push(self, token: int) -> str:
        """Text that `token` completed."""
        ...

    def flush(self) -> str:
        """What is left when no more tokens come."""
        ...


class NoText:
    """The detokenizer of a model without a tokenizer."""

    def skip(self, num_bytes: int) -> None:
        """There is nothing to leave out."""

    def push(self, token: int) -> str:
        """Always empty."""
        return ""

    def flush(self) -> str:
        """Always empty."""
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionModel:
    """What a session needs to know about its model, and nothing more.

    `detokenizer` makes a fresh one for each generation; `pieces` finds tokens by their bytes;
    `fingerprint` identifies the weights; `rope_long` is decided by the session's context limit.
    """

    detokenizer: Callable[[], Detokenizer]
    vocab_size: int
    stop_ids: frozenset[int]
    fingerprint: str
    rope_long: bool = False
    pieces: Callable[[], PieceIndex] = PieceIndex


class Session:
    """One sequence over one cache. `Engine.session` makes it; closing it frees the cache."""

    def __init__(
        self, *, backend: Backend, cache: SequenceCache, model: SessionModel, config: SessionConfig
    ) -> None:
        self.config = config
        self._backend = backend
        self._cache = cache
        self._model = model
        self._tokens: list[int] = []
        self._prompt_end = 0
        # Of the token before the pending end; empty when they must be computed again.
        self._logits = np.zeros(0, np.float32)
        self._generator = np.random.default_rng(config.seed)
        self._meter = Meter(backend.weight_bytes_per_step)
        # A tight budget leaves room for shorter chunks only.
        self._chunk_tokens = min(config.chunk_tokens, cache.chunk_tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token of the sequence, prompt and generated."""
        return tuple(self._tokens)

    @property
    def pending_tokens(self) -> int:
        """Tokens at the end that have not been through the model yet."""
        return len(self._tokens) - self._cache.tokens

    @property
    def kv_bytes_peak(self) -> int:
        """Most bytes its cache ever used. Unlike `stats`, any thread may ask at any time."""
        return self._cache.peak_bytes

    @property
    def what_limits(self) -> str:
        """Flags to raise for a longer context: a cache that evicts nothing needs bytes for it."""
        return "--ctx-size" if self.config.evicts else "--ctx-size and --kv-budget"

    def prefill(
        self, ids: Sequence[int] = (), *, progress: Progress = unseen, cancel: Cancel = never
    ) -> bool:
        """Appends `ids` and runs them through the model, chunk by chunk under the budget.

        `cancel` is asked before each chunk: once it says yes, False is returned and the rest
        stays pending; calling again (without ids) goes on. `progress` gets (done, total) tokens.
        On an error the session is what it was before. Raises `UsageError` for an empty prompt or
        an unknown token, `BudgetError` for a prompt the context or the budget cannot hold.
        """
        self._check_prompt(ids)
        before = len(self._tokens)
        self._append(ids)
        self._meter.prompt(len(ids))
        try:
            return self._forward_pending(progress, cancel)
        except KvqError:
            self._keep(before)
            raise

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        stop_strings: Iterable[str] = (),
        stop_ids: Iterable[int] | None = None,
        logprobs: bool = False,
        begin_with: bytes = b"",
        cancel: Cancel = never,
    ) -> Iterator[Step]:
        """Yields up to `max_tokens` new tokens (None: until the context is full).

        Ends after a token of `stop_ids` (default: the model's end tokens), before any of
        `stop_strings`, or when `cancel` says yes; the last step says why. A generation cancelled
        before its first token yields nothing and leaves the session as it was.

        `begin_with` is the end of a prompt that was not prefilled (see `healing.heal`): the first
        tokens are chosen among those that spell it. The ones that lie within it count as the
        prompt's and are not yielded, and of the first that reaches beyond it only the rest is
        text. Raises `UsageError` for bytes that no tokens spell.
        """
        limit = self._room(max_tokens)
        sampling = Sampling() if sampling is None else sampling
        ends = self._model.stop_ids if stop_ids is None else frozenset(stop_ids)
        beginning = Beginning(self._model.pieces, begin_with)
        text = _Text(self._model.detokenizer(), stop_strings, skipped_bytes=len(begin_with))
        if not self._forward_pending(cancel=cancel):
            return
        given, count = len(self._tokens), 0
        while True:
            token, is_new = self._step(sampling, beginning)
            shown = text.push(token)
            if not is_new and not self._is_full:
                if cancel():
                    self._keep(given)
                    return
                continue
            count += 1
            logprob = log_probability(self._logits, token) if logprobs else None
            reason = None
            if token in ends or text.stopped:
                reason = "stop"
            elif count == limit or self._is_full:
                reason = "length"
            elif cancel():
                reason = "cancelled"
            if reason is not None:
                shown += text.flush()
            yield Step(token=token, text=shown, logprob=logprob, finish_reason=reason)
            if reason is not None:
                return

    def logits(
        self, ids: Sequence[int], *, progress: Progress = unseen
    ) -> Iterator[NDArray[np.float32]]:
        """Appends `ids` and yields the logits float32 [n, V] of every one, chunk by chunk."""
        self._check_prompt(ids)
        if self.pending_tokens:
            self._forward_pending()
        self._append(ids)
        while self.pending_tokens:
            count = min(self.pending_tokens, self._chunk_tokens)
            yield self._forward(count, np.arange(count))
            progress(len(ids) - self.pending_tokens, len(ids))

    def rollback(self, n_tokens: int) -> None:
        """Forgets the last `n_tokens` tokens. Raises `UsageError` for more than there are."""
        if not 0 <= n_tokens <= len(self._tokens):
            raise UsageError(
                f"cannot roll back {n_tokens} tokens; the session holds {len(self._tokens)}"
            )
        self._keep(len(self._tokens) - n_tokens)

    def reseed(self, seed: int) -> None:
        """Starts the sampler's random numbers again at `seed`."""
        check_seed(seed)
        self._generator = np.random.default_rng(seed)

    def save(self, path: Path | str) -> None:
        """Writes tokens, cache and sampler to `path`: a whole file or none. Overwrites."""
        self.capture().write(path)

    def capture(self) -> snapshot.Snapshot:
        """What `save` writes, copied: it may be written later, and by another thread."""
        state = snapshot.SessionState(
            tokens=np.array(self._tokens, np.int64),
            logits=self._logits.copy(),
            generator=self._generator.bit_generator.state,
            cache=self._cache.state(),
        )
        return snapshot.Snapshot(identity=self._identity(), state=state)

    def load(self, path: Path | str) -> None:
        """Becomes the session saved at `path`; unchanged when that is refused.

        Raises `SnapshotError` for a damaged or newer file, another model or another KV plan.
        """
        self._become(snapshot.read(Path(path), self._identity()))

    def restore(self, taken: snapshot.Snapshot) -> None:
        """Becomes what `capture` took; `SnapshotError` if of another model or KV plan."""
        snapshot.check_agrees("the session in memory", taken.identity, self._identity())
        self._become(taken.state)

    def _become(self, state: snapshot.SessionState) -> None:
        self._cache.load_state(state.cache)
        self._tokens = state.tokens.tolist()
        self._prompt_end = len(self._tokens)
        self._logits = state.logits.copy()
        self._generator.bit_generator.state = state.generator

    def stats(self) -> SessionStats:
        """Counts, rates and bytes so far."""
        return self._meter.stats(
            kv_bytes=self._cache.used_bytes,
            kv_bytes_peak=self._cache.peak_bytes,
            kv_budget=self._cache.budget_bytes,
            bytes_per_token=self._cache.bytes_per_token,
            holdings=self._cache.holdings(),
        )

    def close(self) -> None:
        """Frees the cache's memory."""
        self._cache.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_full(self) -> bool:
        return len(self._tokens) >= self.config.context_tokens

    def _step(self, sampling: Sampling, beginning: Beginning) -> tuple[int, bool]:
        """The next token, forward -> sample -> commit, and whether it is not the prompt's."""
        self._forward_pending()
        watch = Stopwatch()
        token = sample(self._logits, sampling, self._tokens, self._generator, beginning.allowed)
        self._tokens.append(token)
        if beginning.take(token):
            self._prompt_end = len(self._tokens)
            self._meter.reread(watch.lap())
            return token, False
        self._meter.sampled(watch.lap())
        return token, True

    def _forward_pending(self, progress: Progress = unseen, cancel: Cancel = never) -> bool:
        """Brings the cache up to the tokens, so that `_logits` are those of the last one."""
        if self.pending_tokens == 0 and len(self._logits) == 0:
            self._cache.trim(len(self._tokens) - 1)
        total = self.pending_tokens
        while self.pending_tokens:
            if cancel():
                return False
            count = min(self.pending_tokens, self._chunk_tokens)
            self._logits = self._forward(count, np.array([count - 1]))[0]
            progress(total - self.pending_tokens, total)
        return True

    def _forward(self, count: int, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Runs the next `count` pending tokens; all of them enter the cache, or none does."""
        watch = Stopwatch()
        first = self._cache.tokens
        ids = np.array(self._tokens[first : first + count], np.int64)
        self._logits = np.zeros(0, np.float32)
        self._cache.begin(count)
        try:
            inputs = plain_input(ids, first, rows, rope_long=self._model.rope_long)
            logits = self._backend.forward(self._cache, inputs)
        except BaseException:
            self._cache.rewind()
            raise
        self._cache.commit(count)
        if first + count > self._prompt_end:
            self._meter.decoded(watch.lap(), self._cache.used_bytes)
        else:
            self._meter.prefilled(count, watch.lap())
        return logits

    def _append(self, ids: Sequence[int]) -> None:
        self._tokens.extend(map(int, ids))
        self._prompt_end = len(self._tokens)

    def _keep(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        if self._cache.tokens > num_tokens:
            self._cache.trim(num_tokens)
        if len(self._tokens) > num_tokens:
            self._logits = np.zeros(0, np.float32)
        del self._tokens[num_tokens:]
        self._prompt_end = min(self._prompt_end, num_tokens)

    def _check_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) == 0:
            if self.pending_tokens == 0:
                raise UsageError("the prompt is empty; give at least one token of text")
            return
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._model.vocab_size:
            raise UsageError(
                f"token {low if low < 0 else high} is not one of the model's: "
                f"0 to {self._model.vocab_size - 1}"
            )
        held, limit = len(self._tokens), self.config.context_tokens
        if held + len(ids) > limit:
            used = f", of which {held} are used" if held else ""
            raise UsageError(
                f"the prompt has {len(ids)} tokens and the context holds {limit}{used}; shorten "
                f"the prompt or raise {self.what_limits}"
            )

    def _room(self, max_tokens: int | None) -> int:
        """How many tokens may be generated now. Raises `UsageError` when there is no room."""
        if not self._tokens:
            raise UsageError("there is nothing to continue; give a prompt first")
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"--predict {max_tokens} is not possible: give 1 or more")
        room = self.config.context_tokens - len(self._tokens)
        if room < 1:
            raise UsageError(
                f"the context of {self.config.context_tokens} tokens is full; "
                f"raise {self.what_limits} or roll the session back"
            )
        return room if max_tokens is None else min(room, max_tokens)

    def _identity(self) -> dict[str, Any]:
        """What a saved session must agree on with the one that loads it."""
        return {
            "model": self._model.fingerprint,
            "plan": asdict(self.config.plan),
            "context_tokens": self.config.context_tokens,
            "budget_bytes": self.config.budget_bytes,
            "chunk_tokens": self._chunk_tokens,
            "cache": self._backend.cache_kind,
            "rope_long": self._model.rope_long,
        }


class _Text:
    """The text of one generation: whole characters, ended by a stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: Iterable[str], *, skipped_bytes: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        if skipped_bytes:
            detokenizer.skip(skipped_bytes)
        self._stops = StopStrings(stop_strings)

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def push(self, token: int) -> str:
        return self._stops.feed(self._detokenizer.push(token))

    def flush(self) -> str:
        if self.stopped:
            return ""
        rest = self._stops.feed(self._detokenizer.flush())
        return rest if self.stopped else rest + self._stops.flush()
