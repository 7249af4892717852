"""A pool's slots: which request gets which, what it finds there, and what goes to disk."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from kvq.errors import KvqError
from kvq_runtime.sequence.hunks import Hunk, common_prefix, hunks, with_moved_gap
from kvq_runtime.sequence.passages import without_passages
from kvq_runtime.sequence.prediction import OFF
from kvq_runtime.sequence.staleness import next_tokens
from kvq_runtime.serving.request import GenerationRequest
from kvq_runtime.serving.saving import Ids, SavedSession, SavedSessions, as_ids
from kvq_runtime.session.answering import AnswerHelpers
from kvq_runtime.session.session import Session

logger = logging.getLogger(__name__)

# Reading fewer tokens than this again is faster than saving or loading them.
WORTH_SAVING_TOKENS = 32
# An edit of another text pays where it saves reading so many tokens.
LEAST_SAVED_TOKENS = 256
# Tokens at the end of a prompt, most of which stay where its conversation goes on.
END_TOKENS = 64
# While the disk is behind, it is looked at this often whether the next text can be saved.
ROOM_CHECK_S = 0.5
# An edit is looked for in so many texts, those that share the longest beginning.
COMPARED_TEXTS = 8


class Slot:
    """Holds one session, whose bytes are taken once; its content changes."""

    def __init__(self, session: Session[Any]) -> None:
        self.session = session
        self._whole_tokens = session.config.budget_tokens
        self.tokens: Ids = as_ids(())
        self.owner = ""
        self.saved: SavedSession | None = None
        self.busy = False
        self.dirty = False
        self.transient = False
        # An editor's text without its passages; None: all of it.
        self.without_passages: Ids | None = None
        # Edits that turn its text into the one it is leased for, where these were computed.
        self.changes: list[Hunk] | None = None
        self.released_at = 0.0
        self._squeezed = False
        self._prompt_tokens = 0

    def align(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = True,
        edits: bool = False,
        helpers: AnswerHelpers[Any] | None = None,
    ) -> int:
        """Makes `ids` the session's prompt; returns how many of them need not be computed.

        `edits`: what follows a change in the middle is kept, see `TokenSequence.align`; otherwise
        what an earlier edit moved is not reused. A session that gave up precision or tokens for a
        longer text is not reused for a text that fits, as a fresh one is better.
        """
        if not edits and self.session.sequence.encoding.staleness.first_moved is not None:
            self.session.sequence.drop_stale()
        if not reuse or (self._squeezed and not self._overflows(len(ids))):
            self.session.rollback(len(self.session.tokens))
            self.changes = None
        changes, self.changes = self.changes, None
        self._prompt_tokens = len(ids)
        cached = self.session.align(ids, edits=edits, changes=changes, helpers=helpers)
        if cached == 0:
            self._squeezed = False
        return cached

    @property
    def stale(self) -> bool:
        """Returns whether it is idle and some of its text is not exact, see `Staleness`."""
        return not self.busy and self.session.sequence.encoding.staleness.stale > 0

    def shared(self, prompt: "_Prompt") -> int:
        """Returns how many tokens `prompt` may share with its text.

        A text of another owner shares none, so that its speed tells nothing about others' texts.
        """
        if self.owner != prompt.owner:
            return 0
        staleness = self.session.sequence.encoding.staleness
        ends = (
            None if prompt.predicted else staleness.computed,
            None if prompt.moved else staleness.first_moved,
        )
        usable = min((end for end in ends if end is not None), default=None)
        return common_prefix(self.tokens[:usable], prompt.ids)

    def cost_of(self, prompt: "_Prompt") -> int:
        """Returns how many new tokens an edit into `prompt` brings, without those of passages.

        Passages are of other files: two texts that have some in common are not one file.
        """
        if self.owner != prompt.owner:
            return len(prompt.without_passages)
        before = self.tokens if self.without_passages is None else self.without_passages
        return sum(len(hunk.new_ids) for hunk in hunks(before, prompt.without_passages))

    def edits_to(self, ids: Ids, owner: str) -> list[Hunk]:
        """Returns the edits that turn this text into `ids`; for another owner all is new.

        They are found by comparing tokens, although an editor reports ranges of characters. Such a
        range belongs to a document, but a prompt is a part of it around the cursor, which moves
        with every key; the tokens at the ends of a range depend on what stands there; and a slot
        may hold an older prompt. `align` passes the edits on and does not search again.
        """
        same = self.owner == owner
        return hunks(self.tokens, ids) if same else [Hunk(0, len(self.tokens), list(ids))]

    def continues(self, changes: Sequence[Hunk]) -> bool:
        """Decides whether edits keep the end of its prompt, as a conversation's next turn does."""
        stop = self._prompt_tokens
        start = stop - END_TOKENS
        lost = sum(max(0, min(hunk.stop, stop) - max(hunk.start, start)) for hunk in changes)
        return 2 * lost <= END_TOKENS

    def give_to(self, owner: str) -> None:
        """Gives the slot to `owner`, and forgets a text that belongs to another one."""
        if self.owner != owner:
            self.session.rollback(len(self.session.tokens))
            self.owner, self.changes = owner, None

    def settle(self) -> None:
        """Notes what the session holds after a request, and forgets what was not read."""
        sequence = self.session.sequence
        unread = sequence.pending_tokens - sequence.encoding.staleness.missing
        self.session.rollback(unread if unread > 1 else 0)
        self.tokens = as_ids(self.session.tokens)
        self._squeezed = self._squeezed or self._overflows(len(self.tokens))
        self.dirty = True
        self.released_at = monotonic()

    def mark_loaded(self, saved: SavedSession | None, owner: str) -> None:
        """Notes that the content is now that of `saved`, which belongs to `owner`, or none."""
        self.owner = owner
        self.tokens = as_ids(self.session.tokens)
        self._prompt_tokens = len(self.tokens)
        self._squeezed = self._overflows(len(self.tokens))
        self.saved = saved
        self.dirty = False

    def _overflows(self, num_tokens: int) -> bool:
        return num_tokens > self._whole_tokens


class Slots:
    """Holds all slots of a pool, and the sessions that had to leave them."""

    def __init__(self, open_session: Callable[[], Session[Any]], count: int, saved: SavedSessions):
        self._open_session = open_session
        self.saved = saved
        self.all = [Slot(open_session()) for _ in range(count)]

    def lease(self, request: GenerationRequest) -> Slot:
        """Returns a free slot for the first prompt of `request`, the one that shares most with it.

        There must be a free slot. A slot that would lose more than it shares is left alone when
        another one is free. What a slot holds is copied, to be saved, before something else takes
        its place; a disk that is behind holds up no request, and the text is read again later.

        A `transient` text, which an editor sends with every key, is never saved. It takes the place
        of a text that it is an edit of, else an empty slot, else any other. With `edits` another
        text may take the place of a text that it is an edit of, where that saves much reading.
        Predicted tokens are shared only with a text that would be predicted too, and moved ones
        with a text that may be edited.
        """
        (ids, _), owner, passages = request.read[0], request.owner, request.passages
        edits, transient, reuse = request.edits, request.transient, request.reuse
        predict = request.predict
        predicted = self.all[0].session.predicts if predict is None else predict != OFF
        outside = as_ids(without_passages(ids, passages) if passages else ids)
        prompt = _Prompt(as_ids(ids), owner, outside, predicted=predicted, moved=edits)
        free = [slot for slot in self.all if not slot.busy]
        for slot in free:
            slot.changes = None
        if transient:
            slot = _editor_slot(free, prompt) or _closest_slot(free, prompt)
            if not slot.transient:
                slot = self._kept_slot(slot, free, prompt, reuse=reuse)
        elif edits and reuse and (edit := self._best_edit(free, prompt)) is not None:
            slot = self._edited_slot(edit, free, prompt)
        else:
            slot = self._kept_slot(_closest_slot(free, prompt), free, prompt, reuse=reuse)
        slot.give_to(owner)
        if edits and not transient and slot.changes is None:
            shared = common_prefix(slot.tokens, prompt.ids)
            slot.changes = [Hunk(shared, len(slot.tokens), prompt.ids[shared:].tolist())]
        if edits and transient and request.gap is not None:
            tokens = as_ids(slot.session.tokens)
            changes = hunks(tokens, prompt.ids) if slot.changes is None else slot.changes
            slot.changes = with_moved_gap(tokens, changes, request.gap)
        slot.transient, slot.busy = transient, True
        slot.without_passages = outside if transient else None
        return slot

    def _kept_slot(
        self, closest: Slot, free: Sequence[Slot], prompt: "_Prompt", *, reuse: bool
    ) -> Slot:
        """Returns a slot for `prompt` that costs no other text more than it must."""
        exact = not (prompt.predicted or prompt.moved)
        shared = closest.shared(prompt) if reuse else 0
        row, on_disk = (
            self.saved.best(prompt.ids, prompt.owner, exact=exact) if reuse else (None, 0)
        )
        if row is not None and on_disk >= shared + WORTH_SAVING_TOKENS:
            return self._copied_slot(row, free, prompt)
        loses_more = len(closest.tokens) - shared > max(WORTH_SAVING_TOKENS, shared)
        return self._make_free(free) if loses_more and not closest.transient else closest

    def _copied_slot(
        self, text: Slot | SavedSession, free: Sequence[Slot], prompt: "_Prompt"
    ) -> Slot:
        """Returns a slot that holds `text`, or another one if it cannot be used."""
        slot = self._make_free(free)
        if slot is text:
            return slot
        slot.give_to(prompt.owner)
        if isinstance(text, Slot):
            with contextlib.suppress(KvqError, MemoryError):
                slot.session.restore(text.session.capture())
            slot.mark_loaded(None, prompt.owner)
        else:
            loaded = self.saved.load(slot.session, text)
            slot.mark_loaded(text if loaded else None, prompt.owner)
        return slot

    def _best_edit(self, free: Sequence[Slot], prompt: "_Prompt") -> "_Edit | None":
        """Returns the edit of a text into `prompt` that leaves least to read; None: no good one.

        What an edit moves is not exact, so it saves `LEAST_SAVED_TOKENS`.
        """
        session = self.all[0].session
        if session.sequence.cache.why_not_edit() is not None:
            return None
        slots = [slot for slot in free if slot.owner == prompt.owner and not slot.transient]
        texts = [*slots, *self.saved.of(prompt.owner)]
        shared = {text: common_prefix(text.tokens, prompt.ids) for text in texts}
        unread = len(prompt.ids) - max(shared.values(), default=0)
        best, least_unread = None, unread - LEAST_SAVED_TOKENS
        # A change of a sink computes all that follows again.
        texts = [text for text in texts if shared[text] >= session.config.plan.sink_tokens]
        for text in sorted(texts, key=lambda text: -shared[text])[:COMPARED_TEXTS]:
            if least_unread <= 0:
                break
            changes = hunks(text.tokens, prompt.ids)
            unread = sum(
                len(new) + next_tokens(stop - start, len(new)) for start, stop, new in changes
            )
            if unread <= least_unread:
                best, least_unread = _Edit(text, changes), unread - 1
        return best

    def _edited_slot(self, edit: "_Edit", free: Sequence[Slot], prompt: "_Prompt") -> Slot:
        """Returns a slot that holds the text of `edit`, to be edited.

        A conversation goes on in its own slot. A text that only resembles the prompt is copied.
        Where that fails, there is nothing to edit.
        """
        text = edit.text
        if isinstance(text, Slot) and text.continues(edit.changes):
            slot = text
        else:
            slot = self._copied_slot(text, free, prompt)
        if np.array_equal(slot.tokens, text.tokens):
            slot.changes = edit.changes
        return slot

    def release(self, slot: Slot, *, failed: bool = False) -> None:
        """Gives a slot back. After an error nothing that it held is kept."""
        if failed:
            self._empty(slot)
        slot.settle()
        slot.dirty = not (failed or slot.transient)
        slot.busy = False

    def save_idle(self, idle_s: float) -> bool:
        """Saves one session that has been idle for so long; False: there is none, or no room."""
        before = monotonic() - idle_s
        for slot in self.all:
            if not slot.busy and slot.dirty and slot.released_at <= before and self.saved.has_room:
                self._save(slot)
                return True
        return False

    def next_save_s(self, idle_s: float) -> float | None:
        """Returns the seconds until `save_idle` may find something; None: nothing."""
        dirty = [slot.released_at for slot in self.all if not slot.busy and slot.dirty]
        if not dirty:
            return None
        least_s = 0.0 if self.saved.has_room else ROOM_CHECK_S
        return max(least_s, min(dirty) + idle_s - monotonic())

    def next_refresh_s(self, idle_s: float) -> float | None:
        """Returns the seconds until `refresh_idle` finds something; None: nothing."""
        stale = [slot.released_at for slot in self.all if slot.stale]
        return max(0.0, min(stale) + idle_s - monotonic()) if stale else None

    def refresh_idle(self, idle_s: float, max_tokens: int) -> bool:
        """Encodes stale tokens of one text that has been idle for so long; False: there is none."""
        before = monotonic() - idle_s
        for slot in self.all:
            if slot.stale and slot.released_at <= before:
                try:
                    slot.session.refresh(max_tokens)
                except Exception as error:  # one text's fault must not end the pool
                    logger.error("a stale text is forgotten: refreshing it failed", exc_info=error)
                    self.release(slot, failed=True)
                return True
        return False

    def save_all(self) -> None:
        """Saves what is not saved yet, at the end; returns when it is on disk."""
        self.saved.flush()
        while self.save_idle(0.0):
            self.saved.flush()
        self.saved.close()

    def close(self) -> None:
        for slot in self.all:
            slot.session.close()

    def _make_free(self, free: Sequence[Slot]) -> Slot:
        """Returns the free slot unused for longest, its content copied to be saved."""
        oldest = min(
            free, key=lambda slot: (len(slot.tokens) > 0, not slot.transient, slot.released_at)
        )
        self._save(oldest)
        oldest.saved = None
        return oldest

    def _save(self, slot: Slot) -> None:
        """Saves a slot's text, if that is worth it and the disk is not behind."""
        worth = len(slot.tokens) >= WORTH_SAVING_TOKENS and not slot.transient
        if slot.dirty and worth and self.saved.fits(slot.session):
            if self.saved.has_room:
                slot.saved = self.saved.save(slot.session, slot.tokens, slot.saved, slot.owner)
            else:
                logger.info("a session was not saved: others are still on their way to the disk")
        slot.dirty = False

    def _empty(self, slot: Slot) -> None:
        """Forgets everything; replaces a session that cannot even do that."""
        try:
            slot.session.rollback(len(slot.session.tokens))
        except KvqError:
            with contextlib.suppress(KvqError):
                slot.session.close()
            slot.session = self._open_session()
        slot.saved = None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Holds a text that needs a slot: its ids and owner, and what it may share of other texts.

    `without_passages` are its tokens that belong to no other text, see `passages`. `predicted`:
    tokens whose keys and values were predicted. `moved`: those that an edit moved.
    """

    ids: Ids
    owner: str
    without_passages: Ids
    predicted: bool
    moved: bool


@dataclass(frozen=True, slots=True)
class _Edit:
    """Holds a text, of a slot or on disk, and the changes that make a prompt of it."""

    text: Slot | SavedSession
    changes: list[Hunk]


def _editor_slot(free: Sequence[Slot], prompt: _Prompt) -> Slot | None:
    """Returns the slot of a text that `prompt` is an edit of, else an empty or an editor's one.

    Of editors' texts the owner's own go first: files of others stay where they are.
    """
    transient = [slot for slot in free if slot.transient]
    costs = [slot.cost_of(prompt) for slot in transient]
    if costs and min(costs) <= len(prompt.without_passages) // 2:
        slot = transient[costs.index(min(costs))]
        slot.changes = slot.edits_to(prompt.ids, prompt.owner)
        return slot
    empty = [slot for slot in free if not len(slot.tokens)]
    of_owner = [slot for slot in transient if slot.owner == prompt.owner]
    return min(empty or of_owner or transient, key=lambda slot: slot.released_at, default=None)


def _closest_slot(slots: Sequence[Slot], prompt: _Prompt) -> Slot:
    """Returns the slot whose text shares the longest beginning; of several the longest unused."""
    return max(slots, key=lambda slot: (slot.shared(prompt), -slot.released_at))
