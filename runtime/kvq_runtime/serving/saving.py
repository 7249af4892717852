"""Sessions kept on disk: found by the tokens they begin with, bounded in bytes, never trusted.

A saved session is `NAME.kvq` (the runtime's snapshot, which checks every byte) beside `NAME.ids`
(its tokens as int64, and -n after them where only the first n - 1 were computed and others
predicted: only a hint where to look). Files of one model and KV setting share a folder, and so may
servers: what one has written the others find. A session is copied by the thread that saves it and
written by another; until it is on disk the copy stands in for the file. Whatever the disk does, the
worst is a prompt read again.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvq.errors import KvqError
from kvq.files import replace_file
from kvq_runtime.hunks import common_prefix
from kvq_runtime.serving.writer import Parcel, Writer
from kvq_runtime.session import Session
from kvq_runtime.staleness import Staleness

logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]

# Between an owner and the rest of a file's name.
_OWNED = "-"
# A file still being written is younger than this.
_STALE_S = 3600


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedSession:
    """One session on disk and the tokens it is believed to hold, all or the first computed."""

    path: Path
    tokens: Ids
    computed: int | None = None

    @property
    def owner(self) -> str:
        """Who may find it (see `owners`): the beginning of its file's name."""
        return self.path.name.rpartition(_OWNED)[0]


class SavedSessions:
    """The saved sessions of one model and KV setting below `root`; `limit_bytes` bounds all.

    `save` and `load` are the engine's; the writing thread adds what is known when a file is there.
    """

    def __init__(self, root: Path, key: str, limit_bytes: int) -> None:
        self._root = root
        self._folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
        self._limit_bytes = limit_bytes
        self._lock = Lock()
        self._rows: list[SavedSession] = []
        self._seen_ns = 0
        self.writer = Writer(self._write)
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
        """The session of `owner` that shares the longest beginning with `ids`, and its length.

        `exact`: a beginning of which nothing was predicted.
        """
        best, length = None, 0
        self._look()
        with self._lock:
            rows = [row for row in self._rows if row.owner == owner]
        for row in rows:
            shared = common_prefix(row.tokens[: row.computed if exact else None], ids)
            if shared > length:
                best, length = row, shared
        return best, length

    def save(
        self, session: Session[Any], tokens: Ids, replaces: SavedSession | None, owner: str = ""
    ) -> SavedSession:
        """Copies `session` to be written, over `replaces` if that is an earlier state of the text.

        The writer must have room. The row returned is found by `best` from now on; when writing
        it fails, that is logged and counted, and what was there before is found again. One that
        is larger than all that may be kept is not written.
        """
        computed = session.sequence.encoding.staleness.computed
        path = self._path_for(tokens, replaces, owner)
        row = SavedSession(path=path, tokens=tokens, computed=computed)
        if not self.fits(session):
            return row
        with self._lock:
            before = next((other for other in self._rows if other.path == row.path), None)

        def done(error: Exception | None) -> None:
            if error is None:
                self.saved += 1
                self._make_room(row.path)
            else:
                self._count_failure()
                self._take_back(row, before)

        try:
            taken = session.capture()
        except (KvqError, MemoryError) as error:
            self._count_failure()
            said = str(error) or "there is no memory for a copy"
            logger.warning("a session was not saved and will be computed again: %s", said)
            return row
        self._replace(row)
        self.writer.put(Parcel(path=row.path, taken=taken, done=done))
        return row

    def fits(self, session: Session[Any]) -> bool:
        """Whether `session` is small enough to be kept."""
        return len(session.tokens) * session.stats().bytes_per_token <= self._limit_bytes

    def load(self, session: Session[Any], row: SavedSession) -> bool:
        """Makes `session` the saved one; False, and the file gone, when it cannot be used."""
        try:
            taken = self.writer.held(row.path)
            session.load(row.path) if taken is None else session.restore(taken)
        except Exception as error:  # noqa: BLE001  whatever a file holds, the request goes on
            self._count_failure()
            said = error if isinstance(error, KvqError) else type(error).__name__
            logger.warning("a saved session cannot be used, its text is read again: %s", said)
            self._forget(row.path)
            return False
        self.restored += 1
        with contextlib.suppress(OSError):
            os.utime(row.path)
        return True

    def _look(self) -> None:
        """Finds what has come into the folder, also by other processes, since the last look."""
        with contextlib.suppress(OSError):
            changed_ns = self._folder.stat().st_mtime_ns
            if not self._limit_bytes or changed_ns == self._seen_ns:
                return
            self._seen_ns = changed_ns
            with self._lock:
                known = {row.path.stem for row in self._rows}
            new = (path for path in _files(self._folder, "*.ids") if path.stem not in known)
            found = [row for row in map(_row, new) if row is not None]
            with self._lock:
                known = {row.path for row in self._rows}
                self._rows += [row for row in found if row.path not in known]

    def _count_failure(self) -> None:
        with self._lock:
            self.failures += 1

    def _write(self, parcel: Parcel) -> None:
        """Both files of a session, on the writing thread."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        parcel.taken.write(parcel.path)
        state = parcel.taken.state
        computed = Staleness(state.ages).computed
        marks = [] if computed is None else [-1 - computed]
        ids = np.append(state.tokens, marks).astype("<i8").tobytes()
        with replace_file(parcel.path.with_suffix(".ids")) as stream:
            stream.write(ids)

    def _replace(self, row: SavedSession) -> None:
        with self._lock:
            self._rows = [other for other in self._rows if other.path != row.path] + [row]

    def _take_back(self, row: SavedSession, before: SavedSession | None) -> None:
        """`row` was not written: whole files of an earlier state are still there, or none."""
        with self._lock:
            if row not in self._rows:
                return  # a later state is on its way to the same place
            self._rows = [other for other in self._rows if other is not row]
            self._rows += [] if before is None else [before]
        if before is None:
            _unlink(row.path)

    def _path_for(self, tokens: Ids, replaces: SavedSession | None, owner: str) -> Path:
        if replaces is not None and replaces.owner == owner:
            kept = common_prefix(replaces.tokens, tokens)
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
                status = path.stat()
                sizes.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in sizes)
        for _, size, path in sorted(sizes):
            if total <= self._limit_bytes:
                return
            if path != keep or size > self._limit_bytes:
                self._forget(path)
                total -= size


def as_ids(tokens: Sequence[int]) -> Ids:
    """Tokens as int64 [n]."""
    return np.array(tokens, np.int64)


def _files(folder: Path, pattern: str) -> list[Path]:
    """What can be seen of it: none where the disk or the system refuses."""
    with contextlib.suppress(OSError):
        return sorted(folder.glob(pattern))
    return []


def _row(path: Path) -> SavedSession | None:
    """The session whose tokens `path` holds, or None when its files do not look right."""
    session = path.with_suffix(".kvq")
    try:
        content = path.read_bytes()
        complete = session.is_file() and len(content) % 8 == 0
    except OSError:
        return None
    if not complete:
        _unlink(session)
        return None
    tokens, computed = np.frombuffer(content, "<i8").astype(np.int64), None
    if len(tokens) and tokens[-1] < 0:
        tokens, computed = tokens[:-1], -1 - int(tokens[-1])
    return SavedSession(path=session, tokens=tokens, computed=computed)


def _unlink(path: Path) -> None:
    for file in (path, path.with_suffix(".ids")):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _unlink_stale(path: Path) -> None:
    """Removes what a process that was killed had begun to write."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < time.time() - _STALE_S:
            path.unlink()
