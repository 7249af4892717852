"""The commands that what is being typed may become, above the prompt."""

from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from kvq_apps.chat.commands import Command, matching

ROWS = 8


class CommandMenu:
    """The commands offered for a text, and the one that Tab or Enter would take."""

    def __init__(self) -> None:
        self._text = ""
        self._closed = False
        self._index = 0

    def rows(self, text: str) -> list[Command]:
        """What is offered for `text`; another text opens a menu that was closed."""
        if text != self._text:
            self._text, self._closed, self._index = text, False, 0
        return [] if self._closed else matching(text)

    def chosen(self, text: str) -> Command | None:
        """The row that is marked."""
        rows = self.rows(text)
        return rows[self._index % len(rows)] if rows else None

    def step(self, text: str, step: int) -> None:
        """Marks the next row or the one before."""
        self._index = (self._index + step) % max(1, len(self.rows(text)))

    def close(self) -> None:
        """Offers nothing more for this text."""
        self._closed = True


class MenuView(Static):
    """Draws a menu, a few rows around the one that is marked."""

    DEFAULT_CSS = "MenuView { height: auto; padding: 0 2; display: none; }"

    def draw(self, menu: CommandMenu, text: str) -> None:
        """Shows what is offered for `text`, or nothing."""
        rows, chosen = menu.rows(text), menu.chosen(text)
        self.display = chosen is not None
        if chosen is None:
            return
        first = max(0, min(rows.index(chosen) - ROWS // 2, len(rows) - ROWS))
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        for row in rows[first : first + ROWS]:
            style = "reverse" if row is chosen else ""
            table.add_row(Text(row.usage), Text(row.says), style=style)
        self.update(table)
