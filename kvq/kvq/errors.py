"""All errors that a user can cause; any other exception is a bug.

An error holds data: what it is `about`, the `value`, and what is `possible`. Its message says what
was asked, what is possible and what to do. It names arguments by marks (`argument`). Whoever shows
the message replaces the marks by names that the reader knows: `str(error)` by those of Python, the
command line by flags.
"""

import collections.abc
import json
import re
import typing

_MARK = re.compile("\ue000([^\ue001=]*)(?:=([^\ue001]*))?\ue001")


def argument(name: str, value: str = "") -> str:
    """Returns the mark of an argument for a message; `value` is what to give it."""
    return f"\ue000{name}={value}\ue001" if value else f"\ue000{name}\ue001"


def in_python(name: str, value: str = "") -> str:
    """Returns an argument as Python writes it: `context_tokens`, `kv="fp"`."""
    return f'{name}="{value}"' if value else name


class KvqError(Exception):
    """Is the base of all errors for users; the command line prints it and exits with `exit_code`.

    Without a `message` one is made from what the error is `about` (the name of an argument), the
    `value` that is not possible, and what is `possible`.
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
        """Returns the argument that is to blame: the given one, else the first in the message."""
        mark = _MARK.search(super().__str__())
        return self._about or (mark and mark[1])

    def message_for(self, spell: collections.abc.Callable[[str, str], str]) -> str:
        """Returns the message, in which `spell(name, value)` writes every argument.

        The value of an argument that has none is "".
        """
        return _MARK.sub(lambda mark: spell(mark[1], mark[2] or ""), super().__str__())

    def __str__(self) -> str:
        return self.message_for(in_python)


class UsageError(KvqError):
    """Says that a flag or argument has a value that cannot be used."""


class DataError(KvqError):
    """Says that a text or evaluation file cannot be used."""


class ModelError(KvqError):
    """Says that a model cannot be used."""


class UnsupportedModelError(ModelError):
    """Says that no family knows this architecture, or this value of one of its keys."""


class CheckpointError(ModelError):
    """Says that a checkpoint, a folder or a GGUF file, is damaged or incomplete."""


class BundleError(KvqError):
    """Says that a bundle is damaged, newer than this version, or not a bundle."""


class BudgetError(KvqError):
    """Says that the byte budget is too small for what was asked, and names one that is not."""


class CacheError(KvqError):
    """Says that the cache got numbers that it cannot hold, or cannot do this in its state."""


class SnapshotError(KvqError):
    """Says that a saved session is damaged, newer, or belongs to another model or plan."""


class BackendError(KvqError):
    """Says that a backend, a library or a feature of it is missing."""


# How Python's own errors about bad values read; their words do not help a user.
_PYTHON_TEXTS = re.compile(
    r"argument|unsupported operand|not supported between|invalid literal for|values? to unpack|"
    r"could not convert|Exceeds the limit|object (is not|has no|cannot|of type)|indices must be|"
    r"cannot be interpreted|division|out of range|cannot convert|not (iterable|subscriptable)|"
    r"math domain|byte string|too large"
)
_ARGUMENT = re.compile(
    r"(unexpected keyword|missing \d+ required).*argument.*?: '(\w+)'|argument '(\w+)'"
)


def reason_of(error: BaseException) -> str:
    """Returns why something could not be read or written, in words for a user."""
    match error:
        case json.JSONDecodeError():
            text = f"it is no JSON from line {error.lineno}, column {error.colno} on"
        case UnicodeDecodeError():
            text = f"it is not UTF-8 at byte {error.start}"
        case UnicodeEncodeError():
            text = f"it has half a letter at character {error.start}"
        case KeyError():
            text = f"it lacks {error.args[0] if error.args else 'a key'}"
        case RecursionError():
            text = "it is nested too deeply"
        case MemoryError():
            text = "there is not enough memory for it"
        case OSError() if error.strerror:
            text = error.strerror
        case _:
            text = _plain(str(error))
    return text


def _plain(text: str) -> str:
    """Returns the text of an exception, or plain words where it is one of Python's own."""
    if "null byte" in text:
        return "it has a zero byte"
    named = _ARGUMENT.search(text)
    if named is not None:
        key = named[2] or named[3]
        return f"it lacks {key}" if "missing" in text else f"{key} is not known"
    return text if text and not _PYTHON_TEXTS.search(text) else "a value in it is not of its kind"


def closed(error: collections.abc.Callable[[], KvqError]) -> typing.Any:
    """Returns a stand-in for a closed object; every use of it raises `error()`."""

    class Closed:
        def __getattr__(self, _: str) -> typing.NoReturn:
            raise error()

    return Closed()
