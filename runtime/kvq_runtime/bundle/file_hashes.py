"""SHA-256 of files; those of large files are remembered between runs."""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq.errors import DataError
from kvq.files import read_regular, replace_file
from kvq.json_values import is_object
from kvq.settings import cache_folder

# Hashes of files this large are remembered between runs; smaller ones are read every time.
REMEMBERED_BYTES = 16 << 20
_MOST_BYTES = 16 << 20


@dataclass(kw_only=True, slots=True)
class HashMemory:
    """Remembers the SHA-256 of large files by path, size and time of change."""

    path: Path
    rows: dict[str, Any]
    changed: bool = False

    @classmethod
    def load(cls) -> "HashMemory":
        """Returns what earlier runs remembered; nothing when the file is missing or damaged."""
        path = cache_folder() / "hashes.json"
        rows: Any = None
        with contextlib.suppress(OSError, ValueError, DataError):
            rows = json.loads(read_regular(path, _MOST_BYTES))
        return cls(path=path, rows=rows if is_object(rows) else {})

    def sha256(self, file: Path) -> str:
        """Returns the file's hash, read from the file unless it is large and unchanged."""
        status = file.stat()
        key = str(file.resolve())
        stamp = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        known: Any = self.rows.get(key)
        if is_object(known) and stamp.items() <= known.items():
            return str(known.get("sha256"))
        digest = file_sha256(file)
        if status.st_size >= REMEMBERED_BYTES:
            self.rows[key] = stamp | {"sha256": digest}
            self.changed = True
        return digest

    def save(self) -> None:
        """Writes back what changed. A folder that cannot be written costs time, nothing else."""
        if not self.changed:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(self.path) as stream:
                stream.write(json.dumps(self.rows).encode())


def file_sha256(file: Path) -> str:
    """Returns the SHA-256 (hex) of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
