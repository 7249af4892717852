"""A reply on its way into a stream: what is thought stands between marks there, and is measured.

A message keeps its thought at its beginning, between the marks of `kvq_models.thinking.KEPT`,
whichever model wrote it. The transcript folds it away; the model is given both parts again, and
its template keeps or drops the first.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from kvq_apps.chat.client import Stream
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_models.thinking import Piece, ThinkingReader, ThinkingWriter, Thought, split


class Thoughts:
    """Writes one reply, or one draft of it, to `stream`; `reader` None: all of it is the answer.

    `tokens` and `ms` are what the thought took.
    """

    def __init__(self, stream: Stream, reader: ThinkingReader | None, draft: int = 0) -> None:
        self.tokens = 0
        self.ms = 0.0
        self._stream = stream
        self._reader = reader
        self._draft = draft
        self._writer = ThinkingWriter()
        self._began_s: float | None = None

    def begin(self, text: str) -> None:
        """The model wrote `text` before: it is in the message, and the reply goes on behind it."""
        if self._reader is not None:
            self._writer.text(self._reader.feed(text))

    def token(self, text: str) -> None:
        """What one token of the model's adds."""
        if self._reader is None:
            self._stream.write(text, self._draft)
            return
        if self._reader.thinking:
            self.tokens += 1
            self._time()
        self.write(self._reader.feed(text))

    def write(self, pieces: Sequence[Piece]) -> None:
        """Pieces that are told apart already."""
        if any(isinstance(piece, Thought) for piece in pieces):
            self._time()
        self._stream.write(self._writer.text(pieces), self._draft)

    def end(self, reason: str) -> None:
        """The reply is over; one that is cut may go on, and what was held back then comes."""
        if self._reader is not None and reason == "stop":
            self.write(self._reader.flush())

    def measured(self, stats: ReplyStats) -> ReplyStats:
        """`stats` with what was thought."""
        return replace(stats, thought_tokens=self.tokens, thought_ms=self.ms)

    def _time(self) -> None:
        now = monotonic()
        self._began_s = now if self._began_s is None else self._began_s
        self.ms = (now - self._began_s) * 1e3


def said_of(message: Message) -> str:
    """What a message says; of a reply without what was thought before it."""
    return split(message.text)[1] if message.role == "assistant" else message.text


def thought_line(stats: ReplyStats) -> str:
    """What a folded thought says of itself: `thought for 3.2 s, 120 tokens`."""
    seconds = f" for {stats.thought_ms / 1e3:.1f} s" if stats.thought_ms else ""
    tokens = f", {stats.thought_tokens} tokens" if stats.thought_tokens else ""
    return f"thought{seconds}{tokens}"
