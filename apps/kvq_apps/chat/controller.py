"""Runs the chat: one job after the other, independent of the screen.

Replies, changes of chat, of KV settings and of the model are jobs of one coroutine. The engine and
the history have a thread each; nothing here waits for them on the screen's thread.
"""

from asyncio import Event, sleep, wait_for
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.errors import KvqError, UsageError
from kvq_apps.chat import interchange
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import ChatClient, Facts
from kvq_apps.chat.conversation import ChatConversation
from kvq_apps.chat.history import History, SavedChat
from kvq_apps.chat.kv_files import KvFiles
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_apps.chat.replies import RETRY_HINT, Replies, error_text
from kvq_apps.chat.screens import DraftsScreen
from kvq_apps.chat.threads import FRAME_S, EngineLink, HistoryLink
from kvq_apps.chat.tool_servers import ToolServers
from kvq_apps.names.model_names import NotPulledError
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal.output import LOG

if TYPE_CHECKING:
    from kvq_apps.chat.chat_app import ChatApp

SAVE_AFTER_S = 2.0
_NO_QUESTION = "there is nothing to answer yet; write a message first"
_Job = Callable[[], Awaitable[None]]
ClientFor = Callable[[str], ChatClient]


class ChatController:
    """Runs a chat, one job after the other; `client_for` makes a client of another model."""

    def __init__(
        self,
        view: "ChatApp",
        client: ChatClient,
        settings: ChatSettings,
        client_for: ClientFor | None = None,
    ) -> None:
        self.view = view
        self.settings = settings
        self.client_for = client_for
        self.queue: list[str] = []
        self.engine = EngineLink(view, client)
        self.history = HistoryLink(view)
        self.conversation = ChatConversation(self.history.write, system=settings.system)
        self.tool_servers = ToolServers(settings.tool_servers, view.say_from_thread)
        self.replies = Replies(self)
        self.kv_files = KvFiles(self)
        self._jobs: list[_Job] = []
        self._wake = Event()
        self._busy = False

    @property
    def idle(self) -> bool:
        """Tells whether nothing runs and nothing waits."""
        waits = self._busy or self._jobs or self.queue or self.engine.lost
        return self.engine.facts is not None and not waits

    @property
    def unanswered(self) -> bool:
        """Tells whether the last answer failed, so that the user may ask again."""
        last = self.conversation.messages[-1:]
        return bool(last) and last[0].state in ("failed", "interrupted")

    # One thing after the other

    async def work(self) -> None:
        """Opens history and engine, then runs jobs until it is cancelled."""
        self.tool_servers.start()
        await self._attempt(self._open_history)
        await self._attempt(self._open_engine)
        while True:
            while (job := self._next_job()) is not None:
                await self._run(job)
            self._wake.clear()
            await self._wait_for_work()

    async def _wait_for_work(self) -> None:
        """Waits for work; where none comes for a while, saves the KV cache first."""
        if self.engine.kv_changed:
            try:
                await wait_for(self._wake.wait(), SAVE_AFTER_S)
            except TimeoutError:
                await self._run(self.kv_files.save)
        await self._wake.wait()

    def _next_job(self) -> _Job | None:
        """Returns the next job; a lost engine is looked for before messages are answered."""
        if self._jobs:
            return self._jobs.pop(0)
        if self.engine.lost:
            return self._find_engine
        if self.queue and self.engine.facts is not None:
            return partial(self.replies.answer, self.queue.pop(0))
        return None

    async def _run(self, job: _Job) -> None:
        self._busy = True
        self.view.changed()
        try:
            await self._attempt(job)
        finally:
            self._busy = False
            self.engine.set_idle()

    async def _attempt(self, job: _Job) -> None:
        """Runs `job` and shows its error, if there is one. The chat goes on."""
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - one failed job must not end the others
            self.view.say(error_text(error), error=True)

    def do(self, job: _Job) -> None:
        """Queues `job` and stops what streams now."""
        self.engine.cancel()
        self._jobs.append(job)
        self._wake.set()

    def enqueue(self, text: str) -> None:
        self.queue.append(text)
        self.view.changed()
        self._wake.set()

    async def leave(self, within_s: float, save_within_s: float | None = None) -> None:
        """Stops what runs, saves the KV cache, and closes history and engine.

        Each step may take `within_s`, saving `save_within_s` (None: as long as it needs). A step
        that hangs is not waited for longer.
        """
        self.history.leaving = True
        self.queue.clear()
        self._jobs.clear()
        self.engine.cancel()
        self.tool_servers.end()
        with suppress(TimeoutError):
            await wait_for(self._until_idle(), within_s)
        if self._busy and self.engine.stream is not None:
            for message in self.conversation.messages:
                if message.state == "streaming":
                    self.conversation.finish("interrupted", self.engine.stats, message)
        elif self.engine.facts is not None:
            with suppress(TimeoutError):
                await wait_for(self.kv_files.save(), save_within_s)
                await wait_for(self.engine.call(self.engine.client.close), within_s)
        self.history.close(within_s)
        self.tool_servers.join(within_s)

    async def _until_idle(self) -> None:
        while self._busy:
            await sleep(FRAME_S)

    # History and engine

    async def _open_history(self) -> None:
        self.engine.set_activity("opening")
        await self.history.open(self.settings.history_path)
        theme = await self.history.read(lambda history: history.setting("theme"))
        self.view.set_theme(theme or "")
        sidebar = await self.history.read(lambda history: history.setting("sidebar"))
        self.view.set_sidebar(shown=bool(sidebar))
        chat_id = self.settings.chat_id
        if chat_id is None and self.settings.latest:
            chat_id = await self.history.read(History.latest)
        if chat_id is not None:
            await self._show_chat(chat_id)

    async def _show_chat(self, chat_id: str) -> None:
        saved = await self.history.read(lambda history: history.saved_chat(chat_id))
        if saved is None:
            self.view.say(f"there is no chat {chat_id}; Ctrl+R lists them", error=True)
            return
        self.conversation.show(saved)
        self.view.show(saved.messages)
        self.engine.stats = ReplyStats()
        self.replies.tell_left_out()

    async def _open_engine(self) -> None:
        await self.engine.open()
        self._adopt_sampling()
        if self.engine.facts is not None and self.conversation.messages:
            self._say_other_model()
            await self.kv_files.restore()
        self.engine.set_idle()

    def _adopt_sampling(self) -> None:
        """Uses the model's own sampling where the user chose none."""
        if self.engine.facts is not None:
            self.settings.model_sampling = self.engine.facts.sampling

    def _say_other_model(self) -> None:
        """Tells the user when another model than before goes on with this chat."""
        facts = self.engine.facts
        note = "" if facts is None else self.conversation.other_model_note(facts)
        if note:
            self.view.say(f"{note}; /model {self.conversation.model} opens its own")

    async def _find_engine(self) -> None:
        """Looks for the lost engine until it is back, Esc is pressed, or another job comes."""
        if await self.engine.find():
            self._adopt_sampling()
            if self.engine.facts is not None:
                self.view.say("the engine is back" + f"; {RETRY_HINT}" * self.unanswered)
        # A job that came meanwhile runs first, then the engine is looked for again.
        elif not self._jobs:
            self.engine.lost = False
            self.view.say("the engine is not looked for any more; /retry asks it again")

    # Jobs

    async def answer_edited(self, message: Message, text: str) -> None:
        """Adds `text` beside `message`, and answers it if it is the user's."""
        before = self.conversation.context(up_to=message)
        edited = self.conversation.add(message.role, text, instead_of=message)
        self.view.show(self.conversation.messages)
        if edited.role == "user":
            await self.replies.reply(edited=before)
            stats = self.engine.stats
            encoded, total = stats.encoded_tokens, stats.prompt_tokens
            if total:
                self.view.say(f"encoded {encoded} of {total} tokens again")

    async def reread(self) -> None:
        """Encodes again the tokens that edits left as they were computed before."""
        self.engine.require_facts()
        count = await self.engine.follow(self.engine.record, self.engine.client.reread)
        if count:
            self.engine.stats = replace(self.engine.stats, predicted_tokens=0)
        self.view.say(
            f"{count} tokens were encoded again" if count else "all of it is exact already"
        )

    async def retry(self, selected: Message | None = None) -> None:
        """Answers again, beside `selected` or the last answer."""
        if self.engine.facts is None:
            await self._open_engine()
        if self.engine.facts is None:
            return
        last = self.conversation.messages[-1] if self.conversation.messages else None
        answer = selected
        if answer is None and last is not None and last.role == "assistant":
            answer = last
        if answer is None and (last is None or last.role not in ("user", "tool")):
            raise UsageError(_NO_QUESTION)
        await self.replies.reply(instead_of=answer)

    def make_drafts(self, count: int) -> None:
        """Writes answers to the last question until there are `count`, the present one included."""
        self._jobs.append(partial(self._make_drafts, count))
        self._wake.set()

    async def _make_drafts(self, count: int) -> None:
        self.engine.require_facts()
        if self.conversation.last_message("user") is None:
            raise UsageError(_NO_QUESTION)
        if count > (self.conversation.last_reply is not None):
            chosen = await self.replies.write_drafts(count)
            await self._choose(chosen.id)

    async def choose_sibling(self, message: Message, step: int) -> None:
        """Shows the branch `step` siblings after a question.

        Siblings of a reply are shown side by side with that reply marked, to choose among them.
        """
        self.conversation.index_of(message)
        chat_id = self.conversation.id
        siblings = await self.history.read(
            lambda history: history.sibling_messages(chat_id, message.id)
        )
        ids = [sibling.id for sibling in siblings]
        number: int | None = (ids.index(message.id) + step) % len(ids)
        if message.role == "assistant":
            self.engine.set_activity("choose a draft")
            number = await self.view.push_screen(
                DraftsScreen(siblings, number), wait_for_dismiss=True
            )
        if number is not None and ids[number] != message.id:
            await self._choose(ids[number])

    async def _choose(self, message_id: str) -> None:
        """Shows the branch that this message is in."""
        chat_id = self.conversation.id

        def choose(history: History) -> SavedChat:
            history.choose(chat_id, message_id)
            saved = history.saved_chat(chat_id)
            assert saved is not None
            return saved

        self.conversation.show(await self.history.read(choose))
        self.view.show(self.conversation.messages)

    async def new_chat(self) -> None:
        """Saves the KV cache of this chat and begins another chat."""
        await self._leave_chat()
        self.conversation.begin(self.settings.system)
        self.view.show([])
        self.engine.stats = ReplyStats()

    async def rename_chat(self, chat_id: str, title: str) -> None:
        if chat_id == self.conversation.id:
            self.conversation.rename(title)
        else:
            self.history.write(lambda history: history.rename(chat_id, title))

    async def delete_chat(self, chat_id: str) -> None:
        """Deletes a chat and its KV cache. If it is the open one, a new chat begins."""
        await self.kv_files.forget(chat_id)
        if chat_id == self.conversation.id:
            self.engine.kv_changed = False
            await self.new_chat()
        self.history.write(lambda history: history.delete(chat_id))

    def begin_anew(self, question: str) -> None:
        self._jobs.append(self.new_chat)
        self.queue.insert(0, question)

    async def resume_chat(self, chat_id: str) -> None:
        """Leaves this chat and goes on with another."""
        await self._leave_chat()
        await self._show_chat(chat_id)
        await self._open_chat_model()
        await self.kv_files.restore()

    async def _open_chat_model(self) -> None:
        """Opens the model this chat was written with, unless the user chose one for all chats."""
        facts, model = self.engine.facts, self.conversation.model
        if facts is None or not self.conversation.other_model_note(facts):
            return
        if not self.settings.model_pinned and self.client_for is not None:
            try:
                await self._switch_model(self.client_for(model))
            except KvqError as error:
                self.view.say(format_error(error), error=True)
        self._say_other_model()

    async def _leave_chat(self) -> None:
        await self.kv_files.save()
        self.replies.warned_full = False
        if self.engine.facts is not None:
            await self.engine.call(self.engine.client.begin)

    async def change_kv(self, k_bits: int | None, v_bits: int | None, budget: str | None) -> None:
        """Changes the KV settings and encodes the conversation again."""
        engine = self.engine
        engine.require_facts()
        engine.facts = facts = await engine.follow(
            engine.record, engine.client.change_kv, k_bits, v_bits, budget
        )
        self.view.say(f"{facts.cache_text}; the conversation was read again")

    async def change_model(self, client: ChatClient) -> None:
        """Opens another model, pulled first if the user agrees; on failure the old one stays."""
        await self.kv_files.save()
        try:
            facts = await self._switch_model(client)
        except NotPulledError as error:
            if not await self._pull(error):
                return
            facts = await self._switch_model(client)
        self.view.say(f"{facts.model} answers from now on")

    async def _pull(self, missing: NotPulledError) -> bool:
        """Pulls a model if the user agrees; returns whether it is here now."""
        answers = (("pull", "Pull it"), ("keep", "Go on with the model of now"))
        if await self.view.ask(missing.question, answers) != "pull":
            return False
        from kvq_apps.names.pulling import pull

        self.engine.set_activity(f"pulling {missing.model.name}")
        await self.engine.call(pull, missing.model, LOG)
        return True

    async def _switch_model(self, client: ChatClient) -> Facts:
        self.engine.set_activity("loading the model")
        facts = await self.engine.call(client.open)
        await self.engine.change_client(client, facts)
        self._adopt_sampling()
        return facts

    async def load_file(self, path: Path) -> None:
        messages = await self.engine.call(interchange.import_chat, path)
        await self.new_chat()
        self.conversation.adopt(messages)
        self.view.show(self.conversation.messages)
