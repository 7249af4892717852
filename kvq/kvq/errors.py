"""Every error a user can cause; anything else that escapes is a bug of ours.

    KvqError
    ├── UsageError               a flag or argument has a bad value
    ├── DataError                a text or evaluation file cannot be used
    ├── ModelError
    │   ├── UnsupportedModelError   an architecture or value no family knows
    │   └── CheckpointError         a checkpoint is damaged or incomplete
    ├── BundleError              a bundle is damaged, newer, or not a bundle
    ├── BudgetError              the byte budget cannot hold what was asked
    ├── CacheError               the cache refuses numbers or a state it cannot hold
    ├── SnapshotError            a saved session cannot be used here
    └── BackendError             a dependency or a feature is missing

An error is data: what it is `about`, the `value`, what is `possible`. Its message says what was
asked, what is possible and what to do, and names arguments by marks (`argument`), which whoever
shows it turns into the names that the reader knows: `str(error)` into those of Python, the command
line into flags.
"""

import collections.abc
import re
import typing

_MARK = re.compile("\ue000([^\ue001=]*)(?:=([^\ue001]*))?\ue001")


def argument(name: str, value: str = "") -> str:
    """An argument in a message, by its name in Python; with a `value` what is to be given."""
    return f"\ue000{name}={value}\ue001" if value else f"\ue000{name}\ue001"


def in_python(name: str, value: str = "") -> str:
    """An argument as Python writes it: `context_tokens`, `kv="fp"`."""
    return f'{name}="{value}"' if value else name


class KvqError(Exception):
    """Base of all errors meant for users; the command line prints it and exits with `exit_code`.

    Where no `message` is given it is made of what the error is `about` (the name of an argument),
    the `value` that cannot be, and what is `possible`.
    """

    exit_code = 2

    def __init__(
        self, message: object = "", *, about: str = "", value: object = None, possible: str = ""
    ) -> None:
        if about and not message:
            message = f"{argument(about)} {value} is not possible" + (possible and f": {possible}")
        super().__init__(message)
        self.value = value
        self.possible = possible
        self._about = about

    @property
    def about(self) -> str | None:
        """The argument that is to blame: the one that was given, else the first in the message."""
        found = _MARK.search(super().__str__())
        return self._about or (found and found[1])

    def told(self, called: collections.abc.Callable[[str, str], str]) -> str:
        """The message, in which argument `name` (and its value or "") is `called(name, value)`."""
        return _MARK.sub(lambda mark: called(mark[1], mark[2] or ""), super().__str__())

    def __str__(self) -> str:
        return self.told(in_python)


class UsageError(KvqError):
    """A flag or argument has a value that cannot be used."""


class DataError(KvqError):
    """A text or evaluation file cannot be used."""


class ModelError(KvqError):
    """A model cannot be used."""


class UnsupportedModelError(ModelError):
    """No family knows this architecture, or this value of one of its keys."""


class CheckpointError(ModelError):
    """A checkpoint, a folder or a GGUF file, is damaged or incomplete."""


class BundleError(KvqError):
    """A bundle is damaged, newer than this version, or not a bundle."""


class BudgetError(KvqError):
    """The byte budget cannot hold what was asked; the message names the smallest that can."""


class CacheError(KvqError):
    """The cache was given numbers it cannot hold, or is in a state that refuses the call."""


class SnapshotError(KvqError):
    """A saved session is damaged, newer, or belongs to another model or plan."""


class BackendError(KvqError):
    """A backend, a library or a feature of it is missing."""


def closed(error: collections.abc.Callable[[], KvqError]) -> typing.Any:
    """Stands where something was that is closed: who asks anything of it is told by an error."""

    class Closed:
        def __getattr__(self, _: str) -> typing.NoReturn:
            raise error()

    return Closed()
