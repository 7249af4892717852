"""The box a message is written in. Text goes in and out exactly; controls are shown, not obeyed."""

from functools import partial

from rich.text import Text
from textual.events import Key, Paste
from textual.message import Message as Event
from textual.widgets import TextArea

from kvq_apps.chat.keys import KEYS, PROMPT_KEYS
from kvq_apps.chat.visible import storable, visible


class Prompt(TextArea):
    """A text area whose Enter sends; `keys_of` says which keys send and which break the line.

    They are taken with the text, not as bindings, so that fast typing keeps its order.
    """

    DEFAULT_CSS = """
    Prompt { height: auto; min-height: 3; max-height: 40%; border: round $border; padding: 0 1; }
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
        self.keys_of = {row.name: row.keys.split(",") for row in KEYS if row.name in PROMPT_KEYS}

    def send(self) -> None:
        """Hands the text over and empties the box."""
        text = storable(self.text)
        if text.strip():
            self.text = ""
            self.post_message(self.Sent(text))
        else:
            self.post_message(self.Again())

    def fill(self, text: str) -> None:
        """Replaces what is written; the cursor goes to the end."""
        self.text = text
        self.move_cursor(self.document.end)

    def get_line(self, line_index: int) -> Text:
        """A line as it is drawn: the same length, control characters as pictures."""
        return Text(visible(self.document.get_line(line_index)), end="", no_wrap=True)

    async def _on_key(self, event: Key) -> None:
        if event.key in self.keys_of["send"]:
            taken = self.send
        elif event.key in self.keys_of["newline"]:
            taken = partial(self.insert, "\n")
        elif event.key == "up" and not self.text:
            taken = partial(self.post_message, self.Recalled())
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()
        taken()

    async def _on_paste(self, event: Paste) -> None:
        event.stop()
        event.prevent_default()
        self._replace_via_keyboard(storable(event.text), *self.selection)
