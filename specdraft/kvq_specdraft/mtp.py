"""The drafter `mtp`: the draft head that comes with a model guesses (multi-token prediction)."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvq.config import Budget
from kvq.errors import BackendError, argument
from kvq_runtime.answer.drafter import NO_DRAFT, Draft, DraftContext
from kvq_runtime.backends import Backend, Mode
from kvq_runtime.config import SessionConfig, SessionRequest
from kvq_runtime.sequence.passes import PassResult, Work
from kvq_runtime.sequence.sequence import TokenSequence
from kvq_runtime.sequence.states import HiddenStates
from kvq_specdraft.guessing import GuessingWithCache
from kvq_specdraft.quantspec import can_narrow, frequent_tokens

# The most states of undrafted tokens that are read in one pass.
_MOST_TOGETHER = 64


@dataclass(kw_only=True, eq=False)
class Mtp(GuessingWithCache):
    """Guesses with the model's draft head, one layer over the model's states.

    Multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437, section 2.2). The head reads a token
    together with the state that the model made of the token before, and guesses the next token.
    Further guesses read the head's own state. It has a cache of its own for the text, within the
    budget of a session that is opened with this drafter (beside it where the drafter comes later).
    It shares the embedding and the output head of the model.

    Row i of its cache is token `_base` + i with the state before it. If states are missing, as
    after a session was loaded, it begins anew behind the gap.

    Args:
        most: The most guesses of a draft. Default 7.
        least: See `Guessing`; default 0.
        head: Guesses are among the first so many tokens, as in `QuantSpec`; default 0.
    """

    head: int = 0
    reads_states = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._text: list[int] = []
        self._base = 1

    def open(self, backend: Backend[Any], config: SessionConfig) -> None:
        """Opens the draft head. Raises `BackendError` for a model without one."""
        self.close()
        paged = backend.paged
        if paged is None:
            raise BackendError(
                f"{argument('draft')} mtp is not possible on the {backend.name} backend, which "
                "tells no states; run a bundle with an ONNX graph, or choose another drafter"
            )
        draft_head = paged.draft_head
        self._mode = Mode(head_tokens=self.head)
        draft_head.check_mode(self._mode)
        self._may_narrow = not self.head and can_narrow(draft_head)
        draft_config = config.draft_head or draft_head.session_config(_same_length(config))
        self._sequence = TokenSequence(draft_head, draft_config)
        self._sequence.hidden_states = HiddenStates(0)  # told with each pass, and not kept
        self._text, self._base = [], 1

    def follow(self, kept: int, new: Sequence[int]) -> None:
        self._text[kept:] = new
        sequence = self._opened
        sequence.keep(min(len(sequence), max(0, kept - self._base)))

    def reading(self, states: HiddenStates) -> Work[Any, float]:
        seconds = 0.0
        while self._missing(states):
            seconds += (yield from self._read(states)).seconds
        return seconds

    def drafting(self, draft_context: DraftContext) -> Work[Any, Draft]:
        """Guesses, unless the state before the due token is unknown."""
        assert draft_context.hidden_states is not None
        together = min(_MOST_TOGETHER, self._opened.chunk_tokens)
        while self._missing(draft_context.hidden_states) > together:
            yield from self._read(draft_context.hidden_states)
        known = draft_context.hidden_states.stop == len(self._text) - 1 and self._missing(
            draft_context.hidden_states
        )
        if len(draft_context.due) != 1 or not known:
            return NO_DRAFT
        if self._may_narrow:
            self._mode = Mode(head_tokens=frequent_tokens(self._text))
        with ExitStack() as self._forgotten:
            return (yield from super().drafting(draft_context))

    def _guess(self, draft_context: DraftContext, new: Sequence[int]) -> Work[Any, PassResult]:
        """Runs the head; the first guess reads all new states of the model, and those rows stay."""
        assert draft_context.hidden_states is not None
        if new is draft_context.due:
            passed = yield from self._read(draft_context.hidden_states, draft_context.exact_rows)
            self._branch = self._forgotten.enter_context(self._opened.branch())
        else:
            passed = yield from self._branch.extend(
                new, exact_rows=draft_context.exact_rows, mode=self._mode, joined=self._state
            )
        assert passed.hidden_states is not None
        self._state = passed.hidden_states[-1:]
        return passed

    def _read(self, states: HiddenStates, exact_rows: int | None = None) -> Work[Any, PassResult]:
        """Adds missing rows to the cache; with `exact_rows` it returns logits of the last one."""
        sequence, first = self._opened, self._next
        count = min(self._missing(states), sequence.chunk_tokens)
        ids = self._text[first : first + count]
        with sequence.branch() as branch:
            passed = yield from branch.extend(
                ids,
                rows=[] if exact_rows is None else [count - 1],
                exact_rows=exact_rows or 0,
                mode=self._mode,
                joined=states.of(first - 1, first - 1 + count),
            )
            branch.commit(range(count))
        states.drop(self._next - 1)
        return passed

    def _missing(self, states: HiddenStates) -> int:
        """Returns how many rows can be read now: tokens whose state before them is known."""
        if not len(states):
            return 0
        if states.first >= self._next:
            self._opened.keep(0)
            self._base = states.first + 1
        return max(0, min(states.stop + 1, len(self._text)) - self._next)

    @property
    def _next(self) -> int:
        """Returns the token whose row is the next of its cache."""
        return self._base + len(self._opened)


def _same_length(config: SessionConfig) -> SessionRequest:
    """Returns the request of a cache for the text of such a session, with the same widths."""
    return SessionRequest(
        kv_budget=Budget(tokens=config.budget_tokens),
        k_bits=config.plan.k_bits,
        v_bits=config.plan.v_bits,
        context_tokens=config.context_tokens,
        chunk_tokens=config.chunk_tokens,
        draft_tokens=config.draft_tokens,
    )
