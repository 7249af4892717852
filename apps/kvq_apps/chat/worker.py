"""One thread that does one thing at a time. Ends with the process, whatever it is doing."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[..., Any], tuple[Any, ...], "Future[Any]"]


class Worker:
    """Runs calls in the order they were given, on a thread that never holds the process back."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """The future result of `function(*arguments)`."""
        future: Future[T] = Future()
        self._jobs.put((function, arguments, future))
        return future

    def stop(self, wait_s: float) -> bool:
        """Ends after the calls given so far; returns whether that took less than `wait_s`."""
        self._jobs.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, arguments, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(error)
