"""A guard that lets one thread at a time use a session."""

from threading import RLock

from kvq.errors import UsageError


class OneThread:
    """Lets one thread at a time into a block, which it may enter again from inside.

    Raises `UsageError` in a thread that comes while another one is inside.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "another thread uses this session now; a session serves one thread at a time: "
                "make one for each thread with `Engine.session`, or take turns"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
