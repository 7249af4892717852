"""What the chat's screen costs: the real app on a paced stream of hard markdown, without a model.

Everything is drawn and encoded as for a terminal, then thrown away. Busy is the CPU time of the
screen's thread; a key is echoed when its character stands in what is written to the terminal.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import perf_counter, sleep, thread_time
from typing import Any

from textual.drivers.headless_driver import HeadlessDriver
from textual.events import Key

from kvq.errors import UsageError
from kvq_apps import output
from kvq_apps.bench.measure import p95
from kvq_apps.chat.app import ChatApp
from kvq_apps.chat.client import Turn
from kvq_apps.chat.conversation import Conversation
from kvq_apps.chat.history import History
from kvq_apps.chat.settings import ChatSettings
from kvq_apps.output import Shown
from kvq_lab.fake_chat import FakeClient, FakeOptions

SIZE = (100, 40)
POLL_S = 0.02
KEY_EVERY_S = 0.2
# An echo that takes longer is not waited for; its key counts with this.
PATIENCE_S = 5.0
MESSAGE_TOKENS = 500
_KEYS = [chr(0x4E00 + number) for number in range(4096)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatJob:
    """A reply of `tokens` words at `tok_s`, then `repeat` openings of a chat of as many."""

    tokens: int = 20_000
    tok_s: float = 200.0
    repeat: int = 7

    def __post_init__(self) -> None:
        """Raises `UsageError` for a value that cannot be measured."""
        for flag, value in (("context", self.tokens), ("repeat", self.repeat)):
            if value < 1:
                raise UsageError(about=f"--{flag}", value=value, possible="give 1 or more")


def _unseen(_data: str) -> None:
    """What is written while nobody measures."""


class SinkDriver(HeadlessDriver):
    """A terminal nobody looks at: what is written goes to `seen`."""

    seen: Callable[[str], None] = staticmethod(_unseen)

    @property
    def is_headless(self) -> bool:
        """A headless app would not encode what it draws."""
        return False

    def write(self, data: str) -> None:
        self.seen(data)


def measure(job: ChatJob, progress: Shown) -> dict[str, Any]:
    """The numbers of a stream and of openings, by name; times in milliseconds."""
    return asyncio.run(_streamed(job, progress)) | asyncio.run(_opened(job, progress))


def hard_words(count: int) -> Iterator[str]:
    """`count` pieces of markdown: what is slow to draw again, in turn, long paragraphs between."""
    words = _endless_words()
    for _ in range(count):
        yield next(words)


def _endless_words() -> Iterator[str]:
    while True:
        for number in range(200):
            yield from ("- ", f"item {number} ", "of a ", "**long** ", "list\n")
        yield "\n```python\n"
        for number in range(400):
            yield from (f"value_{number} ", "= ", f'"{number}" ', "# why\n")
        yield from ("```\n\n", "| a | b |\n", "|---|---|\n")
        for number in range(100):
            yield from (f"| {number} ", f"| `{number}` |\n")
        yield "\n"
        for number in range(3000):
            yield "word " if number % 300 else "\n\nword "
        yield "\n\n"


async def _streamed(job: ChatJob, progress: Shown) -> dict[str, Any]:
    """Busy share, echo of keys and lag behind the engine while a reply streams."""
    engine_s: list[float] = []

    def script(_turn: Turn) -> Iterator[str]:
        first = perf_counter()
        for number, word in enumerate(hard_words(job.tokens)):
            sleep(max(0.0, first + number / job.tok_s - perf_counter()))
            yield word
        engine_s.append(perf_counter() - first)

    app = _app(FakeClient(FakeOptions(context=1 << 30), script), ChatSettings())
    async with _running(app):
        typist = Typist(app)
        app.controller.enqueue("go")
        await _until(lambda: app.controller.engine.stream is not None)
        since, cpu = perf_counter(), thread_time()
        typist.start()
        while not app.controller.idle:
            await asyncio.sleep(POLL_S)
            done = (perf_counter() - since) * job.tok_s
            progress(min(done, job.tokens), job.tokens, "a reply streams into the chat")
        seconds, cpu = perf_counter() - since, thread_time() - cpu
        # The last echo comes from this thread's loop.
        echoes = await asyncio.to_thread(typist.stop)
        answer = app.controller.conversation.messages[-1].text
    assert answer == "".join(hard_words(job.tokens))
    return {
        "tokens": job.tokens,
        "tok_s": job.tok_s,
        "busy_share": cpu / seconds,
        "lag_share": seconds / engine_s[0] - 1,
        "echoes": len(echoes),
        "echo_p50_ms": median(echoes) * 1e3,
        "echo_p95_ms": p95(echoes) * 1e3,
    }


async def _opened(job: ChatJob, progress: Shown) -> dict[str, Any]:
    """How long a saved chat takes from the key that opens it to its text on the screen."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chats.sqlite3"
        long, short = _saved_chats(path, job.tokens)
        app = _app(FakeClient(), ChatSettings(history_path=path))
        taken: list[float] = []
        async with _running(app):
            for number in range(job.repeat):
                progress(number, job.repeat, "opening a long chat")
                await _open(app, short, "the other chat")
                taken.append(await _open(app, long, "the end of it"))
    return {"openings": len(taken), "open_p50_ms": median(taken) * 1e3,
            "open_max_ms": max(taken) * 1e3}  # fmt: skip


async def _open(app: ChatApp, chat_id: str, end: str) -> float:
    """Opens a chat; seconds until the `end` of its text is written."""
    shown: list[float] = []
    _driver(app).seen = lambda data: shown.append(perf_counter()) if end in data else None
    since = perf_counter()
    app.controller.do(lambda: app.controller.resume_chat(chat_id))
    await _until(lambda: shown)
    await _until(lambda: app.controller.idle)
    return shown[0] - since


def _saved_chats(path: Path, tokens: int) -> tuple[str, str]:
    """A history of two chats, one of so many tokens; their ids."""
    history = History(path)
    ids: list[str] = []
    words = hard_words(tokens)
    texts = ["".join(part) for part in iter(lambda: _take(words, MESSAGE_TOKENS), [])]
    for replies in ([*texts[:-1], f"{texts[-1]}\n\n```\n```\n\nthe end of it"], ["the other chat"]):
        conversation = Conversation(lambda write: write(history))
        ids.append(conversation.id)
        for reply in replies:
            conversation.add("user", "go on")
            conversation.add("assistant", reply)
    history.close()
    return ids[0], ids[1]


def _take(words: Iterator[str], count: int) -> list[str]:
    return [word for word, _ in zip(words, range(count), strict=False)]


class Typist:
    """Presses a key, waits for its character on the terminal, takes it back, from a thread."""

    def __init__(self, app: ChatApp) -> None:
        self._driver = _driver(app)
        self._wanted = ""
        self._echoed = Event()
        self._stopped = Event()
        self._echoes: list[float] = []
        self._thread = Thread(target=self._type, daemon=True)

    def start(self) -> None:
        """Begins to type."""
        self._driver.seen = self._see
        self._thread.start()

    def stop(self) -> list[float]:
        """Ends; seconds from each key to its echo."""
        self._stopped.set()
        self._thread.join()
        return self._echoes

    def _see(self, data: str) -> None:
        if self._wanted and self._wanted in data:
            self._echoed.set()

    def _type(self) -> None:
        for key in cycle(_KEYS):
            self._echoed.clear()
            self._wanted = key
            since = perf_counter()
            self._driver.process_message(Key(key, key))
            self._echoed.wait(PATIENCE_S)
            self._echoes.append(perf_counter() - since)
            self._wanted = ""
            self._driver.process_message(Key("backspace", None))
            if self._stopped.wait(KEY_EVERY_S):
                return


def _app(client: FakeClient, settings: ChatSettings) -> ChatApp:
    return ChatApp(client, settings, driver_class=SinkDriver)


def _driver(app: ChatApp) -> SinkDriver:
    driver = app._driver  # pyright: ignore[reportPrivateUsage]
    assert isinstance(driver, SinkDriver)
    return driver


@asynccontextmanager
async def _running(app: ChatApp) -> AsyncGenerator[None]:
    """The app from its first frame until it has been left by its own way."""
    running = asyncio.create_task(app.run_async(size=SIZE, mouse=False))
    await _until(lambda: app.controller.idle)
    yield
    app.quit()
    await running


async def _until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def print_report(data: dict[str, Any]) -> None:
    """The same as a table."""
    rows = [
        ("screen's thread busy", f"{data['busy_share']:.1%}"),
        ("behind the engine", f"{data['lag_share']:.1%}"),
        ("key to echo, median", _milliseconds(data["echo_p50_ms"])),
        ("key to echo, 95 %", _milliseconds(data["echo_p95_ms"])),
        (f"a chat of {data['tokens']} tokens opens in", _milliseconds(data["open_p50_ms"])),
        ("at most", _milliseconds(data["open_max_ms"])),
    ]
    output.print_table(rows, header=(f"{data['tokens']} tokens at {data['tok_s']:g} tok/s", ""))


def _milliseconds(value: float) -> str:
    return f"{value:.1f} ms"
