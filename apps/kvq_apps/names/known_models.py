"""Remembers the models that were made or run here, and the names by which `-m` finds them.

Pulled bundles lie in the models folder, bundles of other checkpoints in the cache folder. For each
other model that was made or run there is a symbolic link, or, where links are not possible, a file
with the model's path: making one is atomic, and that of a deleted model leads nowhere. A name comes
from a pull, an export or a hub id; the first model of a name keeps it. A model that was opened at a
path is found at this path. A GGUF file that nobody else can change is also found by a short name,
if the name means nothing else. The time of an empty file says when a model was used last.
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kvq.files import replace_file
from kvq.settings import cache_folder, data_folder, state_folder
from kvq_apps.names.model_names import is_name
from kvq_runtime.bundle.gguf_format import SUFFIX, is_gguf
from kvq_runtime.bundle.manifest import BUNDLE_FILES, MANIFEST_FILE

# A pulled bundle has this file, see `pull_records`.
RECORD_FILE = "pulled.json"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FINGERPRINT = re.compile(r"-[0-9a-f]{12}$")
# Replaces the / of a hub id in the name of its bundle; names of other bundles do not contain it.
HUB_SLASH = "--"


def bundles_folder() -> Path:
    """Returns the folder that checkpoints used by name are exported to."""
    return cache_folder() / "bundles"


def models_folder() -> Path:
    """Returns the folder of pulled models; only `kvq models rm` deletes from it."""
    return data_folder() / "models"


def pulled_folder(name: str) -> Path:
    """Returns the folder of the pulled model called `name`, which need not exist."""
    return models_folder() / name.replace("/", HUB_SLASH, 1)


def pulled_name(bundle: Path) -> str:
    """Returns the name of a bundle in the models folder."""
    return bundle.name.replace(HUB_SLASH, "/", 1)


def remember(path: Path, *, made: bool = False) -> None:
    """Adds `path`, a bundle or GGUF file, to the list; it is found by its name if `made` here.

    An error of the disk is ignored.
    """
    resolved = path.resolve()
    link = _link(_exported_folder() if made else _opened_folder(), resolved)
    with suppress(OSError):
        if os.path.lexists(link) or is_ours(resolved):
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(resolved)
        except OSError:
            # Windows lets few users make links.
            with replace_file(link) as stream:
                stream.write(str(resolved).encode())
        for other in _entries(link.parent):
            if not _target(other).exists():
                other.unlink()


def unname(path: Path) -> None:
    """Makes a model that was made here be found at its path only."""
    remember(path)
    _link(_exported_folder(), path.resolve()).unlink(missing_ok=True)


def forget(path: Path) -> None:
    """Removes `path` from the list until it is opened again. Raises `OSError`."""
    for folder in (_exported_folder(), _opened_folder()):
        _link(folder, path.resolve()).unlink(missing_ok=True)
    with suppress(OSError):
        _use_file(path).unlink()


def note_use(path: Path) -> None:
    """Notes that a bundle or GGUF file is opened now. An error of the disk is ignored."""
    with suppress(OSError):
        file = _use_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def last_used_s(path: Path) -> float | None:
    """Returns when a bundle or GGUF file was opened last, in seconds since 1970, or None."""
    with suppress(OSError):
        return _use_file(path).stat().st_mtime
    return None


def is_ours(path: Path) -> bool:
    """Says whether `path` lies in a folder where kvq alone makes bundles."""
    ours = {models_folder().resolve(), bundles_folder().resolve()}
    return not ours.isdisjoint(path.resolve().parents)


def paths() -> list[Path]:
    """Returns every bundle and GGUF file that was made or run and exists, the newest first."""
    folders = (models_folder(), bundles_folder())
    listed = (path for folder in folders for path in _entries(folder))
    models = [path for path in listed if path.is_dir() and _files(path)]
    models += dict.fromkeys([*_targets(_exported_folder()), *_targets(_opened_folder())])
    return sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)


def missing() -> list[Path]:
    """Returns the paths of models that were made or run and no longer exist."""
    links = [*_entries(_exported_folder()), *_entries(_opened_folder())]
    return [path for link in links if not (path := _target(link)).exists()]


def named_models() -> list[tuple[str, Path]]:
    """Returns the name and the path of every model that has a name."""
    pulled = [
        (pulled_name(path), path)
        for path in _entries(models_folder())
        if (path / MANIFEST_FILE).exists()
    ]
    return [*pulled, *exported_models().items(), *hub_bundles()]


def exported_models() -> dict[str, Path]:
    """Returns the exported models by name; of several with one name, the first."""
    return _by_name(_targets(_exported_folder()), exported_name)


def exported_name(path: Path) -> str:
    """Returns the name of a model that is exported to `path`."""
    return path.stem if is_gguf(path) else path.name


def opened_files() -> dict[str, Path]:
    """Returns the opened GGUF files by short names, such as `q3-4b` for `Q3-4B.gguf`.

    These are only files that nobody else can change or replace, since a word means them later.
    """
    files = (path for path in _targets(_opened_folder()) if path.suffix == SUFFIX)
    return _by_name(filter(_is_safe, files), lambda path: path.stem.lower())


def hub_bundles() -> list[tuple[str, Path]]:
    """Returns the hub id and the path of every bundle of a hub id."""
    return [
        (_FINGERPRINT.sub("", path.name).replace(HUB_SLASH, "/", 1), path)
        for path in _entries(bundles_folder())
        if HUB_SLASH in path.name
    ]


def num_bytes(path: Path) -> int:
    """Returns the bytes that `remove` would free."""
    return sum(file.stat().st_size for file in _files(path))


def remove(path: Path) -> None:
    """Deletes a GGUF file, or a bundle and its folder unless there are other files in it.

    Raises `OSError`.
    """
    # What makes it a model goes first, so that an interrupted removal leaves no model.
    for file in _files(path):
        file.unlink()
    if path.is_dir():
        with suppress(OSError):
            path.rmdir()
    forget(path)


def _files(path: Path) -> list[Path]:
    """Returns the existing files of a bundle, the record of its pull first, or the GGUF file."""
    if not path.is_dir():
        return [path]
    files = (path / name for name in (RECORD_FILE, *BUNDLE_FILES))
    return [file for file in files if os.path.lexists(file)]


def _is_safe(file: Path) -> bool:
    """Says whether only this user and the system can change `file`, and its name is a model's.

    In a folder with the sticky bit, as above home folders, users cannot rename others' files.
    """
    if not hasattr(os, "getuid") or not is_name(file.stem):
        return False
    places = [file, *file.parents]
    modes = [place.stat() for place in places]
    if any(mode.st_uid not in (0, os.getuid()) for mode in modes):
        return False
    nearest, above = modes[:2], modes[2:]
    open_above = (mode for mode in above if not mode.st_mode & stat.S_ISVTX)
    return not any(mode.st_mode & _WRITABLE_BY_OTHERS for mode in (*nearest, *open_above))


def _by_name(paths: Iterable[Path], name_of: Callable[[Path], str]) -> dict[str, Path]:
    path_of_name: dict[str, Path] = {}
    for path in paths:
        path_of_name.setdefault(name_of(path), path)
    return path_of_name


def _link(folder: Path, resolved: Path) -> Path:
    return folder / hashlib.sha256(bytes(resolved)).hexdigest()[:16]


def _use_file(path: Path) -> Path:
    """Returns the empty file whose time is that of a model's last use."""
    return _link(state_folder() / "used", path.resolve())


def _exported_folder() -> Path:
    return state_folder() / "made"


def _opened_folder() -> Path:
    return state_folder() / "models"


def _targets(folder: Path) -> Iterator[Path]:
    """Yields the existing models that the links in `folder` lead to, the oldest link first."""
    links = sorted(_entries(folder), key=lambda link: link.lstat().st_mtime_ns)
    yield from (path for link in links if (path := _target(link)).exists())


def _target(link: Path) -> Path:
    """Returns the path that a link leads to, or that the file in place of a link contains."""
    return link.resolve() if link.is_symlink() else Path(link.read_text("utf-8"))


def _entries(folder: Path) -> Iterator[Path]:
    yield from folder.glob("[!.]*") if folder.is_dir() else ()
