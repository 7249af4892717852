"""Every error a user can cause; anything else that escapes is a bug of ours.

    KvqError
    ├── UsageError               a flag or argument has a bad value
    ├── DataError                a text or evaluation file cannot be used
    ├── ModelError
    │   ├── UnsupportedModelError   an architecture or value no family knows
    │   └── CheckpointError         a checkpoint folder is damaged or incomplete
    ├── BundleError              a bundle is damaged, newer, or not a bundle
    ├── BudgetError              the byte budget cannot hold what was asked
    ├── CacheError               the cache refuses numbers or a state it cannot hold
    ├── SnapshotError            a saved session cannot be used here
    └── BackendError             a dependency or a feature is missing

A message says what was asked, what is possible, and what to do.
"""


class KvqError(Exception):
    """Base of all errors meant for users; the command line prints it and exits with `exit_code`."""

    exit_code = 2


class UsageError(KvqError):
    """A flag or argument has a value that cannot be used."""


class DataError(KvqError):
    """A text or evaluation file cannot be used."""


class ModelError(KvqError):
    """A model cannot be used."""


class UnsupportedModelError(ModelError):
    """No family knows this architecture, or this value of one of its keys."""


class CheckpointError(ModelError):
    """A checkpoint folder is damaged or incomplete."""


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
