"""What the chat does, one thing after the other, whoever shows it.

Replies, changes of chat, of KV settings and of the model are jobs of one coroutine. The engine and
the history each have their own thread; nothing here waits for them on the screen's.
"""

from asyncio import Event, sleep, wait_for
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvq.errors import KvqError, UsageError
from kvq_apps import output
from kvq_apps.chat import interchange
from kvq_apps.chat.client import ChatClient, Facts, News
from kvq_apps.chat.conversation import Conversation
from kvq_apps.chat.engine_link import FRAME_S, EngineLink
from kvq_apps.chat.history import History, SavedChat
from kvq_apps.chat.history_link import HistoryLink
from kvq_apps.chat.kv_files import KvFiles
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_apps.chat.replies import AGAIN, Replies, words_of
from kvq_apps.chat.settings import ChatSettings
from kvq_apps.chat.view import View
from kvq_apps.flags import told

SAVE_AFTER_S = 2.0
# Nobody waits for the engine: what it predicted is computed.
REFINE_AFTER_S = 0.3
_NO_QUESTION = "there is nothing to answer yet; write a message first"
_Job = Callable[[], Awaitable[None]]
ClientFor = Callable[[str], ChatClient]


class ChatController:
    """The chat at work: its engine, its history, the conversation, what waits to be done.

    `client_for` makes a client of another model.
    """

    def __init__(
        self,
        view: View,
        client: ChatClient,
        settings: ChatSettings,
        client_for: ClientFor | None = None,
    ) -> None:
        self.settings = settings
        self.client_for = client_for
        self.queue: list[str] = []
        self.engine = EngineLink(view, client)
        self.history = HistoryLink(view)
        self.conversation = Conversation(self.history.write, system=settings.system)
        self._replies = Replies(view, self.engine, self.conversation, settings, self._begin_anew)
        self._kv_files = KvFiles(
            view,
            self.engine,
            self.history,
            self.conversation,
            settings.snapshots,
            pinned=settings.kv_pinned,
        )
        self._view = view
        self._jobs: list[_Job] = []
        self._wake = Event()
        self._busy = False
        self._refining = False
        self._refined = True

    @property
    def idle(self) -> bool:
        """Whether nothing is being done or waits to be."""
        waits = self._busy or self._jobs or self.queue or self.engine.lost
        return self.engine.facts is not None and not waits

    @property
    def unanswered(self) -> bool:
        """Whether the last answer failed, so that asking again is what comes next."""
        last = self.conversation.messages[-1:]
        return bool(last) and last[0].state in ("failed", "interrupted")

    # One thing after the other

    async def work(self) -> None:
        """Opens history and engine, then does what is asked for, until it is cancelled."""
        await self._attempt(self._open_history)
        await self._attempt(self._open_engine)
        while True:
            while (job := self._next_job()) is not None:
                self._refined = False
                await self._run(job)
            self._wake.clear()
            await self._rest()

    async def _rest(self) -> None:
        """Waits until something is asked for; once that takes a while, the KV is saved.

        Before that, what was predicted of the conversation is computed.
        """
        if self.engine.stats.predicted_tokens and not self._refined:
            if not await self._asked_within(REFINE_AFTER_S):
                await self._run(self._refine)
            return
        if self.engine.kv_changed and not await self._asked_within(SAVE_AFTER_S):
            await self._run(self._kv_files.save)
        await self._wake.wait()

    async def _asked_within(self, seconds: float) -> bool:
        """Whether something is asked for before so many seconds are over."""
        try:
            await wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _refine(self) -> None:
        """Has what was predicted computed, until somebody asks for something."""
        self._refining, self._refined, before = True, True, self.engine.stats
        try:
            left = await self.engine.follow(self._show_refining, self.engine.client.refine)
        finally:
            self._refining = False
        stopped = self.engine.stream is not None and self.engine.stream.cancelled()
        self._refined = not stopped
        self.engine.stats = replace(before, predicted_tokens=self.engine.stats.predicted_tokens)
        if not (stopped or left or self.engine.stats.predicted_tokens):
            self._view.say(f"{before.predicted_tokens} predicted tokens are computed: all is exact")

    def _show_refining(self, news: News) -> None:
        self.engine.measure(news)
        self.engine.activity = "computing what was predicted"

    def _next_job(self) -> _Job | None:
        """What was asked for first; a lost engine is looked for before messages are answered."""
        if self._jobs:
            return self._jobs.pop(0)
        if self.engine.lost:
            return self._find_engine
        if self.queue and self.engine.facts is not None:
            return partial(self._replies.answer, self.queue.pop(0))
        return None

    async def _run(self, job: _Job) -> None:
        self._busy = True
        self._view.changed()
        try:
            await self._attempt(job)
        finally:
            self._busy = False
            self.engine.rest()

    async def _attempt(self, job: _Job) -> None:
        """Does `job`; what goes wrong is said, and the chat goes on."""
        try:
            await job()
        except Exception as error:  # noqa: BLE001 - one failed job must not end the others
            self._view.say(words_of(error), error=True)

    def do(self, job: _Job) -> None:
        """Queues `job`; what streams now is stopped for it."""
        self.engine.cancel()
        self._jobs.append(job)
        self._wake.set()

    def enqueue(self, text: str) -> None:
        """Queues a message of the user."""
        self.queue.append(text)
        if self._refining:
            self.engine.cancel()
        self._view.changed()
        self._wake.set()

    async def leave(self, within_s: float, save_within_s: float | None = None) -> None:
        """Stops what runs, saves the KV, closes history and engine; waits for none that hangs.

        Each of these may take `within_s`, saving `save_within_s`, None: as long as it takes.
        """
        self.history.leaving = True
        self.queue.clear()
        self._jobs.clear()
        self.engine.cancel()
        with suppress(TimeoutError):
            await wait_for(self._until_idle(), within_s)
        if self._busy and self.engine.stream is not None:
            for message in self.conversation.messages:
                if message.state == "streaming":
                    self.conversation.finish("interrupted", self.engine.stats, message)
        elif self.engine.facts is not None:
            with suppress(TimeoutError):
                await wait_for(self._kv_files.save(), save_within_s)
                await wait_for(self.engine.call(self.engine.client.close), within_s)
        self.history.close(within_s)

    async def _until_idle(self) -> None:
        while self._busy:
            await sleep(FRAME_S)

    # History and engine

    async def _open_history(self) -> None:
        self.engine.doing("opening")
        await self.history.open(self.settings.history_path)
        theme = await self.history.read(lambda history: history.setting("theme"))
        self._view.set_theme(theme or "")
        sidebar = await self.history.read(lambda history: history.setting("sidebar"))
        self._view.set_sidebar(shown=bool(sidebar))
        chat_id = self.settings.chat_id
        if chat_id is None and self.settings.latest:
            chat_id = await self.history.read(History.latest)
        if chat_id is not None:
            await self._show_chat(chat_id)

    async def _show_chat(self, chat_id: str) -> None:
        """Puts a chat of the history on screen."""
        saved = await self.history.read(lambda history: history.saved_chat(chat_id))
        if saved is None:
            self._view.say(f"there is no chat {chat_id}; Ctrl+R lists them", error=True)
            return
        self.conversation.show(saved)
        self._view.show(saved.messages)
        self.engine.stats = ReplyStats()
        self._replies.tell_left_out()

    async def _open_engine(self) -> None:
        await self.engine.open()
        self._take_sampling()
        if self.engine.facts is not None and self.conversation.messages:
            self._tell_model()
            await self._kv_files.restore()
        self.engine.rest()

    def _take_sampling(self) -> None:
        """What the open model asks for holds where nobody said otherwise."""
        if self.engine.facts is not None:
            self.settings.model_sampling = self.engine.facts.sampling

    def _tell_model(self) -> None:
        """Says so where another model goes on with this chat than wrote it."""
        facts = self.engine.facts
        other = "" if facts is None else self.conversation.written_with(facts)
        if other:
            self._view.say(f"{other}; /model {self.conversation.model} opens its own")

    async def _find_engine(self) -> None:
        """Looks for the lost engine until it is there, Esc, or another job."""
        if await self.engine.find():
            self._take_sampling()
            if self.engine.facts is not None:
                self._view.say("the engine is back" + f"; {AGAIN}" * self.unanswered)
        # What was asked for meanwhile comes first, then the engine is looked for again.
        elif not self._jobs:
            self.engine.lost = False
            self._view.say("the engine is not looked for any more; /retry asks it again")

    # Jobs

    async def answer_edited(self, message: Message, text: str) -> None:
        """Puts `text` beside `message` and answers it, if it is the user's."""
        before = self.conversation.context(up_to=message)
        edited = self.conversation.add(message.role, text, instead_of=message)
        self._view.show(self.conversation.messages)
        if edited.role == "user":
            await self._replies.reply(edited=before)
            stats = self.engine.stats
            encoded, total = stats.encoded_tokens, stats.prompt_tokens
            if total:
                self._view.say(f"encoded {encoded} of {total} tokens again")

    async def reread(self) -> None:
        """Has what edits left as it was encoded again."""
        self.engine.opened()
        count = await self.engine.follow(self.engine.measure, self.engine.client.reread)
        self._view.say(
            f"{count} tokens were encoded again" if count else "all of it is exact already"
        )

    async def more(self) -> None:
        """Goes on with the reply that was cut or stopped."""
        self.engine.opened()
        await self._replies.more()

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
        if answer is None and (last is None or last.role != "user"):
            raise UsageError(_NO_QUESTION)
        await self._replies.reply(instead_of=answer)

    def make_drafts(self, count: int) -> None:
        """Answers the last question until there are `count` answers, the one there included."""
        self._jobs.append(partial(self._make_drafts, count))
        self._wake.set()

    async def _make_drafts(self, count: int) -> None:
        self.engine.opened()
        if self.conversation.last("user") is None:
            raise UsageError(_NO_QUESTION)
        if count > (self.conversation.answered is not None):
            taken = await self._replies.drafts(count)
            await self._choose(taken.id)

    async def choose_draft(self, message: Message, step: int) -> None:
        """Shows the replies beside `message`, the one `step` further marked; one is kept."""
        self.conversation.place_of(message)
        chat_id = self.conversation.id
        siblings = await self.history.read(lambda history: history.beside(chat_id, message.id))
        ids = [sibling.id for sibling in siblings]
        marked = (ids.index(message.id) + step) % len(ids)
        self.engine.doing("choose a draft")
        number = await self._view.open_drafts(siblings, marked)
        if number is not None and ids[number] != message.id:
            await self._choose(ids[number])

    async def switch_branch(self, message: Message, step: int) -> None:
        """Shows the branch `step` siblings after `message`."""
        self.conversation.place_of(message)
        chat_id = self.conversation.id
        siblings = await self.history.read(lambda history: history.siblings(chat_id, message.id))
        await self._choose(siblings[(siblings.index(message.id) + step) % len(siblings)])

    async def _choose(self, message_id: str) -> None:
        """Shows the branch that this message is in."""
        chat_id = self.conversation.id

        def choose(history: History) -> SavedChat:
            history.choose(chat_id, message_id)
            saved = history.saved_chat(chat_id)
            assert saved is not None
            return saved

        self.conversation.show(await self.history.read(choose))
        self._view.show(self.conversation.messages)

    async def new_chat(self) -> None:
        """Leaves this chat, its KV saved, and begins another."""
        await self._leave_chat()
        self.conversation.begin(self.settings.system)
        self._view.show([])
        self.engine.stats = ReplyStats()

    async def rename_chat(self, chat_id: str, title: str) -> None:
        """Gives a chat another title."""
        if chat_id == self.conversation.id:
            self.conversation.rename(title)
        else:
            self.history.write(lambda history: history.rename(chat_id, title))

    async def delete_chat(self, chat_id: str) -> None:
        """Removes a chat and its KV for good; the open one makes way for another."""
        await self._kv_files.forget(chat_id)
        if chat_id == self.conversation.id:
            self.engine.kv_changed = False
            await self.new_chat()
        self.history.write(lambda history: history.delete(chat_id))

    def _begin_anew(self, question: str) -> None:
        """Has `question` answered in a new chat."""
        self._jobs.append(self.new_chat)
        self.queue.insert(0, question)

    async def resume_chat(self, chat_id: str) -> None:
        """Leaves this chat and goes on with another."""
        await self._leave_chat()
        await self._show_chat(chat_id)
        await self._open_its_model()
        await self._kv_files.restore()

    async def _open_its_model(self) -> None:
        """Opens the model this chat was written with, unless the user chose one for all."""
        facts, model = self.engine.facts, self.conversation.model
        if facts is None or not self.conversation.written_with(facts):
            return
        if not self.settings.model_pinned and self.client_for is not None:
            try:
                await self._become_model(self.client_for(model))
            except KvqError as error:
                self._view.say(told(error), error=True)
        self._tell_model()

    async def _leave_chat(self) -> None:
        await self._kv_files.save()
        self._replies.warned_full = False
        if self.engine.facts is not None:
            await self.engine.call(self.engine.client.begin)

    async def change_kv(self, k_bits: int | None, v_bits: int | None, budget: str | None) -> None:
        """Goes on with other KV settings, the conversation encoded again."""
        engine = self.engine
        engine.opened()
        engine.facts = facts = await engine.follow(
            engine.measure, engine.client.change_kv, k_bits, v_bits, budget
        )
        widths = output.kv_text(facts.k_bits, facts.v_bits)
        size = output.format_bytes(facts.kv_budget)
        self._view.say(f"KV {widths} of {size}; the conversation was encoded again")

    async def change_model(self, client: ChatClient) -> None:
        """Opens the new model first: if that fails the old one is still there."""
        await self._kv_files.save()
        facts = await self._become_model(client)
        self._view.say(f"{facts.model} answers from now on")

    async def _become_model(self, client: ChatClient) -> Facts:
        self.engine.doing("loading the model")
        facts = await self.engine.call(client.open)
        await self.engine.change_client(client, facts)
        self._take_sampling()
        return facts

    async def save_now(self) -> None:
        """Saves the KV without leaving."""
        await self._kv_files.save_now()

    async def load_file(self, path: Path) -> None:
        """Begins a chat with the messages of a file."""
        messages = await self.engine.call(interchange.import_chat, path)
        await self.new_chat()
        self.conversation.adopt(messages)
        self._view.show(self.conversation.messages)
