"""What the chat needs of an engine, wherever it runs, and the stream a reply travels through.

A client is called from one thread, never the screen's. It is asked for one reply at a time and
writes to its `Stream`, which the screen empties when it likes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Protocol

from kvq.errors import KvqError, ModelError
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_apps.thinking import AUTO
from kvq_runtime.config import Sampling


class ContextFullError(KvqError):
    """The conversation does not fit the context; `needed` and `limit` are tokens, 0: not told."""

    def __init__(self, needed: int, limit: int) -> None:
        sizes = f"needs {needed} tokens and the context holds {limit}"
        super().__init__(
            f"the conversation {sizes if needed else 'is longer than the context'}; "
            "leave out its oldest messages or begin a new chat"
        )
        self.needed = needed
        self.limit = limit


class EngineLostError(KvqError):
    """The engine went away in the middle; asking again may find it back."""


class NoChatError(ModelError):
    """The model has no chat template; `instead` continues plain text with it."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(
            f"{name} has no chat template, so it cannot chat; {instead} continues plain text, and "
            "`default` or an instruction-tuned model such as Qwen/Qwen3-0.6B can chat"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a client runs on. `k_bits` and `kv_budget` are 0 where the engine does not say.

    `budget_tokens`, 0 likewise: what the budget holds at those widths.
    `sampling` is what the model, or its server, asks for.
    `opens` opens this model again, from any folder; `smaller_kv` is what `/kv` takes to make this
    model's cache as small as it gets. Both are empty where the client cannot do that.
    """

    model: str
    context_tokens: int
    k_bits: int = 0
    v_bits: int = 0
    kv_budget: int = 0
    budget_tokens: int = 0
    fingerprint: str = ""
    keeps_kv: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    opens: str = ""
    smaller_kv: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What a reply is asked for with. `max_tokens` None: to the context's end.

    Where the last of `messages` is the assistant's, the reply goes on with it.
    `edited` are the messages up to one of which the last of `messages` is an edit, none else: what
    follows the change in it may then be kept as computed.
    `think` is what `--think` says.
    """

    messages: Sequence[Message]
    edited: Sequence[Message] = ()
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    seed: int | None = None
    think: str = AUTO


@dataclass(kw_only=True, slots=True)
class News:
    """What a stream brought since it was asked last; `texts` by the number of the draft."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    prefilled: tuple[int, int] | None = None
    stats: ReplyStats | None = None

    @property
    def text(self) -> str:
        """Of the first draft, which may be the only one."""
        return self.texts.get(0, "")


class Stream:
    """A reply, or several drafts of one, on its way: the client writes, the screen empties it."""

    def __init__(self) -> None:
        self.started_s = monotonic()
        self._lock = Lock()
        self._news = News()
        # Drafts whose last piece ended with CR: that LF comes next is not known yet.
        self._half_breaks = set[int]()
        self._cancelled = False
        self._stop: Callable[[], None] | None = None

    def write(self, text: str, draft: int = 0) -> None:
        """The next piece of the reply, or of this draft of it; a CR LF in two pieces is a CR."""
        if not text:
            return
        with self._lock:
            new = text.removeprefix("\n") if draft in self._half_breaks else text
            self._half_breaks -= {draft}
            if text.endswith("\r"):
                self._half_breaks.add(draft)
            self._news.texts[draft] = self._news.texts.get(draft, "") + new

    def prefilled(self, done: int, total: int) -> None:
        """So many of the prompt's tokens went through the model."""
        with self._lock:
            self._news.prefilled = (done, total)

    def measured(self, stats: ReplyStats) -> None:
        """What the reply costs so far."""
        with self._lock:
            self._news.stats = stats

    def take(self) -> News:
        """Everything new; the next call begins after it."""
        with self._lock:
            news, self._news = self._news, News()
        return news

    def cancel(self) -> None:
        """Asks the client to stop before its next step."""
        with self._lock:
            self._cancelled, stop = True, self._stop
        if stop is not None:
            stop()

    def when_cancelled(self, stop: Callable[[], None]) -> None:
        """Calls `stop` on a cancel, for a client that may be waiting; at once if there was one."""
        with self._lock:
            self._stop, cancelled = stop, self._cancelled
        if cancelled:
            stop()

    def cancelled(self) -> bool:
        """Whether the reply is not wanted any more."""
        return self._cancelled


class ChatClient(Protocol):
    """An engine to chat with."""

    def open(self) -> Facts:
        """Gets ready; may take long. Raises `KvqError`."""
        ...

    def reply(self, turn: Turn, stream: Stream) -> str:
        """Answers into `stream`; returns why it ended: stop, length or cancelled.

        Raises `ContextFullError` before anything else, `EngineLostError`, other `KvqError`s.
        """
        ...

    def drafts(self, turn: Turn, count: int, stream: Stream) -> list[str]:
        """Answers `count` times, each time anew; returns why each answer ended, as `reply`."""
        ...

    def keep(self, draft: int) -> None:
        """Goes on from this one of the last drafts, the others are forgotten."""
        ...

    def begin(self) -> None:
        """Forgets the conversation: the next turn is another chat's."""
        ...

    def change_kv(
        self, k_bits: int | None, v_bits: int | None, budget: str | None, stream: Stream
    ) -> Facts:
        """Goes on with other KV settings, the conversation encoded again. Raises `KvqError`."""
        ...

    def reread(self, stream: Stream) -> int:
        """Encodes again what edits have left as it was computed before; how many tokens."""
        ...

    def refine(self, stream: Stream) -> int:
        """Computes what was predicted of the conversation, until cancelled; the tokens left."""
        ...

    def save(self, path: Path) -> str | None:
        """Writes the conversation's KV to `path`; returns a hash of its tokens, None: not kept."""
        ...

    def restore(self, path: Path) -> ReplyStats:
        """Takes the KV saved at `path`; returns what is held now. Raises `SnapshotError`."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...
