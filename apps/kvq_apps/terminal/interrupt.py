"""Lets a loop ask whether Ctrl-C was pressed, so that it can end between two steps."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130
_AGAIN_S = 0.01


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed; a second one raises at once."""
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def noted_interrupts() -> Generator[Callable[[], bool]]:
    """Yields a function that says whether Ctrl-C was pressed, whatever error followed.

    An import that is interrupted may raise ImportError instead of KeyboardInterrupt. Python prints
    what a finalizer raises and goes on: an interrupt there is raised again outside of it.
    """
    pressed = False
    print_unraisable = sys.unraisablehook

    def raise_again(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            again = threading.Timer(_AGAIN_S, _interrupt_main_thread)
            again.daemon = True
            again.start()
        else:
            print_unraisable(unraisable)

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, press)
    sys.unraisablehook = raise_again
    try:
        yield lambda: pressed
    finally:
        sys.unraisablehook = print_unraisable
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt_main_thread() -> None:
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:  # wakes a sleep, too
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
