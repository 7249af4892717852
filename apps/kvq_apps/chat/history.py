"""The chats on disk: one SQLite file, a tree of messages per chat, text in chunks as it arrives.

Every method is one short transaction; `History` is used from one thread at a time. What cannot be
written is kept in memory from then on, told through `on_trouble`, and nothing is deleted. What
cannot be read raises `DataError`.
"""

import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from time import monotonic, sleep, time, time_ns
from typing import Any

from kvq.errors import DataError
from kvq_apps.chat.messages import Message
from kvq_apps.chat.visible import storable
from kvq_apps.processes import is_alive

# One script per version; a database of version v gets the scripts after the first v.
MIGRATIONS = (
    """
    CREATE TABLE chat (id TEXT PRIMARY KEY, title TEXT NOT NULL DEFAULT '',
        created REAL NOT NULL, updated REAL NOT NULL, leaf_id TEXT, first_id TEXT);
    CREATE TABLE message (id TEXT PRIMARY KEY, chat_id TEXT NOT NULL REFERENCES chat(id),
        parent_id TEXT REFERENCES message(id), role TEXT NOT NULL, state TEXT NOT NULL,
        created REAL NOT NULL, writer INTEGER NOT NULL);
    CREATE INDEX message_by_parent ON message(chat_id, parent_id);
    CREATE TABLE chunk (message_id TEXT NOT NULL REFERENCES message(id), seq INTEGER NOT NULL,
        text TEXT NOT NULL, PRIMARY KEY (message_id, seq)) WITHOUT ROWID;
    CREATE TABLE run (message_id TEXT PRIMARY KEY REFERENCES message(id), stats TEXT NOT NULL);
    CREATE TABLE kv_snapshot (chat_id TEXT PRIMARY KEY REFERENCES chat(id), path TEXT NOT NULL,
        model TEXT NOT NULL, kv_plan TEXT NOT NULL, token_hash TEXT NOT NULL,
        created REAL NOT NULL);
    CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE VIRTUAL TABLE message_text USING fts5(text, message_id UNINDEXED);
    """,
    "ALTER TABLE chat ADD COLUMN summary TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE kv_snapshot ADD COLUMN kv_budget INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE chat ADD COLUMN model TEXT NOT NULL DEFAULT ''",
)
BUSY_TIMEOUT_S = 10.0
LOSES_NOTHING = "; this chat goes on in memory and will not be saved, nothing was deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSummary:
    """A row of the list of chats; `excerpt` is where a search found its words.

    `model` opens the model that answered last, empty where that is not known.
    """

    id: str
    title: str
    updated_s: float
    messages: int
    model: str = ""
    excerpt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedChat:
    """A chat's chosen branch; the model is given it from `first_id` on, `summary` for the rest.

    `model` as in `ChatSummary`.
    """

    id: str
    title: str
    messages: Sequence[Message]
    first_id: str | None
    summary: str
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRow:
    """Where a chat's KV was saved, and what a session must agree on to take it.

    `kv_plan` is K:V bits, `kv_budget` in bytes, 0 where an older kvq saved it.
    """

    path: str
    model: str
    kv_plan: str
    token_hash: str
    kv_budget: int = 0


class History:
    """The open database; `path` None keeps everything in memory."""

    def __init__(
        self, path: Path | None, *, on_trouble: Callable[[str], None] = lambda _text: None
    ) -> None:
        self._on_trouble = on_trouble
        self.saved = path is not None
        try:
            self._db = _connect(path)
        except _UnusableError as reason:
            self.saved = False
            self._db = _connect(None)
            on_trouble(f"{reason}{LOSES_NOTHING}")
            return
        if path is not None:
            self._transaction(self._mark_interrupted)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    # Writing

    def new_chat(self, chat_id: str) -> None:
        """Adds an empty chat."""
        values = {"id": chat_id, "now": time()}
        self._write("INSERT OR IGNORE INTO chat (id, created, updated) VALUES (:id, :now, :now)",
                    values)  # fmt: skip

    def rename(self, chat_id: str, title: str) -> None:
        """Gives a chat its title."""
        self._write(
            "UPDATE chat SET title = :title WHERE id = :id", {"id": chat_id, "title": title}
        )

    def delete(self, chat_id: str) -> None:
        """Removes a chat and everything that was said in it."""

        def write(db: sqlite3.Connection) -> None:
            for table in ("message_text", "run", "chunk"):
                db.execute(
                    f"DELETE FROM {table} WHERE message_id IN "  # noqa: S608 - our own names
                    "(SELECT id FROM message WHERE chat_id = ?)",
                    (chat_id,),
                )
            for table in ("kv_snapshot", "message"):
                db.execute(f"DELETE FROM {table} WHERE chat_id = ?", (chat_id,))  # noqa: S608
            db.execute("DELETE FROM chat WHERE id = ?", (chat_id,))

        self._transaction(write)

    def add(self, chat_id: str, message: Message) -> None:
        """Adds a message below its parent and makes it the end of the chosen branch."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?)",
                (message.id, chat_id, message.parent_id, message.role, message.state,
                 message.created_s or time(), os.getpid()),
            )  # fmt: skip
            if message.text:
                db.execute("INSERT INTO chunk VALUES (?, 0, ?)", (message.id, message.text))
            if message.state != "streaming":
                _index(db, message.id)
            if message.stats:
                _store_stats(db, message.id, message.stats)
            db.execute(
                "UPDATE chat SET leaf_id = ?, updated = ? WHERE id = ?",
                (message.id, time(), chat_id),
            )

        self._transaction(write)

    def append(self, message_id: str, text: str) -> None:
        """Adds the next piece of a message that streams."""
        self._write(
            "INSERT INTO chunk SELECT :id, coalesce(max(seq) + 1, 0), :text FROM chunk "
            "WHERE message_id = :id",
            {"id": message_id, "text": text},
        )

    def finish(self, message_id: str, state: str, stats: Mapping[str, Any]) -> None:
        """The message is whole, or as whole as it gets."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("UPDATE message SET state = ? WHERE id = ?", (state, message_id))
            _index(db, message_id)
            if stats:
                _store_stats(db, message_id, stats)

        self._transaction(write)

    def choose(self, chat_id: str, message_id: str | None) -> None:
        """Makes the newest end below `message_id` the chosen branch's; None: no branch."""
        leaf = message_id
        while leaf is not None:
            row = self._one(
                "SELECT id FROM message WHERE parent_id = ? ORDER BY created DESC, id DESC", leaf
            )
            if row is None:
                break
            leaf = row["id"]
        self._write("UPDATE chat SET leaf_id = :leaf WHERE id = :id", {"id": chat_id, "leaf": leaf})

    def begin_at(self, chat_id: str, message_id: str | None, summary: str = "") -> None:
        """The model is given `summary`, or nothing, for the messages before this one."""
        self._write(
            "UPDATE chat SET first_id = :first, summary = :summary WHERE id = :id",
            {"id": chat_id, "first": message_id, "summary": summary},
        )

    def remember_model(self, chat_id: str, model: str) -> None:
        """What opens the model that answers from now on."""
        self._write(
            "UPDATE chat SET model = :model WHERE id = :id", {"id": chat_id, "model": model}
        )

    def remember_snapshot(self, chat_id: str, snapshot: SnapshotRow) -> None:
        """Where the chat's KV is saved now."""
        self._write(
            "INSERT OR REPLACE INTO kv_snapshot "
            "VALUES (:id, :path, :model, :plan, :hash, :now, :budget)",
            {"id": chat_id, "path": snapshot.path, "model": snapshot.model,
             "plan": snapshot.kv_plan, "hash": snapshot.token_hash, "now": time(),
             "budget": snapshot.kv_budget},
        )  # fmt: skip

    def set(self, name: str, value: str) -> None:
        """Remembers a setting of the app."""
        self._write("INSERT OR REPLACE INTO setting VALUES (:name, :value)",
                    {"name": name, "value": value})  # fmt: skip

    # Reading

    def setting(self, name: str) -> str | None:
        """A remembered setting."""
        row = self._one("SELECT value FROM setting WHERE name = ?", name)
        return None if row is None else row["value"]

    def chats(self, limit: int = 200) -> list[ChatSummary]:
        """The chats that hold something, the latest first."""
        rows = self._all(
            "SELECT chat.id, title, updated, model, count(message.id) AS messages FROM chat "
            "JOIN message ON message.chat_id = chat.id GROUP BY chat.id "
            "ORDER BY updated DESC, chat.id DESC LIMIT ?",
            limit,
        )
        return [_summary(row) for row in rows]

    def latest(self) -> str | None:
        """The chat used last."""
        return next((chat.id for chat in self.chats(1)), None)

    def search(self, text: str, limit: int = 200) -> list[ChatSummary]:
        """Chats with a message that holds all the words, or else the text itself; latest first."""
        text = storable(text)
        words = ['"' + word.replace('"', '""') + '"' for word in text.split()]
        if not words:
            return self.chats(limit)
        found = self._all(
            _SEARCH.format(
                condition="message_text MATCH ?",
                excerpt="snippet(message_text, 0, '', '', '…', 12)",
            ),
            " ".join([*words[:-1], words[-1] + "*"]),
            limit,
        )
        if not found:
            # Words of languages written without spaces are not words to the index.
            part = text.strip().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
            found = self._all(
                _SEARCH.format(
                    condition="text LIKE ? ESCAPE '\\'", excerpt="substr(message_text.text, 1, 80)"
                ),
                f"%{part}%",
                limit,
            )
        return [_summary(row) for row in found]

    def branch(self, chat_id: str) -> list[Message]:
        """The messages of the chosen branch, from the first."""
        chat = self._one("SELECT leaf_id FROM chat WHERE id = ?", chat_id)
        if chat is None or chat["leaf_id"] is None:
            return []
        rows = self._all(
            "WITH RECURSIVE path(id, depth) AS (SELECT ?, 0 UNION ALL SELECT parent_id, depth + 1 "
            "FROM path JOIN message USING (id) WHERE parent_id IS NOT NULL) "
            "SELECT message.*, stats FROM path JOIN message USING (id) "
            "LEFT JOIN run ON run.message_id = message.id ORDER BY depth DESC",
            chat["leaf_id"],
        )
        return [self._message(row) for row in rows]

    def siblings(self, chat_id: str, message_id: str) -> list[str]:
        """Ids of the messages with the same parent, the oldest first."""
        rows = self._all(
            "SELECT id FROM message WHERE chat_id = ? AND parent_id IS "
            "(SELECT parent_id FROM message WHERE id = ?) ORDER BY created, id",
            chat_id, message_id,
        )  # fmt: skip
        return [row["id"] for row in rows]

    def beside(self, chat_id: str, message_id: str) -> list[Message]:
        """The messages with the same parent, the oldest first."""
        marks = self.siblings(chat_id, message_id)
        rows = [self._all(_MESSAGE, mark) for mark in marks]
        return [self._message(row) for found in rows for row in found]

    def saved_chat(self, chat_id: str) -> SavedChat | None:
        """The chat with its chosen branch, or None if there is no such chat."""
        row = self._one("SELECT title, first_id, summary, model FROM chat WHERE id = ?", chat_id)
        if row is None:
            return None
        return SavedChat(id=chat_id, messages=self.branch(chat_id), **dict(row))

    def snapshot(self, chat_id: str) -> SnapshotRow | None:
        """Where the chat's KV was saved last."""
        row = self._one(_SNAPSHOT, chat_id)
        return None if row is None else SnapshotRow(**dict(row))

    def _message(self, row: sqlite3.Row) -> Message:
        chunks = self._all("SELECT text FROM chunk WHERE message_id = ? ORDER BY seq", row["id"])
        siblings = self.siblings(row["chat_id"], row["id"])
        return Message(
            id=row["id"],
            parent_id=row["parent_id"],
            role=row["role"],
            state=row["state"],
            created_s=row["created"],
            text="".join(chunk["text"] for chunk in chunks),
            branch=siblings.index(row["id"]) + 1,
            branches=len(siblings),
            stats=loads(row["stats"]) if row["stats"] else {},
        )

    # The database

    def _write(self, statement: str, values: Mapping[str, Any]) -> None:
        self._transaction(lambda db: db.execute(statement, values))

    def _transaction(self, write: Callable[[sqlite3.Connection], object]) -> None:
        """Runs `write`; when the disk refuses it, everything moves to memory and it runs there."""
        try:
            with self._db:
                write(self._db)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            if not self.saved:
                raise
            self._retreat(f"the chat history cannot be written ({error})")
            with self._db:
                write(self._db)

    def _retreat(self, reason: str) -> None:
        memory = _connect(None)
        with suppress(sqlite3.DatabaseError):
            self._db.backup(memory)
        self._db.close()
        self._db, self.saved = memory, False
        self._on_trouble(reason + LOSES_NOTHING)

    def _one(self, statement: str, *values: Any) -> sqlite3.Row | None:
        return next(iter(self._all(statement, *values)), None)

    def _all(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"the chat history cannot be read ({error}), nothing was deleted; "
                "sqlite3's .recover may repair its file"
            ) from error

    def _mark_interrupted(self, db: sqlite3.Connection) -> None:
        """What a process that is gone was streaming stays, as interrupted."""
        rows = db.execute("SELECT id, writer FROM message WHERE state = 'streaming'").fetchall()
        for row in rows:
            if row["writer"] == os.getpid() or not is_alive(row["writer"]):
                db.execute("UPDATE message SET state = 'interrupted' WHERE id = ?", (row["id"],))
                _index(db, row["id"])


def new_id() -> str:
    """An identifier that sorts by time and no other process makes."""
    return f"{time_ns():016x}{secrets.token_hex(4)}"


_MESSAGE = (
    "SELECT message.*, stats FROM message LEFT JOIN run ON run.message_id = message.id WHERE id = ?"
)
_SNAPSHOT = "SELECT path, model, kv_plan, token_hash, kv_budget FROM kv_snapshot WHERE chat_id = ?"
_SEARCH = """
    SELECT chat.id, title, updated, model, {excerpt} AS excerpt,
        (SELECT count(*) FROM message WHERE chat_id = chat.id) AS messages
    FROM message_text JOIN message ON message.id = message_text.message_id
        JOIN chat ON chat.id = message.chat_id
    WHERE {condition} ORDER BY updated DESC, chat.id DESC, message.created LIMIT ?
"""


class _UnusableError(Exception):
    """Why a database file cannot be used."""


def _connect(path: Path | None) -> sqlite3.Connection:
    """The database at `path`, made or brought to this version. Raises `_UnusableError`."""
    if path is None:
        return _migrated(_open(":memory:"), None)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite gives its side files the mode of the database.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise _UnusableError(
            f"the chat history {path} cannot be opened ({error.strerror})"
        ) from error
    db = _open(str(path))
    try:
        _write_ahead(db)
        db.execute("PRAGMA synchronous = NORMAL")
        db = _migrated(db, path)
        with db:
            db.execute("BEGIN IMMEDIATE")
        db.execute("SELECT id FROM chat LIMIT 1").fetchone()
    except sqlite3.DatabaseError as error:
        db.close()
        raise _UnusableError(f"the chat history {path} cannot be used ({error})") from error
    except _UnusableError:
        db.close()
        raise
    return db


def _write_ahead(db: sqlite3.Connection) -> None:
    """Switches to the write-ahead log. SQLite does not wait for a lock here, so this does."""
    deadline = monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or monotonic() > deadline:
                raise
        sleep(0.02)


def _open(name: str) -> sqlite3.Connection:
    db = sqlite3.connect(name, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _migrated(db: sqlite3.Connection, path: Path | None) -> sqlite3.Connection:
    version = _version(db)
    if version > len(MIGRATIONS):
        raise _UnusableError(
            f"the chat history {path} is of version {version}, made by a newer kvq; this one "
            f"knows {len(MIGRATIONS)}: upgrade kvq-runtime"
        )
    if version == len(MIGRATIONS):
        return db
    if version and path is not None:
        copy = path.with_name(f"{path.name}.version-{version}")
        with closing(sqlite3.connect(copy)) as target:
            db.backup(target)
        copy.chmod(0o600)
    # Another process may be migrating too: only one holds the lock, the other finds it done.
    db.isolation_level = None
    db.execute("BEGIN IMMEDIATE")
    for number in range(_version(db), len(MIGRATIONS)):
        for statement in MIGRATIONS[number].split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {number + 1}")
    db.execute("COMMIT")
    db.isolation_level = "DEFERRED"
    return db


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]


def _index(db: sqlite3.Connection, message_id: str) -> None:
    db.execute("DELETE FROM message_text WHERE message_id = ?", (message_id,))
    db.execute(
        "INSERT INTO message_text SELECT group_concat(text, ''), ? FROM "
        "(SELECT text FROM chunk WHERE message_id = ? ORDER BY seq)",
        (message_id, message_id),
    )


def _store_stats(db: sqlite3.Connection, message_id: str, stats: Mapping[str, Any]) -> None:
    db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (message_id, dumps(dict(stats))))


def _summary(row: sqlite3.Row) -> ChatSummary:
    excerpt = row["excerpt"] if "excerpt" in row.keys() else ""  # noqa: SIM118 - not a mapping
    return ChatSummary(
        id=row["id"],
        title=row["title"],
        updated_s=row["updated"],
        messages=row["messages"],
        model=row["model"],
        excerpt=" ".join((excerpt or "").split()),
    )
