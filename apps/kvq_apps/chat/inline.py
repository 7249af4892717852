"""Textual's driver for a screen below the command line that can be suspended.

Works on Linux and macOS only: elsewhere Textual has no such driver, and the import fails.
"""

from rich.control import Control
from textual.drivers.linux_inline_driver import LinuxInlineDriver


class InlineDriver(LinuxInlineDriver):
    """Draws from the cursor's line on, and can hand the terminal over to an editor or `fg`.

    All drawing is relative to the cursor. After a suspension the cursor must stand as far below the
    first line as before.
    """

    _cursor = (0, 0)

    @property
    def can_suspend(self) -> bool:
        return True

    def suspend_application_mode(self) -> None:
        """Removes what is drawn."""
        x, y = self._cursor = self._app.cursor_position
        self.write(Control.move(-x, -y).segment.text)
        super().suspend_application_mode()

    def resume_application_mode(self) -> None:
        """Draws again, below what was written meanwhile."""
        super().resume_application_mode()
        x, y = self._cursor
        # Line feeds scroll at the end of the screen; moving down would stop there.
        self.write("\n" * y + Control.move(x, 0).segment.text)
        self.flush()
