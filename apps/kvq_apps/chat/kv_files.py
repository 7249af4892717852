"""The KV cache of each chat on disk: a chat is resumed without encoding it again."""

from contextlib import suppress
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from kvq.config import parse_kv
from kvq.errors import KvqError, SnapshotError, UsageError
from kvq_apps.chat.client import Facts
from kvq_apps.chat.history import SnapshotRow
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal import output

if TYPE_CHECKING:
    from kvq_apps.chat.controller import ChatController

SNAPSHOT_BYTES = 2 << 30
# Files that a killed process left unfinished; another process may be writing still.
ABANDONED_S = 3600
_AGAIN = "the next reply encodes the chat again"


class KvFiles:
    """Saves and restores the KV cache of the open chat in the folder of its settings.

    A chat goes on at the widths and in the budget it was saved with, unless the user pinned others.
    """

    def __init__(self, chat: "ChatController") -> None:
        self._view = chat.view
        self._engine = chat.engine
        self._history = chat.history
        self._conversation = chat.conversation
        self._folder = chat.settings.snapshots
        self._pinned = chat.settings.kv_pinned

    async def restore(self) -> None:
        """Loads the chat's saved KV cache, or says why the next reply encodes the chat again."""
        engine, chat_id = self._engine, self._conversation.id
        row = await self._history.read(lambda history: history.snapshot(chat_id))
        if engine.facts is None or not engine.facts.keeps_kv:
            return
        if row is None:
            self._view.say("no KV cache of this chat is saved: the next reply encodes it again")
            return
        engine.set_activity("restoring the KV cache")
        try:
            note = await self._adopt_settings(row, engine.facts)
            engine.stats = await engine.call(engine.client.restore, Path(row.path))
        except KvqError as error:
            reason = format_error(error).partition(";")[0].replace(row.path, "it")
            self._view.say(f"the KV cache is not restored ({reason}): {_AGAIN}")
            return
        engine.kv_changed = False
        tokens = engine.stats.context_tokens
        self._view.say(f"KV cache restored{note}: {tokens} tokens need no encoding")

    async def _adopt_settings(self, row: SnapshotRow, facts: Facts) -> str:
        """Changes to the widths and the budget of `row`; describes them if they differ."""
        engine = self._engine
        if row.model != facts.fingerprint:
            raise SnapshotError("it was kept for another model")
        budget = row.kv_budget or facts.kv_budget
        current = _settings_text(output.kv_text(facts.k_bits, facts.v_bits), facts.kv_budget)
        saved = _settings_text(row.kv_plan, budget)
        if saved == current:
            return ""
        if self._pinned:
            raise SnapshotError(f"it was kept at {saved}, and you asked for {current}")
        engine.facts = await engine.follow(
            engine.record, engine.client.change_kv, *parse_kv(row.kv_plan), str(budget)
        )
        return f" at {saved}"

    async def save(self) -> None:
        """Saves the chat's KV cache if anything in it is new, and says why that failed."""
        facts = self._engine.facts
        if self._folder and facts is not None and facts.keeps_kv and self._engine.kv_changed:
            try:
                await self._write(self._folder, facts)
            except SnapshotError as error:
                self._view.say(format_error(error), error=True)

    async def save_now(self) -> None:
        """Saves the KV cache, new or not, and says so. Raises `UsageError` where none is kept."""
        facts = self._engine.require_facts()
        if self._folder is None or not facts.keeps_kv:
            keeps = "the server keeps it itself" if self._folder else "--no-log keeps nothing"
            raise UsageError(f"the KV cache of this chat is not saved: {keeps}")
        saved = await self._write(self._folder, facts)
        self._view.say(f"the KV cache of this chat is {'saved' if saved else 'empty'}")

    async def _write(self, folder: Path, facts: Facts) -> bool:
        """Writes the KV cache; returns False for an empty one. Raises `SnapshotError`."""
        engine, chat_id = self._engine, self._conversation.id
        engine.kv_changed = False
        engine.set_activity("saving the KV cache")
        path = folder / f"{chat_id}.kv"
        try:
            saved = await engine.call(engine.client.save, path)
            await engine.call(forget_oldest, folder, SNAPSHOT_BYTES)
        except (SnapshotError, OSError) as error:
            raise SnapshotError(f"the KV cache is not saved: {format_error(error)}") from error
        if saved:
            row = SnapshotRow(
                path=str(path),
                model=facts.fingerprint,
                kv_plan=output.kv_text(facts.k_bits, facts.v_bits),
                kv_budget=facts.kv_budget,
            )
            self._history.write(lambda history: history.remember_snapshot(chat_id, row))
        return saved

    async def forget(self, chat_id: str) -> None:
        """Deletes the saved KV cache of a chat."""
        row = await self._history.read(lambda history: history.snapshot(chat_id))
        if row is not None:
            Path(row.path).unlink(missing_ok=True)


def _settings_text(widths: str, budget: int) -> str:
    return f"{widths} in {output.format_bytes(budget)}"


def forget_oldest(folder: Path, limit_bytes: int) -> None:
    """Deletes the caches used longest ago until the rest fits `limit_bytes`.

    The newest stays, however large it is. Other processes may delete some meanwhile.
    """
    for path in folder.glob(".*.kv-*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time() - ABANDONED_S:
                path.unlink()
    sizes: list[tuple[float, int, Path]] = []
    for path in folder.glob("*.kv"):
        with suppress(FileNotFoundError):
            status = path.stat()
            sizes.append((status.st_mtime, status.st_size, path))
    newest_first = sorted(sizes, reverse=True)
    total = sum(size for _, size, _ in newest_first[:1])
    for _, size, path in newest_first[1:]:
        total += size
        if total > limit_bytes:
            path.unlink(missing_ok=True)
