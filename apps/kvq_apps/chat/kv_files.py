"""Each chat's KV cache on disk, so that a chat can be resumed without encoding it again."""

from contextlib import suppress
from pathlib import Path
from time import time

from kvq.config import parse_kv
from kvq.errors import KvqError, SnapshotError, UsageError
from kvq_apps import output
from kvq_apps.chat.client import Facts
from kvq_apps.chat.conversation import Conversation
from kvq_apps.chat.engine_link import EngineLink
from kvq_apps.chat.history import SnapshotRow
from kvq_apps.chat.history_link import HistoryLink
from kvq_apps.chat.view import View
from kvq_apps.flags import told

SNAPSHOT_BYTES = 2 << 30
# What a process that was killed had begun to write; another process may be writing still.
ABANDONED_S = 3600
_AGAIN = "the next reply encodes the chat again"


class KvFiles:
    """Saves and restores the open chat's KV in `folder`; None: nothing is saved.

    A chat goes on at the widths and in the budget it was saved with, unless they are `pinned`.
    """

    def __init__(
        self,
        view: View,
        engine: EngineLink,
        history: HistoryLink,
        conversation: Conversation,
        folder: Path | None,
        *,
        pinned: bool = False,
    ) -> None:
        self._view = view
        self._engine = engine
        self._history = history
        self._conversation = conversation
        self._folder = folder
        self._pinned = pinned

    async def restore(self) -> None:
        """Takes the chat's saved KV, or says why the next reply encodes the chat again."""
        engine, chat_id = self._engine, self._conversation.id
        row = await self._history.read(lambda history: history.snapshot(chat_id))
        if engine.facts is None or not engine.facts.keeps_kv:
            return
        if row is None:
            self._view.say("no KV cache of this chat is saved: the next reply encodes it again")
            return
        engine.doing("restoring the KV cache")
        try:
            at = await self._become(row, engine.facts)
            engine.stats = await engine.call(engine.client.restore, Path(row.path))
        except KvqError as error:
            reason = told(error).partition(";")[0].replace(row.path, "it")
            self._view.say(f"the KV cache is not restored ({reason}): {_AGAIN}")
            return
        engine.kv_changed = False
        tokens = engine.stats.context_tokens
        self._view.say(f"KV cache restored{at}: {tokens} tokens need no encoding")

    async def _become(self, row: SnapshotRow, facts: Facts) -> str:
        """Takes the widths and the budget of `row`; says them if they are others than now."""
        engine = self._engine
        if row.model != facts.fingerprint:
            raise SnapshotError("it was kept for another model")
        budget = row.kv_budget or facts.kv_budget
        now = _settings(output.kv_text(facts.k_bits, facts.v_bits), facts.kv_budget)
        kept = _settings(row.kv_plan, budget)
        if kept == now:
            return ""
        if self._pinned:
            raise SnapshotError(f"it was kept at {kept}, and you asked for {now}")
        engine.facts = await engine.follow(
            engine.measure, engine.client.change_kv, *parse_kv(row.kv_plan), str(budget)
        )
        return f" at {kept}"

    async def save(self) -> None:
        """Saves the chat's KV, if there is anything new in it; says why that failed."""
        facts = self._engine.facts
        if self._folder and facts is not None and facts.keeps_kv and self._engine.kv_changed:
            try:
                await self._write(self._folder, facts)
            except SnapshotError as error:
                self._view.say(told(error), error=True)

    async def save_now(self) -> None:
        """Saves it, new or not, and says so. Raises `UsageError` where no KV is kept."""
        facts = self._engine.opened()
        if self._folder is None or not facts.keeps_kv:
            keeps = "the server keeps it itself" if self._folder else "--no-log keeps nothing"
            raise UsageError(f"the KV cache of this chat is not saved: {keeps}")
        saved = await self._write(self._folder, facts)
        self._view.say(f"the KV cache of this chat is {'saved' if saved else 'empty'}")

    async def _write(self, folder: Path, facts: Facts) -> bool:
        """Saves it; False: there is nothing in it. Raises `SnapshotError`."""
        engine, chat_id = self._engine, self._conversation.id
        engine.kv_changed = False
        engine.doing("saving the KV cache")
        path = folder / f"{chat_id}.kv"
        try:
            digest = await engine.call(engine.client.save, path)
            await engine.call(forget_oldest, folder, SNAPSHOT_BYTES)
        except (SnapshotError, OSError) as error:
            raise SnapshotError(f"the KV cache is not saved: {told(error)}") from error
        if digest is not None:
            row = SnapshotRow(
                path=str(path),
                model=facts.fingerprint,
                kv_plan=output.kv_text(facts.k_bits, facts.v_bits),
                token_hash=digest,
                kv_budget=facts.kv_budget,
            )
            self._history.write(lambda history: history.remember_snapshot(chat_id, row))
        return digest is not None

    async def forget(self, chat_id: str) -> None:
        """Removes what is saved of a chat."""
        row = await self._history.read(lambda history: history.snapshot(chat_id))
        if row is not None:
            Path(row.path).unlink(missing_ok=True)


def _settings(widths: str, budget: int) -> str:
    return f"{widths} in {output.format_bytes(budget)}"


def forget_oldest(folder: Path, limit_bytes: int) -> None:
    """Removes the saved caches used longest ago until `limit_bytes` hold the rest.

    The newest stays, however large. Other processes may remove some meanwhile.
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
    kept = sum(size for _, size, _ in newest_first[:1])
    for _, size, path in newest_first[1:]:
        kept += size
        if kept > limit_bytes:
            path.unlink(missing_ok=True)
