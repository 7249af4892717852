"""Which projects' files a person trusts, each by its place and its bytes. Knows no setting.

One note for each file lies in the user's state folder, so that two commands never write the same.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvq.errors import UsageError
from kvq.files import replace_file
from kvq.settings import state_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A trusted file: where it lies, and the SHA-256 in hex of the bytes that were trusted."""

    path: str
    digest: str


def is_trusted(path: Path, digest: str) -> bool:
    """Whether the file at `path`, with bytes of this digest, was trusted."""
    return _read(_note_of(path)) == Note(path=str(path), digest=digest)


def trust(path: Path, digest: str) -> None:
    """From now on these bytes at `path` are trusted. Raises `UsageError` if that cannot be kept."""
    file = _note_of(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(file) as stream:
            stream.write(json.dumps(asdict(Note(path=str(path), digest=digest))).encode())
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None


def revoke(path: Path) -> bool:
    """Trusts the file at `path` no more; whether it was. Raises `UsageError`."""
    file = _note_of(path)
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(f"{file} cannot be removed: {error.strerror}") from None
    return True


def notes() -> Iterator[Note]:
    """Every file that was trusted, whether or not it is still there or still the same."""
    for file in sorted(_folder().glob("*.json")):
        if (note := _read(file)) is not None:
            yield note


def _read(file: Path) -> Note | None:
    with suppress(OSError, ValueError, TypeError):
        return Note(**json.loads(file.read_text("utf-8")))
    return None


def _note_of(path: Path) -> Path:
    return _folder() / f"{hashlib.sha256(bytes(path)).hexdigest()[:16]}.json"


def _folder() -> Path:
    return state_folder() / "trust"
