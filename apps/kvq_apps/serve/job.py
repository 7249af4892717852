"""One request on its way through the engine: its prompts, its choices, its numbers.

`steps` is a generator that stops after every chunk of a prompt and every token: between two stops
the engine may do something else, or never come back.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from kvq_apps.serve.arenas import Arena
from kvq_apps.serve.indent import IndentLimit
from kvq_apps.serve.outbox import Delta, Done, Failed, Finished, Outbox, Report, TokenLog
from kvq_apps.serve.ranked import ranked_steps
from kvq_apps.serve.requests import Ask
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.healing import heal
from kvq_runtime.metrics import Stopwatch
from kvq_runtime.session import Session, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """What every job needs of the model: its text, its ends, tokens of a prompt per step."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    chunk_tokens: int


class Job:
    """What one client asked for. Made by its handler, stepped by the engine's thread alone.

    Setting `cancelled`, from anywhere, ends it before its next step. `waits` is the engine's own:
    it has a slot, but what its arena holds cannot be put aside yet.
    """

    def __init__(self, ask: Ask, outbox: Outbox) -> None:
        self.ask = ask
        self.outbox = outbox
        self.cancelled = False
        self.waits = False
        self.progress = (0, sum(map(len, ask.prompts)))
        self._arrived = monotonic()
        self._queued_s = 0.0
        self._ttft_s = 0.0
        self._prompt_s = 0.0
        self._decode_s = 0.0
        self._decode_steps = 0
        self._encoded = 0
        self._cached = 0
        self._new = 0
        self._stats_of: Session | None = None

    @property
    def rank(self) -> int:
        """See `scheduler.PRIORITIES`."""
        return self.ask.rank

    @property
    def ready(self) -> bool:
        """Whether a step makes sense: it has begun and its reader keeps up, or it is to end."""
        return self.cancelled or not (self.waits or self.outbox.full)

    def steps(self, arena: Arena, decoding: Decoding) -> Generator[None]:
        """Everything the request asked for, one forward pass or less between two yields.

        Only what spells the end of a healed prompt comes in one go, mostly no token or one.
        """
        self._stats_of = arena.session
        self._queued_s = monotonic() - self._arrived
        index = 0
        for whole in self.ask.prompts:
            ids, begin_with = heal(decoding.tokenizer, whole) if self.ask.heal else (whole, b"")
            yield from self._read(arena, ids, decoding.chunk_tokens)
            if self.ask.max_tokens == 0:
                self._finish(index, "length")
                index += 1
                continue
            for choice in range(self.ask.choices):
                arena.session.rollback(len(arena.session.tokens) - len(ids))
                steps = self._generate(arena.session, self.ask.seed + choice, decoding, begin_with)
                yield from self._write(steps, index, decoding)
                index += 1
        self.outbox.put(Done(report=self.report()))

    def fail(self, error: Exception) -> None:
        """Tells the client that nothing more will come."""
        self.outbox.put(Failed(error=error))

    def report(self) -> Report:
        """The numbers so far."""
        session = self._stats_of
        report = Report(
            prompt_tokens=sum(map(len, self.ask.prompts)),
            cached_tokens=self._cached,
            new_tokens=self._new,
            queued_ms=self._queued_s * 1e3,
            ttft_ms=self._ttft_s * 1e3,
            prompt_ms=self._prompt_s * 1e3,
            decode_ms=self._decode_s * 1e3,
            prefill_tok_s=self._encoded / self._prompt_s if self._prompt_s else 0.0,
            decode_tok_s=self._decode_steps / self._decode_s if self._decode_s else 0.0,
        )
        if session is None:
            return report
        stats = session.stats()
        return replace(
            report,
            kv_bytes=stats.kv_bytes,
            kv_bytes_peak=stats.kv_bytes_peak,
            kv_budget=stats.kv_budget,
            context_tokens=len(session.tokens),
            mean_k_bits=stats.mean_k_bits,
            mean_v_bits=stats.mean_v_bits,
            evicted_share=stats.evicted_share,
        )

    def _read(self, arena: Arena, ids: Sequence[int], chunk_tokens: int) -> Iterator[None]:
        """Brings the session to `ids`, a chunk at a time."""
        watch = Stopwatch()
        session = arena.session
        cached = arena.reuse(ids, allowed=self.ask.reuse)
        self._cached += cached
        self.progress = (self.progress[0] + cached, self.progress[1])
        while True:
            rest = ids[len(session.tokens) :]
            if not rest and session.pending_tokens == 0:
                return
            before = session.pending_tokens
            chunk = rest[:chunk_tokens] if before == 0 else ()
            session.prefill(chunk, cancel=_OneChunk())
            done = before + len(chunk) - session.pending_tokens
            self._encoded += done
            self.progress = (self.progress[0] + done, self.progress[1])
            self._prompt_s += watch.lap()
            yield
            watch.lap()

    def _write(
        self, steps: Iterator[tuple[Step, TokenLog | None]], index: int, decoding: Decoding
    ) -> Iterator[None]:
        """One choice, token by token."""
        started = monotonic()
        indent = IndentLimit(self.ask.indent)
        watch = Stopwatch()
        first = True
        for step, log in steps:
            seconds = watch.lap()
            if first and self._new == 0:
                self._ttft_s = monotonic() - self._arrived
                self._prompt_s += seconds
            else:
                self._decode_steps += 1
                self._decode_s += seconds
            first = False
            self._new += 1
            reason = step.finish_reason
            text = indent.feed(step.text)
            if indent.reached:
                reason = "stop"
            elif reason is None and self._out_of_time(started, text):
                reason = "length"
            text += indent.flush() if reason is not None else ""
            ends = step.token in decoding.stop_ids and step.finish_reason == "stop"
            logs = () if log is None or ends else (log,)
            if text or logs:
                self.outbox.put(Delta(index=index, text=text, logs=logs))
            if reason is not None:
                self._finish(index, reason)
                return
            yield
            watch.lap()

    def _generate(
        self, session: Session, seed: int, decoding: Decoding, begin_with: bytes
    ) -> Iterator[tuple[Step, TokenLog | None]]:
        ask = self.ask
        if ask.top_logprobs:
            room = session.config.context_tokens - len(session.tokens)
            limit = room if ask.max_tokens is None else min(room, ask.max_tokens)
            ends = decoding.stop_ids if ask.stop_ids is None else ask.stop_ids
            yield from ranked_steps(session, decoding.tokenizer, ask, seed, limit, ends)
            return
        session.reseed(seed)
        held = len(session.tokens)
        for step in session.generate(
            ask.max_tokens,
            sampling=ask.sampling,
            stop_strings=ask.stop,
            stop_ids=ask.stop_ids,
            logprobs=ask.logprobs,
            begin_with=begin_with,
        ):
            if self._new == 0:
                # Tokens that only spell the prompt's end went through the model as well.
                self._encoded += len(session.tokens) - held - 1
            log = None
            if step.logprob is not None:
                log = TokenLog(token=step.token, logprob=step.logprob)
            yield step, log

    def _out_of_time(self, started: float, text: str) -> bool:
        """Whether the time for an answer is over and a line has just ended."""
        limit_ms = self.ask.time_limit_ms
        return limit_ms > 0 and "\n" in text and (monotonic() - started) * 1e3 > limit_ms

    def _finish(self, index: int, reason: str) -> None:
        self.outbox.put(Finished(index=index, reason=reason, report=self.report()))


class _OneChunk:
    """The cancel that lets one chunk pass."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        asked, self._asked = self._asked, True
        return asked
