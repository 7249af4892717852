"""A thread that writes sessions to disk while the engine goes on.

A session stays in memory until it is on disk: the one that is being written and `MOST_WAITING`
more, no others. Whatever is unwritten when the writer closes is written before it ends.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

from kvq.errors import KvqError
from kvq_runtime.session.snapshot import Snapshot

logger = logging.getLogger(__name__)

MOST_WAITING = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """Holds a session for `path`. The writing thread calls `done(error)`, None after success."""

    path: Path
    snapshot: Snapshot
    done: Callable[[Exception | None], None]


class SnapshotWriter:
    """Writes parcels in the order they came; `write` puts one on disk.

    The writing thread calls `on_room` when another parcel may be put.
    """

    def __init__(self, write: Callable[[Parcel], None]) -> None:
        self._write = write
        self.on_room: Callable[[], None] = _do_nothing
        self._changed = Condition()
        self._waiting: dict[Path, Parcel] = {}
        self._current: Parcel | None = None
        self._thread: Thread | None = None
        self._failing = False

    @property
    def has_room(self) -> bool:
        """Returns whether `put` takes a parcel now."""
        return len(self._waiting) < MOST_WAITING

    def put(self, parcel: Parcel) -> None:
        """Takes `parcel` to write it soon; there must be room."""
        with self._changed:
            assert self.has_room
            self._waiting[parcel.path] = parcel
            if self._thread is None:
                self._thread = Thread(target=self._main, name="kvq-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def unwritten(self, path: Path) -> Snapshot | None:
        """Returns what will be at `path`, while it is not on disk yet."""
        with self._changed:
            if path in self._waiting:
                return self._waiting[path].snapshot
            if self._current is not None and self._current.path == path:
                return self._current.snapshot
            return None

    def wait(self) -> None:
        """Returns when everything is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._current is None)

    def close(self) -> None:
        """Writes the rest and ends the thread; a later `put` begins another."""
        self.wait()
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _main(self) -> None:
        while (parcel := self._next()) is not None:
            self._deliver(parcel)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _next(self) -> Parcel | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._thread is None)
            if not self._waiting:
                return None
            self._current = self._waiting.pop(next(iter(self._waiting)))
        self.on_room()
        return self._current

    def _deliver(self, parcel: Parcel) -> None:
        try:
            self._write(parcel)
        except (OSError, KvqError) as error:
            # A full disk fails every time, so only the first failure is a warning.
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "a session was not saved and will be computed again: %s", error)
            self._failing = True
            parcel.done(error)
        except Exception as error:
            logger.error("a session was not saved", exc_info=error)
            parcel.done(error)
        else:
            self._failing = False
            parcel.done(None)


def _do_nothing() -> None:
    """Ignores that there is room."""
