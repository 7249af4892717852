"""Draws the real app into SVG files: `python tests/support/chat_pictures.py FOLDER [MODEL]`.

Without a MODEL the answers are written here and every number comes from the fake engine; with one
they are the model's own.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fake_chat import FakeClient, FakeOptions
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.chat.client import ChatClient, Turn
from kvq_apps.chat.local import LocalClient

SIZE = (96, 30)
QUESTIONS = (
    "What is a KV cache, and why make it smaller?",
    "Write a Python function that counts the words of a file.",
)
ANSWERS = (
    "While it writes, a model looks back at every token it has seen. The **KV cache** keeps what "
    "it needs for that, the *keys* and *values* of each token, so that nothing is computed "
    "twice.\n\n"
    "- It grows with every token.\n"
    "- At 16 bits it soon outweighs the model.\n"
    "- Keys need more bits than values: `--kv 4:2` keeps four and two.\n",
    "```python\n"
    "from collections import Counter\n"
    "from pathlib import Path\n\n\n"
    "def count_words(path: str) -> Counter[str]:\n"
    '    """How often each word stands in the file."""\n'
    "    return Counter(Path(path).read_text().lower().split())\n"
    "```\n\n"
    '`count_words("notes.txt").most_common(3)` gives the three commonest.\n',
)
# File name -> theme, and the key pressed before the picture is taken.
PICTURES = {
    "chat": ("textual-dark", ""),
    "chat-light": ("textual-light", ""),
    "chat-resume": ("tokyo-night", "ctrl+r"),
    "chat-beside": ("textual-dark", "ctrl+b"),
}


def main(argv: list[str]) -> int:
    """Writes one picture per theme."""
    folder = Path(argv[0] if argv else "docs")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (theme, key) in PICTURES.items():
        client = _model(argv[1]) if len(argv) > 1 else _written()
        picture = asyncio.run(_picture(client, theme, key))
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(f"{folder / name}.svg  {len(picture) // 1024} KiB")
    return 0


async def _picture(client: ChatClient, theme: str, key: str) -> str:
    with TemporaryDirectory() as folder:
        app = ChatApp(client, ChatSettings(history_path=Path(folder) / "chats.sqlite3"))
        async with app.run_test(size=SIZE) as pilot:
            app.theme = theme
            for question in QUESTIONS:
                if key:
                    app.action_new_chat()
                    await pilot.pause(0.1)
                app.prompt.fill(question)
                await pilot.press("enter")
                await pilot.pause(0.1)
                while not app.controller.idle:
                    await pilot.pause(0.05)
            app.prompt.fill("And only the words longer than three letters?")
            app.prompt.cursor_blink = False
            if key:
                await pilot.press(key)
            await pilot.pause(0.2)
            picture = app.export_screenshot(title="kvq chat")
            with suppress(TimeoutError):
                await app.action_quit()
            return picture


def _written() -> FakeClient:
    answers = iter(ANSWERS)

    def script(_turn: Turn) -> Iterator[str]:
        words = next(answers).split(" ")
        yield from (word + " " for word in words[:-1])
        yield words[-1]

    return FakeClient(FakeOptions(tok_ms=20, prefill_ms=40, context=8192), script)


def _model(name: str) -> LocalClient:
    return LocalClient(name, engine_options={}, session_options={"k_bits": 4, "v_bits": 2})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
