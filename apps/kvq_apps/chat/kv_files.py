"""Each chat's KV cache on disk, so that a chat can be resumed without encoding it again."""

from pathlib import Path

from kvq.errors import SnapshotError
from kvq_apps import output
from kvq_apps.chat.conversation import Conversation
from kvq_apps.chat.engine_link import EngineLink
from kvq_apps.chat.history import SnapshotRow
from kvq_apps.chat.history_link import HistoryLink
from kvq_apps.chat.view import View

SNAPSHOT_BYTES = 2 << 30


class KvFiles:
    """Saves and restores the open chat's KV in `folder`; None: nothing is saved."""

    def __init__(
        self,
        view: View,
        engine: EngineLink,
        history: HistoryLink,
        conversation: Conversation,
        folder: Path | None,
    ) -> None:
        self._view = view
        self._engine = engine
        self._history = history
        self._conversation = conversation
        self._folder = folder

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
            tokens = await engine.call(engine.client.restore, Path(row.path))
        except SnapshotError as error:
            self._view.say(f"the KV cache is not restored ({error}); the next reply encodes again")
            return
        self._view.say(f"KV cache restored: {tokens} tokens need no encoding")

    async def save(self) -> None:
        """Saves the chat's KV, if there is anything new in it."""
        engine, folder, chat_id = self._engine, self._folder, self._conversation.id
        facts = engine.facts
        if folder is None or facts is None or not (facts.keeps_kv and engine.kv_changed):
            return
        engine.kv_changed = False
        engine.doing("saving the KV cache")
        path = folder / f"{chat_id}.kv"
        try:
            digest = await engine.call(engine.client.save, path)
            await engine.call(forget_oldest, folder, SNAPSHOT_BYTES)
        except (SnapshotError, OSError) as error:
            self._view.say(f"the KV cache is not saved: {error}", error=True)
            return
        if digest is not None:
            row = SnapshotRow(
                path=str(path),
                model=facts.fingerprint,
                kv_plan=output.kv_text(facts.k_bits, facts.v_bits),
                token_hash=digest,
            )
            self._history.write(lambda history: history.remember_snapshot(chat_id, row))


def forget_oldest(folder: Path, limit_bytes: int) -> None:
    """Removes the saved caches used longest ago until `limit_bytes` hold the rest."""
    files = sorted(folder.glob("*.kv"), key=lambda path: path.stat().st_mtime, reverse=True)
    kept = 0
    for path in files:
        kept += path.stat().st_size
        if kept > limit_bytes:
            path.unlink(missing_ok=True)
