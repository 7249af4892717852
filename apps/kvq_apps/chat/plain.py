"""The chat without a screen: a message from a pipe, or line by line on a plain terminal.

Only the answer goes to stdout; notes for the user go to stderr. There are no escape codes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import asdict

from kvq.errors import KvqError, UsageError
from kvq_apps.chat import commands
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import ChatClient, Stream, Turn
from kvq_apps.chat.conversation import ChatConversation
from kvq_apps.chat.history import History
from kvq_apps.chat.messages import Message, ReplyStats, state_after
from kvq_apps.chat.meter import why_cut
from kvq_apps.chat.threads import Worker
from kvq_apps.settings.flags import format_error
from kvq_apps.terminal import output
from kvq_apps.terminal.interrupt import INTERRUPTED, interruptible
from kvq_apps.thinking import HIDE
from kvq_models.thinking import KEPT, Piece, ThinkingReader, split

POLL_S = 0.02
# An engine whose reply nobody reads any more may take this long to stop.
STOP_WITHIN_S = 3.0
Show = Callable[[str], None]


class PlainChat:
    """Runs a chat whose replies go to `show`; `how_to_continue` says what to do about a cut one."""

    def __init__(
        self, client: ChatClient, settings: ChatSettings, show: Show, how_to_continue: str
    ) -> None:
        self.stats = ReplyStats()
        self._client = client
        self._settings = settings
        self._show = show
        self._how_to_continue = how_to_continue
        self._engine = Worker("kvq-engine")
        self._reader = ThinkingReader(KEPT)
        self._in_thought = False
        self._history = History(settings.history_path, on_trouble=output.print_note)
        self.conversation = ChatConversation(self._write, system=settings.system)
        self._resume()
        self._facts = client.open()
        settings.model_sampling = self._facts.sampling
        note = self.conversation.other_model_note(self._facts)
        if note:
            output.print_note(note)

    @property
    def model(self) -> str:
        return self._facts.model

    def begin(self) -> None:
        self.conversation.begin(self._settings.system)

    def answer(self, text: str) -> str:
        """Shows the reply to `text`; returns why it ended. Raises `KvqError`.

        Ctrl-C stops it. The text so far stays, as it does after an error.
        """
        self.conversation.add("user", output.storable(text))
        turn = self._settings.turn(self.conversation.context())
        return self._reply(turn, self.conversation.add("assistant", ""))

    def continue_reply(self) -> str:
        """Shows more of the reply that was cut; returns why it ended. Raises `KvqError`."""
        reply = self.conversation.cut_reply()
        turn = self._settings.turn(self.conversation.context())
        reply.state = "streaming"
        return self._reply(turn, reply)

    def _reply(self, turn: Turn, reply: Message) -> str:
        self.conversation.remember_model(self._facts)
        reason, self._reader = "failed", ThinkingReader(KEPT)
        self._reader.feed(reply.text)
        try:
            reason = self._stream(turn)
        finally:
            self.conversation.finish(state_after(reason), self.stats)
            self._show_pieces(self._reader.flush())
            if not reply.text.endswith("\n"):
                self._show("\n")
        if reason == "length":
            cut = why_cut(self._facts, self.stats, self._settings.max_tokens)
            output.print_note(f"{cut}; {self._how_to_continue}")
        return reason

    def close(self) -> None:
        """Closes history and engine; an engine that is still at work ends with the process."""
        self._history.close()
        if self._engine.stop(STOP_WITHIN_S):
            self._client.close()

    def _stream(self, turn: Turn) -> str:
        stream = Stream()
        # Waiting beside the engine leaves Ctrl-C to this thread, also while the engine is silent.
        reply = self._engine.submit(self._client.reply, turn, stream)
        try:
            with interruptible() as pressed:
                while not wait([reply], POLL_S).done:
                    if pressed():
                        stream.cancel()
                    self._drain(stream)
            self._drain(stream)
        finally:
            stream.cancel()
        return reply.result()

    def _drain(self, stream: Stream) -> None:
        update = stream.take()
        if update.stats is not None:
            self.stats = update.stats
        text = output.storable(update.text)
        self.conversation.feed(text)
        self._show_pieces(self._reader.feed(text))

    def _show_pieces(self, pieces: Sequence[Piece]) -> None:
        """Shows the answer, and the thought beside it unless thoughts are hidden."""
        for piece in pieces:
            if isinstance(piece, str):
                if self._in_thought:
                    output.print_aside("\n\n")
                self._in_thought = False
                self._show(piece)
            elif self._settings.think != HIDE and self._show is not _discard_text:
                self._in_thought = True
                output.print_aside(piece.text)

    def _resume(self) -> None:
        chat_id = self._settings.chat_id
        if chat_id is None and self._settings.latest:
            chat_id = self._history.latest()
        if chat_id is None:
            return
        saved = self._history.saved_chat(chat_id)
        if saved is None:
            raise UsageError(f"there is no chat {chat_id}; `kvq chat --list` shows them")
        self.conversation.show(saved)

    def _write(self, write: Callable[[History], None]) -> None:
        write(self._history)


def answer_once(client: ChatClient, settings: ChatSettings, text: str, *, as_json: bool) -> int:
    """Answers one message; with `as_json` only one JSON object is printed."""
    show = _discard_text if as_json else _print_text
    chat = PlainChat(client, settings, show, "--predict N allows more")
    try:
        reason = chat.answer(text)
    finally:
        chat.close()
    if as_json:
        thought, answer = split(chat.conversation.messages[-1].text)
        facts = {
            "chat": chat.conversation.id, "model": chat.model, "text": answer,
            "thought": thought,
            "finish_reason": reason,
        }  # fmt: skip
        output.print_json(facts | asdict(chat.stats))
    return INTERRUPTED if reason == "cancelled" else 0


def converse(client: ChatClient, settings: ChatSettings) -> int:
    """Reads lines until the input ends: prompts go to stderr, replies to stdout."""
    chat = PlainChat(client, settings, _print_text, "/more goes on with it")
    output.print_note("kvq chat: a line is a message; /new, /more, /help, /quit or Ctrl+D")
    try:
        for line in _lines():
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not _command(chat, line):
                        break
                else:
                    chat.answer(line[1:] if line.startswith("//") else line)
            except KvqError as error:
                output.print_error(error, format_error(error), as_json=False)
    except KeyboardInterrupt:
        output.print_note("")
        return INTERRUPTED
    finally:
        chat.close()
    return 0


def _command(chat: PlainChat, line: str) -> bool:
    """Runs a command that works without a screen; returns whether to go on."""
    name = commands.parse_command(line)[0].name
    if name == "new":
        chat.begin()
    elif name == "more":
        chat.continue_reply()
    elif name == "help":
        output.print_note("/new begins a new chat, /more goes on with a reply, /quit ends")
    elif name != "quit":
        raise UsageError(f"/{name} needs a full terminal; here /new, /more, /help and /quit work")
    return name != "quit"


def _lines() -> Iterator[str]:
    while True:
        output.print_note("> ", end="")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _print_text(text: str) -> None:
    output.print_data(text, end="")


def _discard_text(_text: str) -> None:
    """Shows nothing: the whole answer is printed at the end."""
