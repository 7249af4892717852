"""Makes a folder that appears whole or not at all. Knows nothing of what is in it."""

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvq.errors import BundleError, argument
from kvq.files import left_behind
from kvq_runtime.bundle.manifest import MANIFEST_FILE

if sys.platform != "win32":
    import fcntl

# Errors of a rename where another export of the same name was first, and how often it is tried.
_OVERTAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
_TRIES = 4


@contextmanager
def staged(destination: Path, *, force: bool) -> Generator[Path, None, None]:
    """Yields a new folder beside `destination`, renamed to it at the end and removed on failure.

    An existing bundle is replaced only with `force`, anything else never. What a killed export of
    this name left is removed, and what one of another name left after a day. A link at
    `destination` stays, and what it points to is written. Raises `BundleError`, also in place of an
    `OSError` of the body.
    """
    destination = free_destination(destination, force=force)
    mark = secrets.token_hex(4)
    folder = destination.with_name(f".{destination.name}.{mark}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        with _locked(folder):
            yield folder
            old = destination.with_name(f".{destination.name}.{mark}.old")
            _publish(folder, destination, old, force=force)
    except OSError as error:
        raise BundleError(
            f"{destination} cannot be written: {error.strerror or error}; "
            "make room there, or choose another folder: `kvq export -o`"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_destination(destination: Path, *, force: bool) -> Path:
    """Returns where an export to `destination` goes; raises `BundleError` as `staged` does."""
    destination = destination.resolve() if destination.is_symlink() else destination
    _clear_leftovers(destination)
    _check_destination(destination, force=force)
    return destination


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises `BundleError` when the disk of `folder` has fewer than `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise BundleError(
            f"the bundle takes {num_bytes / 2**20:.0f} MiB, the disk of {folder.parent} has "
            f"{free / 2**20:.0f} MiB free; make room, or choose another folder: "
            "`kvq export -o`"
        )


@contextmanager
def _locked(folder: Path) -> Generator[None, None, None]:
    """Holds the folder's lock, which ends with the process however that ends; Windows has none."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _clear_leftovers(destination: Path) -> None:
    """Finishes for a killed export: removes its half, and puts an old bundle back."""
    has_parent = destination.name and destination.parent.is_dir()
    if not has_parent or sys.platform == "win32":
        return
    for leftover in left_behind(destination.parent, r"\..+\.[0-9a-f]{8}\.partial"):
        with suppress(OSError), _locked(leftover):
            shutil.rmtree(leftover)
    hidden = re.compile(rf"\.{re.escape(destination.name)}\.([0-9a-f]{{8}})\.(partial|old)")
    leftovers = [
        (match[1], match[2])
        for path in destination.parent.iterdir()
        if (match := hidden.fullmatch(path.name))
    ]
    for mark in sorted({mark for mark, _ in leftovers}):
        partial, old = (
            destination.with_name(f".{destination.name}.{mark}.{kind}")
            for kind in ("partial", "old")
        )
        with suppress(OSError):
            if partial.is_dir():
                with _locked(partial):  # refused while its export lives
                    shutil.rmtree(partial)
            if not old.is_dir():
                continue
            if destination.exists():
                shutil.rmtree(old)
            else:
                old.rename(destination)


def _check_destination(destination: Path, *, force: bool) -> None:
    if not destination.name:
        raise BundleError(f"{destination} cannot be a bundle; give the name of a folder")
    if not destination.exists():
        return
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if not (destination / MANIFEST_FILE).is_file():
        raise BundleError(
            f"{destination} exists and is not a bundle, so it is not replaced; "
            "move it away, or choose another folder: `kvq export -o`"
        )
    if not force:
        raise BundleError(
            f"{destination} already holds a bundle; replace it with {argument('force')}, "
            "or choose another folder: `kvq export -o`"
        )


def _publish(folder: Path, destination: Path, old: Path, *, force: bool) -> None:
    """Renames `folder` to `destination`, which another export may make or replace meanwhile."""
    for last in (*(False,) * _TRIES, True):
        # By now something may lie there.
        _check_destination(destination, force=force)
        try:
            _move(folder, destination, old)
        except OSError as error:
            if last or error.errno not in _OVERTAKEN or not folder.is_dir():
                raise
        else:
            return


def _move(folder: Path, destination: Path, old: Path) -> None:
    """Renames `folder` to `destination`; puts back what was there if the second rename fails."""
    if not destination.exists():
        folder.rename(destination)
        return
    destination.rename(old)
    try:
        folder.rename(destination)
    except BaseException:
        if destination.exists():  # another export came between
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
