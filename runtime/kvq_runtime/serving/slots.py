"""A pool's slots: which request gets which, what it finds there, what goes to disk.

Owns prefix reuse and the choice of who gives way. Knows sessions and tokens, no request.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from kvq.errors import KvqError
from kvq_runtime.answering import Aids
from kvq_runtime.hunks import Hunk, common_prefix, hunks
from kvq_runtime.prediction import OFF
from kvq_runtime.serving.saving import Ids, SavedSession, SavedSessions, as_ids
from kvq_runtime.session import Session

logger = logging.getLogger(__name__)

# Fewer tokens than this are read again sooner than they are saved or looked for on disk.
WORTH_SAVING_TOKENS = 32


class Slot:
    """One session whose bytes are taken once; its content changes hands."""

    def __init__(self, session: Session[Any]) -> None:
        self.session = session
        self._whole_tokens = session.config.budget_tokens
        self.tokens: Ids = as_ids(())
        self.owner = ""
        self.saved: SavedSession | None = None
        self.busy = False
        self.dirty = False
        self.transient = False
        # Those that make of its text the one it is leased for, where that was asked for.
        self.changes: list[Hunk] | None = None
        self.released_at = 0.0
        self._squeezed = False

    def align(
        self,
        ids: Sequence[int],
        *,
        reuse: bool = True,
        edits: bool = False,
        aids: Aids[Any] | None = None,
    ) -> int:
        """Makes `ids` the session's prompt; how many of them need not be computed.

        `edits`: what follows a change in the middle is kept; see `Sequence.align`.

        A session that had to give up precision or tokens for a longer text is not reused for a
        text that fits: a fresh one is better.
        """
        if not reuse or (self._squeezed and not self._overflows(len(ids))):
            self.session.rollback(len(self.session.tokens))
            self.changes = None
        changes, self.changes = self.changes, None
        cached = self.session.align(ids, edits=edits, changes=changes, aids=aids)
        if cached == 0:
            self._squeezed = False
        return cached

    @property
    def stale(self) -> bool:
        """Whether nobody uses it and some of its text is not exact; see `Staleness`."""
        return not self.busy and self.session.sequence.encoding.staleness.stale > 0

    def shared(self, ids: Ids, owner: str, *, exact: bool) -> int:
        """Tokens it shares with a text of `owner`; what others gave it is not told by its speed.

        `exact`: of those only what was computed.
        """
        computed = self.session.sequence.encoding.staleness.computed if exact else None
        return common_prefix(self.tokens[:computed], ids) if self.owner == owner else 0

    def changed(self, ids: Ids, owner: str) -> list[Hunk]:
        """The edits that make a text of `owner` of this one; of another owner's all is new.

        They are found by comparing tokens, although an editor tells ranges of characters. Such a
        range is of a document since its last change. A prompt is cut from what stands before the
        cursor and behind it, which moves with every key, as far as there is room; the tokens at a
        range's ends depend on what stands there; and what a slot holds may be an older prompt. What
        is found here goes on to the cache with `align`, which does not look again.
        """
        same = self.owner == owner
        return hunks(self.tokens, ids) if same else [Hunk(0, len(self.tokens), list(ids))]

    def give_to(self, owner: str) -> None:
        """Belongs to `owner` from now on; what it holds of another's text is forgotten."""
        if self.owner != owner:
            self.session.rollback(len(self.session.tokens))
            self.owner, self.changes = owner, None

    def settle(self) -> None:
        """Notes what the session holds after a request; what that left unread is forgotten."""
        sequence = self.session.sequence
        unread = sequence.pending_tokens - sequence.encoding.staleness.missing
        self.session.rollback(unread if unread > 1 else 0)
        self.tokens = as_ids(self.session.tokens)
        self._squeezed = self._squeezed or self._overflows(len(self.tokens))
        self.dirty = True
        self.released_at = monotonic()

    def replaced(self, saved: SavedSession | None, owner: str) -> None:
        """Notes that the content is now that of `saved`, which is `owner`'s, or none."""
        self.owner = owner
        self.tokens = as_ids(self.session.tokens)
        self._squeezed = self._overflows(len(self.tokens))
        self.saved = saved
        self.dirty = False

    def _overflows(self, num_tokens: int) -> bool:
        return num_tokens > self._whole_tokens


class Slots:
    """All slots of a pool, and the sessions that had to leave them."""

    def __init__(self, open_session: Callable[[], Session[Any]], count: int, saved: SavedSessions):
        self._open_session = open_session
        self.saved = saved
        self.all = [Slot(open_session()) for _ in range(count)]

    def lease(
        self,
        ids: Sequence[int],
        *,
        owner: str,
        reuse: bool,
        transient: bool = False,
        predict: str | None = None,
    ) -> Slot | None:
        """A free slot for a text of `owner`, the one that shares most with it; there must be one.

        A slot that would lose more than it shares is left alone when another is free, and what
        a slot holds is copied, to be saved, before something else takes its place; None while
        that has to wait for earlier copies to reach the disk. A `transient` text, as an editor
        sends one with every key, is never saved, and takes the place of one that it is an edit of,
        or else of any other where no slot is empty. What was predicted is only shared with a text
        that would be predicted as well; `predict` as in a request.
        """
        wanted = as_ids(ids)
        exact = not self.all[0].session.predicts if predict is None else predict == OFF
        free = [slot for slot in self.all if not slot.busy]
        for slot in free:
            slot.changes = None
        slot = _for_an_editor(free, wanted, owner) if transient else None
        slot = slot or _closest(free, wanted, owner, exact=exact)
        if not (transient and slot.transient):
            slot = self._for_keeps(slot, free, wanted, owner, reuse=reuse, exact=exact)
        if slot is None:
            return None
        slot.give_to(owner)
        slot.transient = transient
        slot.busy = True
        return slot

    def _for_keeps(
        self,
        closest: Slot,
        free: Sequence[Slot],
        wanted: Ids,
        owner: str,
        *,
        reuse: bool,
        exact: bool,
    ) -> Slot | None:
        """A slot for `wanted` that costs no other text more than it must; None: not yet."""
        shared = closest.shared(wanted, owner, exact=exact) if reuse else 0
        row, on_disk = self.saved.best(wanted, owner, exact=exact) if reuse else (None, 0)
        if row is not None and on_disk >= shared + WORTH_SAVING_TOKENS:
            slot = self._make_free(free)
            if slot is not None:
                slot.give_to(owner)
                slot.replaced(row if self.saved.load(slot.session, row) else None, owner)
            return slot
        loses_more = len(closest.tokens) - shared > max(WORTH_SAVING_TOKENS, shared)
        return self._make_free(free) if loses_more and not closest.transient else closest

    def release(self, slot: Slot, *, failed: bool = False) -> None:
        """Gives a slot back. After an error nothing that it held is kept."""
        if failed:
            self._empty(slot)
        slot.settle()
        slot.dirty = not (failed or slot.transient)
        slot.busy = False

    def save_idle(self, idle_s: float) -> bool:
        """Saves one session that has been idle for so long; False when there is none."""
        before = monotonic() - idle_s
        for slot in self.all:
            if not slot.busy and slot.dirty and slot.released_at <= before:
                if not self.saved.writer.has_room:
                    return False
                self._save(slot)
                return True
        return False

    def next_save_s(self, idle_s: float) -> float | None:
        """Seconds until `save_idle` will find something, or None: nothing, or no room yet."""
        dirty = [slot.released_at for slot in self.all if not slot.busy and slot.dirty]
        if not dirty or not self.saved.writer.has_room:
            return None
        return max(0.0, min(dirty) + idle_s - monotonic())

    def next_refresh_s(self, idle_s: float) -> float | None:
        """Seconds until `refresh_idle` will find something, or None: nothing."""
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
        self.saved.writer.wait()
        while self.save_idle(0.0):
            self.saved.writer.wait()
        self.saved.writer.close()

    def close(self) -> None:
        """Frees every slot."""
        for slot in self.all:
            slot.session.close()

    def _make_free(self, free: Sequence[Slot]) -> Slot | None:
        """The free slot unused for longest, its content copied to be saved; None: not yet."""
        oldest = min(
            free, key=lambda slot: (len(slot.tokens) > 0, not slot.transient, slot.released_at)
        )
        if self._worth_saving(oldest) and not self.saved.writer.has_room:
            return None
        self._save(oldest)
        oldest.saved = None
        return oldest

    def _worth_saving(self, slot: Slot) -> bool:
        worth = len(slot.tokens) >= WORTH_SAVING_TOKENS and not slot.transient
        return slot.dirty and worth and self.saved.fits(slot.session)

    def _save(self, slot: Slot) -> None:
        if self._worth_saving(slot):
            slot.saved = self.saved.save(slot.session, slot.tokens, slot.saved, slot.owner)
        slot.dirty = False

    def _empty(self, slot: Slot) -> None:
        """Forgets everything; a session that cannot even do that is replaced."""
        try:
            slot.session.rollback(len(slot.session.tokens))
        except KvqError:
            with contextlib.suppress(KvqError):
                slot.session.close()
            slot.session = self._open_session()
        slot.saved = None


def _for_an_editor(free: Sequence[Slot], wanted: Ids, owner: str) -> Slot | None:
    """The slot of a text that `wanted` is an edit of, else an empty one, else another editor's."""
    spent = [slot for slot in free if slot.transient]
    found = [slot.changed(wanted, owner) for slot in spent]
    costs = [sum(len(hunk.new_ids) for hunk in changes) for changes in found]
    if costs and min(costs) <= len(wanted) // 2:
        best = costs.index(min(costs))
        spent[best].changes = found[best]
        return spent[best]
    empty = [slot for slot in free if not len(slot.tokens)]
    return min(empty or spent, key=lambda slot: slot.released_at, default=None)


def _closest(slots: Sequence[Slot], wanted: Ids, owner: str, *, exact: bool) -> Slot:
    """The slot whose text begins most like `wanted`; of several, the one unused for longest."""
    return max(slots, key=lambda one: (one.shared(wanted, owner, exact=exact), -one.released_at))
