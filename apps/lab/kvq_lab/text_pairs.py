"""Two versions of files: from two files, two folders, or the commits of a git repository."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import DataError, UsageError, argument, reason_of


@dataclass(frozen=True, slots=True)
class TextPair:
    """Holds two versions of a file."""

    name: str
    old: str
    new: str


def file_pairs(old: str, new: str, only: str = "*") -> Iterator[TextPair]:
    """Yields two files, or the files that differ in two folders, paired by their paths.

    Left out are files that are hidden, that are no UTF-8, or whose names do not match `only`.
    Raises `UsageError` for a file and a folder.
    """
    before, after = Path(old), Path(new)
    if before.is_dir() != after.is_dir():
        raise UsageError(f"{old} and {new} cannot be compared: give two files, or two folders")
    names = sorted(path.relative_to(after).as_posix() for path in after.rglob("*"))
    for name in names if after.is_dir() else [""]:
        paths = before / name, after / name
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if hidden or not all(map(Path.is_file, paths)):
            continue
        try:
            contents = paths[0].read_bytes(), paths[1].read_bytes()
        except OSError as error:
            raise DataError(f"{paths[1]} cannot be read: {reason_of(error)}") from error
        yield from _pair(name or after.name, *contents, only)


def commit_pairs(folder: str, only: str = "*") -> Iterator[TextPair]:
    """Yields the files below `folder` that commits changed, the newest commit first.

    Merges are left out, and so are files as in `file_pairs`. Raises `UsageError` where git refuses.
    """
    for commit in _git(folder, "log", "--no-merges", "--format=%H").decode().split():
        words = ("--no-commit-id", "--name-only", "--relative", "--diff-filter=M", "-r", "-z")
        for name in filter(None, _git(folder, "diff-tree", *words, commit).decode().split("\0")):
            old = _git(folder, "show", f"{commit}^:./{name}")
            yield from _pair(name, old, _git(folder, "show", f"{commit}:./{name}"), only)


def _pair(name: str, old: bytes, new: bytes, only: str) -> Iterator[TextPair]:
    try:
        texts = _text(old), _text(new)
    except UnicodeDecodeError:
        return
    if texts[0] != texts[1] and Path(name).match(only):
        yield TextPair(name, *texts)


def _text(content: bytes) -> str:
    """Returns UTF-8 as text whose lines end as most do."""
    return content.decode().replace("\r\n", "\n").replace("\r", "\n")


def _git(folder: str, *words: str) -> bytes:
    try:
        command = ["git", "-C", folder, *words]
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip()
        raise UsageError(
            f"{argument('--git')} {folder} is not possible: {said or reason_of(error)}; give a "
            "folder in a git repository"
        ) from error
