"""How a question is answered: the reply streams into the conversation, a full context gives way."""

from asyncio import ensure_future
from collections.abc import Callable, Sequence
from functools import partial

from kvq.errors import KvqError
from kvq_apps.chat import fitting
from kvq_apps.chat.client import ContextFullError, EngineLostError, News, Turn
from kvq_apps.chat.conversation import Conversation
from kvq_apps.chat.engine_link import EngineLink
from kvq_apps.chat.messages import Message, ReplyStats, state_after
from kvq_apps.chat.meter import WARN_SHARE, context_share, why_cut
from kvq_apps.chat.settings import ChatSettings
from kvq_apps.chat.view import View
from kvq_apps.chat.visible import storable
from kvq_apps.flags import told
from kvq_models.thinking import split

AGAIN = "Enter in the empty prompt asks again"


def words_of(error: Exception) -> str:
    """What to say of an error on the screen, instead of a traceback."""
    ours = isinstance(error, KvqError)
    return told(error) if ours else f"internal error: {type(error).__name__}: {told(error)}"


class Replies:
    """Answers the branch of `conversation` that is shown.

    `begin_anew` is called with a question that the user wants answered in a new chat. A context
    that is nearly full is told once, then it is `warned_full`.
    """

    def __init__(
        self,
        view: View,
        engine: EngineLink,
        conversation: Conversation,
        settings: ChatSettings,
        begin_anew: Callable[[str], None],
    ) -> None:
        self._view = view
        self._engine = engine
        self._conversation = conversation
        self._settings = settings
        self._begin_anew = begin_anew
        self.warned_full = False

    async def answer(self, text: str) -> None:
        """Adds the user's message and answers it."""
        self._view.add(self._conversation.add("user", text))
        await self.reply()

    async def reply(
        self, *, instead_of: Message | None = None, edited: Sequence[Message] = ()
    ) -> None:
        """Streams an answer to the branch's end, or another one instead of a message.

        `edited` is the branch as it was, up to the message of which its end now is an edit.
        """
        message = self._conversation.add("assistant", "", instead_of=instead_of)
        if instead_of is None:
            self._view.add(message)
        else:
            self._view.show(self._conversation.messages)
        await self._stream_into(message, edited=edited)

    async def _stream_into(
        self, message: Message, *, edited: Sequence[Message] = (), begun: Message | None = None
    ) -> None:
        """Has the branch answered into its last message, which may have `begun`."""
        state = "failed"
        try:
            state = await self._ask(edited, begun)
        except EngineLostError as error:
            self._engine.lose(error)
        except ContextFullError as error:
            alone = not self._conversation.oldest_turns(1)
            self._view.say(fitting.too_long(error) if alone else told(error), error=True)
        except Exception as error:  # noqa: BLE001 - said, and the chat goes on
            self._view.say(f"{words_of(error)}. {AGAIN}", error=True)
        finally:
            self._conversation.finish(state, self._engine.stats)
            self._view.finished(message)
        self._tell_context(state)

    async def more(self) -> None:
        """Goes on with the reply that was cut. Raises `UsageError` where there is none."""
        message = self._conversation.cut_reply()
        message.state = "streaming"
        self._view.show(self._conversation.messages)
        await self._stream_into(message, begun=message)

    async def drafts(self, count: int) -> Message:
        """Has the last question answered until there are `count` replies; returns the one chosen.

        A reply that is there is the first of them. A choice stops what is still written.
        """
        former = self._conversation.answered
        context = [row for row in self._conversation.context() if row is not former]
        new = self._conversation.begin_drafts(count - (former is not None))
        shown = new if former is None else [former, *new]
        chosen = ensure_future(self._view.open_drafts(shown, len(shown) - len(new)))
        chosen.add_done_callback(lambda _: self._engine.cancel())
        states = ["failed"] * len(new)
        try:
            show = partial(self._drain_drafts, new, len(shown) - len(new))
            turn = self._settings.turn(context)
            self._answered()
            self._engine.stats = ReplyStats()
            client = self._engine.client
            reasons = await self._engine.follow(show, client.drafts, turn, len(new))
            states = [state_after(reason) for reason in reasons]
        except EngineLostError as error:
            self._engine.lose(error)
        except Exception as error:  # noqa: BLE001 - said, and one of the drafts is still chosen
            self._view.say(words_of(error), error=True)
        finally:
            for message, state in zip(new, states, strict=True):
                self._conversation.finish(state, self._engine.stats, message)
            self._view.drafts_finished(shown)
        self._engine.stream = None
        self._engine.doing("choose a draft")
        number = await chosen
        taken = former if number is None else shown[number]
        if taken is not None and taken is not former and "failed" not in states:
            await self._engine.call(self._engine.client.keep, new.index(taken))
        return taken or new[0]

    def _drain_drafts(self, new: list[Message], first: int, news: News) -> None:
        self._engine.measure(news)
        for draft, text in news.texts.items():
            self._engine.activity = "answering"
            self._view.feed_draft(first + draft, storable(text))
            self._conversation.feed(storable(text), new[draft])

    async def _ask(self, edited: Sequence[Message], begun: Message | None) -> str:
        """Asks the client until the conversation fits; returns the state the reply ends in."""
        way: str | None = None
        left_out = self._conversation.left_out
        while True:
            try:
                context = self._conversation.context(up_to=begun)
                turn = self._settings.turn(context, edited=edited)
                reason = await self._stream(turn, self._drain)
            except ContextFullError as error:
                way = way or await self._ask_what_goes(error)
                if way not in ("trim", "summarise"):
                    raise
                if not await self._make_room(way, error):
                    way = None
                continue
            if self._conversation.left_out != left_out:
                self.tell_left_out()
            return state_after(reason)

    async def _stream(self, turn: Turn, show: Callable[[News], None]) -> str:
        """Has the client answer `turn`; returns why it ended."""
        self._answered()
        self._engine.stats = ReplyStats()
        return await self._engine.follow(show, self._engine.client.reply, turn)

    def _answered(self) -> None:
        """The model that answers is the chat's from now on."""
        if self._engine.facts is not None:
            self._conversation.answered_by(self._engine.facts)

    def _drain(self, news: News) -> None:
        self._engine.measure(news)
        text = storable(news.text)
        if text:
            self._engine.activity = "answering"
        self._view.feed(text)
        self._conversation.feed(text)

    # A full context

    async def _ask_what_goes(self, error: ContextFullError) -> str | None:
        """What the user wants done about a full context."""
        if not self._conversation.oldest_turns(1):
            return None
        self._engine.stream = None
        self._engine.doing("the context is full")
        answer = await self._view.ask(told(error), fitting.WAYS)
        question = self._conversation.last("user")
        if answer == "new" and question is not None:
            self._begin_anew(question.text)
        return answer

    async def _make_room(self, way: str, error: ContextFullError) -> bool:
        """Leaves the oldest messages out or sums them up; whether there is anything less now."""
        conversation = self._conversation
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
        conversation = self._conversation
        system = [row for row in conversation.context()[:1] if row.role == "system"]
        parts: list[str] = []
        turn = fitting.summary_turn(system, old, limit, self._settings)
        try:
            reason = await self._stream(turn, partial(self._collect, parts))
        except ContextFullError:
            fewer = conversation.oldest_turns(sum(len(row.text) for row in old) // 2)
            return len(fewer) < len(old) and await self._summarise(fewer, limit)
        summary = split(storable("".join(parts)))[1].strip()
        if reason == "cancelled" or not summary:
            return False
        conversation.leave_out(old, summary)
        return True

    def _collect(self, parts: list[str], news: News) -> None:
        self._engine.measure(news)
        parts.append(news.text)
        self._engine.activity = "summing up"

    def tell_left_out(self) -> None:
        """Says what the model is not given of the conversation, if anything."""
        conversation = self._conversation
        count = conversation.left_out
        if count and conversation.summary:
            self._view.say(
                f"the model is given this instead of the first {count} messages, which stay in "
                f"the chat: {conversation.summary}"
            )
        elif count:
            self._view.say(f"the first {count} messages are no longer given to the model")

    def _tell_context(self, state: str) -> None:
        if self._engine.facts is None:
            return
        share = context_share(self._engine.facts, self._engine.stats)
        if state == "length" and share >= 1:
            self._view.say("the context is full: the next message asks what to leave out, or /new")
        elif state == "length":
            cut = why_cut(self._engine.facts, self._engine.stats, self._settings.max_tokens)
            self._view.say(f"{cut}; /more goes on with it, /set predict N changes the limit")
        elif share >= WARN_SHARE and not self.warned_full:
            self.warned_full = True
            self._view.say(f"the context is {share:.0%} full: /new begins a new chat")
