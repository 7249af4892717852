"""Sessions on disk: found by the tokens they begin with, limited in bytes, never trusted.

A saved session is two files: `NAME.kvq`, the runtime's snapshot, which checks every byte, and
`NAME.ids`, its tokens as int64. If only the first n - 1 tokens are exact, and later ones were
predicted or moved by an edit, -n follows them; this is only a hint where to look. Files of one
model and KV setting share a folder, and several servers may share it: each finds what the others
wrote. Other users may write there, too. What is no regular file of this user, or larger than it can
be, is never read. The thread that saves a session copies it, and another one writes the copy; until
it is on disk the copy stands in for the file. There are at most `MOST_UNWRITTEN` copies. Whatever
the disk does, the worst case is that a prompt is read again.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import DataError, KvqError
from kvq.files import is_private, read_regular, replace_file
from kvq_runtime.sequence.hunks import common_prefix, hunks
from kvq_runtime.sequence.staleness import Staleness
from kvq_runtime.session import snapshot
from kvq_runtime.session.session import Session

logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]

# Copies in memory at most: one that is being written, and one that waits.
MOST_UNWRITTEN = 2
# Between an owner and the rest of a file's name.
_OWNED = "-"
# A file that is still being written is younger than this.
_STALE_S = 3600
_ID_BYTES = 8
# No model has a longer context.
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedSession:
    """Describes one session on disk: its tokens, and how many first ones are exact.

    `exact_tokens` None: all are. The tokens are only believed until the session is loaded.
    """

    path: Path
    tokens: Ids
    exact_tokens: int | None = None

    @property
    def owner(self) -> str:
        """Returns who may find it (see `owners`): the beginning of its file's name."""
        return self.path.name.rpartition(_OWNED)[0]


class SavedSessions:
    """Finds, saves and loads the sessions of one model and KV setting below `root`.

    `limit_bytes` limits all of them, of any model. None has more than `context_tokens`. The
    engine's thread calls `save` and `load`; a thread of its own writes.
    """

    def __init__(
        self, root: Path, key: str, limit_bytes: int, context_tokens: int = _MOST_TOKENS
    ) -> None:
        self._root = root
        self._folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._limit_bytes = limit_bytes
        self._context_tokens = context_tokens
        self._lock = Lock()
        self._rows: list[SavedSession] = []
        # Names in the folder that cannot be used; each is logged once.
        self._unusable: set[str] = set()
        self._seen_ns = 0
        # What is not on disk yet, and where it will be, in the order of writing.
        self._unwritten: list[tuple[Path, snapshot.Snapshot]] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvq-writer")
        self._failing = False
        self.saved = 0
        self.restored = 0
        self.failures = 0
        for path in _files(self._folder, ".*"):
            _unlink_stale(path)
        self._look()

    def __len__(self) -> int:
        return len(self._rows)

    def best(
        self, ids: Ids, owner: str = "", *, exact: bool = True
    ) -> tuple[SavedSession | None, int]:
        """Returns the session of `owner` with the longest beginning of `ids`, and its length.

        `exact`: only computed tokens count, no predicted ones and none that an edit has moved.
        """
        best, length = None, 0
        for row in self.of(owner):
            shared = common_prefix(row.tokens[: row.exact_tokens if exact else None], ids)
            if shared > length:
                best, length = row, shared
        return best, length

    def of(self, owner: str) -> list[SavedSession]:
        """Returns the sessions of `owner`."""
        self._look()
        with self._lock:
            return [row for row in self._rows if row.owner == owner]

    def save(
        self, session: Session[Any], tokens: Ids, replaces: SavedSession | None, owner: str = ""
    ) -> SavedSession:
        """Copies `session` to be written, over `replaces` if that is an earlier state of the text.

        There must be room (`has_room`). `best` finds the returned row from now on. When writing it
        fails, this is logged and counted, and what was there before is found again. A session that
        is larger than the limit is not written.
        """
        assert self.has_room
        exact_tokens = session.sequence.encoding.staleness.first_stale
        path = self._path_for(tokens, replaces, owner)
        row = SavedSession(path=path, tokens=tokens, exact_tokens=exact_tokens)
        if not self.fits(session):
            return row
        with self._lock:
            before = next((other for other in self._rows if other.path == row.path), None)
        try:
            copy = session.capture()
        except (KvqError, MemoryError) as error:
            self._count_failure()
            reason = str(error) or "there is no memory for a copy"
            logger.warning("a session was not saved and will be computed again: %s", reason)
            return row
        self._replace(row)
        with self._lock:
            self._unwritten.append((row.path, copy))
        self._executor.submit(self._write, row, before, copy)
        return row

    @property
    def has_room(self) -> bool:
        """Returns whether `save` may make another copy now."""
        return len(self._unwritten) < MOST_UNWRITTEN

    def flush(self) -> None:
        """Returns when everything is written."""
        self._executor.submit(lambda: None).result()

    def close(self) -> None:
        """Writes the rest and ends the thread that writes."""
        self._executor.shutdown()

    def fits(self, session: Session[Any]) -> bool:
        """Decides whether `session` is small enough to be saved."""
        return len(session.tokens) * session.stats().bytes_per_token <= self._limit_bytes

    def load(self, session: Session[Any], row: SavedSession) -> bool:
        """Makes `session` the saved one.

        Returns False, and removes the file, where it cannot be used.
        """
        try:
            copy = self._copy_of(row.path) or snapshot.examine(
                row.path, most_bytes=self._limit_bytes, private=True
            )
            session.restore(copy)
        except Exception as error:  # noqa: BLE001  whatever a file holds, the request goes on
            self._count_failure()
            reason = error if isinstance(error, KvqError) else type(error).__name__
            logger.warning("a saved session cannot be used, its text is read again: %s", reason)
            self._forget(row.path)
            return False
        self.restored += 1
        with contextlib.suppress(OSError):
            os.utime(row.path)
        return True

    def _look(self) -> None:
        """Finds what has come into the folder since the last look, also from other processes."""
        with contextlib.suppress(OSError):
            changed_ns = self._folder.stat().st_mtime_ns
            if not self._limit_bytes or changed_ns == self._seen_ns:
                return
            self._seen_ns = changed_ns
            with self._lock:
                known = {row.path.stem for row in self._rows} | self._unusable
            new = (path for path in _files(self._folder, "*.ids") if path.stem not in known)
            rows = [row for row in map(self._row, new) if row is not None]
            with self._lock:
                known = {row.path for row in self._rows}
                self._rows += [row for row in rows if row.path not in known]

    def _row(self, path: Path) -> SavedSession | None:
        """Returns the session whose tokens `path` holds, None when its files do not look right."""
        most_bytes = _ID_BYTES * (self._context_tokens + 1)
        try:
            return _read_row(path, most_bytes)
        except (OSError, DataError) as error:
            self._unusable.add(path.stem)
            logger.warning("a saved session is ignored: %s", error)
            return None

    def _count_failure(self) -> None:
        with self._lock:
            self.failures += 1

    def _copy_of(self, path: Path) -> snapshot.Snapshot | None:
        """Returns what will be at `path`, while it is not on disk yet."""
        with self._lock:
            copies = reversed(self._unwritten)
            return next((copy for place, copy in copies if place == path), None)

    def _write(
        self, row: SavedSession, before: SavedSession | None, copy: snapshot.Snapshot
    ) -> None:
        """Writes a session, on the writing thread, which goes on whatever happens."""
        try:
            self._write_files(row.path, copy)
        except Exception as error:
            if isinstance(error, OSError | KvqError):
                # A full disk fails every time, so only the first failure is a warning.
                level = logging.DEBUG if self._failing else logging.WARNING
                logger.log(level, "a session was not saved and will be computed again: %s", error)
                self._failing = True
            else:
                logger.error("a session was not saved", exc_info=error)
            self._count_failure()
            self._take_back(row, before)
        else:
            self._failing = False
            self.saved += 1
            self._make_room(row.path)
        finally:
            with self._lock:
                del self._unwritten[0]

    def _write_files(self, path: Path, copy: snapshot.Snapshot) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        snapshot.write(path, copy)
        exact_tokens = Staleness(copy.state.ages).first_stale
        marks = [] if exact_tokens is None else [-1 - exact_tokens]
        ids = np.append(copy.state.tokens, marks).astype("<i8").tobytes()
        with replace_file(path.with_suffix(".ids")) as stream:
            stream.write(ids)

    def _replace(self, row: SavedSession) -> None:
        with self._lock:
            self._rows = [other for other in self._rows if other.path != row.path] + [row]

    def _take_back(self, row: SavedSession, before: SavedSession | None) -> None:
        """Removes `row`, which was not written, and brings back an earlier state of it."""
        with self._lock:
            if row not in self._rows:
                return  # a later state is on its way to the same place
            self._rows = [other for other in self._rows if other is not row]
            self._rows += [] if before is None else [before]
        if before is None:
            _unlink(row.path)

    def _path_for(self, tokens: Ids, replaces: SavedSession | None, owner: str) -> Path:
        if replaces is not None and replaces.owner == owner:
            lost = sum(hunk.stop - hunk.start for hunk in hunks(replaces.tokens, tokens))
            kept = len(replaces.tokens) - lost
            if 2 * kept >= len(replaces.tokens):
                return replaces.path
        return self._folder / f"{owner}{_OWNED if owner else ''}{secrets.token_hex(8)}.kvq"

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._rows = [row for row in self._rows if row.path != path]
        _unlink(path)

    def _make_room(self, keep: Path) -> None:
        """Deletes the sessions unused for longest, of any model, until the rest fits."""
        sizes: list[tuple[float, int, Path]] = []
        for path in _files(self._root, "*/*.kvq"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if is_private(status) and not path.parent.is_symlink():
                    sizes.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in sizes)
        for _, size, path in sorted(sizes):
            if total <= self._limit_bytes:
                return
            if path != keep or size > self._limit_bytes:
                self._forget(path)
                total -= size


def as_ids(tokens: Sequence[int]) -> Ids:
    """Returns tokens as int64 [n]."""
    return np.array(tokens, np.int64)


def _files(folder: Path, pattern: str) -> list[Path]:
    """Returns the files that can be seen; none where the disk or the system refuses."""
    with contextlib.suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def _read_row(path: Path, most_bytes: int) -> SavedSession | None:
    """Reads the session whose tokens `path` holds; removes the files of half a session.

    Returns None for these. Raises `OSError` and `DataError` for files that kvq has not written.
    """
    content = read_regular(path, most_bytes, through_links=False, private=True)
    session = path.with_suffix(".kvq")
    if not os.path.lexists(session) or len(content) % _ID_BYTES:
        _unlink(session)
        return None
    if not is_private(session.lstat()):
        raise DataError(f"{session} is no regular file of this user")
    tokens, exact_tokens = np.frombuffer(content, "<i8").astype(np.int64), None
    if len(tokens) and tokens[-1] < 0:
        tokens, exact_tokens = tokens[:-1], -1 - int(tokens[-1])
    return SavedSession(path=session, tokens=tokens, exact_tokens=exact_tokens)


def _unlink(path: Path) -> None:
    for file in (path, path.with_suffix(".ids")):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _unlink_stale(path: Path) -> None:
    """Removes what a killed process had begun to write."""
    with contextlib.suppress(OSError):
        if path.lstat().st_mtime < time.time() - _STALE_S:
            path.unlink()
