"""What the chat does, one thing after the other, whoever shows it.

Replies, changes of chat, of KV settings and of the model are jobs of one coroutine. The engine and
the history each have their own thread; nothing here waits for them on the screen's.
"""

from asyncio import Event, sleep, wait_for, wrap_future
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeVar

from kvq.errors import KvqError, SnapshotError, UsageError
from kvq_apps import output
from kvq_apps.chat import fitting, interchange
from kvq_apps.chat.client import (
    ChatClient,
    ContextFullError,
    EngineLostError,
    Facts,
    News,
    Stream,
    Turn,
)
from kvq_apps.chat.conversation import Conversation
from kvq_apps.chat.history import History, SavedChat, SnapshotRow
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_apps.chat.meter import WARN_SHARE, context_share
from kvq_apps.chat.settings import ChatSettings
from kvq_apps.chat.visible import storable
from kvq_apps.chat.worker import Worker

FRAME_S = 0.033
LEAVE_WITHIN_S = 3.0
SNAPSHOT_BYTES = 2 << 30
# How long a lost engine is left alone before each try to find it again; then the last, for ever.
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0)
AGAIN = "Enter in the empty prompt asks again"
_STATES = {"cancelled": "stopped", "stop": "done"}
T = TypeVar("T")
Job = Callable[[], Awaitable[None]]


class View(Protocol):
    """Where it is all shown. Called on the screen's thread only, but for `say_from_thread`."""

    def say(self, text: str, *, error: bool = False) -> None:
        """Shows a remark in the conversation."""
        ...

    def say_from_thread(self, text: str) -> None:
        """Shows an error that another thread met."""
        ...

    def changed(self) -> None:
        """The activity, the numbers or the queue are new."""
        ...

    def show(self, messages: Sequence[Message]) -> None:
        """Shows these messages alone."""
        ...

    def add(self, message: Message) -> None:
        """Shows one more message."""
        ...

    def feed(self, text: str) -> None:
        """Shows more of the last message; empty: draws what is not drawn yet."""
        ...

    def finished(self, message: Message) -> None:
        """The last message is whole, its state is new."""
        ...

    async def ask(self, question: str, answers: Sequence[tuple[str, str]]) -> str | None:
        """The key of the answer the user chooses, None for none."""
        ...

    def set_theme(self, name: str) -> None:
        """Takes the theme used last, if it is there."""
        ...


class Desk:
    """The chat at work: its engine, its history, the conversation, what waits to be done."""

    def __init__(self, view: View, client: ChatClient, settings: ChatSettings) -> None:
        self.client = client
        self.settings = settings
        self.facts: Facts | None = None
        self.stats = ReplyStats()
        self.queue: list[str] = []
        self.conversation = Conversation(self.write, system=settings.system)
        self.stream: Stream | None = None
        self.activity = ""
        self._view = view
        self._engine = Worker("kvq-engine")
        self._history_thread = Worker("kvq-history")
        self._history: History | None = None
        self._jobs: list[Job] = []
        self._wake = Event()
        self._busy = False
        self._kv_unsaved = False
        self._warned_full = False
        self._lost = False
        self._leaving = False

    @property
    def idle(self) -> bool:
        """Whether nothing is being done or waits to be."""
        waits = self._busy or self._jobs or self.queue or self._lost
        return self.facts is not None and not waits

    @property
    def unanswered(self) -> bool:
        """Whether the last answer failed, so that asking again is what comes next."""
        last = self.conversation.messages[-1:]
        return bool(last) and last[0].state in ("failed", "interrupted")

    @property
    def has_history(self) -> bool:
        """Whether the history is open yet."""
        return self._history is not None

    # One thing after the other

    async def work(self) -> None:
        """Opens history and engine, then does what is asked for, until it is cancelled."""
        await self._open_history()
        await self._open_engine()
        while True:
            while (job := self._next_job()) is not None:
                await self._run(job)
            self._wake.clear()
            await self._wake.wait()

    def _next_job(self) -> Job | None:
        """What was asked for first; a lost engine is looked for before messages are answered."""
        if self._jobs:
            return self._jobs.pop(0)
        if self._lost:
            return self._reconnect
        if self.queue and self.facts is not None:
            return partial(self._answer, self.queue.pop(0))
        return None

    async def _run(self, job: Job) -> None:
        self._busy = True
        self._view.changed()
        try:
            await job()
        except KvqError as error:
            self._view.say(str(error), error=True)
        finally:
            self._busy, self.stream = False, None
            self._doing("ready" if self.facts else "no model")

    def do(self, job: Job) -> None:
        """Queues `job`; what streams now is stopped for it."""
        self.cancel()
        self._jobs.append(job)
        self._wake.set()

    def enqueue(self, text: str) -> None:
        """Queues a message of the user."""
        self.queue.append(text)
        self._view.changed()
        self._wake.set()

    def cancel(self) -> bool:
        """Stops what streams; whether anything did that was not stopping already."""
        stream = self.stream
        if stream is None or stream.cancelled():
            return False
        stream.cancel()
        return True

    async def leave(self) -> None:
        """Stops what runs, saves the KV, closes history and engine; waits for none that hangs."""
        self._leaving = True
        self.queue.clear()
        self._jobs.clear()
        self.cancel()
        with suppress(TimeoutError):
            await wait_for(self._until_idle(), LEAVE_WITHIN_S)
        if self._busy and self.stream is not None:
            self.conversation.finish("interrupted", self.stats)
        elif self.facts is not None:
            await self._save_kv()
            with suppress(TimeoutError):
                await wait_for(self._on_engine(self.client.close), LEAVE_WITHIN_S)
        if self._history is not None:
            self._history_thread.call(self._history.close)
        self._history_thread.stop(LEAVE_WITHIN_S)

    async def _until_idle(self) -> None:
        while self._busy:
            await sleep(FRAME_S)

    async def _on_engine(self, function: Callable[..., T], *arguments: object) -> T:
        return await wrap_future(self._engine.call(function, *arguments))

    def _doing(self, activity: str) -> None:
        self.activity = activity
        self._view.changed()

    # History

    def write(self, write: Callable[[History], None]) -> None:
        """Has the history's thread do `write`, after what it was given before."""
        future = self._history_thread.call(lambda: write(self._opened_history()))
        future.add_done_callback(self._written)

    def _written(self, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None and not self._leaving:
            self._view.say_from_thread(
                f"the chat history failed: {error}; copy what you need with y"
            )

    async def read(self, read: Callable[[History], T]) -> T:
        """What `read` finds in the history, on its thread."""
        return await wrap_future(self._history_thread.call(lambda: read(self._opened_history())))

    def _opened_history(self) -> History:
        assert self._history is not None
        return self._history

    async def _open_history(self) -> None:
        self._doing("opening")
        troubles: list[str] = []

        def trouble(text: str) -> None:
            if self._history is None:
                troubles.append(text)
            else:
                self._view.say_from_thread(text)

        path = self.settings.history_path
        future = self._history_thread.call(lambda: History(path, on_trouble=trouble))
        self._history = await wrap_future(future)
        for text in troubles:
            self._view.say(text, error=True)
        self._view.set_theme(await self.read(lambda history: history.setting("theme")) or "")
        chat_id = self.settings.chat_id
        if chat_id is None and self.settings.latest:
            latest = await self.read(lambda history: history.chats(1))
            chat_id = latest[0].id if latest else None
        if chat_id is not None:
            await self._show_chat(chat_id)

    async def _show_chat(self, chat_id: str) -> None:
        """Puts a chat of the history on screen."""
        saved = await self.read(lambda history: history.saved_chat(chat_id))
        if saved is None:
            self._view.say(f"there is no chat {chat_id}; Ctrl+R lists them", error=True)
            return
        self.conversation.show(saved)
        self._view.show(saved.messages)
        self.stats = ReplyStats()
        self._tell_left_out()

    # The engine

    async def _open_engine(self) -> None:
        self._doing("loading the model")
        opening = self._engine.call(self.client.open)
        with suppress(Exception):
            await wrap_future(opening)
        self._opened(opening)
        if self.facts is not None and self.conversation.messages:
            await self._restore_kv()
        self._doing("ready" if self.facts else "no model")

    def _opened(self, opening: "Future[Facts]") -> None:
        """Takes what opening the client came to; says what is wrong."""
        error = opening.exception()
        self.facts = opening.result() if error is None else None
        if isinstance(error, EngineLostError):
            self._lose(error)
        elif isinstance(error, KvqError):
            self._view.say(f"{error}; /model NAME tries another", error=True)
        elif error is not None:
            text = f"the model cannot be loaded: {error}; /model NAME tries another"
            self._view.say(text, error=True)

    def _lose(self, error: EngineLostError) -> None:
        self._lost = True
        self._view.say(f"engine lost, retrying: {error}", error=True)

    async def _reconnect(self) -> None:
        """Looks for the lost engine, ever less often, until it is there, Esc, or another job."""
        self.stream = stream = Stream()
        self._doing("engine lost, retrying")
        for wait_s in chain(RETRY_S, repeat(RETRY_S[-1])):
            end = monotonic() + wait_s
            while monotonic() < end and not stream.cancelled():
                await sleep(FRAME_S)
            if stream.cancelled():
                break
            opening = self._engine.call(self.client.open)
            while not opening.done() and not stream.cancelled():
                await sleep(FRAME_S)
            if opening.done() and not isinstance(opening.exception(), EngineLostError):
                self._lost = False
                self._opened(opening)
                if self.facts is not None:
                    self._view.say("the engine is back" + f"; {AGAIN}" * self.unanswered)
                return
        # What was asked for meanwhile comes first, then the engine is looked for again.
        if not self._jobs:
            self._lost = False
            self._view.say("the engine is not looked for any more; /retry asks it again")

    async def _restore_kv(self) -> None:
        """Takes the chat's saved KV, or says why the next reply encodes the chat again."""
        chat_id = self.conversation.id
        row = await self.read(lambda history: history.snapshot(chat_id))
        if self.facts is None or not self.facts.keeps_kv:
            return
        if row is None:
            self._view.say("no KV cache of this chat is saved: the next reply encodes it again")
            return
        self._doing("restoring the KV cache")
        try:
            tokens = await self._on_engine(self.client.restore, Path(row.path))
        except SnapshotError as error:
            self._view.say(f"the KV cache is not restored ({error}); the next reply encodes again")
            return
        self._view.say(f"KV cache restored: {tokens} tokens need no encoding")

    async def _save_kv(self) -> None:
        """Saves the chat's KV, so that it can be resumed without encoding."""
        folder, facts = self.settings.snapshots, self.facts
        if folder is None or facts is None or not (facts.keeps_kv and self._kv_unsaved):
            return
        self._kv_unsaved = False
        self._doing("saving the KV cache")
        path, chat_id = folder / f"{self.conversation.id}.kv", self.conversation.id
        try:
            digest = await self._on_engine(self.client.save, path)
            await self._on_engine(forget_oldest, folder, SNAPSHOT_BYTES)
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
            self.write(lambda history: history.remember_snapshot(chat_id, row))

    # Replies

    async def _answer(self, text: str) -> None:
        """Adds the user's message and answers it."""
        self._view.add(self.conversation.add("user", text))
        await self._reply()

    async def _reply(self, *, instead_of: Message | None = None) -> None:
        """Streams an answer to the branch's end, or another one instead of a message."""
        message = self.conversation.add("assistant", "", instead_of=instead_of)
        if instead_of is None:
            self._view.add(message)
        else:
            self._view.show(self.conversation.messages)
        state = "failed"
        try:
            state = await self._ask()
        except EngineLostError as error:
            self._lose(error)
        except ContextFullError as error:
            alone = not self.conversation.oldest_turns(1)
            self._view.say(fitting.too_long(error) if alone else str(error), error=True)
        except KvqError as error:
            self._view.say(f"{error}. {AGAIN}", error=True)
        except Exception as error:  # noqa: BLE001 - shown instead of a traceback on the screen
            text = f"internal error: {type(error).__name__}: {error}. {AGAIN}"
            self._view.say(text, error=True)
        finally:
            self.conversation.finish(state, self.stats)
            self._view.finished(message)
        self._tell_context(state)

    async def _ask(self) -> str:
        """Asks the client until the conversation fits; returns the state the reply ends in."""
        way: str | None = None
        left_out = self.conversation.left_out
        while True:
            try:
                reason = await self._stream(self._turn(), self._drain)
            except ContextFullError as error:
                way = way or await self._ask_what_goes(error)
                if way not in ("trim", "summarise"):
                    raise
                if not await self._make_room(way, error):
                    way = None
                continue
            if self.conversation.left_out != left_out:
                self._tell_left_out()
            return _STATES.get(reason, reason)

    def _turn(self) -> Turn:
        settings = self.settings
        return Turn(
            messages=self.conversation.context(),
            sampling=settings.sampling,
            max_tokens=settings.max_tokens,
            seed=settings.seed,
        )

    async def _stream(self, turn: Turn, show: Callable[[News], None]) -> str:
        """Has the client answer `turn`, to be stopped by `cancel`; returns why it ended."""
        self.stream = stream = Stream()
        self.stats = ReplyStats()
        self._doing("encoding")
        self._kv_unsaved = True
        return await self._follow(stream, self._engine.call(self.client.reply, turn, stream), show)

    async def _follow(self, stream: Stream, future: "Future[T]", show: Callable[[News], None]) -> T:
        """Gives `show` what arrives in `stream` until `future` is there."""
        while not future.done():
            await sleep(FRAME_S)
            show(stream.take())
        show(stream.take())
        return future.result()

    def _drain(self, news: News) -> None:
        self._measure(news)
        text = storable(news.text)
        if text:
            self.activity = "answering"
        self._view.feed(text)
        self.conversation.feed(text)

    def _measure(self, news: News) -> None:
        """Takes the numbers of `news`."""
        if news.stats is not None:
            self.stats = news.stats
        if news.prefilled is not None:
            done, total = news.prefilled
            self.activity = f"encoding {done}/{total}" if done < total else "answering"
        if news.stats is not None or news.prefilled is not None:
            self._view.changed()

    # A full context

    async def _ask_what_goes(self, error: ContextFullError) -> str | None:
        """What the user wants done about a full context."""
        if not self.conversation.oldest_turns(1):
            return None
        self.stream = None
        self._doing("the context is full")
        answer = await self._view.ask(str(error), fitting.WAYS)
        if answer == "new":
            question = self.conversation.last("user")
            self._jobs.append(self.new_chat)
            if question is not None:
                self.queue.insert(0, question.text)
        return answer

    async def _make_room(self, way: str, error: ContextFullError) -> bool:
        """Leaves the oldest messages out or sums them up; whether there is anything less now."""
        conversation = self.conversation
        summarised = way == "summarise"
        excess = fitting.excess_characters(conversation.context(), error, summarised=summarised)
        old = conversation.oldest_turns(excess)
        if old and summarised:
            return await self._summarise(old, error.limit)
        if old:
            conversation.leave_out(old)
        return bool(old)

    async def _summarise(self, old: list[Message], limit: int) -> bool:
        """Has the model replace its oldest messages by a summary; half as many if it must."""
        conversation = self.conversation
        system = [row for row in conversation.context()[:1] if row.role == "system"]
        parts: list[str] = []

        def show(news: News) -> None:
            self._measure(news)
            parts.append(news.text)
            self.activity = "summing up"

        try:
            reason = await self._stream(
                fitting.summary_turn(system, old, limit, self.settings), show
            )
        except ContextFullError:
            fewer = conversation.oldest_turns(sum(len(row.text) for row in old) // 2)
            return len(fewer) < len(old) and await self._summarise(fewer, limit)
        summary = storable("".join(parts)).strip()
        if reason == "cancelled" or not summary:
            return False
        conversation.leave_out(old, summary)
        return True

    def _tell_left_out(self) -> None:
        """Says what the model is not given of the conversation, if anything."""
        conversation = self.conversation
        count = conversation.left_out
        if count and conversation.summary:
            self._view.say(
                f"the model is given this instead of the first {count} messages, which stay in "
                f"the chat: {conversation.summary}"
            )
        elif count:
            self._view.say(f"the first {count} messages are no longer given to the model")

    def _tell_context(self, state: str) -> None:
        if self.facts is None:
            return
        share = context_share(self.facts, self.stats)
        if state == "length" and share >= 1:
            self._view.say("the context is full: the next message asks what to leave out, or /new")
        elif share >= WARN_SHARE and not self._warned_full:
            self._warned_full = True
            self._view.say(f"the context is {share:.0%} full: /new begins a new chat")

    # Jobs

    async def answer_edited(self, message: Message, text: str) -> None:
        """Puts `text` beside `message` and answers it, if it is the user's."""
        edited = self.conversation.add(message.role, text, instead_of=message)
        self._view.show(self.conversation.messages)
        if edited.role == "user":
            await self._reply()
            stats = self.stats
            self._view.say(f"encoded {stats.encoded_tokens} of {stats.prompt_tokens} tokens again")

    async def retry(self, selected: Message | None = None) -> None:
        """Answers again, beside `selected` or the last answer."""
        if self.facts is None:
            await self._open_engine()
        if self.facts is None:
            return
        last = self.conversation.messages[-1] if self.conversation.messages else None
        answer = selected
        if answer is None and last is not None and last.role == "assistant":
            answer = last
        if answer is None and (last is None or last.role != "user"):
            raise UsageError("there is nothing to answer yet; write a message first")
        await self._reply(instead_of=answer)

    def make_drafts(self, count: int) -> None:
        """Answers the last question until there are `count` answers, the one there included."""
        if self.conversation.last("user") is None:
            raise UsageError("there is nothing to answer yet; write a message first")
        answered = self.conversation.messages[-1].role == "assistant"
        self._jobs += [self.retry] * (count - answered)
        self._wake.set()

    async def switch_branch(self, message: Message, step: int) -> None:
        """Shows the branch `step` siblings after `message`."""
        chat_id = self.conversation.id

        def switch(history: History) -> SavedChat:
            siblings = history.siblings(chat_id, message.id)
            index = (siblings.index(message.id) + step) % len(siblings)
            history.choose(chat_id, siblings[index])
            saved = history.saved_chat(chat_id)
            assert saved is not None
            return saved

        self.conversation.show(await self.read(switch))
        self._view.show(self.conversation.messages)

    async def new_chat(self) -> None:
        """Leaves this chat, its KV saved, and begins another."""
        await self._leave_chat()
        self.conversation = Conversation(self.write, system=self.settings.system)
        self._view.show([])
        self.stats = ReplyStats()

    async def resume_chat(self, chat_id: str) -> None:
        """Leaves this chat and goes on with another."""
        await self._leave_chat()
        await self._show_chat(chat_id)
        await self._restore_kv()

    async def _leave_chat(self) -> None:
        await self._save_kv()
        self._warned_full = False
        if self.facts is not None:
            await self._on_engine(self.client.begin)

    async def change_kv(self, k_bits: int | None, v_bits: int | None, budget: str | None) -> None:
        """Goes on with other KV settings, the conversation encoded again."""
        if self.facts is None:
            raise UsageError("there is no model yet; /model NAME loads one")
        self.stream = stream = Stream()
        self._doing("encoding")
        change = self._engine.call(self.client.change_kv, k_bits, v_bits, budget, stream)
        self.facts = await self._follow(stream, change, self._measure)
        self._kv_unsaved = True
        widths = output.kv_text(self.facts.k_bits, self.facts.v_bits)
        size = output.format_bytes(self.facts.kv_budget)
        self._view.say(f"KV {widths} of {size}; the conversation was encoded again")

    async def change_model(self, client: ChatClient) -> None:
        """Opens the new model first: if that fails the old one is still there."""
        self._doing("loading the model")
        facts = await self._on_engine(client.open)
        await self._save_kv()
        old, self.client, self.facts = self.client, client, facts
        await self._on_engine(old.close)
        self._view.say(f"{facts.model} answers from now on")

    async def save_now(self) -> None:
        """Saves the KV without leaving."""
        self._kv_unsaved = True
        await self._save_kv()
        self._view.say("the KV cache of this chat is saved")

    async def load_file(self, path: Path) -> None:
        """Begins a chat with the messages of a file."""
        messages = await self._on_engine(interchange.import_chat, path)
        await self.new_chat()
        self.conversation.adopt(messages)
        self._view.show(self.conversation.messages)


def forget_oldest(folder: Path, limit_bytes: int) -> None:
    """Removes the saved caches used longest ago until `limit_bytes` hold the rest."""
    files = sorted(folder.glob("*.kv"), key=lambda path: path.stat().st_mtime, reverse=True)
    kept = 0
    for path in files:
        kept += path.stat().st_size
        if kept > limit_bytes:
            path.unlink(missing_ok=True)
