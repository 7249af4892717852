"""The folder of one repository in the hub's cache on this machine, as huggingface_hub lays it out.

`blobs` has the files by their hash, `snapshots/COMMIT` links to them by their names, and
`refs/main` says which commit was the last. Nothing is read outside the cache, and nothing is
written outside the repository's folder, whatever links lie there.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from kvq.errors import ModelError
from kvq.files import replace_file
from kvq_export.read.hub_client import COMMIT

# Leaves room for what a temporary file's name has besides.
_MOST_NAME_BYTES = 200
_MOST_PATH = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRepository:
    """Reads and writes what the cache has of a repository."""

    cache: Path
    folder: Path

    @classmethod
    def of(cls, hub_id: str) -> "CachedRepository":
        """Returns the repository `hub_id`, which need not be there. Raises `ModelError`."""
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
        repository = cls(cache=cache, folder=cache / f"models--{hub_id.replace('/', '--')}")
        if not _lies_in(repository.folder, cache):
            raise ModelError(
                f"{repository.folder} is a link that leads out of the hub's cache, and is not "
                "followed; delete it, or give the checkpoint's folder itself"
            )
        return repository

    def file(self, commit: str, name: str) -> Path:
        """Returns where a file of a commit lies, or will lie."""
        return self.folder / "snapshots" / commit / name

    def has_file(self, path: Path, num_bytes: int | None) -> bool:
        """Tells whether a file of that many bytes (None: any) is there, inside the cache."""
        try:
            return (
                path.is_file()
                and _lies_in(path, self.cache)
                and num_bytes in (None, path.stat().st_size)
            )
        except OSError:
            return False

    def blob(self, key: str) -> Path:
        """Returns where the content that is called `key` lies, or will lie."""
        return self.folder / "blobs" / key

    @contextmanager
    def written(self, path: Path) -> Generator[BinaryIO]:
        """Yields a new file that takes the place of `path` at the end. Raises `ModelError`."""
        self._make_folder_of(path)
        with replace_file(path, private=False) as stream:
            yield stream

    def link(self, path: Path, blob: Path) -> None:
        """Makes `path` lead to `blob`; where there are no links, moves the file itself there."""
        self._make_folder_of(path)
        temporary = path.with_name(f".{path.name}-{token_hex(4)}")
        try:
            target = blob.parent.resolve() / blob.name
            temporary.symlink_to(os.path.relpath(target, path.parent.resolve()))
        except OSError:
            blob.replace(temporary)
        temporary.replace(path)

    def remember(self, commit: str) -> None:
        """Remembers `commit` as what is taken when the hub cannot be asked."""
        if commit == self.last_commit():
            return
        with self.written(self.folder / "refs" / "main") as stream:
            stream.write(commit.encode())

    def last_commit(self) -> str | None:
        """Returns the commit that was remembered last."""
        reference = self.folder / "refs" / "main"
        if not self.has_file(reference, len("0" * 40)):
            return None
        commit = reference.read_text("ascii", "replace")
        return commit if COMMIT.fullmatch(commit) else None

    def names(self, commit: str) -> list[str]:
        """Returns the names of the files of a commit that are there."""
        folder = self.folder / "snapshots" / commit
        paths = [path for path in folder.rglob("*") if self.has_file(path, None)]
        return sorted(path.relative_to(folder).as_posix() for path in paths)

    def _make_folder_of(self, path: Path) -> None:
        """Makes the folder of `path`. Raises `ModelError` where a link leads it elsewhere."""
        if not _lies_in(path.parent, self.folder):
            raise ModelError(
                f"{path.parent} leads out of {self.folder} by a link, and nothing is written "
                "there; delete the link"
            )
        path.parent.mkdir(parents=True, exist_ok=True)


def is_plain_name(name: str) -> bool:
    """Tells whether a repository's file may be called so on every system."""
    return len(name) <= _MOST_PATH and all(
        part not in ("", ".", "..")
        and part.isprintable()
        and not set(part) & set('\\:*?"<>|')
        and len(part.encode()) <= _MOST_NAME_BYTES
        for part in name.split("/")
    )


def _lies_in(path: Path, folder: Path) -> bool:
    """Tells whether `path`, with every link followed, is `folder` or below it."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False
