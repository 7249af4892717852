"""The models that were made or run here, and the names by which `-m` finds them again.

Bundles that were pulled lie in the models folder, those of other checkpoints in the cache folder.
Of each other model that was made or used there is a symbolic link, or where those cannot be made a
file with its path: to make one is atomic, and of a model that is gone it leads nowhere. A name is
only what the user gave one, by a pull, an export or a hub id: what was opened at a path, in a
folder that may be a stranger's, is found at its path alone.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvq.files import replace_file
from kvq.settings import cache_folder, data_folder, state_folder
from kvq_runtime.gguf_format import is_gguf
from kvq_runtime.manifest import BUNDLE_FILES, MANIFEST_FILE

_FINGERPRINT = re.compile(r"-[0-9a-f]{12}$")
# What stands for the / of a hub id in the name of its bundle; other bundles' names have none.
HUB_SLASH = "--"


def bundles_folder() -> Path:
    """Where checkpoints used by name are exported to."""
    return cache_folder() / "bundles"


def models_folder() -> Path:
    """Where the models that were pulled lie: the user's own folder, which only `rm` empties."""
    return data_folder() / "models"


def pulled_folder(name: str) -> Path:
    """Where the pulled model called `name` lies, or would."""
    return models_folder() / name.replace("/", HUB_SLASH, 1)


def pulled_name(bundle: Path) -> str:
    """The name of a bundle in the models folder."""
    return bundle.name.replace(HUB_SLASH, "/", 1)


def remember(path: Path, *, made: bool = False) -> None:
    """From now on `path`, a bundle or GGUF file, is listed, and found by its name if `made` here.

    Never in anyone's way.
    """
    whole = path.resolve()
    folder = _made() if made else _opened()
    link = folder / hashlib.sha256(bytes(whole)).hexdigest()[:16]
    with suppress(OSError):
        own = (models_folder().resolve(), bundles_folder().resolve())
        if os.path.lexists(link) or whole.parent in own:
            return
        folder.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(whole)
        except OSError:
            # Windows lets few users make links.
            with replace_file(link) as stream:
                stream.write(str(whole).encode())
        for other in _listed(folder):
            if not _target(other).exists():
                other.unlink()


def paths() -> list[Path]:
    """Every bundle and GGUF file that was made or run and is there, the newest first."""
    folders = (models_folder(), bundles_folder())
    found = [path for folder in folders for path in _listed(folder) if path.is_dir()]
    found += dict.fromkeys([*_targets(_made()), *_targets(_opened())])
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def named() -> list[tuple[str, Path]]:
    """Every model that has a name, by its names."""
    pulled = [
        (pulled_name(path), path)
        for path in _listed(models_folder())
        if (path / MANIFEST_FILE).exists()
    ]
    return [*pulled, *made(), *of_hub()]


def made() -> list[tuple[str, Path]]:
    """What was exported under a name, the newest first: its folder's, or a GGUF file's own."""
    own = set(_targets(_made()))
    return [(path.stem if is_gguf(path) else path.name, path) for path in paths() if path in own]


def of_hub() -> list[tuple[str, Path]]:
    """The bundles of hub ids, by their ids."""
    return [
        (_FINGERPRINT.sub("", path.name).replace(HUB_SLASH, "/", 1), path)
        for path in _listed(bundles_folder())
        if HUB_SLASH in path.name
    ]


def remove(bundle: Path) -> None:
    """Deletes the files of a bundle, and its folder unless something else is in there."""
    # The manifest first: what is left, if this is cut off, is no bundle.
    for name in BUNDLE_FILES:
        (bundle / name).unlink(missing_ok=True)
    with suppress(OSError):
        bundle.rmdir()


def _made() -> Path:
    return state_folder() / "made"


def _opened() -> Path:
    return state_folder() / "models"


def _targets(folder: Path) -> Iterator[Path]:
    yield from (path for link in _listed(folder) if (path := _target(link)).exists())


def _target(link: Path) -> Path:
    """What a link of ours leads to, or what is written in the file that stands for one."""
    return link.resolve() if link.is_symlink() else Path(link.read_text("utf-8"))


def _listed(folder: Path) -> Iterator[Path]:
    yield from folder.glob("[!.]*") if folder.is_dir() else ()
