"""The server's arenas: which request gets which, what it finds there, what goes to disk.

Owns prefix reuse and the choice of who gives way. Knows sessions and tokens, no request.
"""

import contextlib
from collections.abc import Callable, Sequence
from time import monotonic

from kvq.errors import KvqError
from kvq_apps.serve.saved import Ids, SavedSession, SavedSessions, as_ids, common_prefix
from kvq_runtime.session import Session

# Fewer tokens than this are read again sooner than they are saved or looked for on disk.
WORTH_SAVING_TOKENS = 32


class Arena:
    """One session whose bytes are taken once; its content changes hands."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tokens: Ids = as_ids(())
        self.saved: SavedSession | None = None
        self.busy = False
        self.dirty = False
        self.transient = False
        self.released_at = 0.0
        self._squeezed = False

    def reuse(self, ids: Sequence[int], *, allowed: bool = True) -> int:
        """Keeps what the session shares with `ids`; how many of these need not be computed.

        A session that had to give up precision or tokens for a longer text is not reused for a
        text that fits: a fresh one is better.
        """
        wanted, held = as_ids(ids), as_ids(self.session.tokens)
        shared = common_prefix(held, wanted) if allowed else 0
        if self._squeezed and not self._overflows(len(wanted)):
            shared = 0
        self.session.rollback(len(held) - shared)
        if shared == 0:
            self._squeezed = False
        # The last token goes through the model again when its logits were dropped.
        computed = shared - self.session.pending_tokens
        return max(0, min(computed, len(wanted) - 1))

    def settle(self) -> None:
        """Notes what the session holds after a request."""
        self.tokens = as_ids(self.session.tokens)
        self._squeezed = self._squeezed or self._overflows(len(self.tokens))
        self.dirty = True
        self.released_at = monotonic()

    def replaced(self, saved: SavedSession | None) -> None:
        """Notes that the content is now that of `saved`, or none."""
        self.tokens = as_ids(self.session.tokens)
        self._squeezed = self._overflows(len(self.tokens))
        self.saved = saved
        self.dirty = False

    def _overflows(self, num_tokens: int) -> bool:
        stats = self.session.stats()
        return num_tokens * stats.bytes_per_token > stats.kv_budget


class Arenas:
    """All arenas of a server, and the sessions that had to leave them."""

    def __init__(self, open_session: Callable[[], Session], count: int, saved: SavedSessions):
        self._open_session = open_session
        self.saved = saved
        self.all = [Arena(open_session()) for _ in range(count)]

    def lease(self, ids: Sequence[int], *, reuse: bool, transient: bool = False) -> Arena | None:
        """A free arena for a text, the one that shares most with it; there must be one.

        An arena that would lose more than it shares is left alone when another is free, and what
        an arena holds is copied, to be saved, before something else takes its place; None while
        that has to wait for earlier copies to reach the disk. A `transient` text, as an editor
        sends one with every key, takes the place of another and is never saved.
        """
        wanted = as_ids(ids)
        free = [arena for arena in self.all if not arena.busy]
        spent = [arena for arena in free if arena.transient]
        arena = _closest(spent if transient and spent else free, wanted)
        if not (transient and arena.transient):
            arena = self._for_keeps(arena, free, wanted, reuse=reuse)
        if arena is None:
            return None
        arena.transient = transient
        arena.busy = True
        return arena

    def _for_keeps(
        self, closest: Arena, free: Sequence[Arena], wanted: Ids, *, reuse: bool
    ) -> Arena | None:
        """An arena for `wanted` that costs no other text more than it must; None: not yet."""
        shared = common_prefix(closest.tokens, wanted) if reuse else 0
        row, on_disk = self.saved.best(wanted) if reuse else (None, 0)
        if row is not None and on_disk >= shared + WORTH_SAVING_TOKENS:
            arena = self._make_free(free)
            if arena is not None:
                arena.replaced(row if self.saved.load(arena.session, row) else None)
            return arena
        loses_more = len(closest.tokens) - shared > max(WORTH_SAVING_TOKENS, shared)
        return self._make_free(free) if loses_more and not closest.transient else closest

    def release(self, arena: Arena, *, failed: bool = False) -> None:
        """Gives an arena back. After an error nothing that it held is kept."""
        if failed:
            self._empty(arena)
        arena.settle()
        arena.dirty = not failed
        arena.busy = False

    def save_idle(self, idle_s: float) -> bool:
        """Saves one session that has been idle for so long; False when there is none."""
        if not self.saved.writer.has_room:
            return False
        before = monotonic() - idle_s
        for arena in self.all:
            if not arena.busy and arena.dirty and arena.released_at <= before:
                self._save(arena)
                return True
        return False

    def next_save_s(self, idle_s: float) -> float | None:
        """Seconds until `save_idle` will find something, or None: nothing, or no room yet."""
        if not self.saved.writer.has_room:
            return None
        dirty = [arena.released_at for arena in self.all if not arena.busy and arena.dirty]
        return max(0.0, min(dirty) + idle_s - monotonic()) if dirty else None

    def save_all(self) -> None:
        """Saves what is not saved yet, at the end; returns when it is on disk."""
        self.saved.writer.wait()
        while self.save_idle(0.0):
            self.saved.writer.wait()
        self.saved.writer.close()

    def close(self) -> None:
        """Frees every arena."""
        for arena in self.all:
            arena.session.close()

    def _make_free(self, free: Sequence[Arena]) -> Arena | None:
        """The free arena unused for longest, its content copied to be saved; None: not yet."""
        oldest = min(
            free, key=lambda arena: (len(arena.tokens) > 0, not arena.transient, arena.released_at)
        )
        if self._worth_saving(oldest) and not self.saved.writer.has_room:
            return None
        self._save(oldest)
        oldest.saved = None
        return oldest

    def _worth_saving(self, arena: Arena) -> bool:
        worth = len(arena.tokens) >= WORTH_SAVING_TOKENS and not arena.transient
        return arena.dirty and worth and self.saved.fits(arena.session)

    def _save(self, arena: Arena) -> None:
        if self._worth_saving(arena):
            arena.saved = self.saved.save(arena.session, arena.tokens, arena.saved)
        arena.dirty = False

    def _empty(self, arena: Arena) -> None:
        """Forgets everything; a session that cannot even do that is replaced."""
        try:
            arena.session.rollback(len(arena.session.tokens))
        except KvqError:
            with contextlib.suppress(KvqError):
                arena.session.close()
            arena.session = self._open_session()
        arena.saved = None


def _closest(arenas: Sequence[Arena], wanted: Ids) -> Arena:
    """The arena whose text begins most like `wanted`; of several, the one unused for longest."""
    return max(arenas, key=lambda one: (common_prefix(one.tokens, wanted), -one.released_at))
