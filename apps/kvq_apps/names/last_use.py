"""Remembers when a model was opened last, as the time of an empty file in the state folder."""

import hashlib
from contextlib import suppress
from pathlib import Path

from kvq.settings import state_folder


def note(model: Path) -> None:
    """Notes that a bundle or GGUF file is opened now. An error of the disk is ignored."""
    with suppress(OSError):
        file = _file(model)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def seconds(model: Path) -> float | None:
    """Returns the time of the last use in seconds since 1970, or None."""
    with suppress(OSError):
        return _file(model).stat().st_mtime
    return None


def forget(model: Path) -> None:
    """Removes the note about a model that is deleted."""
    with suppress(OSError):
        _file(model).unlink()


def _file(model: Path) -> Path:
    return state_folder() / "used" / hashlib.sha256(bytes(model.resolve())).hexdigest()[:16]
