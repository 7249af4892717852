"""Ctrl-C as a question a loop can ask, so that it ends between two steps; its exit code."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed; pressed again, it ends at once."""
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def noted_interrupts() -> Generator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C ended something, in whatever words.

    An import that is interrupted may raise ImportError instead of KeyboardInterrupt.
    """
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
