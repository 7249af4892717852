"""One request on its way through a pool: its prompts, its choices, its numbers.

`work` is a generator that yields requests for passes. Between two passes the pool may do something
else, or close it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvq.config import DEFAULT_DRAFT_TOKENS
from kvq_runtime.answer.alternatives import Writer
from kvq_runtime.answer.generation import GenerationOptions, Step
from kvq_runtime.answer.stop_strings import IndentLimit
from kvq_runtime.sequence.passes import PassRequest, Work
from kvq_runtime.serving.outbox import Delta, Failed, Finished, Measured, Outbox, Report, TokenLog
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.slots import Slot
from kvq_runtime.session.answering import AnswerHelpers
from kvq_runtime.session.metrics import NO_ROUNDS, SessionStats
from kvq_runtime.session.session import Session

# Bytes of logits of a prompt's rows that are in memory at once.
_SCORED_BYTES = 16 << 20
# One token of an answer and the draft after it cost little beside a pass's other rows.
BRIEF_ROWS = 1 + DEFAULT_DRAFT_TOKENS


def scored_rows(session: Session[Any], chunk_tokens: int) -> int:
    """Returns how many rows of a prompt are scored in one pass, by the bytes of their logits."""
    return max(1, min(chunk_tokens, _SCORED_BYTES // (4 * session.vocab_size)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """Holds what every job needs to know: the model's end tokens, and prompt tokens per pass."""

    stop_ids: frozenset[int]
    chunk_tokens: int


class Job:
    """Does what one client asked for. Its handler makes it; only the pool's thread works on it.

    `cancelled`, which any thread may set, ends it before its next pass. `pass_request` is what it
    asks for next.
    """

    def __init__(self, request: GenerationRequest, outbox: Outbox) -> None:
        self.request = request
        # See `scheduler.PRIORITIES`.
        self.rank = request.rank
        self.outbox = outbox
        self.cancelled = False
        self.pass_request: PassRequest[Any] | None = None
        self.progress = (0, sum(map(len, request.prompts)))
        self._arrived = monotonic()
        self._queued_s = 0.0
        self._ttft_s = 0.0
        self._prompt_s = 0.0
        self._decode_s = 0.0
        self._decoded = 0
        self._encoded = 0
        self._cached = self._moved = 0
        self._new = 0
        self._session: Session[Any] | None = None
        self._edits_before = 0
        self._rounds_before = NO_ROUNDS

    @property
    def brief(self) -> bool:
        """Returns whether its next rows are few, like those of an answer and unlike a prompt's."""
        return self.pass_request is not None and len(self.pass_request.rows.ids) <= BRIEF_ROWS

    @property
    def ready(self) -> bool:
        """Returns whether a pass makes sense: its reader keeps up, or it is to end."""
        return self.cancelled or not self.outbox.full

    def work(self, slot: Slot, decoding: Decoding) -> Work[Any, None]:
        """Does everything the request asked for, with the drafter and predictor it asked for."""
        request, draft = self.request, self.request.draft
        passages = None
        if len(request.read) == 1:
            ids, _ = request.read[0]
            passages = slot.session.passages(ids, request.passages, request.owner)
        helpers = slot.session.helpers(
            draft() if callable(draft) else None, request.predict, passages
        )
        try:
            yield from self._work(slot, decoding, helpers)
        finally:
            if callable(draft):
                helpers.drafting.close()

    def _work(self, slot: Slot, decoding: Decoding, helpers: AnswerHelpers[Any]) -> Work[Any, None]:
        request, session = self.request, slot.session
        self._session = session
        self._edits_before = session.sequence.encoding.edited_tokens
        self._rounds_before = session.rounds
        self._queued_s = monotonic() - self._arrived
        index = 0
        if request.pooled or request.compared:
            yield from self._measure_prompts(slot, decoding.chunk_tokens, helpers)
            return
        for ids, begin_with in request.read:
            if request.scored:
                yield from self._score(slot, ids, index, decoding.chunk_tokens)
            else:
                yield from self._read(slot, ids, decoding.chunk_tokens, helpers)
            if request.max_tokens == 0:
                self._finish(index, "length")
                index += 1
                continue
            if request.writer is not None:
                yield from self._write_alternatives(session, index, begin_with, request.writer)
                index += request.choices
                continue
            if session.branches_fit(request.choices, request.max_tokens, begin_with):
                yield from self._write_side_by_side(session, index, begin_with, decoding)
                index += request.choices
                continue
            for choice in range(request.choices):
                session.rollback(len(session.tokens) - len(ids))
                session.reseed(request.seed + choice)
                options = request.options(begin_with, choice)
                yield from self._answer(session, index, options, decoding, helpers)
                index += 1

    def fail(self, error: Exception) -> None:
        """Tells the client that nothing more will come."""
        self.outbox.put(Failed(error=error))

    def report(self, stats: SessionStats | None = None) -> Report:
        """Returns the numbers so far; `stats` are the session's, if they were just counted."""
        session = self._session
        if stats is None:
            stats = SessionStats() if session is None else session.stats()
        return Report(
            prompt_tokens=sum(map(len, self.request.prompts)),
            cached_tokens=self._cached,
            moved_tokens=self._moved,
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
        self, slot: Slot, ids: Sequence[int], chunk_tokens: int, helpers: AnswerHelpers[Any]
    ) -> Work[Any, None]:
        """Brings the session to `ids`, a chunk at a time."""
        cached = slot.align(
            ids, reuse=self.request.reuse, edits=self.request.edits, helpers=helpers
        )
        self._cached += cached
        self._moved += slot.session.sequence.encoding.staleness.moved
        remaining = len(slot.session.sequence.ready())
        taken_before = slot.session.sequence.encoding.taken_tokens
        self.progress = (self.progress[0] + len(ids) - remaining, self.progress[1])
        while remaining:
            self._prompt_s += yield from slot.session.reading(chunk_tokens, helpers)
            done, remaining = remaining, len(slot.session.sequence.due())
            self._encoded += done - remaining
            self.progress = (self.progress[0] + done - remaining, self.progress[1])
        from_passages = slot.session.sequence.encoding.taken_tokens - taken_before
        self._cached, self._moved = self._cached + from_passages, self._moved + from_passages
        self._encoded -= from_passages

    def _score(
        self, slot: Slot, ids: Sequence[int], index: int, chunk_tokens: int
    ) -> Work[Any, None]:
        """Reads `ids` anew and sends the log-probability of each token after those before it."""
        session, top = slot.session, self.request.top_logprobs
        slot.align(ids, reuse=False)
        logs, num_scored = (TokenLog(token=ids[0], logprob=None),), 1
        self._send_scores(index, logs)
        while session.sequence.due():
            result = yield from session.scoring(scored_rows(session, chunk_tokens))
            self._prompt_s += result.seconds
            self._encoded += len(result.logits)
            self.progress = (self.progress[0] + len(result.logits), self.progress[1])
            # No token follows the last row.
            rows = zip(ids[num_scored:], result.logits, strict=False)
            logs = tuple(TokenLog.scored(logits, token, top) for token, logits in rows)
            num_scored += len(logs)
            self._send_scores(index, logs)

    def _measure_prompts(
        self, slot: Slot, chunk_tokens: int, helpers: AnswerHelpers[Any]
    ) -> Work[Any, None]:
        """Reads each prompt and sends its numbers: pooled states, or logits that are compared."""
        request, session = self.request, slot.session
        for index, ids in enumerate(request.prompts):
            if request.pooled:
                slot.align(ids, reuse=False)
                values, seconds = yield from session.pooling(chunk_tokens)
                self._prompt_s += seconds
                self._encoded += len(ids)
                self.progress = (self.progress[0] + len(ids), self.progress[1])
            else:
                yield from self._read(slot, ids, chunk_tokens, helpers)
                logits = session.sequence.encoding.logits
                assert logits is not None
                values = logits[list(request.compared)]
            self.outbox.put(Measured(index=index, values=values))

    def _send_scores(self, index: int, logs: tuple[TokenLog, ...]) -> None:
        """Sends the scores of a piece of the prompt to each of its choices, from `index` on."""
        for choice in range(index, index + self.request.choices_of_prompt):
            self.outbox.put(Delta(index=choice, text="", logs=logs))

    def _write_side_by_side(
        self, session: Session[Any], index: int, begin_with: bytes, decoding: Decoding
    ) -> Work[Any, None]:
        """Writes all choices of a prompt, a token of each in every pass; see `branch_answers`."""
        request, started = self.request, monotonic()
        options = request.options(begin_with)
        seeds = [request.seed + i for i in range(request.choices)]
        with session.branch_answers(seeds, options, distinct=request.distinct) as branched:
            indents = [IndentLimit(request.indent) for _ in range(request.choices)]
            while branched.running:
                steps, seconds = yield from branched.stepping()
                self._measure(seconds, len(steps), 0)
                for choice, step in steps:
                    args = index + choice, step, indents[choice], started, decoding.stop_ids
                    if self._write(*args) is not None:
                        branched.leave(choice)

    def _write_alternatives(
        self, session: Session[Any], index: int, begin_with: bytes, writer: Writer
    ) -> Work[Any, None]:
        """Lets `writer` write the choices of a prompt; there may be fewer than asked for."""
        request, started = self.request, monotonic()
        alternatives = yield from session.drafting(
            request.choices,
            request.options(begin_with),
            writer,
            lambda: self.cancelled,
            exact=False,
        )
        self._measure(
            monotonic() - started, sum(len(alternative.ids) for alternative in alternatives), 0
        )
        stats = session.stats()
        for choice, alternative in enumerate(alternatives, index):
            self._new += len(alternative.ids)
            start = 0
            for token, logprob, end in zip(
                alternative.ids, alternative.logprobs, alternative.ends, strict=True
            ):
                text, start = alternative.text[start:end], end
                log = TokenLog(token=token, logprob=logprob, characters=len(text))
                logs = (log,) if request.logprobs else ()
                self.outbox.put(Delta(index=choice, text=text, logs=logs))
            self._finish(choice, alternative.finish_reason, stats=stats)
        for choice in range(index + len(alternatives), index + request.choices):
            self._finish(choice, "stop", stats=stats)

    def _answer(
        self,
        session: Session[Any],
        index: int,
        options: GenerationOptions,
        decoding: Decoding,
        helpers: AnswerHelpers[Any],
    ) -> Work[Any, None]:
        """Writes one choice, token by token."""
        generation = session.begin(options)
        started, tokens_before = monotonic(), len(session.tokens)
        indent = IndentLimit(self.request.indent)
        reason = None
        while reason is None:
            steps, seconds = yield from session.stepping(generation, helpers=helpers)
            if not generation.begun:
                self._prompt_s += seconds
                continue
            self._measure(seconds, len(steps), len(session.tokens) - tokens_before - len(steps))
            for step in steps:
                reason = self._write(index, step, indent, started, decoding.stop_ids)
                if reason is not None:
                    break

    def _measure(self, seconds: float, written: int, healed: int) -> None:
        """Counts a round that wrote `written` tokens; the first one answers the prompt."""
        if self._new:
            self._decoded += written
            self._decode_s += seconds
        else:
            self._ttft_s = monotonic() - self._arrived
            self._prompt_s += seconds
            # Tokens that only spell the prompt's end went through the model, too.
            self._encoded += healed

    def _write(
        self, index: int, step: Step, indent: IndentLimit, started: float, ends: frozenset[int]
    ) -> str | None:
        """Sends a step's text; returns why the choice ended, or None."""
        self._new += 1
        reason = step.finish_reason
        text = indent.feed(step.text)
        if indent.reached:
            reason = "stop"
        elif reason is None and self._out_of_time(started, text):
            reason = "length"
        text += indent.flush() if reason is not None else ""
        ended = step.token in ends and step.finish_reason == "stop"
        # A reader of scores expects a row for every token.
        hidden = step.logprob is None or (ended and not self.request.scored)
        logs = () if hidden else (TokenLog.of(step, len(text)),)
        if text or logs:
            self.outbox.put(Delta(index=index, text=text, logs=logs))
        if reason is not None:
            self._finish(index, reason, step.stop_string)
        return reason

    def _out_of_time(self, started: float, text: str) -> bool:
        """Decides whether the time for an answer is over and a line has just ended."""
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
