"""Ctrl-C as a question a loop can ask, so that it ends between two steps; its exit code."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
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
