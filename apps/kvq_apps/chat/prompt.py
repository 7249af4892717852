"""The box a message is written in. Text goes in and out exactly; controls are shown, not obeyed."""

import re
from collections.abc import Callable
from functools import partial

from rich.text import Text
from textual.events import Key, Paste
from textual.message import Message as Event
from textual.widgets import TextArea

from kvq_apps.chat.keys import KEYS, PROMPT_KEYS
from kvq_apps.chat.menu import CommandMenu
from kvq_apps.chat.visible import storable, visible

# What is pasted in more lines or characters than these stands as one word until it is sent.
PASTE_LINES = 20
PASTE_CHARACTERS = 4000


class Prompt(TextArea):
    """A text area whose Enter sends; `keys_of` says which keys send and which break the line.

    They are taken with the text, not as bindings, so that fast typing keeps its order. `written`
    is the text with what long pastes stand for; `menu` the commands that it may become.
    """

    DEFAULT_CSS = """
    Prompt { height: auto; min-height: 3; max-height: 40%;
        padding: 0 1; border: round $foreground-muted;
    }
    Prompt:focus { border: round $primary; }
    """

    class Sent(Event):
        """The user wants `text` to go."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Again(Event):
        """The user sent nothing: Enter in an empty box."""

    class Recalled(Event):
        """The user asks for the queued message back: Up in an empty box."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, soft_wrap=True, placeholder="Write a message, / for commands")
        self.highlight_cursor_line = False
        self.menu = CommandMenu()
        self._pasted: dict[str, str] = {}
        self.keys_of = {row.name: row.keys.split(",") for row in KEYS if row.name in PROMPT_KEYS}

    def send(self) -> None:
        """Hands the text over and empties the box."""
        text = storable(self.written)
        if text.strip():
            self.fill("")
            self.post_message(self.Sent(text))
        else:
            self.post_message(self.Again())

    def fill(self, text: str) -> None:
        """Replaces what is written; the cursor goes to the end."""
        self._pasted.clear()
        self.text = text
        self.move_cursor(self.document.end)

    @property
    def written(self) -> str:
        """The text with every long paste in its place."""
        text = self.text
        if self._pasted:
            parts = re.split("(" + "|".join(map(re.escape, self._pasted)) + ")", text)
            text = "".join(self._pasted.get(part, part) for part in parts)
        return text

    def get_line(self, line_index: int) -> Text:
        """A line as it is drawn: the same length, control characters as pictures."""
        return Text(visible(self.document.get_line(line_index)), end="", no_wrap=True)

    async def _on_key(self, event: Key) -> None:
        taken = self._in_menu(event.key)
        if taken is not None:
            pass
        elif event.key in self.keys_of["send"]:
            taken = self.send
        elif event.key in self.keys_of["newline"]:
            taken = partial(self.insert, "\n")
        elif event.key == "up" and not self.text:
            taken = partial(self.post_message, self.Recalled())
        elif event.key == "backspace" and self._stands_after_paste():
            taken = self._take_paste_away
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        taken()

    async def _on_paste(self, event: Paste) -> None:
        event.stop()
        event.prevent_default()
        text = storable(event.text)
        lines = text.count("\n") + 1
        if lines > PASTE_LINES or len(text) > PASTE_CHARACTERS:
            word = f"[paste {len(self._pasted) + 1}: {lines} lines, {len(text)} characters]"
            self._pasted[word] = text
            text = word
        self._replace_via_keyboard(text, *self.selection)

    # A long paste

    def _stands_after_paste(self) -> str | None:
        """The word for a long paste right before the cursor."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column] if self.selection.is_empty else ""
        return next((word for word in self._pasted if before.endswith(word)), None)

    def _take_paste_away(self) -> None:
        word, (row, column) = self._stands_after_paste(), self.cursor_location
        if word is not None:
            self.delete((row, column - len(word)), (row, column))

    # The menu of commands

    def _in_menu(self, key: str) -> Callable[[], object] | None:
        """What `key` does while commands are offered; None: what it does always."""
        text, chosen = self.text, self.menu.chosen(self.text)
        if chosen is None:
            return None
        if key in ("up", "down"):
            return partial(self._mark, 1 if key == "down" else -1)
        if key == "escape":
            return self._close_menu
        typed = text.removeprefix("/") in (chosen.name, *chosen.synonyms)
        if key == "tab" or (key in self.keys_of["send"] and chosen.needs_words and not typed):
            return partial(self.fill, f"/{chosen.name}{' ' * bool(chosen.takes)}")
        if key in self.keys_of["send"] and not typed:
            return partial(self._send_command, chosen.name)
        return None

    def _mark(self, step: int) -> None:
        self.menu.step(self.text, step)
        self.post_message(self.Changed(self))

    def _close_menu(self) -> None:
        self.menu.close()
        self.post_message(self.Changed(self))

    def _send_command(self, name: str) -> None:
        self.fill(f"/{name}")
        self.send()
