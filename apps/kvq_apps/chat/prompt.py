"""The box a message is written in, and its menu of commands; control characters are shown."""

import re
from collections.abc import Callable, Sequence
from functools import partial

from rich.table import Table
from rich.text import Text
from textual.events import Key, Paste
from textual.message import Message as Event
from textual.widgets import Static, TextArea

from kvq_apps.chat.commands import Command, matching_commands
from kvq_apps.chat.keys import KEYS, PROMPT_KEYS
from kvq_apps.terminal.output import storable, visible

# A longer paste is shown as one word until it is sent.
PASTE_LINES = 20
PASTE_CHARACTERS = 4000
MENU_ROWS = 8


class MenuView(Static):
    """Draws the offered commands: a few rows around the marked one."""

    DEFAULT_CSS = "MenuView { height: auto; padding: 0 2; display: none; }"

    def draw(self, commands: Sequence[Command], marked: int) -> None:
        """Shows the commands, or hides the menu if there is none."""
        self.display = bool(commands)
        first = max(0, min(marked - MENU_ROWS // 2, len(commands) - MENU_ROWS))
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        for number, row in list(enumerate(commands))[first : first + MENU_ROWS]:
            style = "reverse" if number == marked else ""
            table.add_row(Text(row.usage), Text(row.help), style=style)
        self.update(table)


class PromptBox(TextArea):
    """Edits a text; Enter sends it. `keys_by_name` says which keys send or break the line.

    These keys are handled with the text, not as bindings, so that fast typing keeps its order.
    `full_text` is the text with long pastes in full.
    """

    DEFAULT_CSS = """
    PromptBox { height: auto; min-height: 3; max-height: 40%;
        padding: 0 1; border: round $foreground-muted;
    }
    PromptBox:focus { border: round $primary; }
    """

    class Sent(Event):
        """Asks to send `text`."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class RetryRequested(Event):
        """Asks to answer again: Enter in an empty box."""

    class RecallRequested(Event):
        """Asks for the queued message: Up in an empty box."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, soft_wrap=True, placeholder="Write a message, / for commands")
        self.highlight_cursor_line = False
        # Which command of the menu for this text is marked; None: the menu is closed.
        self._menu_text = ""
        self._menu_index: int | None = 0
        self._pastes: dict[str, str] = {}
        self.keys_by_name = {
            row.name: row.keys.split(",") for row in KEYS if row.name in PROMPT_KEYS
        }

    def send(self) -> None:
        text = storable(self.full_text)
        if text.strip():
            self.fill("")
            self.post_message(self.Sent(text))
        else:
            self.post_message(self.RetryRequested())

    def fill(self, text: str) -> None:
        """Replaces the text; the cursor goes to the end."""
        self._pastes.clear()
        self.text = text
        self.move_cursor(self.document.end)

    @property
    def full_text(self) -> str:
        """Returns the text with every long paste in its place."""
        text = self.text
        if self._pastes:
            parts = re.split("(" + "|".join(map(re.escape, self._pastes)) + ")", text)
            text = "".join(self._pastes.get(part, part) for part in parts)
        return text

    def get_line(self, line_index: int) -> Text:
        """Returns a line as drawn: of the same length, with pictures for control characters."""
        return Text(visible(self.document.get_line(line_index)), end="", no_wrap=True)

    async def _on_key(self, event: Key) -> None:
        action = self._menu_action(event.key)
        if action is not None:
            pass
        elif event.key in self.keys_by_name["send"]:
            action = self.send
        elif event.key in self.keys_by_name["newline"]:
            action = partial(self.insert, "\n")
        elif event.key == "up" and not self.text:
            action = partial(self.post_message, self.RecallRequested())
        elif event.key == "backspace" and self._paste_before_cursor():
            action = self._delete_paste
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        action()

    async def _on_paste(self, event: Paste) -> None:
        event.stop()
        event.prevent_default()
        text = storable(event.text)
        lines = text.count("\n") + 1
        if lines > PASTE_LINES or len(text) > PASTE_CHARACTERS:
            word = f"[paste {len(self._pastes) + 1}: {lines} lines, {len(text)} characters]"
            self._pastes[word] = text
            text = word
        self._replace_via_keyboard(text, *self.selection)

    # A long paste

    def _paste_before_cursor(self) -> str | None:
        """Returns the word of the long paste right before the cursor, if there is one."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column] if self.selection.is_empty else ""
        return next((word for word in self._pastes if before.endswith(word)), None)

    def _delete_paste(self) -> None:
        word, (row, column) = self._paste_before_cursor(), self.cursor_location
        if word is not None:
            self.delete((row, column - len(word)), (row, column))

    # The menu of commands

    def offered(self) -> tuple[list[Command], int]:
        """Returns the commands that the text may become, and the number of the marked one.

        A menu that was closed opens again when the text changes.
        """
        if self.text != self._menu_text:
            self._menu_text, self._menu_index = self.text, 0
        rows = [] if self._menu_index is None else matching_commands(self.text)
        return rows, (self._menu_index or 0) % max(1, len(rows))

    def _menu_action(self, key: str) -> Callable[[], object] | None:
        """Returns what `key` does while commands are offered; None: its usual action."""
        rows, marked = self.offered()
        if not rows:
            return None
        if key in ("up", "down"):
            return partial(self._mark, marked + (1 if key == "down" else -1))
        if key == "escape":
            return partial(self._mark, None)
        command, sends = rows[marked], key in self.keys_by_name["send"]
        is_complete = self.text.removeprefix("/") in command.names
        if key == "tab" or (sends and command.needs_argument and not is_complete):
            return partial(self.fill, f"/{command.name}{' ' * bool(command.argument)}")
        if sends and not is_complete:
            return partial(self._send_command, command.name)
        return None

    def _mark(self, index: int | None) -> None:
        """Marks a command, or closes the menu."""
        self._menu_index = index
        self.post_message(self.Changed(self))

    def _send_command(self, name: str) -> None:
        self.fill(f"/{name}")
        self.send()
