"""Drafts of one reply side by side, while they are written and to choose from."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Static

from kvq_apps.chat.messages import Message
from kvq_apps.chat.transcript import TranscriptView

# A narrower column than this cannot be read: fewer are shown then, the marked one among them.
COLUMN_CELLS = 36
SAYS = "Alt+] and Alt+[ (Alt+N, Alt+P) mark a draft   Enter keeps it   Esc leaves all as it was"


class DraftsScreen(ModalScreen[int | None]):
    """Shows `messages` in columns; returns the number of the one kept, None for none."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "dismiss(None)", "leave it"),
        ("enter", "keep", "keep it"),
        ("tab", "step(1)", "next"),
        ("shift+tab", "step(-1)", "previous"),
        *((str(number), f"mark({number - 1})", f"draft {number}") for number in range(1, 10)),
    ]
    DEFAULT_CSS = """
    DraftsScreen {
        align: center middle;
        & > Vertical { width: 96%; height: 90%; background: $surface; padding: 0 1; }
        Horizontal { height: 1fr; }
        TranscriptView { width: 1fr; border: round $foreground-muted; }
        TranscriptView.marked { border: round $primary; }
        Static { height: auto; color: $text-muted; }
    }
    """

    def __init__(self, messages: Sequence[Message], marked: int) -> None:
        super().__init__()
        self.marked = marked
        # What the conversation shows of a draft, such as its place, is not said twice.
        self._messages = [replace(message, branch=1, branches=1) for message in messages]
        self.columns = [TranscriptView() for _ in messages]

    def compose(self) -> ComposeResult:
        """The columns above what the keys do."""
        with Vertical():
            with Horizontal():
                yield from self.columns
            yield Static(SAYS, markup=False)

    def on_mount(self) -> None:
        """Each column shows its draft."""
        for column, message in zip(self.columns, self._messages, strict=True):
            column.show([message])
        self._draw()

    def on_resize(self, event: Resize) -> None:
        """As many columns as there is room for."""
        self._draw()

    def feed(self, number: int, text: str) -> None:
        """Shows more of a draft that is being written."""
        self._messages[number].text += text
        if self.is_mounted:
            self.columns[number].feed(text)

    def finish(self, messages: Sequence[Message]) -> None:
        """Nothing more is written; `messages` say how each ended."""
        for column, mine, message in zip(self.columns, self._messages, messages, strict=True):
            mine.state = message.state
            if column.is_mounted:
                column.finish()
                column.restate(mine)

    def action_step(self, step: int) -> None:
        """Marks the draft so many further."""
        self.action_mark((self.marked + step) % len(self.columns))

    def action_mark(self, number: int) -> None:
        """Marks a draft."""
        if number < len(self.columns):
            self.marked = number
            self._draw()

    def action_keep(self) -> None:
        """The marked one it is."""
        self.dismiss(self.marked)

    def _draw(self) -> None:
        count = len(self.columns)
        room = max(1, min(count, self.size.width // COLUMN_CELLS))
        first = min(max(0, self.marked - room // 2), count - room)
        for number, column in enumerate(self.columns):
            column.display = first <= number < first + room
            column.set_class(number == self.marked, "marked")
            column.border_title = f"{number + 1}/{count}"
        self.columns[self.marked].focus()
