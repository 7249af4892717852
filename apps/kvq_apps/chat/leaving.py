"""How the chat on screen ends: by a key, or by a signal, with what was said kept."""

import os
import signal
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Coroutine
from time import time
from typing import Any

from kvq_apps.chat.choosing import ChoosingApp

LEAVE_WITHIN_S = 3.0
# A signal ends the chat: what runs may take so long to stop, and the KV so long to be saved.
STOP_WITHIN_S = 0.4
SAVE_WITHIN_S = 0.8


class LeavingApp(ChoosingApp):
    """An app that shows chats and is left; `said` is what was said since it began, as drawn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.said: list[str] = []
        self._started_s = time()
        self._leaving = False

    async def action_quit(self) -> None:
        """Leaves; asked again, without waiting for anything."""
        if self._leaving:
            self.exit()
            return
        self._leaving = True
        self._only_leave(self._leave())

    def quit(self) -> None:
        self.run_worker(self.action_quit())

    def _only_leave(self, leave: Coroutine[Any, Any, None]) -> None:
        """Does `leave` in place of a way that takes longer."""
        self.run_worker(leave, exit_on_error=True, exclusive=True, group="leaving")

    async def _leave(self) -> None:
        self._close_screens()
        await self.controller.leave(LEAVE_WITHIN_S)
        self.said = self.transcript.lines_since(self._started_s)
        self.exit()

    def _close_screens(self) -> None:
        """Closes what is over the conversation; what waits for an answer there goes on."""
        while len(self.screen_stack) > 1:
            self.screen.dismiss(None)

    def _end_on_signals(self) -> None:
        """A closed terminal and `kill` end the chat as Ctrl+Q does, but within a second or two."""
        if self.is_headless or os.name != "posix":
            return
        loop = get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            # At once, not in the loop's turn: see `_let_go`.
            signal.signal(number, lambda number, _: self._signalled(loop, number))

    def _signalled(self, loop: AbstractEventLoop, number: int) -> None:
        if not os.isatty(0):
            self._let_go()
        loop.call_soon_threadsafe(self._end, number)

    def _let_go(self) -> None:
        """The terminal is gone: neither write to it, which may wait for ever, nor take it back.

        The kernel follows a hang-up by a SIGCONT, which Textual would begin to draw again at.
        """
        signal.signal(signal.SIGCONT, lambda _number, _frame: None)
        if self._driver is not None:
            self._driver.write = lambda data: None

    def _end(self, number: int) -> None:
        self._leaving = True
        self._only_leave(self._end_soon(number))

    async def _end_soon(self, number: int) -> None:
        self._close_screens()
        await self.controller.leave(STOP_WITHIN_S, SAVE_WITHIN_S)
        if not os.isatty(0):
            os._exit(128 + number)  # all is kept, and Textual would wait for the terminal
        self.exit(return_code=128 + number)
