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

A message says what was asked, what is possible, and what to do. It is written once, with the flags
of the command line; outside of a command its text has the names of Python's arguments instead.
"""

import collections.abc
import re
from contextlib import contextmanager

_ARGUMENTS = {
    "kv fp": 'kv="fp"', "kv": "kv", "kbits": "k_bits", "vbits": "v_bits", "kv-budget": "kv_budget",
    "kv-offload": "kv_offload",
    "kv-policy": "policy", "kv-predict": "predict",
    "ctx-size": "context_tokens", "chunk-tokens": "chunk_tokens",
    "threads": "threads", "backend": "backend", "seed": "seed", "draft": "draft",
    "drafts-method": "method", "predict": "max_tokens", "temp": "temperature", "top-k": "top_k",
    "top-p": "top_p", "min-p": "min_p", "repeat-penalty": "repeat_penalty",
    "repeat-last-n": "repeat_window_tokens", "presence-penalty": "presence_penalty",
    "frequency-penalty": "frequency_penalty",
}  # fmt: skip
# A command in backticks is left as it is.
_FLAG = re.compile(r"`kvq [^`]*`|--(kv fp\b|[a-z][a-z-]*[a-z])")
_commands = 0


@contextmanager
def named_by_flags() -> collections.abc.Generator[None]:
    """While inside, errors of this process name the flags of the command line."""
    global _commands  # noqa: PLW0603  one process is one command
    _commands += 1
    try:
        yield
    finally:
        _commands -= 1


def in_command() -> bool:
    """Whether this process is a command of a person, not a program that imports kvq."""
    return _commands > 0


class KvqError(Exception):
    """Base of all errors meant for users; the command line prints it and exits with `exit_code`."""

    exit_code = 2

    def __str__(self) -> str:
        text = super().__str__()
        return text if _commands else _FLAG.sub(_argument, text)


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


def _argument(found: re.Match[str]) -> str:
    return _ARGUMENTS.get(found[1], found[0])
