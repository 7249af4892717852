"""The chats on disk: one SQLite file with a tree of messages per chat, text in chunks.

Every method is one short transaction; `History` is used from one thread at a time. When the disk
refuses a write, the history goes on in memory, `on_trouble` is called, and nothing is deleted. What
cannot be read raises `DataError`.
"""

import os
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from json import dumps, loads
from pathlib import Path
from time import monotonic, sleep, time, time_ns
from typing import Any

from kvq.errors import DataError
from kvq_apps.chat.messages import Message, ToolCall
from kvq_apps.processes import is_alive
from kvq_apps.terminal.output import storable, visible

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
    "ALTER TABLE message ADD COLUMN calls TEXT NOT NULL DEFAULT '[]'",
)
BUSY_TIMEOUT_S = 10.0
LOSES_NOTHING = "; this chat goes on in memory and will not be saved, nothing was deleted"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSummary:
    """Describes a chat in the list of chats; `excerpt` is where a search matched.

    `model` is the name that opens the model that answered last; empty: not known.
    """

    id: str
    title: str
    updated_s: float
    messages: int
    model: str = ""
    excerpt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedChat:
    """Holds a chat's chosen branch.

    The model gets the messages from `first_id` on, and `summary` for those before. `model` is as in
    `ChatSummary`.
    """

    id: str
    title: str
    messages: Sequence[Message]
    first_id: str | None
    summary: str
    model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRow:
    """Tells where a chat's KV cache was saved, and what a session must match to load it.

    `kv_plan` is K:V bits. `kv_budget` is in bytes; 0: saved by an older kvq.
    """

    path: str
    model: str
    kv_plan: str
    kv_budget: int = 0


def model_name(model: str) -> str:
    """Returns the name of a model in `--list`: a path's last part, else the name itself."""
    path = Path(model)
    return path.name if path.is_absolute() else model


def chat_title(chat: ChatSummary) -> str:
    """Returns what a search matched, else the title."""
    return visible(" ".join(chat.excerpt.split()) or chat.title or "(no title)")


def chat_line(chat: ChatSummary) -> str:
    """Describes a chat in one line: date, length, model and title."""
    when = datetime.fromtimestamp(chat.updated_s).astimezone().strftime("%Y-%m-%d %H:%M")
    parts = when, f"{chat.messages:>4} messages", visible(model_name(chat.model)), chat_title(chat)
    return "  ".join(filter(None, parts))


class History:
    """Reads and writes the database; `path` None keeps everything in memory."""

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
        self._db.close()

    # Writing

    def new_chat(self, chat_id: str) -> None:
        self._write(
            "INSERT OR IGNORE INTO chat (id, created, updated) VALUES (:id, :now, :now)", id=chat_id
        )

    def rename(self, chat_id: str, title: str) -> None:
        self._write("UPDATE chat SET title = :title WHERE id = :id", id=chat_id, title=title)

    def delete(self, chat_id: str) -> None:

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
                "INSERT INTO message VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (message.id, chat_id, message.parent_id, message.role, message.state,
                 message.created_s or time(), os.getpid(), _calls_text(message.calls)),
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
            id=message_id, text=text,
        )  # fmt: skip

    def finish(
        self,
        message_id: str,
        state: str,
        stats: Mapping[str, Any],
        calls: Sequence[ToolCall] = (),
    ) -> None:
        """Stores the final state of a message."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE message SET state = ?, calls = ? WHERE id = ?",
                (state, _calls_text(calls), message_id),
            )
            _index(db, message_id)
            if stats:
                _store_stats(db, message_id, stats)

        self._transaction(write)

    def choose(self, chat_id: str, message_id: str | None) -> None:
        """Chooses the branch that ends in the newest message below `message_id`; None: none."""
        leaf = message_id
        while leaf is not None:
            row = self._first_row(
                "SELECT id FROM message WHERE parent_id = ? ORDER BY created DESC, id DESC", leaf
            )
            if row is None:
                break
            leaf = row["id"]
        self._write("UPDATE chat SET leaf_id = :leaf WHERE id = :id", id=chat_id, leaf=leaf)

    def set_first_message(self, chat_id: str, message_id: str | None, summary: str = "") -> None:
        """Sets the first message that the model gets, and the `summary` of those before."""
        self._write(
            "UPDATE chat SET first_id = :first, summary = :summary WHERE id = :id",
            id=chat_id, first=message_id, summary=summary,
        )  # fmt: skip

    def remember_model(self, chat_id: str, model: str) -> None:
        """Remembers the name that opens the model that answers from now on."""
        self._write("UPDATE chat SET model = :model WHERE id = :id", id=chat_id, model=model)

    def remember_snapshot(self, chat_id: str, snapshot: SnapshotRow) -> None:
        """Remembers where the chat's KV cache is saved now."""
        self._write(
            "INSERT OR REPLACE INTO kv_snapshot "
            "VALUES (:id, :path, :model, :kv_plan, '', :now, :kv_budget)",
            id=chat_id, **asdict(snapshot),
        )  # fmt: skip

    def set(self, name: str, value: str) -> None:
        self._write("INSERT OR REPLACE INTO setting VALUES (:name, :value)", name=name, value=value)

    # Reading

    def setting(self, name: str) -> str | None:
        row = self._first_row("SELECT value FROM setting WHERE name = ?", name)
        return None if row is None else row["value"]

    def chats(self, limit: int = 200) -> list[ChatSummary]:
        """Lists the chats that have messages, the latest first."""
        order = "WHERE messages > 0 ORDER BY updated DESC, chat.id DESC LIMIT ?"
        return self._summaries(f"{_SUMMARY} FROM chat {order}", limit)

    def latest(self) -> str | None:
        return next((chat.id for chat in self.chats(1)), None)

    def search(self, text: str, limit: int = 200) -> list[ChatSummary]:
        """Finds chats with a message that has all the words, or the text itself; latest first."""
        text = storable(text)
        words = ['"' + word.replace('"', '""') + '"' for word in text.split()]
        if not words:
            return self.chats(limit)
        chats = self._summaries(
            _SEARCH.format(
                condition="message_text MATCH ?",
                excerpt="snippet(message_text, 0, '', '', '…', 12)",
            ),
            " ".join([*words[:-1], words[-1] + "*"]),
            limit,
        )
        if chats:
            return chats
        # The index knows no words of languages that are written without spaces.
        part = text.strip().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        return self._summaries(
            _SEARCH.format(
                condition="text LIKE ? ESCAPE '\\'", excerpt="substr(message_text.text, 1, 80)"
            ),
            f"%{part}%",
            limit,
        )

    def branch(self, chat_id: str) -> list[Message]:
        """Returns the messages of the chosen branch, from the first."""
        return self._messages(
            f"""
            WITH RECURSIVE path(id, depth) AS (SELECT leaf_id, 0 FROM chat WHERE id = ?
                UNION ALL SELECT parent_id, depth + 1 FROM path JOIN message USING (id)
                WHERE parent_id IS NOT NULL)
            {_MESSAGE} JOIN path USING (id) ORDER BY depth DESC
            """,  # noqa: S608 - our own names
            chat_id,
        )

    def sibling_messages(self, chat_id: str, message_id: str) -> list[Message]:
        """Returns the messages with the same parent, the oldest first."""
        return self._messages(
            f"{_MESSAGE} WHERE chat_id = ? AND parent_id IS "  # noqa: S608 - our own names
            "(SELECT parent_id FROM message WHERE id = ?) ORDER BY created, id",
            chat_id, message_id,
        )  # fmt: skip

    def saved_chat(self, chat_id: str) -> SavedChat | None:
        """Returns the chat with its chosen branch, or None if there is no such chat."""
        row = self._first_row(
            "SELECT title, first_id, summary, model FROM chat WHERE id = ?", chat_id
        )
        if row is None:
            return None
        return SavedChat(id=chat_id, messages=self.branch(chat_id), **dict(row))

    def snapshot(self, chat_id: str) -> SnapshotRow | None:
        """Returns where the chat's KV cache was saved last."""
        row = self._first_row(_SNAPSHOT, chat_id)
        return None if row is None else SnapshotRow(**dict(row))

    def _summaries(self, statement: str, *values: Any) -> list[ChatSummary]:
        return [ChatSummary(**dict(row)) for row in self._rows(statement, *values)]

    def _messages(self, statement: str, *values: Any) -> list[Message]:
        return [_message(dict(row)) for row in self._rows(statement, *values)]

    # The database

    def _write(self, statement: str, **values: Any) -> None:
        """Executes one statement; `:now` in it is the time."""
        self._transaction(lambda db: db.execute(statement, {"now": time(), **values}))

    def _transaction(self, write: Callable[[sqlite3.Connection], object]) -> None:
        """Runs `write`. When the disk refuses it, everything moves to memory and it runs there."""
        try:
            with self._db:
                write(self._db)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            if not self.saved:
                raise
            self._move_to_memory(f"the chat history cannot be written ({error})")
            with self._db:
                write(self._db)

    def _move_to_memory(self, reason: str) -> None:
        memory = _connect(None)
        with suppress(sqlite3.DatabaseError):
            self._db.backup(memory)
        self._db.close()
        self._db, self.saved = memory, False
        self._on_trouble(reason + LOSES_NOTHING)

    def _first_row(self, statement: str, *values: Any) -> sqlite3.Row | None:
        return next(iter(self._rows(statement, *values)), None)

    def _rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"the chat history cannot be read ({error}), nothing was deleted; "
                "sqlite3's .recover may repair its file"
            ) from error

    def _mark_interrupted(self, db: sqlite3.Connection) -> None:
        """Marks the streaming messages of processes that are gone as interrupted."""
        rows = db.execute("SELECT id, writer FROM message WHERE state = 'streaming'").fetchall()
        for row in rows:
            if row["writer"] == os.getpid() or not is_alive(row["writer"]):
                db.execute("UPDATE message SET state = 'interrupted' WHERE id = ?", (row["id"],))
                _index(db, row["id"])


def new_id() -> str:
    """Returns an identifier that sorts by time and that no other process makes."""
    return f"{time_ns():016x}{secrets.token_hex(4)}"


_TEXT = (
    "(SELECT group_concat(text, '') FROM "
    "(SELECT text FROM chunk WHERE message_id = {} ORDER BY seq))"
)
_SIBLINGS = (
    "(SELECT count(*) FROM message AS sibling WHERE sibling.chat_id = message.chat_id "
    "AND sibling.parent_id IS message.parent_id"
)
_MESSAGE = (
    "SELECT message.id, parent_id, role, state, created AS created_s, calls, stats, "  # noqa: S608
    f"coalesce({_TEXT.format('message.id')}, '') AS text, {_SIBLINGS}) AS branches, "
    f"{_SIBLINGS} AND (sibling.created, sibling.id) <= (message.created, message.id)) AS branch "
    "FROM message LEFT JOIN run ON run.message_id = message.id"
)
_SNAPSHOT = "SELECT path, model, kv_plan, kv_budget FROM kv_snapshot WHERE chat_id = ?"
_SUMMARY = (
    "SELECT chat.id, title, updated AS updated_s, model, "
    "(SELECT count(*) FROM message WHERE chat_id = chat.id) AS messages"
)
_SEARCH = f"""
    {_SUMMARY}, {{excerpt}} AS excerpt
    FROM message_text JOIN message ON message.id = message_text.message_id
        JOIN chat ON chat.id = message.chat_id
    WHERE {{condition}} ORDER BY updated DESC, chat.id DESC, message.created LIMIT ?
"""


class _UnusableError(Exception):
    """Says why a database file cannot be used."""


def _connect(path: Path | None) -> sqlite3.Connection:
    """Opens the database at `path`, made or migrated to this version. Raises `_UnusableError`."""
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
    """Switches to the write-ahead log; waits for a lock itself, as SQLite does not here."""
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
    # Another process may be migrating too: one gets the lock, the other finds the work done.
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
    db.execute("DELETE FROM message_text WHERE message_id = :id", {"id": message_id})
    db.execute(f"INSERT INTO message_text SELECT {_TEXT.format(':id')}, :id", {"id": message_id})


def _calls_text(calls: Sequence[ToolCall]) -> str:
    return dumps([asdict(call) for call in calls])


def _message(row: dict[str, Any]) -> Message:
    row["stats"] = loads(row["stats"] or "{}")
    row["calls"] = [ToolCall(**call) for call in loads(row["calls"])]
    return Message(**row)


def _store_stats(db: sqlite3.Connection, message_id: str, stats: Mapping[str, Any]) -> None:
    db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (message_id, dumps(dict(stats))))
