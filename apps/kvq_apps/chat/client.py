"""What the chat needs of an engine, and the stream that carries a reply.

A client is called from one thread, never the screen's. It writes one reply at a time into a
`Stream`, and the screen reads from it when it likes.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from threading import Lock
from time import monotonic
from typing import Any, Protocol

from kvq.errors import KvqError, ModelError, SnapshotError
from kvq.formats import format_bytes
from kvq_apps.chat.messages import Message, ReplyStats, ToolCall
from kvq_apps.terminal.output import bits_text, cache_sentence, kv_text, storable
from kvq_apps.thinking import AUTO
from kvq_models.thinking import Piece, ThinkingReader, ThinkingWriter, Thought
from kvq_models.tools import CallPiece, Reader
from kvq_models.tools import Piece as CallingPiece
from kvq_runtime.config import Sampling


class ContextFullError(KvqError):
    """Reports that the conversation does not fit; `needed` and `limit` are tokens, 0: not known."""

    def __init__(self, needed: int, limit: int) -> None:
        sizes = f"needs {needed} tokens and the context holds {limit}"
        super().__init__(
            f"the conversation {sizes if needed else 'is longer than the context'}; "
            "leave out its oldest messages or begin a new chat"
        )
        self.needed = needed
        self.limit = limit


class EngineLostError(KvqError):
    """Reports that the engine went away during a reply; asking again may find it back."""


class NoChatError(ModelError):
    """Reports a model without a chat template; `alternative` continues plain text with it."""

    def __init__(self, name: str, alternative: str) -> None:
        super().__init__(
            f"{name} has no chat template, so it cannot chat; {alternative} continues plain text, "
            "and `default` or an instruction-tuned model such as Qwen/Qwen3-0.6B can chat"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Describes the model a client runs. `k_bits` and `kv_budget` are 0 where they are not known.

    `budget_tokens` is what the budget holds at these widths; `full_kv` and `full_tokens` describe
    the full cache (`output.cache_facts`); 0 and empty where they are not known.
    `sampling` is the default of the model or its server. `lasting_name` opens this model again from
    any folder; empty where the client cannot do that. `calls_tools` is False for a model whose
    template has no known form of calls.
    """

    model: str
    context_tokens: int
    k_bits: int = 0
    v_bits: int = 0
    kv_budget: int = 0
    budget_tokens: int = 0
    full_kv: str = ""
    full_tokens: int = 0
    fingerprint: str = ""
    keeps_kv: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    lasting_name: str = ""
    calls_tools: bool = True

    @property
    def cache_text(self) -> str:
        """Describes the cache's bytes and what they hold; empty where that is not known."""
        if not self.k_bits:
            return ""
        size, kv = format_bytes(self.kv_budget), kv_text(self.k_bits, self.v_bits)
        if not self.full_kv:
            return f"cache of {size} at {bits_text(kv)}"
        sentence = cache_sentence(
            {
                "kv": kv,
                "context": self.context_tokens,
                "budget_tokens": self.budget_tokens,
                "full_kv": self.full_kv,
                "full_tokens": self.full_tokens,
            }
        )
        return f"cache of {size}, which holds {sentence}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Holds a request for a reply. `max_tokens` None: up to the context's end.

    If the last of `messages` is the assistant's, the reply continues it. If the last message was
    edited, `edited` are the messages as they were, up to the old version; what follows the change
    in it may then be kept as computed. `think` is the value of `--think`. The model may call the
    functions in `tools`, which have a name, a description and parameters.
    """

    messages: Sequence[Message]
    edited: Sequence[Message] = ()
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    seed: int | None = None
    think: str = AUTO
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(kw_only=True, slots=True)
class StreamUpdate:
    """Holds what a stream brought since the last read; `texts` are by draft number."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    prefill_progress: tuple[int, int] | None = None
    stats: ReplyStats | None = None
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    @property
    def text(self) -> str:
        """Returns the text of the first draft, which may be the only one."""
        return self.texts.get(0, "")


class Stream:
    """Carries a reply, or several drafts of one: the client writes, the screen reads."""

    def __init__(self) -> None:
        self.started_s = monotonic()
        self._lock = Lock()
        self._update = StreamUpdate()
        # Drafts whose last piece ended with CR: a LF may follow.
        self._half_breaks = set[int]()
        self._cancelled = False
        self._stop: Callable[[], object] | None = None

    def write(self, text: str, draft: int = 0) -> None:
        """Adds a piece of a reply or a draft; a CR LF split over two pieces counts as a CR."""
        if not text:
            return
        with self._lock:
            new = text.removeprefix("\n") if draft in self._half_breaks else text
            self._half_breaks -= {draft}
            if text.endswith("\r"):
                self._half_breaks.add(draft)
            self._update.texts[draft] = self._update.texts.get(draft, "") + new

    def report_prefill(self, done: int, total: int) -> None:
        """Reports how many of the prompt's tokens went through the model."""
        with self._lock:
            self._update.prefill_progress = (done, total)

    def report_stats(self, stats: ReplyStats) -> None:
        with self._lock:
            self._update.stats = stats

    def report_call(self, name: str, arguments: str, identity: str = "") -> None:
        """Reports a call of a tool; without an `identity` it gets one that every template takes."""
        call = ToolCall(
            id=storable(identity) or token_hex(5)[:9],
            name=storable(name),
            arguments=storable(arguments),
        )
        with self._lock:
            self._update.calls.append(call)

    def take(self) -> StreamUpdate:
        """Returns everything new; the next call begins after it."""
        with self._lock:
            update, self._update = self._update, StreamUpdate()
        return update

    def cancel(self) -> None:
        """Asks the client to stop before its next step."""
        with self._lock:
            self._cancelled, stop = True, self._stop
        if stop is not None:
            stop()

    def when_cancelled(self, stop: Callable[[], object]) -> None:
        """Calls `stop` on a cancel, for a client that may wait; at once if it is cancelled."""
        with self._lock:
            self._stop, cancelled = stop, self._cancelled
        if cancelled:
            stop()

    def cancelled(self) -> bool:
        """Tells whether the reply is not wanted any more."""
        return self._cancelled


class ReplyWriter:
    """Writes one reply or draft to `stream`; `reader` None: all of it is the answer.

    `calls` separates calls of tools from the answer. `tokens` and `ms` are what the thought took.
    """

    def __init__(
        self,
        stream: Stream,
        reader: ThinkingReader | None,
        draft: int = 0,
        calls: Reader | None = None,
    ) -> None:
        self.tokens = 0
        self.ms = 0.0
        self._stream = stream
        self._reader = reader
        self._draft = draft
        self._calls = calls
        self._writer = ThinkingWriter()
        self._began_s: float | None = None

    def begin(self, text: str) -> None:
        """Reads the text that the message has already, which the reply continues."""
        if self._reader is not None:
            self._writer.text(self._reader.feed(text))

    def token(self, text: str) -> None:
        """Writes what one token of the model adds."""
        if self._reader is None:
            self.write([text])
            return
        if self._reader.thinking:
            self.tokens += 1
            self._update_time()
        self.write(self._reader.feed(text))

    def write(self, pieces: Sequence[Piece]) -> None:
        """Writes pieces that are told apart already."""
        if any(isinstance(piece, Thought) for piece in pieces):
            self._update_time()
        for piece in pieces:
            if self._calls is None or isinstance(piece, Thought):
                self._stream.write(self._writer.text([piece]), self._draft)
            else:
                self._write_answer(self._calls.feed(piece))

    def end(self, reason: str) -> None:
        """Ends the reply. A reply that was cut may go on, so only a finished one is flushed."""
        if self._reader is not None and reason == "stop":
            self.write(self._reader.flush())
        if self._calls is not None:
            self._write_answer(self._calls.flush(cut=reason != "stop"))

    def _write_answer(self, pieces: Sequence[CallingPiece]) -> None:
        for piece in pieces:
            if isinstance(piece, CallPiece):
                self._stream.report_call(piece.name, piece.arguments)
            else:
                self._stream.write(self._writer.text([piece]), self._draft)

    def with_thought(self, stats: ReplyStats) -> ReplyStats:
        """Returns `stats` with the numbers of the thought."""
        return replace(stats, thought_tokens=self.tokens, thought_ms=self.ms)

    def _update_time(self) -> None:
        now = monotonic()
        self._began_s = now if self._began_s is None else self._began_s
        self.ms = (now - self._began_s) * 1e3


class ChatClient(Protocol):
    """Gives an engine to chat with. The defaults are of one that keeps no KV cache for the chat."""

    @abstractmethod
    def open(self) -> Facts:
        """Gets ready; may take long. Raises `KvqError`."""

    @abstractmethod
    def reply(self, turn: Turn, stream: Stream) -> str:
        """Writes an answer into `stream`; returns stop, length, cancelled or tool_calls.

        Raises `ContextFullError` before anything else, `EngineLostError`, and other `KvqError`s.
        """

    @abstractmethod
    def drafts(self, turn: Turn, count: int, stream: Stream) -> list[str]:
        """Writes `count` independent answers; returns why each ended, as `reply` does."""

    def begin(self) -> None:
        """Forgets the conversation: the next turn belongs to another chat."""

    @abstractmethod
    def change_kv(
        self, k_bits: int | None, v_bits: int | None, budget: str | None, stream: Stream
    ) -> Facts:
        """Changes the KV settings and encodes the conversation again. Raises `KvqError`."""

    def reread(self, stream: Stream) -> int:
        """Encodes again what edits left as it was; returns how many tokens that were."""
        return 0

    def save(self, path: Path) -> bool:
        """Writes the conversation's KV cache to `path`; returns False for an empty one."""
        return False

    def restore(self, path: Path) -> ReplyStats:
        """Loads the KV cache saved at `path`; returns its numbers. Raises `SnapshotError`."""
        raise SnapshotError(f"this engine keeps no KV cache of a chat, so it cannot load {path}")

    def close(self) -> None:
        """Frees everything."""
