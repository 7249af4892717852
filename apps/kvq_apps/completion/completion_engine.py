"""Completions at a place of a text, by a pool of this process whose sessions follow the texts.

The whole file is the prompt (prefix, suffix, middle), and the cache holds it. Whatever has changed
since the last request, also the cursor's place, is an edit: only new tokens go through the model.
Each of the last files has a session of its own.
"""

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from time import perf_counter
from typing import Any

from kvq.errors import UsageError, argument
from kvq.settings import cache_folder
from kvq_apps.completion.document import NamedText, TextDocument
from kvq_apps.completion.edit_history import EditedLines, NextEdit
from kvq_apps.completion.frozen_file import MOST_TYPED, FrozenFile
from kvq_apps.completion.next_edit import NextEditor
from kvq_apps.completion.prompts import GapPrompts
from kvq_apps.completion.suggestions import (
    BLOCK_TOKENS,
    DEFAULT_DRAFTS,
    DEFAULT_TOKENS,
    Completion,
    cursor_context,
    filter_suggestions,
    whole_lines,
)
from kvq_models.infilling import fixed_tokens, infill_tokens
from kvq_runtime.answer.alternatives import Writer
from kvq_runtime.answer.drafter import Drafter
from kvq_runtime.answer.generation import Cancel, never_cancelled
from kvq_runtime.answer.healing import heal
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.serving import outbox
from kvq_runtime.serving.job import Job
from kvq_runtime.serving.outbox import Delta, Done, Failed, Finished, Outbox, TokenLog, steps_of
from kvq_runtime.serving.pool import PoolConfig, Served, SessionPool
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.saving import SavedSessions
from kvq_runtime.serving.scheduler import PRIORITIES
from kvq_runtime.serving.slots import Slots

logger = logging.getLogger(__name__)

# Cache rows for suggestions; more or longer suggestions are cut to fit.
DRAFT_ROWS = 96
# Characters of a long file that are looked at, per token of the context: code has 3 to 4.
NEAR_CHARACTERS = 6
# How long a request waits before it checks whether it is still wanted.
POLL_S = 0.005
_OUTBOX_BYTES = 1 << 20
_GREEDY = Sampling(temperature=0.0)
# Whose text their prompts are: the files' sessions keep the files.
_NEXT_EDITS = "next edits"


class CompletionEngine:
    """Completes texts with one engine and a session for each of `files`.

    It writes up to `drafts` suggestions of up to `tokens` tokens. `exact`: a cached token never
    precedes a change on its left, as on a cache that cannot move tokens after an edit. Typed text
    then stands after the frozen file (`FrozenFile`), and any other change encodes again from its
    place on.
    """

    def __init__(
        self,
        engine: Engine,
        writer: Writer,
        *,
        drafts: int | None = None,
        tokens: int = DEFAULT_TOKENS,
        session_options: dict[str, Any] | None = None,
        exact: bool = False,
        files: int = 1,
        next_edits: bool = False,
        chunk_tokens: int | None = None,
    ) -> None:
        """Opens the sessions. `drafts` None: `DEFAULT_DRAFTS`, or 1 if the backend writes only one.

        `next_edits` opens another session, so that `next_edit` takes no place of a file.
        `chunk_tokens` of a file are read at once; None: as many as take about 50 ms. Raises
        `ModelError` for a model that cannot fill in a middle, `UsageError` for no suggestions or
        for more than the backend writes, and what opening a session raises.
        """
        several = engine.backend.takes_trees
        drafts = (DEFAULT_DRAFTS if several else 1) if drafts is None else drafts
        if drafts > 1 and not several:
            raise UsageError(
                f"{drafts} suggestions at one place are not possible on the {engine.backend.name} "
                f"backend: ask for one ({argument('--drafts')} 1), or choose a bundle that `kvq "
                "export` made"
            )
        if min(drafts, tokens, files) < 1:
            raise UsageError("suggestions, tokens of a completion and files are 1 or more")
        self._tokenizer = engine.tokenizer
        fim = infill_tokens(self._tokenizer)
        self._stop_ids = frozenset({*engine.model.stop_ids, fim.prefix, fim.suffix, fim.middle})
        self._prompts = GapPrompts(self._tokenizer)
        self._writer = writer
        options: dict[str, Any] = {
            "draft_tokens": DRAFT_ROWS,
            "sink_tokens": fixed_tokens(self._tokenizer),
            "edits": not exact,
            **(session_options or {}),
        }

        def load() -> Served:
            saved = SavedSessions(cache_folder() / "sessions", "completions", 0)
            return Served(
                backend=engine.backend,
                stop_ids=self._stop_ids,
                slots=Slots(lambda: engine.session(**options), files + next_edits, saved),
                close=lambda: None,  # the engine is its owner's
            )

        changed = Event()
        config = PoolConfig(sessions=files + next_edits, chunk_tokens=chunk_tokens)
        self._pool = SessionPool(load, config, changed.set)
        self._pool.start()
        while not (self._pool.ready or self._pool.ended):
            changed.wait()
            changed.clear()
        if self._pool.error is not None:
            raise self._pool.error
        assert self._pool.served is not None
        session = self._pool.served.slots.all[0].session
        why_not_edit = session.sequence.cache.why_not_edit()
        if why_not_edit is not None and not exact:
            logger.info("completions encode again from a change on: %s", why_not_edit)
        self._frozen_file = FrozenFile() if exact or why_not_edit is not None else None
        self._drafts = drafts
        self._draft_rows = session.config.draft_tokens
        # Rows per suggestion; the beginning that it must have may take a row per byte.
        self._rows = max(1, self._draft_rows // (drafts + 1))
        self._room = session.config.context_tokens - session.config.draft_tokens - 1
        self._tokens = tokens
        self._takes_drafts = engine.backend.takes_drafts
        self._next = NextEditor(self._tokenizer, engine.model.name, self._write)

    def complete(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        cancel: Cancel = never_cancelled,
    ) -> Completion:
        """Returns suggestions for `place` (line, code points) up to the line's end.

        Where a block begins there is one suggestion, its body as far as `BLOCK_TOKENS` allow.
        `other_parts` are of other files, which the model reads first, the least useful one first.
        """
        since = perf_counter()
        context = cursor_context(document, place)
        job, news = self._submit(
            document, place, other_parts, "completion", self._tokens, context.indent
        )
        texts, logs = [""] * self._drafts, [list[TokenLog]() for _ in range(self._drafts)]
        report = None
        for event in self._events(job, news, cancel):
            if isinstance(event, Delta):
                texts[event.index] += event.text
                logs[event.index] += event.logs
            elif isinstance(event, Finished) and event.reason == "length" and context.indent:
                texts[event.index] = whole_lines(texts[event.index])
            elif isinstance(event, Done):
                report = event.report
        if report is None:
            return Completion(drafts=(), why_not="cancelled")
        steps = map(steps_of, logs, texts)
        suggestions = filter_suggestions(context, zip(texts, steps, strict=True))
        return Completion(
            drafts=tuple(suggestions),
            reused_tokens=report.cached_tokens,
            encoded_tokens=report.prompt_tokens - report.cached_tokens,
            ms=(perf_counter() - since) * 1e3,
            why_not=None if suggestions else "filtered",
        )

    def read(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        cancel: Cancel = never_cancelled,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> bool:
        """Fills a session with what a completion at `place` will need; returns False on a cancel.

        `progress` gets (done, total) tokens meanwhile. The pool encodes stale tokens again in idle
        time.
        """
        job, news = self._submit(document, place, other_parts, "batch", 0)
        for _ in self._events(job, news, cancel):
            progress(*job.progress)
        return not job.cancelled

    def next_edit(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        uri: str,
        edits: Sequence[EditedLines],
        form: str = "auto",
        cancel: Cancel = never_cancelled,
    ) -> NextEdit:
        """Returns what may change next in the document `uri` after these edits.

        `form`: the prompt, a name of `FORMS`, or `auto`.
        """
        return self._next.next_edit(document, place, uri, edits, form, cancel)

    def _write(
        self,
        ids: list[int],
        most: int,
        stop: tuple[str, ...],
        stop_ids: Set[int | None],
        drafter: Drafter,
        cancel: Cancel,
    ) -> Iterator[outbox.Event | None]:
        """Yields the events of what the model writes after `ids`; none where that has no room."""
        if len(ids) + most > self._room:
            return
        request = GenerationRequest(
            prompts=(tuple(ids),),
            sampling=_GREEDY,
            seed=0,
            rank=PRIORITIES["completion"],
            max_tokens=most,
            stop=stop,
            stop_ids=self._stop_ids | {token for token in stop_ids if token is not None},
            logprobs=True,
            transient=True,
            owner=_NEXT_EDITS,
            draft=(lambda: drafter) if self._takes_drafts else False,
        )
        job, news = self._submit_request(request)
        try:
            yield from self._events(job, news, cancel)
        finally:
            self._pool.cancel(job)

    def close(self) -> None:
        """Frees the sessions."""
        self._pool.stop()

    def _submit(
        self,
        document: TextDocument,
        place: tuple[int, int],
        other_parts: Sequence[NamedText],
        priority: str,
        tokens: int,
        indent: int = 0,
    ) -> tuple[Job, SimpleQueue[None]]:
        """Submits a job at a place; returns it and what gets an item when it has news.

        `indent`: the job writes one body of a block, whose lines have so many spaces at least.
        """
        choices, rows = self._drafts, self._rows
        if indent:
            choices, rows, tokens = 1, max(rows, self._draft_rows // 2), BLOCK_TOKENS
        prefix, suffix = document.text_around(place, self._room * NEAR_CHARACTERS)
        ids, begin_with, passages = self._prompt(prefix, suffix, other_parts)
        request = GenerationRequest(
            prompts=(tuple(ids),),
            healed=((tuple(ids), begin_with),),
            sampling=_GREEDY,
            seed=0,
            rank=PRIORITIES[priority],
            choices=choices,
            max_tokens=min(tokens, rows - len(begin_with)),
            stop=() if indent else ("\n",),
            indent=indent,
            stop_ids=self._stop_ids,
            logprobs=True,
            transient=True,
            edits=self._frozen_file is None,
            gap=self._prompts.gap_id,
            passages=passages,
            writer=self._writer,
        )
        return self._submit_request(request)

    def _submit_request(self, request: GenerationRequest) -> tuple[Job, SimpleQueue[None]]:
        news = SimpleQueue[None]()
        job = Job(request, Outbox(_OUTBOX_BYTES, partial(news.put, None)))
        self._pool.submit(job)
        return job, news

    def _events(
        self, job: Job, news: SimpleQueue[None], cancel: Cancel
    ) -> Iterator[outbox.Event | None]:
        """Yields the events of `job` until it is done or cancelled; None: no event for a while.

        Raises the error that the pool failed with.
        """
        while True:
            event = job.outbox.take()
            if event is None:
                if cancel():
                    self._pool.cancel(job)
                    return
                try:
                    news.get(timeout=POLL_S)
                except Empty:
                    yield None
                continue
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Done):
                return

    def _prompt(
        self, prefix: str, suffix: str, other_parts: Sequence[NamedText]
    ) -> tuple[list[int], bytes, tuple[tuple[int, ...], ...]]:
        """Returns ids of a prompt that fits, the bytes that the answer must begin with, passages.

        Where edits keep nothing, other files in front would cost a whole text at each of them.
        """
        typed, room = "", self._room
        if self._frozen_file is not None:
            prefix, suffix, typed = self._frozen_file.split(prefix, suffix)
            room -= MOST_TYPED
        other_parts = other_parts if self._frozen_file is None else ()
        fitted = self._prompts.fit(prefix, suffix, room, other_parts)
        whole = [*fitted.ids, *self._tokenizer.encode(typed)]
        # Typing may have stopped inside what the tokenizer writes as one token.
        ids, begin_with = heal(self._tokenizer, whole)
        if len(begin_with) > self._rows * 2 // 3:
            ids, begin_with = whole, b""
        return ids, begin_with, fitted.passages
