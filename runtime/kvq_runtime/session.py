"""One user's sequence, its prompts and answers, run at once; `answering` has them as work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import KvqError, UsageError
from kvq.formats import format_bytes
from kvq.selectors import rule_named
from kvq_runtime import snapshot
from kvq_runtime.alternatives import Alternative, Writer
from kvq_runtime.answering import Aids, Answering
from kvq_runtime.backends import C
from kvq_runtime.config import Sampling, check_seed
from kvq_runtime.constraint import Constraint
from kvq_runtime.generation import Cancel, GenerationOptions, Step, never
from kvq_runtime.hunks import Hunk
from kvq_runtime.metrics import Rounds, SessionStats
from kvq_runtime.passes import run

Progress = Callable[[int, int], None]


def unseen(done: int, total: int) -> None:
    """The progress nobody watches."""


def no_names(name: str) -> Writer:
    """Whoever opens a session may give it the names of writers; without one there are none."""
    raise UsageError(f"the method {name!r} is not known here: give the method itself, a Writer")


class Session(Answering[C]):
    """One sequence that prompts are given to and answers are generated from.

    `Engine.session` makes it; closing it frees the cache, and every use after that raises
    `UsageError`. A session belongs to one thread at a time: two calls at once are a mistake of
    the caller's that native code answers with an error, not with a crash. Sessions of one engine
    may run in different threads.
    """

    writers: Callable[[str], Writer] = staticmethod(no_names)

    @property
    def exact(self) -> bool:
        """Whether all it holds was computed, and none of it before a change on its left.

        It holds then the same tokens at the same positions as a session that read the text at
        once, and nothing of a text that is gone. It need not hold the same bits, nor give the same
        logits: pages begin at other tokens, whose keys and values share other scales, and
        attention adds up in another order, so that a last digit may take the activations of a
        product, 8 bits each, to the next step. Reading a prompt in other chunks costs as much.
        """
        return self.sequence.encoding.staleness.stale == 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token of the sequence, prompt and generated."""
        return self.sequence.tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens at the end that have not been through the model yet."""
        return self.sequence.pending_tokens

    @property
    def kv_bytes_peak(self) -> int:
        """Most bytes its cache ever used. Unlike `stats`, any thread may ask at any time."""
        return self.sequence.cache.peak_bytes

    def prefill(
        self,
        ids: Sequence[int] | str = (),
        *,
        progress: Progress = unseen,
        cancel: Cancel = never,
        predict: str | None = None,
    ) -> bool:
        """Appends `ids`, or a text's, and runs them through the model chunk by chunk.

        `cancel` is asked before each chunk: once it says yes, False is returned and the rest
        stays pending; calling again (without ids) goes on. `progress` gets (done, total) tokens;
        `predict`: what of it is predicted, None: as the session does. On an error the session is
        what it was before. Raises `UsageError` for an empty prompt or an unknown token,
        `BudgetError` for a prompt the context or the budget cannot hold.
        """
        before, aids = len(self.sequence), self.aids(predict=predict)
        if isinstance(ids, str):
            ids = self._encoded(ids)
        _check_ids(ids)
        self._append_prompt(ids)
        try:
            return self._catch_up(progress, cancel, aids)
        except KvqError:
            self._keep(before)
            raise

    def align(
        self,
        ids: Sequence[int],
        *,
        edits: bool = False,
        changes: list[Hunk] | None = None,
        aids: Aids[C] | None = None,
    ) -> int:
        """Becomes the prompt `ids`, keeping the beginning that is held; see `Sequence.align`.

        What is not held is pending; `prefill()` runs it. Raises as `prefill` does.
        """
        self._check_length(len(ids), held=0)
        predicts = (aids or self._aids).prediction is not None
        cached = self.sequence.align(ids, edits=edits, changes=changes, predicts=predicts)
        self._prompt_end = len(ids)
        self._meter.prompt(len(ids))
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
        """Replaces tokens `start` to `stop`; how many tokens are kept as computed.

        Only metadata changes: `new_ids`, the next `reencode_next` tokens and the last
        `reencode_tail` of the text are pending, and `prefill()` or the next answer runs them. See
        `Sequence.edit` for the rest, and for the default.
        """
        kept = self.sequence.edit(
            start, stop, new_ids, reencode_next=reencode_next, reencode_tail=reencode_tail
        )
        self._prompt_end = len(self.sequence)
        self._meter.prompt(self.pending_tokens)
        return kept

    def refresh(self, max_tokens: int | None = None, *, cancel: Cancel = never) -> int:
        """Encodes up to `max_tokens` stale tokens again, for idle time; how many are left.

        A token is stale when text on its left has changed since it was encoded, and when it was
        predicted or computed from one that was. `cancel` is asked before each piece. See
        `Sequence.refresh`.
        """
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
        constraint: Constraint | None = None,
        shown: Iterable[int] = (),
        cancel: Cancel = never,
    ) -> Iterator[Step]:
        """Yields new tokens; `GenerationOptions` says what each argument asks for.

        The whole answer fits `constraint`, unless `max_tokens` or the context cut it short.

        Ends also when `cancel`, asked after every token, says yes; the last step says why. A
        generation cancelled before its first token yields nothing and leaves the session as it
        was. Who stops asking has the session end with the last token that was yielded.
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
        if not self._catch_up(unseen, cancel):
            return
        given = len(self.sequence)
        while generation.finish_reason is None:
            yield from self._shown(run(self.stepping(generation, cancel))[0])
        if not generation.begun:
            self._keep(given)

    def drafts(
        self,
        count: int = 3,
        length: int = 10,
        *,
        method: Writer | str = "auto",
        sampling: Sampling | None = None,
        stop_strings: Iterable[str] = (),
        stop_ids: Iterable[int] | None = None,
        begin_with: bytes = b"",
        constraint: Constraint | None = None,
        cancel: Cancel = never,
        exact: bool = True,
    ) -> list[Alternative]:
        """Up to `count` ways to go on of up to `length` tokens each, the greedy one first.

        The session stays as it is; `prefill(found[i].ids)` takes one of them. `method` is a
        `Writer` or the name of one, such as branches, superposed or auto; `sampling` is for those
        that draw. The rows needed, about `count * length`, must fit the session's `draft_tokens`.
        `exact` False: log-probabilities may be some hundredths off, and it takes less time. Other
        arguments as in `generate`: what is not cut short fits `constraint` as a whole.
        Raises `UsageError`, and what a pass raises.
        """
        options = GenerationOptions(
            max_tokens=length,
            sampling=Sampling() if sampling is None else sampling,
            stop_strings=tuple(stop_strings),
            stop_ids=None if stop_ids is None else frozenset(stop_ids),
            begin_with=begin_with,
            grammar=None if constraint is None else self._vocabulary.grammar(constraint),
        )
        writer = self.writers(method) if isinstance(method, str) else method
        if not self._catch_up(unseen, cancel):
            return []
        return run(self.drafting(count, options, writer, cancel, exact=exact))

    def logits(
        self, ids: Sequence[int], *, progress: Progress = unseen
    ) -> Iterator[NDArray[np.float32]]:
        """Appends `ids` and yields the logits float32 [n, V] of every one, chunk by chunk.

        A session whose steps read less than all takes as many rows at a time as a step may have.
        """
        steps = rule_named(self.config.read).share < 1
        rows = self.config.draft_tokens if steps else self.sequence.chunk_tokens
        if self.pending_tokens:
            self._catch_up(unseen, never)
        self._append_prompt(ids)
        while due := self.sequence.ready():
            piece = due[: self.sequence.chunk_tokens]
            found: list[NDArray[np.float32]] = []
            for start in range(0, len(piece), rows):
                part = piece[start : start + rows]
                with self.sequence.forward(part) as branch:
                    branch.commit(range(len(part)))
                    found.append(branch.logits)
            yield np.concatenate(found)
            progress(len(ids) - self.pending_tokens, len(ids))

    def rollback(self, n_tokens: int) -> None:
        """Forgets the last `n_tokens` tokens. Raises `UsageError` for more than there are.

        Exact, as if the session had never gone further, on an unquantised cache, while no page has
        closed meanwhile, and to the edge of a page (`sink_tokens` and a multiple of 64 tokens) on a
        cache without a floating-point tail (`KvPlan.tail_tokens` 0, as a budget for less than the
        context has). Elsewhere the newest tokens stay quantised in pages that have closed: what
        follows differs slightly, and alike however far the session had gone.
        """
        self.sequence.rollback(n_tokens)
        self._prompt_end = min(self._prompt_end, len(self.sequence))

    def reseed(self, seed: int) -> None:
        """Starts the sampler's random numbers again at `seed`."""
        check_seed(seed)
        self._generator = np.random.default_rng(seed)

    def save(self, path: Path | str) -> None:
        """Writes tokens, cache and sampler to `path`: a whole file or none. Overwrites."""
        self.capture().write(path)

    def capture(self) -> snapshot.Snapshot:
        """What `save` writes, copied: it may be written later, and by another thread."""
        state = self.sequence.state()
        return snapshot.Snapshot(
            identity=self._identity(),
            state=snapshot.SessionState(
                tokens=state.tokens,
                logits=np.zeros(0, np.float32) if state.logits is None else state.logits,
                generator=self._generator.bit_generator.state,
                cache=state.cache,
                ages=state.ages,
            ),
        )

    def load(self, path: Path | str) -> None:
        """Becomes the session saved at `path`; unchanged when that is refused.

        Raises `SnapshotError` for a damaged or newer file, another model or another KV plan.
        """
        self._become(path, snapshot.read(Path(path), self._identity()))

    def restore(self, taken: snapshot.Snapshot) -> None:
        """Becomes what `capture` took; `SnapshotError` if of another model or KV plan."""
        what = "the session in memory"
        snapshot.check_agrees(what, taken.identity, self._identity())
        self._become(what, taken.state)

    @property
    def rounds(self) -> Rounds:
        """What passes over generated tokens came to so far; `stats` counts the cache as well."""
        return self._meter.rounds

    def stats(self) -> SessionStats:
        """Counts, rates and bytes so far."""
        cache = self.sequence.cache
        return self._meter.stats(
            kv_bytes=cache.used_bytes,
            kv_bytes_peak=cache.peak_bytes,
            kv_budget=cache.budget_bytes,
            bytes_per_token=cache.bytes_per_token,
            held=cache.holdings(),
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

    def _catch_up(self, progress: Progress, cancel: Cancel, aids: Aids[C] | None = None) -> bool:
        """Runs everything due; False when `cancel` said yes before that."""
        left = total = len(self.sequence.ready())
        while left:
            if cancel():
                return False
            run(self.reading(aids=aids))
            left = len(self.sequence.due())
            progress(total - left, total)
        return True

    def _shown(self, steps: Sequence[Step]) -> Iterator[Step]:
        """The steps of one round; the tokens of those that nobody asks for are taken back."""
        held = len(self.sequence)
        for left, step in zip(reversed(range(len(steps))), steps, strict=True):
            try:
                yield step
            except GeneratorExit:
                with suppress(UsageError):  # the session may be closed
                    self.rollback(left if len(self.sequence) == held else 0)
                raise

    def _encoded(self, text: str) -> list[int]:
        if self._vocabulary.encode is None:
            raise UsageError("this model has no tokenizer: give token ids instead of a text")
        return self._vocabulary.encode(text, start=len(self.sequence) == 0)

    def _append_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) == 0 and not self.sequence.due():
            raise UsageError("the prompt is empty; give at least one token of text")
        self._check_length(len(ids), held=len(self.sequence))
        self.sequence.append(ids)
        if len(ids):
            self._prompt_end = len(self.sequence)
        self._meter.prompt(len(ids))

    def _check_length(self, count: int, *, held: int) -> None:
        limit = self.config.context_tokens
        if held + count > limit:
            used = f", of which {held} are used" if held else ""
            raise UsageError(
                f"the prompt has {count} tokens and the context holds {limit}{used}; shorten "
                f"the prompt or raise {self.config.what_limits}"
            )

    def _keep(self, num_tokens: int) -> None:
        self.sequence.keep(num_tokens)
        self._prompt_end = min(self._prompt_end, num_tokens)

    def _become(self, what: Path | str, state: snapshot.SessionState) -> None:
        """Everything is checked before anything is replaced."""
        found = snapshot.restored(what, state, vocab_size=self._backend.model.vocab_size)
        snapshot.fill(what, self.sequence.cache, found)
        logits = found.logits if len(found.logits) else None
        self.sequence.adopt(found.tokens, logits, found.ages)
        self._prompt_end = len(self.sequence)
        self._generator = found.generator

    def _identity(self) -> dict[str, Any]:
        """What a saved session must agree on with the one that loads it."""
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


def _check_ids(given: object) -> None:
    if not isinstance(given, Sequence | np.ndarray):
        raise UsageError(f"prefill takes token ids or a text; {type(given).__name__} was given")
