"""The drafter `model`: a smaller model of the same vocabulary guesses."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError, argument
from kvq_runtime.answer.drafter import NO_DRAFT, Draft, DraftContext
from kvq_runtime.backends import Backend
from kvq_runtime.config import SessionConfig, SessionRequest
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.hunks import common_prefix
from kvq_runtime.sequence.passes import PassResult, Work
from kvq_runtime.sequence.sequence import TokenSequence
from kvq_runtime.session.vocabularies import check_vocabularies
from kvq_specdraft.guessing import GuessingWithCache

# Loaded draft models by path and threads; the sessions of a process share their weights.
_engines: WeakValueDictionary[tuple[str, int], Engine] = WeakValueDictionary()
_loading = Lock()


@dataclass(kw_only=True, eq=False)
class Model(GuessingWithCache):
    """Guesses with a smaller model of the same vocabulary.

    This is speculative decoding as first published (arXiv 2211.17192). Each session has a cache of
    its own in the draft model, with the budget of a session by itself. The sessions of a process
    share the draft model's weights.

    Args:
        most: The most guesses of a draft. Default 7.
        least: See `Guessing`; default 0.
        path: A bundle or GGUF file; required.
        context: Tokens that the cache of the draft model holds; 0, the default: as many as the
            session's.
        threads: Threads of the draft model; 0, the default: as many as cores.
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
        self._vocab_size = 0

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """Opens the draft model. Raises `BackendError` if its vocabulary is another one."""
        self.close()
        self._engine = _shared_engine(self.path, self.threads)
        check_vocabularies(f"{argument('draft')} model", self._engine.backend, backend)
        tokens = min(self.context or config.context_tokens, self._engine.model.context_length)
        draft_config = self._engine.backend.session_config(SessionRequest(context_tokens=tokens))
        self._sequence = TokenSequence(self._engine.backend, draft_config)
        self._vocab_size = backend.model.vocab_size

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """Follows the text; guesses that were right stay in the cache."""
        sequence = self._opened
        shared = common_prefix(sequence.tokens[kept:], new)
        sequence.keep(kept + shared)
        sequence.append(new[shared:])

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """Guesses, unless the context is full."""
        if self._opened.room < draft_context.room:
            return NO_DRAFT
        return (yield from super().drafting(draft_context))

    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, PassResult]:
        """Runs the draft model over all tokens that it has not read, `new` included."""
        sequence, seconds = self._opened, 0.0
        if new is not draft_context.due:
            sequence.append(new)
        while sequence.due():
            seconds += yield from sequence.advancing()
        with sequence.branch() as branch:
            passed = yield from branch.extend([], rows=[-1])
        logits = _of_width(passed.logits, self._vocab_size)
        return PassResult(logits=logits, seconds=seconds, rows=1)


def _of_width(logits: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Returns logits [R, V] of a vocabulary of `width` ids; ids that are missing get -inf."""
    missing = max(0, width - logits.shape[1])
    return np.pad(logits[:, :width], ((0, 0), (0, missing)), constant_values=-np.inf)


def _shared_engine(path: str, threads: int) -> Engine:
    with _loading:
        engine = _engines.get((path, threads))
        if engine is None:
            engine = Engine.open(path, threads=threads or None)
            _engines[path, threads] = engine
        return engine
