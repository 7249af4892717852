"""The chat without a screen: a message from a pipe, or line by line on a terminal that is plain.

The answer alone goes to stdout; what the person should know goes to stderr. No escape codes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from threading import Thread

from kvq.errors import KvqError, UsageError
from kvq_apps import output
from kvq_apps.chat import commands
from kvq_apps.chat.client import ChatClient, Stream, Turn
from kvq_apps.chat.conversation import Conversation
from kvq_apps.chat.history import History
from kvq_apps.chat.messages import Message, ReplyStats, state_after
from kvq_apps.chat.meter import why_cut
from kvq_apps.chat.settings import ChatSettings
from kvq_apps.chat.visible import storable
from kvq_apps.flags import told
from kvq_apps.interrupt import INTERRUPTED, interruptible
from kvq_apps.thinking import HIDE
from kvq_models.thinking import KEPT, Piece, ThinkingReader, split

POLL_S = 0.02
# An engine whose reply nobody reads any more may take so long to stop.
STOP_WITHIN_S = 3.0
Show = Callable[[str], None]


class PlainChat:
    """One chat whose replies go to `show` as they arrive, and into the history.

    `ways_on` says what to do about a reply that was cut.
    """

    def __init__(
        self, client: ChatClient, settings: ChatSettings, show: Show, ways_on: str
    ) -> None:
        self.stats = ReplyStats()
        self._client = client
        self._settings = settings
        self._show = show
        self._ways_on = ways_on
        self._thread: Thread | None = None
        self._reader = ThinkingReader(KEPT)
        self._aside = False
        self._history = History(settings.history_path, on_trouble=output.print_note)
        self.conversation = Conversation(self._write, system=settings.system)
        self._resume()
        self._facts = client.open()
        settings.model_sampling = self._facts.sampling
        other = self.conversation.written_with(self._facts)
        if other:
            output.print_note(other)

    @property
    def model(self) -> str:
        """What the model that answers is called."""
        return self._facts.model

    def begin(self) -> None:
        """A new, empty chat."""
        self.conversation.begin(self._settings.system)

    def answer(self, text: str) -> str:
        """Shows the reply to `text`; returns why it ended. Raises `KvqError`.

        Ctrl-C stops it; what came so far stays, as it does after an error.
        """
        self.conversation.add("user", storable(text))
        turn = self._settings.turn(self.conversation.context())
        return self._reply(turn, self.conversation.add("assistant", ""))

    def go_on(self) -> str:
        """Shows more of the reply that was cut; returns why it ended. Raises `KvqError`."""
        reply = self.conversation.cut_reply()
        turn = self._settings.turn(self.conversation.context())
        reply.state = "streaming"
        return self._reply(turn, reply)

    def _reply(self, turn: Turn, reply: Message) -> str:
        self.conversation.answered_by(self._facts)
        reason, self._reader = "failed", ThinkingReader(KEPT)
        self._reader.feed(reply.text)
        try:
            reason = self._stream(turn)
        finally:
            self.conversation.finish(state_after(reason), self.stats)
            self._tell(self._reader.flush())
            if not reply.text.endswith("\n"):
                self._show("\n")
        if reason == "length":
            cut = why_cut(self._facts, self.stats, self._settings.max_tokens)
            output.print_note(f"{cut}; {self._ways_on}")
        return reason

    def close(self) -> None:
        """Closes history and engine; one that is still at work ends with the process."""
        self._history.close()
        if self._thread is not None:
            self._thread.join(STOP_WITHIN_S)
        if self._thread is None or not self._thread.is_alive():
            self._client.close()

    def _stream(self, turn: Turn) -> str:
        stream = Stream()
        outcome: list[str | BaseException] = []

        def reply() -> None:
            try:
                outcome.append(self._client.reply(turn, stream))
            except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
                outcome.append(error)

        # Waiting beside the engine leaves Ctrl-C to this thread, also while the engine is silent.
        self._thread = thread = Thread(target=reply, daemon=True)
        try:
            with interruptible() as pressed:
                thread.start()
                while thread.is_alive():
                    thread.join(POLL_S)
                    if pressed():
                        stream.cancel()
                    self._drain(stream)
            self._drain(stream)
        finally:
            stream.cancel()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def _drain(self, stream: Stream) -> None:
        news = stream.take()
        if news.stats is not None:
            self.stats = news.stats
        text = storable(news.text)
        self.conversation.feed(text)
        self._tell(self._reader.feed(text))

    def _tell(self, pieces: Sequence[Piece]) -> None:
        """Shows the answer; what is thought is told beside it, unless it is to be hidden."""
        for piece in pieces:
            if isinstance(piece, str):
                if self._aside:
                    output.print_aside("\n\n")
                self._aside = False
                self._show(piece)
            elif self._settings.think != HIDE and self._show is not _unshown:
                self._aside = True
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
    """One message, one reply; with `as_json` nothing but one object is printed."""
    show = _unshown if as_json else _shown
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
    """Line by line until the input ends: prompts on stderr, replies on stdout."""
    chat = PlainChat(client, settings, _shown, "/more goes on with it")
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
                output.print_error(error, told(error), as_json=False)
    except KeyboardInterrupt:
        output.print_note("")
        return INTERRUPTED
    finally:
        chat.close()
    return 0


def _command(chat: PlainChat, line: str) -> bool:
    """Does what works without a screen; returns whether to go on."""
    name, _ = commands.parse_command(line)
    if name == "new":
        chat.begin()
    elif name == "more":
        chat.go_on()
    elif name == "help":
        output.print_note("/new begins a new chat, /more goes on with a reply, /quit ends")
    elif name != "quit":
        raise UsageError(f"/{name} needs a full terminal; here /new, /more, /help and /quit work")
    return name != "quit"


def _lines() -> Iterator[str]:
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _shown(text: str) -> None:
    output.print_data(text, end="")


def _unshown(_text: str) -> None:
    """The whole answer is printed at the end."""
