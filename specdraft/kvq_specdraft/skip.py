"""Self-speculation with some layers left out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import UsageError, argument
from kvq_runtime.backends import Backend, Mode
from kvq_runtime.config import SessionConfig
from kvq_runtime.drafter import Draft, DraftContext
from kvq_runtime.passes import Work
from kvq_specdraft.guessing import SelfGuessing
from kvq_specdraft.layer_sets import Choosing, Kinds

# Tokens of the text's end that say what kind of text it is, and that layers are chosen by.
_KIND_TOKENS = 256
# Sets found in this process, by the model's fingerprint and how many layers are left out.
_known: dict[tuple[str, int], Kinds] = {}


@dataclass(kw_only=True, eq=False)
class Skip(SelfGuessing):
    """Guesses without the layers of `layers`, such as 3+5+8-10, or without `count` it chooses.

    Chosen by the dynamic program of CLaSp (arXiv 2505.24196), which keeps the state of the stream
    closest to the whole model's, and kept by the kind of text as KNN-SSD (2505.16162) keeps them:
    a text much like an earlier one begins with that one's layers. Departures: CLaSp chooses after
    every check, here once for a text, as each choice costs passes; closeness is the cosine of
    what the head makes of the state, less its mean, which is what guesses depend on. KNN-SSD tells
    kinds by hidden states and searches their sets beforehand, here counts of tokens tell them and
    sets are those found so far, for all sessions of the process. `count` 0: a third of the layers.
    """

    layers: str = ""
    count: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given = parsed(self.layers)
        if self._given and self.count:
            raise UsageError(f"{argument('draft')} skip: give layers= or count=, not both")
        if self.count < 0:
            raise UsageError(about="draft", value=f"skip: count={self.count}", possible="0 or more")
        self._text: list[int] = []
        self._chosen = False

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """See `Drafter`. Raises `UsageError` for more layers than there are."""
        layers = backend.model.num_layers
        count = len(self._given) or self.count or max(1, layers // 3)
        if count >= layers:
            raise UsageError(
                f"{argument('draft')} skip: of this model's {layers} layers {count} cannot be "
                f"left out: at most {layers - 1}"
            )
        self._mode = Mode(skipped=self._given or tuple(range(layers - count, layers)))
        backend.check_mode(self._mode)
        self._chosen = bool(self._given)
        self._count, self._num_layers = count, layers
        self._kinds = _known.setdefault((backend.model.fingerprint, count), Kinds())

    def follow(self, kept: int, new: Sequence[int]) -> None:
        """See `Drafter`. A text that goes on from elsewhere is another one."""
        if kept < len(self._text) // 2 and not self._given:
            self._chosen = False
        self._text[kept:] = new

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """See `Drafter`."""
        if not self._chosen:
            kind = self._text[-_KIND_TOKENS:]
            known = self._kinds.nearest(kind)
            if known is None:
                known = yield from self._choose(draft_context)
                self._kinds.keep(kind, known)
            self._mode, self._chosen = Mode(skipped=known), True
        return (yield from super().drafting(draft_context))

    def _choose(self, draft_context: DraftContext) -> Work[Any, tuple[int, ...]]:
        """The layers to leave out by what the model makes of the newest tokens."""
        choosing = Choosing(num_layers=self._num_layers, count=self._count)
        while (skipped := choosing.wanted()) is not None:
            draft_context.branch.rewind(0)
            passed = yield from draft_context.branch.extend(
                list(draft_context.due), mode=Mode(skipped=skipped)
            )
            choosing.take(states(passed.logits))
        draft_context.branch.rewind(0)
        return choosing.best


def parsed(layers: str) -> tuple[int, ...]:
    """Layer numbers of a text such as 3+5+8-10, in order. Raises `UsageError`."""
    found = set[int]()
    for part in filter(None, layers.split("+")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                about="draft",
                value=f"skip: layers={layers}",
                possible="layers and spans of them joined by +, such as 3+5+8-10",
            )
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def states(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length 1: the head's view of the stream's state, less what softmax cannot see."""
    centred = logits - logits.mean(axis=1, keepdims=True)
    return centred / np.linalg.norm(centred, axis=1, keepdims=True)
