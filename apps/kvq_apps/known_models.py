"""The models that were made or run here, and the names by which `-m` finds them again.

Bundles that were exported by name lie in the cache folder. Of each other model that was used there
is a symbolic link: to make one is atomic, and of a model that is gone it leads nowhere.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvq.settings import cache_folder, state_folder
from kvq_runtime.bundle import (
    DATA_FILE,
    GGUF_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
)
from kvq_runtime.gguf_format import is_gguf

_FINGERPRINT = re.compile(r"-[0-9a-f]{12}$")


def bundles_folder() -> Path:
    """Where checkpoints used by name are exported to."""
    return cache_folder() / "bundles"


def remember(path: Path) -> None:
    """From now on `path`, a bundle or GGUF file, is found by its name. Never in anyone's way."""
    whole = path.resolve()
    link = _links() / hashlib.sha256(bytes(whole)).hexdigest()[:16]
    with suppress(OSError):
        if link.is_symlink() or whole.parent == bundles_folder().resolve():
            return
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(whole)
        for other in _listed(_links()):
            if not other.exists():
                other.unlink()


def paths() -> list[Path]:
    """Every bundle and GGUF file that was made or run and is there, the newest first."""
    found = [path for path in _listed(bundles_folder()) if path.is_dir()]
    found += [path for link in _listed(_links()) if (path := link.resolve()).exists()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def called(path: Path) -> str:
    """What a model at `path` is called: a hub id, or the name of its folder or file."""
    if path.parent == bundles_folder():
        return _FINGERPRINT.sub("", path.name).replace("--", "/", 1)
    return path.stem if is_gguf(path) else path.name


def remove(bundle: Path) -> None:
    """Deletes the files of a bundle, and its folder unless something else is in there."""
    # The manifest first: what is left, if this is cut off, is no bundle.
    for name in (MANIFEST_FILE, MODEL_FILE, DATA_FILE, GGUF_FILE, TOKENIZER_FILE, TEMPLATE_FILE):
        (bundle / name).unlink(missing_ok=True)
    with suppress(OSError):
        bundle.rmdir()


def named(name: str) -> Path | None:
    """The newest model called `name`."""
    return next((path for path in paths() if called(path) == name), None)


def _links() -> Path:
    return state_folder() / "models"


def _listed(folder: Path) -> Iterator[Path]:
    yield from folder.glob("[!.]*") if folder.is_dir() else ()
