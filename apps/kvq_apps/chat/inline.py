"""The screen below the command line: Textual's driver, which here can also make way for others.

Linux and macOS only: elsewhere there is no such driver, and this cannot be imported.
"""

from rich.control import Control
from textual.drivers.linux_inline_driver import LinuxInlineDriver


class InlineDriver(LinuxInlineDriver):
    """Draws from the line on that the cursor stood in, and leaves it again for an editor or `fg`.

    Everything is drawn relative to the cursor, so it must stand as far below the first line when
    drawing goes on as it did before.
    """

    _cursor = (0, 0)

    @property
    def can_suspend(self) -> bool:
        """Whether the screen can be handed over."""
        return True

    def suspend_application_mode(self) -> None:
        """Takes away what is drawn."""
        x, y = self._cursor = self._app.cursor_position
        self.write(Control.move(-x, -y).segment.text)
        super().suspend_application_mode()

    def resume_application_mode(self) -> None:
        """Draws again, below what was written meanwhile."""
        super().resume_application_mode()
        x, y = self._cursor
        # Line feeds scroll at the end of the screen, where moving down would stop.
        self.write("\n" * y + Control.move(x, 0).segment.text)
        self.flush()
