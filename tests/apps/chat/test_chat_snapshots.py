"""How the screen looks: the app's own SVG picture, read back as text and styles, against files.

A cell's colours are named after the theme's variables, so that a Textual that moves a shade breaks
nothing here. `python tests/apps/chat/test_chat_snapshots.py` draws the files anew; read their diff.
"""

import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from html import unescape
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.terminal_theme import SVG_EXPORT_THEME
from textual.pilot import Pilot

from chat_pilot import run, say, send, telling, until
from fake_chat import FakeClient, FakeOptions
from kvq_apps.chat import chat_app as app_module
from kvq_apps.chat import client as client_module
from kvq_apps.chat.chat_app import ChatApp
from kvq_apps.chat.screens import QuestionScreen

FOLDER = Path(__file__).parent / "snapshots"
ROWS = 18
CELL_WIDTH, LINE_HEIGHT = 12.2, 24.4
ANSWER = (
    "# Pages\n\nA **page** holds `64` tokens, *never* more:\n\n"
    "```python\ndef page_of(token: int) -> int:\n    return token // 64  # whole\n```\n\n"
)
ITEMS = "\n".join(f"{number}. item {number} of a long list" for number in range(1, 201))
TABLE = "| K | V | bytes |\n|---|---|---|\n| 4 | 2 | 48 |\n\n> said before\n\nand one more line"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A picture: what the client says, and what is done before it is taken."""

    theme: str
    columns: int
    client: Callable[[], FakeClient]
    script: Callable[[ChatApp, Pilot[Any]], Awaitable[None]]


async def home(_app: ChatApp, _pilot: Pilot[Any]) -> None:
    """Nothing was said yet."""


async def streaming(app: ChatApp, pilot: Pilot[Any]) -> None:
    await send(app, pilot, "What is a page?")
    await until(pilot, lambda: "and one more line" in "\n".join(app.transcript.lines_since(0.0)))
    await send(app, pilot, "typed meanwhile")
    await until(pilot, lambda: app.controller.queue == ["typed meanwhile"])


async def long_list(app: ChatApp, pilot: Pilot[Any]) -> None:
    await say(app, pilot, "List two hundred things.")
    await pilot.press("pageup")
    await pilot.press("alt+up")


async def error(app: ChatApp, pilot: Pilot[Any]) -> None:
    await say(app, pilot, "Fail in the middle.")
    await say(app, pilot, "/nosuch")


async def full(app: ChatApp, pilot: Pilot[Any]) -> None:
    await say(app, pilot, "one")
    await send(app, pilot, "word " * 40)
    await until(pilot, lambda: isinstance(app.screen, QuestionScreen))


def answering() -> FakeClient:
    text = ANSWER + TABLE
    pieces = [text[first : first + 4] for first in range(0, len(text), 4)]
    # Waiting for more, not writing it: the pilot waits until the process does little.
    return FakeClient(FakeOptions(tok_ms=1, hold_at=len(pieces) + 1), lambda _: [*pieces, ""])


def listing() -> FakeClient:
    return telling(ITEMS, context=100_000)


def failing() -> FakeClient:
    return telling("This much came before it failed.", fail_at=5)


def small() -> FakeClient:
    return FakeClient(FakeOptions(context=60))


CASES = {
    "home-dark-40": Case(theme="textual-dark", columns=40, client=FakeClient, script=home),
    "home-light-120": Case(theme="textual-light", columns=120, client=FakeClient, script=home),
    "streaming-dark-120": Case(
        theme="textual-dark", columns=120, client=answering, script=streaming
    ),
    "streaming-ansi-40": Case(theme="ansi-dark", columns=40, client=answering, script=streaming),
    "list-light-40": Case(theme="textual-light", columns=40, client=listing, script=long_list),
    "list-ansi-120": Case(theme="ansi-light", columns=120, client=listing, script=long_list),
    "error-dark-40": Case(theme="textual-dark", columns=40, client=failing, script=error),
    "error-light-120": Case(theme="textual-light", columns=120, client=failing, script=error),
    "full-ansi-120": Case(theme="ansi-dark", columns=120, client=small, script=full),
}


def drawing(app: ChatApp, case: Case) -> str:
    """What is on the screen now."""
    return described(app.export_screenshot(), case.columns, app.theme_variables)


def picture(case: Case) -> str:
    """The screen of a case, as text."""
    drawn: list[str] = []

    async def script(app: ChatApp, pilot: Pilot[Any]) -> None:
        app.choose_theme(case.theme)
        app.prompt.cursor_blink = False
        await case.script(app, pilot)
        await pilot.pause()
        app.draw_meter()
        await pilot.pause()
        # On a busy machine the last layout, as that of a scrollbar, comes a moment after the text.
        while drawn[-1:] != (last := [drawing(app, case)]):
            drawn.extend(last)
            await pilot.pause(0.05)

    run(script, case.client(), size=(case.columns, ROWS))
    return drawn[-1]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_the_screen_looks_as_it_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze(monkeypatch)
    expected = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert picture(CASES[name]) == expected, "see this file's first lines"


def test_the_files_are_few_and_small() -> None:
    files = list(FOLDER.iterdir())
    assert {file.stem for file in files} == set(CASES)
    assert len(files) < 12
    assert max(file.stat().st_size for file in files) < 8192


def freeze(patch: pytest.MonkeyPatch) -> None:
    """Stops the clock twelve seconds after every reply began."""
    patch.setattr(client_module, "monotonic", lambda: 1000.0)
    patch.setattr(app_module, "monotonic", lambda: 1012.0)


# An SVG read back


def described(svg: str, columns: int, variables: dict[str, str]) -> str:
    """The text of a terminal's picture, then the runs of each line's styles and what they are."""
    names = colour_names(variables)
    styles = {
        number: (names(fill), weight)
        for number, fill, weight in re.findall(r"-r(\d+) { fill: (#\w+);?([^}]*) }", svg)
    }
    characters = [[" "] * columns for _ in range(ROWS)]
    fronts = [[("", "")] * columns for _ in range(ROWS)]
    backs = [[""] * columns for _ in range(ROWS)]
    for fill, x, y, width in re.findall(
        r'<rect fill="(#\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="24.65"', svg
    ):
        row, first = round((float(y) - 1.5) / LINE_HEIGHT), round(float(x) / CELL_WIDTH)
        for column in range(first, first + round(float(width) / CELL_WIDTH)):
            backs[row][column] = names(fill)
    for number, x, y, text in re.findall(
        r'<text class="\S+-r(\d+)" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', svg
    ):
        row, first = round((float(y) - 20) / LINE_HEIGHT), round(float(x) / CELL_WIDTH)
        for column, character in enumerate(unescape(text).replace("\xa0", " ").strip("\n"), first):
            characters[row][column] = character
            fronts[row][column] = styles[number]
    legend: dict[str, str] = {}
    lines = ["".join(row).rstrip() for row in characters]
    runs = [
        " ".join(
            f"{legend.setdefault(style, chr(ord('a') + len(legend)))}{len(list(cells))}"
            for style, cells in groupby(cell_styles(*row))
        )
        for row in zip(characters, fronts, backs, strict=True)
    ]
    shades = [f"{letter} {style}" for style, letter in legend.items()]
    return "\n".join([*lines, "-" * columns, *runs, "-" * columns, *shades, ""])


def cell_styles(
    characters: list[str], fronts: list[tuple[str, str]], backs: list[str]
) -> list[str]:
    """How each cell of a line looks; a blank one like what is before it on the same ground."""
    styles: list[str] = []
    for index, (character, (colour, weight), back) in enumerate(
        zip(characters, fronts, backs, strict=True)
    ):
        if character != " ":
            styles.append(" ".join(filter(None, (colour, on(back), weight))))
        elif index and backs[index - 1] == back:
            styles.append(styles[-1])
        else:
            styles.append(on(back))
    return styles


def on(back: str) -> str:
    """A ground in words; a terminal's own has no name."""
    return f"on {back or 'default'}"


def colour_names(variables: dict[str, str]) -> Callable[[str], str]:
    """Names a colour by the first of the theme's variables that has it."""
    names: dict[str, str] = {}
    plain = ("foreground", "background", "primary", "secondary", "accent", "surface", "panel")
    for name in (*plain, *sorted(variables)):
        names.setdefault(variables[name].lower(), name)
    for number in range(16):
        names.setdefault(SVG_EXPORT_THEME.ansi_colors[number].hex, f"ansi-{number}")
    names.setdefault(SVG_EXPORT_THEME.background_color.hex, "default")
    names.setdefault(SVG_EXPORT_THEME.foreground_color.hex, "default")
    return lambda colour: names.get(colour.lower(), "mixed")


def main() -> int:
    """Draws every file anew."""
    FOLDER.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        freeze(patch)
        for name, case in CASES.items():
            (FOLDER / f"{name}.txt").write_text(picture(case), encoding="utf-8")
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
