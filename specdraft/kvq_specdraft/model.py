"""Guesses by a smaller model of the same vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError, argument
from kvq_runtime.backends import Backend
from kvq_runtime.config import SessionConfig, SessionRequest
from kvq_runtime.drafter import NO_DRAFT, Draft, DraftContext
from kvq_runtime.engine import Engine
from kvq_runtime.hunks import common_prefix
from kvq_runtime.passes import Passed, Work
from kvq_runtime.sequence import TokenSequence
from kvq_runtime.vocabularies import check_vocabularies
from kvq_specdraft.guessing import Guessing

# Loaded draft models by path and threads: sessions of one process share their weights.
_engines: WeakValueDictionary[tuple[str, int], Engine] = WeakValueDictionary()
_loading = Lock()


@dataclass(kw_only=True, eq=False)
class Model(Guessing):
    """Guesses with the model at `path`, a bundle or GGUF file of the same vocabulary.

    Speculative decoding as first published (arXiv 2211.17192). Each session has a cache of its own
    in it, for `context` tokens (0: as many as the session's) in the budget a session has by itself,
    and shares its weights with the other sessions of the process. `threads` 0: as many as cores.
    """

    path: str = ""
    context: int = 0
    threads: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UsageError(
                f"{argument('draft')} model: path= is missing; name a bundle or a GGUF file"
            )
        self._sequence: TokenSequence[Any] | None = None
        self._vocab_size = 0

    @property
    def held_bytes(self) -> int:
        """Its cache's budget; its weights are the process's, whoever drafts with them."""
        sequence = self._sequence
        return 0 if sequence is None else sequence.config.budget_bytes

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """See `Drafter`. Raises `BackendError` for a model of another vocabulary."""
        self.close()
        self._engine = _shared_engine(self.path, self.threads)
        check_vocabularies(f"{argument('draft')} model", self._engine.backend, backend)
        tokens = min(self.context or config.context_tokens, self._engine.model.context_length)
        own = self._engine.backend.session_config(SessionRequest(context_tokens=tokens))
        self._sequence = TokenSequence(self._engine.backend, own)
        self._vocab_size = backend.model.vocab_size

    def close(self) -> None:
        """See `Drafter`."""
        if self._sequence is not None:
            self._sequence.close()
            self._sequence = None

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """Its own guesses that were right stay in its cache."""
        sequence = self._opened
        shared = common_prefix(sequence.tokens[kept:], new)
        sequence.keep(kept + shared)
        sequence.append(new[shared:])

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """See `Drafter`; nothing where its context is full."""
        if self._opened.room < draft_context.room:
            return NO_DRAFT
        return (yield from super().drafting(draft_context))

    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, Passed]:
        """The text and the guesses so far are in the sequence, or become so."""
        sequence, seconds = self._opened, 0.0
        if new is not draft_context.due:
            sequence.append(new)
        while sequence.due():
            seconds += yield from sequence.advancing()
        with sequence.branch() as branch:
            passed = yield from branch.extend([], rows=[-1])
        logits = _of_width(passed.logits, self._vocab_size)
        return Passed(logits=logits, seconds=seconds, rows=1)

    @property
    def _opened(self) -> TokenSequence[Any]:
        assert self._sequence is not None, "a session opens its drafter"
        return self._sequence


def _of_width(logits: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Logits [R, V] of a vocabulary padded to `width` ids, none of which can be told apart."""
    missing = max(0, width - logits.shape[1])
    return np.pad(logits[:, :width], ((0, 0), (0, missing)), constant_values=-np.inf)


def _shared_engine(path: str, threads: int) -> Engine:
    with _loading:
        engine = _engines.get((path, threads))
        if engine is None:
            engine = Engine.open(path, threads=threads or None)
            _engines[path, threads] = engine
        return engine
