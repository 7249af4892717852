"""Completions at a place of a text, by a pool of this process whose sessions follow the texts.

The whole file is the prompt (prefix, suffix, middle), and the cache holds it. What has changed
since the last request, the cursor's own place included, is an edit: only new tokens go through the
model. Each of the files that somebody was in last has a session of its own.
"""

import logging
from collections.abc import Callable, Iterator
from threading import Event
from time import perf_counter
from typing import Any

from kvq.errors import UsageError, argument
from kvq.settings import cache_folder
from kvq_apps.completion.document import Document
from kvq_apps.completion.drafts import (
    DEFAULT_DRAFTS,
    DEFAULT_TOKENS,
    Completion,
    to_show,
)
from kvq_apps.completion.frozen import MOST_TYPED, Frozen
from kvq_apps.completion.prompts import GapPrompts
from kvq_models.infilling import fixed_tokens, infill_tokens
from kvq_runtime.alternatives import Writer
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.generation import Cancel, never
from kvq_runtime.healing import heal
from kvq_runtime.serving import outbox
from kvq_runtime.serving.job import Job
from kvq_runtime.serving.outbox import Delta, Done, Failed, Outbox
from kvq_runtime.serving.pool import PoolConfig, Served, SessionPool
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.saving import SavedSessions
from kvq_runtime.serving.scheduler import PRIORITIES
from kvq_runtime.serving.slots import Slots

logger = logging.getLogger(__name__)

# Rows that suggestions may take; longer or more ones are cut to them.
DRAFT_ROWS = 96
# Of a long file so many characters a token of the context are looked at: code has 3 to 4.
NEAR_CHARACTERS = 6
# How long a request waits before it asks whether it is still wanted.
POLL_S = 0.005
_OUTBOX_BYTES = 1 << 20
_GREEDY = Sampling(temperature=0.0)


class CompletionEngine:
    """One engine, a session for each of `files`, up to `drafts` suggestions at a place.

    A suggestion has up to `tokens` tokens. `exact`: nothing that is cached ever precedes a change
    on its left, as on a cache that cannot move what follows an edit. What is typed then stands
    behind the frozen file (`Frozen`), and any other change encodes again from its place on.
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
        chunk_tokens: int | None = None,
    ) -> None:
        """`drafts` None: `DEFAULT_DRAFTS`, or one on a backend that writes no several.

        `chunk_tokens` of a file are read at once, None: as many as take about 50 ms. Raises
        `ModelError` for a model that fills in no middle, `UsageError` for no suggestions, and for
        several on such a backend, and what opening a session raises.
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
        self._ends = frozenset({*engine.model.stop_ids, fim.prefix, fim.suffix, fim.middle})
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
                stop_ids=self._ends,
                slots=Slots(lambda: engine.session(**options), files, saved),
                close=lambda: None,  # the engine is its owner's
            )

        changed = Event()
        config = PoolConfig(sessions=files, chunk_tokens=chunk_tokens)
        self._pool = SessionPool(load, config, changed.set)
        self._pool.start()
        while not (self._pool.ready or self._pool.ended):
            changed.wait()
            changed.clear()
        if self._pool.error is not None:
            raise self._pool.error
        assert self._pool.served is not None
        session = self._pool.served.slots.all[0].session
        cannot = session.sequence.cache.why_not_edit()
        if cannot is not None and not exact:
            logger.info("completions encode again from a change on: %s", cannot)
        self._frozen = Frozen() if exact or cannot is not None else None
        self._drafts = drafts
        # Of one suggestion; the beginning that it is given may take a row for each of its bytes.
        self._rows = max(1, session.config.draft_tokens // (drafts + 1))
        self._room = session.config.context_tokens - session.config.draft_tokens - 1
        self._tokens = tokens

    def complete(
        self, document: Document, place: tuple[int, int], *, cancel: Cancel = never
    ) -> Completion:
        """Suggestions that go on at `place` (line, code points) up to the line's end."""
        since = perf_counter()
        job, news = self._asked(document, place, "completion", self._tokens)
        texts, logprobs = [""] * self._drafts, [0.0] * self._drafts
        report = None
        for event in self._events(job, news, cancel):
            if isinstance(event, Delta):
                texts[event.index] += event.text
                logprobs[event.index] += sum(log.logprob for log in event.logs)
            elif isinstance(event, Done):
                report = event.report
        if report is None:
            return Completion(drafts=(), why_not="cancelled")
        kept = to_show(document, place, zip(texts, logprobs, strict=True))
        return Completion(
            drafts=tuple(kept),
            reused_tokens=report.cached_tokens,
            encoded_tokens=report.prompt_tokens - report.cached_tokens,
            ms=(perf_counter() - since) * 1e3,
            why_not=None if kept else "filtered",
        )

    def read(
        self,
        document: Document,
        place: tuple[int, int],
        *,
        cancel: Cancel = never,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> bool:
        """Has a session hold what a completion at `place` will need; False once `cancel` says so.

        `progress` gets (done, total) tokens meanwhile. What is stale then, the pool's idle time
        encodes again.
        """
        job, news = self._asked(document, place, "batch", 0)
        for _ in self._events(job, news, cancel):
            progress(*job.progress)
        return not job.cancelled

    def close(self) -> None:
        """Frees the sessions."""
        self._pool.stop()

    def _asked(
        self, document: Document, place: tuple[int, int], priority: str, tokens: int
    ) -> tuple[Job, Event]:
        """What the pool is asked for at a place, and what is set when it has said something."""
        prefix, suffix = document.around(place, self._room * NEAR_CHARACTERS)
        ids, begin_with = self._prompt(prefix, suffix)
        request = GenerationRequest(
            prompts=(tuple(ids),),
            healed=((tuple(ids), begin_with),),
            sampling=_GREEDY,
            seed=0,
            rank=PRIORITIES[priority],
            choices=self._drafts,
            max_tokens=min(tokens, self._rows - len(begin_with)),
            stop=("\n",),
            stop_ids=self._ends,
            logprobs=True,
            transient=True,
            edits=self._frozen is None,
            writer=self._writer,
        )
        news = Event()
        job = Job(request, Outbox(_OUTBOX_BYTES, news.set))
        self._pool.submit(job)
        return job, news

    def _events(self, job: Job, news: Event, cancel: Cancel) -> Iterator[outbox.Event | None]:
        """What the pool says of `job`, until it is done or cancelled; None: nothing for a while.

        Raises what the pool failed with.
        """
        while True:
            event = job.outbox.take()
            if event is None:
                if cancel():
                    self._pool.cancel(job)
                    return
                news.wait(POLL_S)
                news.clear()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Done):
                return

    def _prompt(self, prefix: str, suffix: str) -> tuple[list[int], bytes]:
        """Ids of a prompt that fits, and the bytes that what follows must begin with."""
        typed, room = "", self._room
        if self._frozen is not None:
            prefix, suffix, typed = self._frozen.split(prefix, suffix)
            room -= MOST_TYPED
        ids, _ = self._prompts.fitted(prefix, suffix, room)
        whole = [*ids, *self._tokenizer.encode(typed)]
        # Typing may have stopped inside what the tokenizer writes as one token.
        ids, begin_with = heal(self._tokenizer, whole)
        return (whole, b"") if len(begin_with) > self._rows * 2 // 3 else (ids, begin_with)
