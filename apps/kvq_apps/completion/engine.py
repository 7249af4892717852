"""Completions at a place of a text, over one session that follows the text by its edits.

The whole file is the prompt (prefix, suffix, middle), and the cache holds it. What has changed
since the last request, the cursor's own place included, is an edit: only new tokens go through the
model.
"""

import logging
from time import perf_counter
from typing import Any

from kvq.errors import UsageError, argument
from kvq_apps.completion.blocks import BlockTokenizer
from kvq_apps.completion.document import Document
from kvq_apps.completion.drafts import (
    DEFAULT_DRAFTS,
    DEFAULT_TOKENS,
    Completion,
    to_show,
)
from kvq_apps.completion.frozen import MOST_TYPED, Frozen
from kvq_models.infilling import FRONT_STEPS, fixed_tokens, infill_prompt, infill_tokens
from kvq_runtime.alternatives import Writer
from kvq_runtime.engine import Engine
from kvq_runtime.generation import Cancel, never
from kvq_runtime.healing import heal

logger = logging.getLogger(__name__)

# Rows that suggestions may take; longer or more ones are cut to them.
DRAFT_ROWS = 96
# Of a long file so many characters a token of the context are looked at: code has 3 to 4.
NEAR_CHARACTERS = 6


class CompletionEngine:
    """One engine, one session, up to `drafts` suggestions of up to `tokens` tokens at a place.

    `exact`: nothing that is cached ever precedes a change on its left, as on a cache that cannot
    move what follows an edit. What is typed then stands behind the frozen file (`Frozen`), and any
    other change encodes again from its place on.
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
    ) -> None:
        """`drafts` None: `DEFAULT_DRAFTS`, or one on a backend that writes no several.

        Raises `ModelError` for a model that fills in no middle, `UsageError` for none, and for
        several on such a backend.
        """
        several = engine.backend.takes_trees
        drafts = (DEFAULT_DRAFTS if several else 1) if drafts is None else drafts
        if drafts > 1 and not several:
            raise UsageError(
                f"{drafts} suggestions at one place are not possible on the {engine.backend.name} "
                f"backend: ask for one ({argument('--drafts')} 1), or choose a bundle that `kvq "
                "export` made"
            )
        if drafts < 1 or tokens < 1:
            raise UsageError("suggestions and tokens of a completion are 1 or more")
        self._tokenizer = engine.tokenizer
        fim = infill_tokens(self._tokenizer)
        self._ends = frozenset({*engine.model.stop_ids, fim.prefix, fim.suffix, fim.middle})
        self._encode = BlockTokenizer(self._tokenizer).encode
        self._writer = writer
        options: dict[str, Any] = {
            "draft_tokens": DRAFT_ROWS,
            "sink_tokens": fixed_tokens(self._tokenizer),
            "edits": not exact,
            **(session_options or {}),
        }
        self._session = engine.session(**options)
        cannot = self._session.sequence.cache.why_not_edit()
        if cannot is not None and not exact:
            logger.info("completions encode again from a change on: %s", cannot)
        self._frozen = Frozen() if exact or cannot is not None else None
        self._drafts = drafts
        # Of one suggestion; the beginning that it is given may take a row for each of its bytes.
        self._rows = max(1, self._session.config.draft_tokens // (drafts + 1))
        self._tokens = tokens

    def complete(
        self, document: Document, place: tuple[int, int], *, cancel: Cancel = never
    ) -> Completion:
        """Suggestions that go on at `place` (line, code points) up to the line's end."""
        since = perf_counter()
        session = self._session
        begin_with = self._align(document, place)
        encoded = len(session.sequence.due())
        if encoded and not session.prefill(cancel=cancel):
            return Completion(drafts=(), why_not="cancelled")
        tokens = min(self._tokens, self._rows - len(begin_with))
        found = session.drafts(
            self._drafts, tokens, method=self._writer,
            stop_strings=("\n",), stop_ids=self._ends, begin_with=begin_with,
            cancel=cancel, exact=False,
        )  # fmt: skip
        kept = to_show(document, place, ((one.text, one.logprob) for one in found))
        return Completion(
            drafts=tuple(kept),
            reused_tokens=len(session.tokens) - encoded,
            encoded_tokens=encoded,
            ms=(perf_counter() - since) * 1e3,
            why_not=None if kept else "cancelled" if cancel() else "filtered",
        )

    def expect(self, document: Document, place: tuple[int, int]) -> None:
        """A completion may be asked for at this place: idle time reads the document for it."""
        self._align(document, place)

    def refresh(self, max_tokens: int, cancel: Cancel = never) -> int:
        """Encodes some of what is not, and then of what is stale; how many tokens are left."""
        stale = self._session.refresh(max_tokens, cancel=cancel)
        return stale + len(self._session.sequence.due())

    def close(self) -> None:
        """Frees the session."""
        self._session.close()

    def _align(self, document: Document, place: tuple[int, int]) -> bytes:
        """Makes the prompt of a place the session's; the bytes that what follows begins with."""
        config = self._session.config
        room = config.context_tokens - config.draft_tokens - 1
        prefix, suffix = document.around(place, room * NEAR_CHARACTERS)
        ids, begin_with = self._prompt(prefix, suffix, room)
        self._session.align(ids, edits=self._frozen is None)
        return begin_with

    def _prompt(self, prefix: str, suffix: str, room: int) -> tuple[list[int], bytes]:
        """Ids of at most `room` tokens, and the bytes that what follows must begin with."""
        typed = ""
        if self._frozen is not None:
            prefix, suffix, typed = self._frozen.split(prefix, suffix)
            room -= MOST_TYPED
        step = max(1, room // FRONT_STEPS)
        ids = infill_prompt(self._tokenizer, prefix, suffix, room, self._encode, step=step)
        whole = [*ids, *self._tokenizer.encode(typed)]
        # Typing may have stopped inside what the tokenizer writes as one token.
        ids, begin_with = heal(self._tokenizer, whole)
        return (whole, b"") if len(begin_with) > self._rows * 2 // 3 else (ids, begin_with)
