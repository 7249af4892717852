"""Runs the chat app without a terminal: press keys, wait for what must become true."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from html import unescape
from pathlib import Path
from threading import Event
from typing import Any

from rich.style import Style
from textual.pilot import Pilot

from fake_chat import FakeClient, FakeOptions
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import ChatClient, Turn
from kvq_apps.chat.history import History
from kvq_apps.chat.markdown import STYLES
from kvq_apps.chat.messages import Message
from kvq_apps.chat.screens import HelpScreen

LONG_S = 120.0
PALETTE = {name: Style(color=f"color({100 + index})") for index, name in enumerate(STYLES)}

Script = Callable[[ChatApp, Pilot[Any]], Awaitable[None]]


def run(
    script: Script,
    client: ChatClient | None = None,
    *,
    folder: Path | None = None,
    size: tuple[int, int] = (80, 24),
    ready: bool = True,
    **settings: Any,
) -> ChatApp:
    """Runs `script` on an app whose history is in `folder`, and leaves the app by its own way."""
    if folder is not None:
        settings = {
            "history_path": folder / "chats.sqlite3", "snapshots": folder / "kv", **settings
        }  # fmt: skip
    app = ChatApp(client or FakeClient(), ChatSettings(**settings))

    async def drive() -> None:
        async with app.run_test(size=size) as pilot:
            if ready:
                await until(pilot, lambda: app.controller.engine.facts is not None)
            await script(app, pilot)
            if app.is_running and not app._exit:
                await app.action_quit()
                await until(pilot, lambda: app._exit)

    asyncio.run(drive())
    return app


async def until(pilot: Pilot[Any], condition: Callable[[], object]) -> None:
    """Waits for `condition`; long enough that only a hang fails."""
    waited = 0.0
    while not condition():
        assert waited < LONG_S, "what was waited for never came"
        await pilot.pause(0.01)
        waited += 0.01
    await pilot.pause()


async def send(app: ChatApp, pilot: Pilot[Any], text: str) -> None:
    """Sends a message or a command."""
    app.prompt.fill(text)
    await pilot.press("enter")


async def say(app: ChatApp, pilot: Pilot[Any], text: str) -> None:
    """Sends a message or a command and waits until nothing is being done."""
    await send(app, pilot, text)
    await until(pilot, lambda: app.controller.idle)


def shown(app: ChatApp) -> str:
    """The whole conversation as it is drawn."""
    return "\n".join(app.transcript.lines_since(0.0))


def meter(app: ChatApp) -> str:
    """What the meter says."""
    app.draw_meter()
    return str(app.query_one("#meter").render())


def telling(*texts: str, **options: Any) -> FakeClient:
    """A fake client that answers with these texts in turn, four characters at a time."""
    count = iter(range(1_000_000))

    def script(_turn: Turn) -> list[str]:
        text = texts[min(next(count), len(texts) - 1)]
        return [text[first : first + 4] for first in range(0, len(text), 4)]

    return FakeClient(FakeOptions(**options), script)


def gated(before: str, after: str, **options: Any) -> tuple[FakeClient, Event]:
    """A client that stops after `before` until the event is set, then goes on with `after`."""
    gate = Event()

    def script(_turn: Turn) -> Iterator[str]:
        for text, wait in ((before, False), (after, True)):
            if wait:
                gate.wait(LONG_S)
            yield from (text[first : first + 4] for first in range(0, len(text), 4))

    return FakeClient(FakeOptions(**options), script), gate


def saved(folder: Path) -> list[Message]:
    """The chosen branch of the latest chat on disk."""
    history = History(folder / "chats.sqlite3")
    messages = history.branch(history.chats(1)[0].id)
    history.close()
    return messages


def sent_messages(client: FakeClient, turn: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in client.turns[turn].messages]


def on_screen(app: ChatApp) -> str:
    """The text of what is on the screen."""
    svg = app.export_screenshot()
    return unescape(re.sub("<[^>]*>", "", re.sub(r"</text>", "\n", svg))).replace("\xa0", " ")


def help_of_app() -> str:
    texts: list[str] = []

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        texts.append(app.screen.text)
        await pilot.press("escape")

    run(script)
    return texts[0]
