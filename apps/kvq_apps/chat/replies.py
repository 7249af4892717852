"""Answers questions: streams a reply into the conversation, and makes room in a full context.

Only the engine counts tokens: its count of the whole conversation gives characters per token.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvq.errors import KvqError
from kvq_apps.chat.client import ContextFullError, EngineLostError, StreamUpdate, Turn
from kvq_apps.chat.messages import Message, ReplyStats, state_after
from kvq_apps.chat.meter import WARN_SHARE, context_share, why_cut
from kvq_apps.chat.screens import DraftsScreen
from kvq_apps.chat.tool_calls import MOST_ROUNDS, ToolCalls
from kvq_apps.chat.tool_servers import ServerTool
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal.output import storable
from kvq_models.thinking import split

if TYPE_CHECKING:
    from kvq_apps.chat.controller import ChatController

RETRY_HINT = "Enter in the empty prompt asks again"
# After a cut this share of the context is filled, so some turns more fit.
FILLED_SHARE, FILLED_SHARE_SUMMARISED = 0.75, 0.5
SUMMARY_SHARE = 1 / 8
SUMMARY_TOKENS = (16, 512)
REMEDIES = (
    ("trim", "Leave the oldest messages out (they stay in the chat)"),
    ("summarise", "Let the model sum the oldest messages up (they stay in the chat)"),
    ("new", "Begin a new chat with this message"),
    ("keep", "Do nothing"),
)
_SUMMARY_REQUEST = (
    "Sum up our conversation so far in at most {words} words and in its language, so that we can "
    "go on from the summary alone. Keep names, numbers, decisions, code we still need and open "
    "questions. Write the summary and nothing else."
)


def error_text(error: Exception) -> str:
    """Describes an error on the screen, instead of a traceback."""
    head = "" if isinstance(error, KvqError) else f"internal error: {type(error).__name__}: "
    return head + format_error(error)


class Replies:
    """Answers at the end of the branch that `chat` shows."""

    def __init__(self, chat: "ChatController") -> None:
        self._chat = chat
        self._view = chat.view
        self._engine = chat.engine
        self._conversation = chat.conversation
        self._settings = chat.settings
        self._tool_calls = ToolCalls(chat)
        self._tools: Mapping[str, ServerTool] = {}
        # The user knows that the context is nearly full.
        self.warned_full = False

    async def answer(self, text: str) -> None:
        """Adds the user's message and answers it."""
        self._view.add(self._conversation.add("user", text))
        await self.reply()

    async def reply(
        self, *, instead_of: Message | None = None, edited: Sequence[Message] = ()
    ) -> None:
        """Streams an answer to the branch's end, or another one instead of a message.

        `edited` is the branch as it was, up to the old version of the edited message.
        """
        message = self._conversation.add("assistant", "", instead_of=instead_of)
        if instead_of is None:
            self._view.add(message)
        else:
            self._view.show(self._conversation.messages)
        await self._answer_at_end(message, edited)

    async def continue_reply(self) -> None:
        """Continues the reply that was cut or stopped. Raises `UsageError` where there is none."""
        self._engine.require_facts()
        message = self._conversation.cut_reply()
        message.state = "streaming"
        self._view.show(self._conversation.messages)
        await self._answer_at_end(message, partial_reply=message)

    async def _answer_at_end(
        self,
        message: Message,
        edited: Sequence[Message] = (),
        partial_reply: Message | None = None,
    ) -> None:
        """Streams into `message`, and further answers while the model calls tools."""
        for number in range(MOST_ROUNDS):
            if number:
                message, edited, partial_reply = self._conversation.add("assistant", ""), (), None
                self._view.add(message)
            self._tools = self._tool_calls.offered()
            state = await self._stream_into(message, edited, partial_reply)
            if not message.calls:
                self._tell_context(state)
                return
            if not await self._tool_calls.answer(message.calls, self._tools):
                self._view.say("the calls were stopped; /retry answers without them")
                return
        self._view.say(f"{MOST_ROUNDS} replies in a row called tools; /retry lets the model go on")

    async def _stream_into(
        self, message: Message, edited: Sequence[Message], partial_reply: Message | None
    ) -> str:
        """Streams into the last message, or continues `partial_reply`; returns its state."""
        state = "failed"
        try:
            state = await self._ask(edited, partial_reply)
            # Calls that are complete run, even if the reply was cut after them.
            state = "done" if state == "length" and message.calls else state
        except EngineLostError as error:
            self._engine.lose(error)
        except ContextFullError as error:
            nothing_fits = not self._conversation.oldest_turns(1)
            self._view.say(_too_long(error) if nothing_fits else format_error(error), error=True)
        except Exception as error:  # noqa: BLE001 - said, and the chat goes on
            self._view.say(f"{error_text(error)}. {RETRY_HINT}", error=True)
        finally:
            self._conversation.finish(state, self._engine.stats)
            self._view.finished(message)
        return state

    async def write_drafts(self, count: int) -> Message:
        """Writes replies to the last question until there are `count`; returns the chosen one.

        A present reply is the first of them. A choice stops the writing.
        """
        previous = self._conversation.last_reply
        context = [row for row in self._conversation.context() if row is not previous]
        new = self._conversation.begin_drafts(count - (previous is not None))
        shown = new if previous is None else [previous, *new]
        screen = DraftsScreen(shown, len(shown) - len(new))
        choice = self._view.push_screen(screen, wait_for_dismiss=True)
        choice.add_done_callback(lambda _: self._engine.cancel())
        states = ["failed"] * len(new)
        try:
            show = partial(self._drain_drafts, new, screen)
            turn = self._settings.turn(context)
            self._begin_answering()
            client = self._engine.client
            reasons = await self._engine.follow(show, client.drafts, turn, len(new))
            states = [state_after(reason) for reason in reasons]
        except EngineLostError as error:
            self._engine.lose(error)
        except Exception as error:  # noqa: BLE001 - said, and one of the drafts is still chosen
            self._view.say(error_text(error), error=True)
        finally:
            for message, state in zip(new, states, strict=True):
                self._conversation.finish(state, self._engine.stats, message)
            screen.finish(shown)
        self._engine.stream = None
        self._engine.set_activity("choose a draft")
        number = await choice
        chosen = previous if number is None else shown[number]
        return chosen or new[0]

    def _drain_drafts(self, new: list[Message], screen: DraftsScreen, update: StreamUpdate) -> None:
        self._engine.record(update)
        for draft, text in update.texts.items():
            self._engine.activity = "answering"
            screen.feed(len(screen.columns) - len(new) + draft, storable(text))
            self._conversation.feed(storable(text), new[draft])

    async def _ask(self, edited: Sequence[Message], partial_reply: Message | None) -> str:
        """Asks the client until the conversation fits; returns the state of the reply."""
        remedy: str | None = None
        left_out = self._conversation.num_left_out
        tools = [tool.function for tool in self._tools.values()]
        while True:
            try:
                context = self._conversation.context(up_to=partial_reply)
                turn = self._settings.turn(context, edited=edited, tools=tools)
                reason = await self._stream(turn, self._drain)
            except ContextFullError as error:
                remedy = remedy or await self._ask_for_remedy(error)
                if remedy not in ("trim", "summarise"):
                    raise
                if not await self._make_room(remedy, error):
                    remedy = None
                continue
            if self._conversation.num_left_out != left_out:
                self.tell_left_out()
            return state_after(reason)

    async def _stream(self, turn: Turn, show: Callable[[StreamUpdate], None]) -> str:
        """Streams an answer to `turn`; returns why it ended."""
        self._begin_answering()
        return await self._engine.follow(show, self._engine.client.reply, turn)

    def _begin_answering(self) -> None:
        """Remembers the model that answers now as the chat's, and forgets the last numbers."""
        if self._engine.facts is not None:
            self._conversation.remember_model(self._engine.facts)
        self._engine.stats = ReplyStats()

    def _drain(self, update: StreamUpdate) -> None:
        self._engine.record(update)
        text = storable(update.text)
        if text:
            self._engine.activity = "answering"
        self._view.feed(text)
        self._conversation.feed(text)
        message = self._conversation.messages[-1]
        message.calls = [*message.calls, *update.calls]

    # A full context

    async def _ask_for_remedy(self, error: ContextFullError) -> str | None:
        """Asks the user what to do about a full context."""
        if not self._conversation.oldest_turns(1):
            return None
        self._engine.stream = None
        self._engine.set_activity("the context is full")
        answer = await self._view.ask(format_error(error), REMEDIES)
        question = self._conversation.last_message("user")
        if answer == "new" and question is not None:
            self._chat.begin_anew(question.text)
        return answer

    async def _make_room(self, remedy: str, error: ContextFullError) -> bool:
        """Leaves out or summarises the oldest messages; returns whether that succeeded."""
        conversation, summarised = self._conversation, remedy == "summarise"
        excess = 1
        if error.needed > 0:
            share = FILLED_SHARE_SUMMARISED if summarised else FILLED_SHARE
            characters = sum(len(row.text) for row in conversation.context())
            tokens = error.needed - share * error.limit
            excess = max(1, round(tokens * characters / error.needed))
        old = conversation.oldest_turns(excess)
        if old and summarised:
            return await self._summarise(old, error.limit)
        if old:
            conversation.leave_out(old)
        return bool(old)

    async def _summarise(self, old: list[Message], limit: int) -> bool:
        """Lets the model summarise its oldest messages; only half of them if they do not fit."""
        conversation = self._conversation
        system = [row for row in conversation.context()[:1] if row.role == "system"]
        least, most = SUMMARY_TOKENS
        tokens = min(most, max(least, round(limit * SUMMARY_SHARE)))
        request = Message(role="user", text=_SUMMARY_REQUEST.format(words=tokens // 2))
        parts: list[str] = []

        def collect(update: StreamUpdate) -> None:
            self._engine.record(update)
            parts.append(update.text)
            self._engine.activity = "summing up"

        try:
            turn = self._settings.turn([*system, *old, request], tokens)
            reason = await self._stream(turn, collect)
        except ContextFullError:
            fewer = conversation.oldest_turns(sum(len(row.text) for row in old) // 2)
            return len(fewer) < len(old) and await self._summarise(fewer, limit)
        summary = split(storable("".join(parts)))[1].strip()
        if reason == "cancelled" or not summary:
            return False
        conversation.leave_out(old, summary)
        return True

    def tell_left_out(self) -> None:
        """Says which messages the model does not get, if any."""
        count, summary = self._conversation.num_left_out, self._conversation.summary
        if count and summary:
            self._view.say(
                f"the model is given this instead of the first {count} messages, which stay in "
                f"the chat: {summary}"
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


def _too_long(error: ContextFullError) -> str:
    """Returns the message for a conversation in which nothing can be left out."""
    holds = f" of {error.limit} tokens" if error.limit else ""
    return (
        f"this message alone is longer than the context{holds}; shorten it (Alt+Up, then e), or "
        "give more with --ctx-size"
    )
