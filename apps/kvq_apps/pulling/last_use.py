"""When a model was opened last: the time of an empty file of its own in the state folder."""

import hashlib
from contextlib import suppress
from pathlib import Path

from kvq.settings import state_folder


def note(model: Path) -> None:
    """The bundle or GGUF file is opened now. Never in anyone's way."""
    with suppress(OSError):
        file = _file(model)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def seconds(model: Path) -> float | None:
    """When it was, in seconds since 1970, or None."""
    with suppress(OSError):
        return _file(model).stat().st_mtime
    return None


def forget(model: Path) -> None:
    """The model is no longer there."""
    with suppress(OSError):
        _file(model).unlink()


def _file(model: Path) -> Path:
    return state_folder() / "used" / hashlib.sha256(bytes(model.resolve())).hexdigest()[:16]
