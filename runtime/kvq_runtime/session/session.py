"""One user's sequence, its prompts and answers; `answering` has the same as shared work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import KvqError, UsageError
from kvq.formats import format_bytes
from kvq.selectors import rule_named
from kvq_runtime.answer.generation import Cancel, GenerationOptions, Step, never_cancelled
from kvq_runtime.backends import C
from kvq_runtime.config import Sampling, check_seed
from kvq_runtime.sequence.hunks import Hunk
from kvq_runtime.sequence.passes import run
from kvq_runtime.session.answering import AnswerHelpers, Answering
from kvq_runtime.session.metrics import Rounds, SessionStats

if TYPE_CHECKING:
    from kvq_runtime.answer.alternatives import Alternative, Writer
    from kvq_runtime.answer.constraint import Constraint
    from kvq_runtime.session import snapshot

Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Ignores progress."""


def no_writers(name: str) -> "Writer":
    """Raises `UsageError`: a session knows names of writers only where its opener gives them."""
    raise UsageError(f"the method {name!r} is not known here: give the method itself, a Writer")


class Session(Answering[C]):
    """Holds one text that prompts are added to and answers are generated from.

    `Engine.session` makes it. Closing it frees the cache, and every use after that raises
    `UsageError`. A session serves one thread at a time: a call while another thread's call runs
    raises `UsageError`. Sessions of one engine may run in different threads.
    """

    writers: "Callable[[str], Writer]" = staticmethod(no_writers)

    @property
    def exact(self) -> bool:
        """Returns whether all it holds was computed, and none of it before a change on its left.

        Then it holds the same tokens at the same positions as a session that read the text at once,
        and nothing of text that is gone. Its bits and logits may differ slightly: pages begin at
        other tokens, whose keys and values share other scales, and sums run in another order.
        Reading a prompt in other chunks has the same effect.
        """
        return self.sequence.encoding.staleness.stale == 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Returns every token of the sequence, prompt and generated."""
        return self.sequence.tokens

    @property
    def pending_tokens(self) -> int:
        """Returns how many tokens at the end have not been through the model yet."""
        return self.sequence.pending_tokens

    @property
    def kv_bytes_peak(self) -> int:
        """Returns the most bytes its cache ever used. Any thread may call it at any time."""
        return self.sequence.cache.peak_bytes

    def prefill(
        self,
        ids: Sequence[int] | str = (),
        *,
        progress: Progress = no_progress,
        cancel: Cancel = never_cancelled,
        predict: str | None = None,
        passages: Sequence[Sequence[int]] = (),
    ) -> bool:
        """Appends a prompt and runs it through the model chunk by chunk.

        After an error the session is what it was before.

        Args:
            ids: Token ids, or a text that is encoded first. Empty (the default): goes on with
                tokens that are pending.
            progress: Called after each chunk with (done, total) tokens.
            cancel: Asked before each chunk. Once it returns True the rest stays pending; a call
                without `ids` goes on later.
            predict: Which part is predicted, as in `Engine.session`. None: as the session does.
            passages: Parts of the text, as token ids and in its order, that other prompts have too,
                such as other files of a project. What another session of the engine computed for
                such a part is taken over, and is stale afterwards, see `refresh`. Where the model
                cannot do this, all is computed.

        Returns:
            True when all is done, False when it was cancelled.

        Raises:
            UsageError: For an empty prompt, an unknown token, or a prompt that the context cannot
                hold.
            BudgetError: For a prompt that the budget cannot hold.
        """
        with self._one_thread:
            before, helpers = len(self.sequence), self.helpers(predict=predict)
            if isinstance(ids, str):
                ids = self._encoded(ids)
            _check_ids(ids)
            self._append_prompt(ids)
            if passages:
                known = self.passages(self.tokens, passages)
                helpers = self.helpers(predict=predict, passages=known)
            try:
                return self._catch_up(progress, cancel, helpers)
            except KvqError:
                self._keep(before)
                raise

    def align(
        self,
        ids: Sequence[int],
        *,
        edits: bool = False,
        changes: list[Hunk] | None = None,
        helpers: AnswerHelpers[C] | None = None,
    ) -> int:
        """Becomes the prompt `ids` and keeps the beginning that both share.

        `prefill()` runs the rest. See `TokenSequence.align` for the arguments. Raises what
        `prefill` raises.
        """
        with self._one_thread:
            self._check_length(len(ids), current_tokens=0)
            predicts = (helpers or self._helpers).prediction is not None
            cached = self.sequence.align(ids, edits=edits, changes=changes, predicts=predicts)
            self._prompt_end = len(ids)
            self._meter.add_prompt(len(ids))
            return cached

    def edit(
        self,
        start: int,
        stop: int,
        new_ids: Sequence[int],
        *,
        reencode_next: int | None = None,
        reencode_tail: int = 1,
    ) -> int:
        """Replaces tokens of the text and keeps the keys and values of what follows.

        No model runs: the new tokens and those that are encoded again become pending, and
        `prefill()` or the next answer runs them. What follows becomes stale, see `refresh`.

        Args:
            start: First token that is replaced, counted from 0.
            stop: The token after the last one that is replaced. Equal to `start`: nothing is
                removed.
            new_ids: Tokens that take their place. Empty: the old ones are removed.
            reencode_next: How many tokens after the edit are encoded again. None: as many as were
                removed or added, whichever is more, at most 16.
            reencode_tail: How many of the text's last tokens are encoded again. Default 1.

        Returns:
            How many tokens of the new text are kept as computed.

        Raises:
            UsageError: For a place outside the text, an unknown token, or a text that the context
                cannot hold.
        """
        with self._one_thread:
            kept = self.sequence.edit(
                start, stop, new_ids, reencode_next=reencode_next, reencode_tail=reencode_tail
            )
            self._prompt_end = len(self.sequence)
            self._meter.add_prompt(self.pending_tokens)
            return kept

    def refresh(self, max_tokens: int | None = None, *, cancel: Cancel = never_cancelled) -> int:
        """Encodes stale tokens again, for idle time.

        A token is *stale* when text on its left has changed since it was encoded, and when it was
        predicted or computed from a stale token. See `exact`.

        Args:
            max_tokens: How many tokens are encoded again at most. None: all.
            cancel: Asked before each piece. Once it returns True no further piece is encoded.

        Returns:
            How many tokens are still stale.
        """
        with self._one_thread:
            return self.sequence.refresh(max_tokens, cancel)

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        sampling: Sampling | None = None,
        stop_strings: Iterable[str] = (),
        stop_ids: Iterable[int] | None = None,
        logprobs: bool = False,
        begin_with: bytes = b"",
        constraint: "Constraint | None" = None,
        shown: Iterable[int] = (),
        cancel: Cancel = never_cancelled,
    ) -> Iterator[Step]:
        """Generates an answer and yields its tokens as steps.

        A caller that stops iterating leaves the session at the last token it was given. An answer
        that is cancelled before its first token yields nothing and leaves the session as it was.

        Args:
            max_tokens: New tokens at most. None: until the model ends the answer or the context is
                full.
            sampling: How tokens are chosen. None: `Sampling()`.
            stop_strings: The answer ends before any of these texts.
            stop_ids: The answer ends after any of these tokens. None: the model's end tokens.
            logprobs: Each step has the natural log-probability of its token.
            begin_with: Bytes that the first tokens must spell, see `heal`. They count as the
                prompt's.
            constraint: What the whole answer must match, unless `max_tokens` or the context cut it
                short. None: any text.
            shown: Control tokens whose text is part of the answer.
            cancel: Asked after every token. Once it returns True the answer ends.

        Yields:
            One step for each token. The last step has a `finish_reason`.

        Raises:
            UsageError: For a session without text, a full context, a constraint that cannot be
                followed, or bytes that no tokens spell.
        """
        generation = self.begin(
            GenerationOptions(
                max_tokens=max_tokens,
                sampling=Sampling() if sampling is None else sampling,
                stop_strings=tuple(stop_strings),
                stop_ids=None if stop_ids is None else frozenset(stop_ids),
                logprobs=logprobs,
                begin_with=begin_with,
                grammar=None if constraint is None else self._vocabulary.grammar(constraint),
                shown=frozenset(shown),
            )
        )
        if not self._catch_up(no_progress, cancel):
            return
        remaining = length = tokens_before = len(self.sequence)
        try:
            while generation.finish_reason is None:
                with self._one_thread:
                    steps, _ = run(self.stepping(generation, cancel))
                remaining, length = len(steps), len(self.sequence)
                for step in steps:
                    remaining -= 1
                    yield step
        except GeneratorExit:  # nobody asks for the round's other tokens
            with suppress(UsageError):  # the session may be closed
                self.rollback(remaining if len(self.sequence) == length else 0)
            raise
        if not generation.begun:
            self._keep(tokens_before)

    def drafts(
        self,
        count: int = 3,
        length: int = 10,
        *,
        method: "Writer | str" = "branches",
        stop_strings: Iterable[str] = (),
        stop_ids: Iterable[int] | None = None,
        begin_with: bytes = b"",
        constraint: "Constraint | None" = None,
        cancel: Cancel = never_cancelled,
        exact: bool = True,
    ) -> "list[Alternative]":
        """Writes several ways to go on, and leaves the session as it is.

        `prefill(drafts[i].ids)` takes one of them.

        Args:
            count: How many alternatives are asked for.
            length: Tokens of each at most.
            method: A `Writer`, or the name of one: `branches` or `superposed`.
            stop_strings: As in `generate`.
            stop_ids: As in `generate`.
            begin_with: As in `generate`.
            constraint: As in `generate`. An alternative that is not cut short matches it as a
                whole.
            cancel: Asked before each pass. Once it returns True the result is what exists then.
            exact: False: log-probabilities may be some hundredths off, which takes less time.

        Returns:
            Up to `count` alternatives, the greedy one first.

        Raises:
            UsageError: For options that the method cannot do, and where the rows, about `count *
                length`, do not fit the session's `draft_tokens` or its context.
        """
        options = GenerationOptions(
            max_tokens=length,
            stop_strings=tuple(stop_strings),
            stop_ids=None if stop_ids is None else frozenset(stop_ids),
            begin_with=begin_with,
            grammar=None if constraint is None else self._vocabulary.grammar(constraint),
        )
        with self._one_thread:
            writer = self.writers(method) if isinstance(method, str) else method
            if not self._catch_up(no_progress, cancel):
                return []
            return run(self.drafting(count, options, writer, cancel, exact=exact))

    def logits(
        self, ids: Sequence[int], *, progress: Progress = no_progress
    ) -> Iterator[NDArray[np.float32]]:
        """Appends `ids` and yields the logits float32 [n, V] of every token, chunk by chunk.

        A session whose steps read a part of the cache takes as many rows at a time as a step may
        have.
        """
        steps = rule_named(self.config.read).share < 1
        rows = self.config.draft_tokens if steps else self.sequence.chunk_tokens
        with self._one_thread:
            if self.pending_tokens:
                self._catch_up(no_progress, never_cancelled)
            self._append_prompt(ids)
        while due := self.sequence.ready():
            piece = due[: self.sequence.chunk_tokens]
            parts: list[NDArray[np.float32]] = []
            with self._one_thread:
                for start in range(0, len(piece), rows):
                    most = min(rows, len(piece) - start)
                    parts.append(run(self.scoring(most)).logits)
            yield np.concatenate(parts)
            progress(len(ids) - self.pending_tokens, len(ids))

    def pooled(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Becomes the text `ids`, read anew, and returns its pooled hidden states [hidden].

        `TextEmbedding.vector` makes the text's vector from them. Raises what `prefill` raises, and
        `BackendError` for a model that gives no hidden states.
        """
        self._keep(0)
        self.align(ids)
        with self._one_thread:
            return run(self.pooling())[0]

    def rollback(self, n_tokens: int) -> None:
        """Forgets the last `n_tokens` tokens.

        The result is exact, as if the session had never gone further, in these cases: the cache is
        not quantised; no page has closed meanwhile; or the new end is the edge of a page
        (`sink_tokens` and a multiple of 64 tokens) and the cache has no floating-point tail
        (`KvPlan.tail_tokens` 0, as with a budget for less than the context). Elsewhere the newest
        tokens stay quantised in closed pages, so what follows differs slightly. It does not depend
        on how far the session had gone.

        Args:
            n_tokens: How many tokens are forgotten.

        Raises:
            UsageError: For more tokens than there are.
        """
        with self._one_thread:
            self.sequence.rollback(n_tokens)
            self._prompt_end = min(self._prompt_end, len(self.sequence))

    def reseed(self, seed: int) -> None:
        """Starts the sampler's random numbers again at `seed`."""
        check_seed(seed)
        self._generator = np.random.default_rng(seed)

    def save(self, path: Path | str) -> None:
        """Writes tokens, cache and sampler to a file.

        Args:
            path: The file. It is replaced as a whole; after an error the old one is still there.

        Raises:
            SnapshotError: Where the file cannot be written.
        """
        from kvq_runtime.session import snapshot

        snapshot.write(Path(path), self.capture())

    def capture(self) -> "snapshot.Snapshot":
        """Copies what `save` writes, so that another thread may write it later."""
        from kvq_runtime.session import snapshot

        with self._one_thread:
            return snapshot.Snapshot(
                identity=self._identity(),
                state=self.sequence.state(),
                generator=self._generator.bit_generator.state,
            )

    def load(self, path: Path | str) -> None:
        """Becomes the session that was saved at `path`.

        Args:
            path: The file.

        Raises:
            SnapshotError: For a damaged or newer file, and for a session of another model or KV
                plan. The session is then unchanged.
        """
        from kvq_runtime.session import snapshot

        self._become(path, snapshot.examine(Path(path)))

    def restore(self, copy: "snapshot.Snapshot") -> None:
        """Becomes what `capture` copied; raises `SnapshotError` for another model or KV plan."""
        self._become("the session in memory", copy)

    @property
    def rounds(self) -> Rounds:
        """Returns the sums over rounds so far, without measuring the cache as `stats` does."""
        return self._meter.rounds

    def stats(self) -> SessionStats:
        """Returns counts, rates and bytes so far."""
        cache = self.sequence.cache
        return self._meter.stats(
            kv_bytes=cache.used_bytes,
            kv_bytes_peak=cache.peak_bytes,
            kv_budget=cache.budget_bytes,
            bytes_per_token=cache.bytes_per_token,
            held=cache.usage(),
            edits=self.sequence.encoding.edit_counts,
            recomputed_tokens=self.sequence.encoding.recomputed_tokens,
            draft_bytes=self.draft_bytes,
            auxiliary_bytes=self.auxiliary_bytes,
        )

    def __repr__(self) -> str:
        config = self.config
        return (
            f"<kvq.Session: {len(self.sequence)} of {config.context_tokens} tokens, "
            f"kv={config.plan.k_bits}:{config.plan.v_bits}, "
            f"budget={format_bytes(config.budget_bytes)}>"
        )

    def __enter__(self) -> "Session[C]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _catch_up(
        self, progress: Progress, cancel: Cancel, helpers: AnswerHelpers[C] | None = None
    ) -> bool:
        """Runs everything due; returns False when `cancel` returned True before that."""
        remaining = total = len(self.sequence.ready())
        while remaining:
            if cancel():
                return False
            with self._one_thread:
                run(self.reading(helpers=helpers))
            remaining = len(self.sequence.due())
            progress(total - remaining, total)
        return True

    def _encoded(self, text: str) -> list[int]:
        if self._vocabulary.encode is None:
            raise UsageError("this model has no tokenizer: give token ids instead of a text")
        return self._vocabulary.encode(text, start=len(self.sequence) == 0)

    def _append_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) == 0 and not self.sequence.due():
            raise UsageError("the prompt is empty; give at least one token of text")
        self._check_length(len(ids), current_tokens=len(self.sequence))
        self.sequence.append(self._backend.model.checked(ids))
        if len(ids):
            self._prompt_end = len(self.sequence)
        self._meter.add_prompt(len(ids))

    def _check_length(self, count: int, *, current_tokens: int) -> None:
        limit = self.config.context_tokens
        if current_tokens + count > limit:
            used = f", of which {current_tokens} are used" if current_tokens else ""
            raise UsageError(
                f"the prompt has {count} tokens and the context holds {limit}{used}; shorten "
                f"the prompt or raise {self.config.limiting_arguments}"
            )

    def _keep(self, num_tokens: int) -> None:
        self.sequence.keep(num_tokens)
        self._prompt_end = min(self._prompt_end, num_tokens)

    def _become(self, source: Path | str, copy: "snapshot.Snapshot") -> None:
        """Checks everything before it replaces anything."""
        from kvq_runtime.session import snapshot

        state = copy.state
        with self._one_thread:
            snapshot.check_agrees(source, copy.identity, self._identity())
            snapshot.check_state(source, state, vocab_size=self._backend.model.vocab_size)
            snapshot.fill(source, self.sequence.cache, state)
            self.sequence.adopt(state.tokens.tolist(), state.logits, state.ages)
            self._prompt_end = len(self.sequence)
            self._generator = np.random.default_rng(0)
            self._generator.bit_generator.state = copy.generator

    def _identity(self) -> dict[str, Any]:
        """Returns what a saved session must agree on with the one that loads it."""
        arena = self.config.arena
        later: dict[str, Any] = {}
        if arena is not None and arena.probes:
            later["evidence"] = arena.evidence
        if arena is not None and arena.keeps_places:
            later["places"] = "the last that were used"
        return later | {
            "model": self._backend.model.fingerprint,
            "plan": asdict(self.config.plan),
            "context_tokens": self.config.context_tokens,
            "budget_bytes": self.config.budget_bytes,
            "chunk_tokens": self.sequence.chunk_tokens,
            "cache": self._backend.cache_kind,
            "rope_long": self.sequence.rope_long,
        }


def _check_ids(ids: object) -> None:
    if not isinstance(ids, Sequence | np.ndarray):
        raise UsageError(f"prefill takes token ids or a text; {type(ids).__name__} was given")
