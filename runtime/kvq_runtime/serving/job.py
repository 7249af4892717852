"""One request on its way through a pool: its prompts, its choices, its numbers.

`work` is a generator that yields the rows it needs a pass for: between two passes the pool may do
something else, or never come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvq.config import DEFAULT_DRAFT_TOKENS
from kvq_runtime.alternatives import Writer
from kvq_runtime.answering import Aids
from kvq_runtime.generation import GenerationOptions, Step
from kvq_runtime.metrics import NO_ROUNDS, SessionStats
from kvq_runtime.passes import Call, Work
from kvq_runtime.serving.outbox import Delta, Failed, Finished, Outbox, Report, TokenLog
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.slots import Slot
from kvq_runtime.session import Session
from kvq_runtime.stop_strings import IndentLimit

# One token of an answer and a draft behind it: beside a pass's other rows they cost little.
BRIEF_ROWS = 1 + DEFAULT_DRAFT_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """What every job needs of the model: its ends, and tokens of a prompt per pass."""

    stop_ids: frozenset[int]
    chunk_tokens: int


class Job:
    """What one client asked for. Made by its handler, worked on by the pool's thread alone.

    Setting `cancelled`, from anywhere, ends it before its next pass. `waits` is the pool's own:
    it has a slot, but what that holds cannot be put aside yet; `call` is what it asks for next.
    """

    def __init__(self, request: GenerationRequest, outbox: Outbox) -> None:
        self.request = request
        self.outbox = outbox
        self.cancelled = False
        self.waits = False
        self.call: Call[Any] | None = None
        self.progress = (0, sum(map(len, request.prompts)))
        self._arrived = monotonic()
        self._queued_s = 0.0
        self._ttft_s = 0.0
        self._prompt_s = 0.0
        self._decode_s = 0.0
        self._decoded = 0
        self._encoded = 0
        self._cached = 0
        self._new = 0
        self._session: Session[Any] | None = None
        self._edits_before = 0
        self._rounds_before = NO_ROUNDS

    @property
    def rank(self) -> int:
        """See `scheduler.PRIORITIES`."""
        return self.request.rank

    @property
    def brief(self) -> bool:
        """Whether its next rows are few, as those of an answer are and a prompt's are not."""
        return self.call is not None and len(self.call.rows.ids) <= BRIEF_ROWS

    @property
    def ready(self) -> bool:
        """Whether a pass makes sense: it has begun and its reader keeps up, or it is to end."""
        return self.cancelled or not (self.waits or self.outbox.full)

    def work(self, slot: Slot, decoding: Decoding) -> Work[Any, None]:
        """Everything the request asked for, with the drafter and predictor that it asked for."""
        asked = self.request.draft
        aids = slot.session.aids(asked() if callable(asked) else None, self.request.predict)
        try:
            yield from self._work(slot, decoding, aids)
        finally:
            if callable(asked):
                aids.drafting.close()

    def _work(self, slot: Slot, decoding: Decoding, aids: Aids[Any]) -> Work[Any, None]:
        request, session = self.request, slot.session
        self._session = session
        self._edits_before = session.sequence.encoding.edited_tokens
        self._rounds_before = session.rounds
        self._queued_s = monotonic() - self._arrived
        index = 0
        for ids, begin_with in request.read:
            yield from self._read(slot, ids, decoding.chunk_tokens, aids)
            if request.max_tokens == 0:
                self._finish(index, "length")
                index += 1
                continue
            if request.writer is not None:
                yield from self._written(session, index, begin_with, request.writer)
                index += request.choices
                continue
            if session.branches_fit(request.choices, request.max_tokens, begin_with):
                yield from self._side_by_side(session, index, begin_with, decoding)
                index += request.choices
                continue
            for choice in range(request.choices):
                session.rollback(len(session.tokens) - len(ids))
                session.reseed(request.seed + choice)
                options = request.options(begin_with, choice)
                yield from self._answer(session, index, options, decoding, aids)
                index += 1

    def fail(self, error: Exception) -> None:
        """Tells the client that nothing more will come."""
        self.outbox.put(Failed(error=error))

    def report(self, stats: SessionStats | None = None) -> Report:
        """The numbers so far; `stats` are the session's, if somebody has just counted them."""
        session = self._session
        if stats is None:
            stats = SessionStats() if session is None else session.stats()
        return Report(
            prompt_tokens=sum(map(len, self.request.prompts)),
            cached_tokens=self._cached,
            edited_tokens=stats.edits.edited_tokens - self._edits_before,
            new_tokens=self._new,
            queued_ms=self._queued_s * 1e3,
            ttft_ms=self._ttft_s * 1e3,
            prompt_ms=self._prompt_s * 1e3,
            decode_ms=self._decode_s * 1e3,
            prefill_tok_s=self._encoded / self._prompt_s if self._prompt_s else 0.0,
            decode_tok_s=self._decoded / self._decode_s if self._decode_s else 0.0,
            context_tokens=0 if session is None else len(session.tokens),
            rounds=stats.rounds - self._rounds_before,
            stats=stats,
        )

    def _read(
        self, slot: Slot, ids: Sequence[int], chunk_tokens: int, aids: Aids[Any]
    ) -> Work[Any, None]:
        """Brings the session to `ids`, a chunk at a time."""
        cached = slot.align(ids, reuse=self.request.reuse, edits=self.request.edits, aids=aids)
        self._cached += cached
        left = len(slot.session.sequence.ready())
        self.progress = (self.progress[0] + len(ids) - left, self.progress[1])
        while left:
            self._prompt_s += yield from slot.session.reading(chunk_tokens, aids)
            done, left = left, len(slot.session.sequence.due())
            self._encoded += done - left
            self.progress = (self.progress[0] + done - left, self.progress[1])

    def _side_by_side(
        self, session: Session[Any], index: int, begin_with: bytes, decoding: Decoding
    ) -> Work[Any, None]:
        """All choices of a prompt, a token of each in every pass; see `branch_answers`."""
        request, started = self.request, monotonic()
        options = request.options(begin_with)
        seeds = [request.seed + i for i in range(request.choices)]
        with session.branch_answers(seeds, options, distinct=request.distinct) as branched:
            indents = [IndentLimit(request.indent) for _ in range(request.choices)]
            while branched.going:
                steps, seconds = yield from branched.stepping()
                self._measure(seconds, len(steps), 0)
                for choice, step in steps:
                    args = index + choice, step, indents[choice], started, decoding.stop_ids
                    if self._write(*args) is not None:
                        branched.leave(choice)

    def _written(
        self, session: Session[Any], index: int, begin_with: bytes, writer: Writer
    ) -> Work[Any, None]:
        """The choices of a prompt as `writer` writes them, those that it does not empty."""
        request, started = self.request, monotonic()
        found = yield from session.drafting(
            request.choices,
            request.options(begin_with),
            writer,
            lambda: self.cancelled,
            exact=False,
        )
        self._measure(monotonic() - started, sum(len(one.ids) for one in found), 0)
        stats = session.stats()
        for choice, one in enumerate(found, index):
            self._new += len(one.ids)
            each = zip(one.ids, one.logprobs, strict=True) if request.logprobs else ()
            logs = tuple(TokenLog(token=token, logprob=logprob) for token, logprob in each)
            self.outbox.put(Delta(index=choice, text=one.text, logs=logs))
            self._finish(choice, one.finish_reason, stats=stats)
        for choice in range(index + len(found), index + request.choices):
            self._finish(choice, "stop", stats=stats)

    def _answer(
        self,
        session: Session[Any],
        index: int,
        options: GenerationOptions,
        decoding: Decoding,
        aids: Aids[Any],
    ) -> Work[Any, None]:
        """One choice, token by token."""
        generation = session.begin(options)
        started, held = monotonic(), len(session.tokens)
        indent = IndentLimit(self.request.indent)
        reason = None
        while reason is None:
            steps, seconds = yield from session.stepping(generation, aids=aids)
            if not generation.begun:
                self._prompt_s += seconds
                continue
            self._measure(seconds, len(steps), len(session.tokens) - held - len(steps))
            for step in steps:
                reason = self._write(index, step, indent, started, decoding.stop_ids)
                if reason is not None:
                    break

    def _measure(self, seconds: float, written: int, healed: int) -> None:
        """A round that wrote so many tokens took this long; the first answers the prompt."""
        if self._new:
            self._decoded += written
            self._decode_s += seconds
        else:
            self._ttft_s = monotonic() - self._arrived
            self._prompt_s += seconds
            # Tokens that only spell the prompt's end went through the model as well.
            self._encoded += healed

    def _write(
        self, index: int, step: Step, indent: IndentLimit, started: float, ends: frozenset[int]
    ) -> str | None:
        """Sends a step's text; why the choice ended, or None."""
        self._new += 1
        reason = step.finish_reason
        text = indent.feed(step.text)
        if indent.reached:
            reason = "stop"
        elif reason is None and self._out_of_time(started, text):
            reason = "length"
        text += indent.flush() if reason is not None else ""
        hidden = step.logprob is None or (step.token in ends and step.finish_reason == "stop")
        logs = () if hidden else (TokenLog.of(step),)
        if text or logs:
            self.outbox.put(Delta(index=index, text=text, logs=logs))
        if reason is not None:
            self._finish(index, reason, step.stop_string)
        return reason

    def _out_of_time(self, started: float, text: str) -> bool:
        """Whether the time for an answer is over and a line has just ended."""
        limit_ms = self.request.time_limit_ms
        return limit_ms > 0 and "\n" in text and (monotonic() - started) * 1e3 > limit_ms

    def _finish(
        self,
        index: int,
        reason: str,
        stop_string: str | None = None,
        stats: SessionStats | None = None,
    ) -> None:
        report = self.report(stats)
        self.outbox.put(
            Finished(index=index, reason=reason, stop_string=stop_string, report=report)
        )
