"""A thread that writes sessions to disk while the engine goes on. Knows no arena and no request.

What it was given is in memory until it is on disk: a session being written and `MOST_WAITING`
more, no others. Whatever is still unwritten when it closes is written before it ends.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

from kvq.errors import KvqError
from kvq_runtime.snapshot import Snapshot

logger = logging.getLogger(__name__)

MOST_WAITING = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A session for `path`; `done(error)` is called on the writing thread, None after success."""

    path: Path
    taken: Snapshot
    done: Callable[[Exception | None], None]


class Writer:
    """Writes parcels in the order they came; `write` puts one on disk.

    `on_room`, called from the writing thread, says that another may be put.
    """

    def __init__(self, write: Callable[[Parcel], None]) -> None:
        self._write = write
        self.on_room: Callable[[], None] = _nobody
        self._changed = Condition()
        self._waiting: dict[Path, Parcel] = {}
        self._current: Parcel | None = None
        self._thread: Thread | None = None
        self._failing = False

    @property
    def has_room(self) -> bool:
        """Whether `put` takes a parcel now."""
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

    def held(self, path: Path) -> Snapshot | None:
        """What will be at `path`, while it is not on disk yet."""
        with self._changed:
            if path in self._waiting:
                return self._waiting[path].taken
            if self._current is not None and self._current.path == path:
                return self._current.taken
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
            # A full disk fails every time: the first failure is news, the next ones are not.
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


def _nobody() -> None:
    """Nobody waits for room."""
