"""A session's drafter at work: it follows the text, drafts, and learns what became of drafts."""

from collections.abc import Sequence
from typing import Generic

from kvq.errors import BackendError, UsageError, argument
from kvq_runtime.answer.drafter import NO_DRAFT, Draft, DraftContext, Drafter, Round
from kvq_runtime.answer.generation import Accepted, Generation
from kvq_runtime.backends import Backend, C
from kvq_runtime.sequence.branch import Branch
from kvq_runtime.sequence.passes import PassResult, Work
from kvq_runtime.sequence.sequence import TokenSequence
from kvq_runtime.sequence.states import HiddenStates


class Drafting(Generic[C]):
    """Connects one drafter, or none, with the text of a sequence."""

    def __init__(
        self, backend: Backend[C], sequence: TokenSequence[C], drafter: Drafter | None
    ) -> None:
        """Opens the drafter. Raises `BackendError` where the backend cannot take its drafts."""
        self.drafter = drafter
        self._backend = backend
        self._sequence = sequence
        # For so many more rounds the drafter is not asked.
        self._pause = 0
        if drafter is not None:
            self._check_possible(drafter)
            drafter.open(backend, sequence.config)

    def hidden_states(self) -> HiddenStates | None:
        """Returns room for the hidden states that the drafter reads, if it reads any."""
        if self.drafter is None or not self.drafter.reads_states:
            return None
        config = self._sequence.config
        return HiddenStates(1 + config.chunk_tokens + config.draft_tokens)

    def _check_possible(self, drafter: Drafter) -> None:
        """Raises `BackendError` where the backend takes no drafts, or none that branch."""
        if not self._backend.takes_drafts:
            raise BackendError(
                f"{argument('draft')} {drafter.name} is not possible with this model on the "
                f"{self._backend.name} backend, which takes no tokens back out of its recurrent "
                "states; choose none, or run a bundle with an ONNX graph"
            )
        if drafter.branches and not self._backend.takes_trees:
            raise BackendError(
                f"{argument('draft')} {drafter.name} is not possible on the "
                f"{self._backend.name} backend, which takes no drafts that branch; choose rewrite, "
                "lookup, suffix or none, or run a bundle with an ONNX graph"
            )

    @property
    def held_bytes(self) -> int:
        """Returns the bytes the drafter holds beside the cache; any thread may call it."""
        return 0 if self.drafter is None else self.drafter.held_bytes

    def close(self) -> None:
        """Frees what the drafter holds."""
        if self.drafter is not None:
            self.drafter.close()

    def reading(self) -> Work[C, float]:
        """Lets the drafter take the hidden states of what was read; returns its seconds."""
        states = self._sequence.hidden_states
        if states is None or self.drafter is None:
            return 0.0
        self._report_changes(self.drafter)
        return (yield from self.drafter.reading(states))

    def draft(
        self, generation: Generation, branch: Branch[C], due: Sequence[int]
    ) -> Work[C, Draft]:
        """Returns what the drafter guesses, as far as the answer and the branch have room for it.

        Where nothing is due the next token needs no pass, and a draft would cost one.
        """
        drafter = self.drafter
        if drafter is None or self._pause or not generation.drafts or not due:
            return NO_DRAFT
        self._report_changes(drafter)
        cache = self._sequence.cache
        room = min(generation.room - 1, cache.draft_room - len(due))
        if room < 1:
            return NO_DRAFT
        draft_context = DraftContext(
            branch=branch,
            due=due,
            room=room,
            exact_rows=generation.exact_rows,
            foresight=generation.foresight,
            hidden_states=self._sequence.hidden_states,
        )
        draft = yield from drafter.drafting(draft_context)
        branch.forget()
        _check(type(drafter).__name__, draft, room, self._backend.model.vocab_size)
        return draft if draft.is_chain else draft.first(cache.tree_room - len(due))

    def observe(self, draft: Draft, accepted: Accepted, result: PassResult) -> None:
        """Tells the drafter what the pass made of `draft`."""
        if self._pause:
            self._pause -= 1
        elif self.drafter is not None:
            self._pause = draft.pause
            self.drafter.observe(
                Round(
                    draft=draft,
                    path=accepted.path,
                    tokens=(*(draft.ids[place] for place in accepted.path), accepted.token),
                    logits=result.logits,
                    rows=result.rows,
                    seconds=result.seconds,
                )
            )

    def _report_changes(self, drafter: Drafter) -> None:
        """Tells `drafter` how the text has changed since its last call."""
        drafter.follow(*self._sequence.changes(drafter))


def _check(drafter: str, draft: Draft, room: int, vocab_size: int) -> None:
    """Raises `UsageError` for a draft that cannot be."""
    count, parents = len(draft.ids), draft.parents
    if count > room or not all(0 <= token < vocab_size for token in draft.ids):
        raise UsageError(
            f"{drafter} proposed {count} tokens; possible are up to {room} of 0 to {vocab_size - 1}"
        )
    if parents is not None and (
        len(parents) != count
        or not all(-1 <= parent < place for place, parent in enumerate(parents))
    ):
        raise UsageError(
            f"{drafter} proposed a tree with parents {parents}; possible is for each of {count} "
            "tokens an earlier one, or -1"
        )
    if draft.probabilities is not None and draft.probabilities.shape != (count, vocab_size):
        raise UsageError(
            f"{drafter} gave probabilities of shape {draft.probabilities.shape}; possible is "
            f"({count}, {vocab_size})"
        )
