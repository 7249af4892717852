"""From what a user calls a model to its files. Exports a checkpoint once, when it must."""

import hashlib
import importlib.util
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvq.errors import BundleError, ModelError
from kvq_apps import known_models, output
from kvq_runtime.bundle import MANIFEST_FILE
from kvq_runtime.gguf_format import SUFFIX, is_gguf

DEFAULT = "default"
# Folders of checkpoints inside the models package, by the name a user calls them.
EMBEDDED = (DEFAULT, "nano")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str | None) -> Path:
    """The bundle folder or GGUF file that `name` means.

    `name` is one of them, a checkpoint folder, a hub id, or an embedded model: `default` (also
    meant by None) or `nano`, unless a folder of that name is there; else a model that was made or
    run before and is called so. A checkpoint is exported into the user's cache folder the first
    time, with progress on stderr. Raises `ModelError` naming what is possible.
    """
    place = _locate(name)
    if place.source is not None:
        return _exported(place.path, place.source, place.name)
    if is_gguf(place.path) or (place.path / MANIFEST_FILE).exists():
        known_models.remember(place.path)
    return place.path


def resolve_checkpoint(name: str) -> str:
    """The checkpoint folder or hub id that `name` means: itself, or an embedded model's folder."""
    embedded = name in EMBEDDED and not Path(name).is_dir()
    return _embedded_checkpoint(name) if embedded else name


def ready_model(name: str | None) -> Path | None:
    """As `resolve_model`, but None for a checkpoint that is not exported yet."""
    place = _locate(name)
    ready = place.source is None or (place.path / MANIFEST_FILE).exists()
    return place.path if ready else None


def known_names() -> dict[str, Path]:
    """The models that were made or run, by what means each: its name, else its path."""
    found: dict[str, Path] = {}
    for path in known_models.paths():
        name = known_models.called(path)
        with suppress(ModelError):
            if _locate(name).path.resolve() == path.resolve():
                found[name] = path
                continue
        found[str(path)] = path
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A model's files; of a checkpoint `source` the bundle called `name` that is made of it."""

    path: Path
    source: str | None = None
    name: str = ""


def _locate(name: str | None) -> _Place:
    name = DEFAULT if name is None else name
    path = Path(name).expanduser()
    if name in EMBEDDED and not (path / MANIFEST_FILE).exists():
        return _bundle_of(_embedded_checkpoint(name), name)
    if (path / MANIFEST_FILE).exists():
        return _Place(path=path)
    if (path / "config.json").exists():
        return _bundle_of(str(path.resolve()), path.resolve().name)
    if path.is_file():
        if is_gguf(path):
            return _Place(path=path)
        raise ModelError(
            f"{name} is a file, and no GGUF file; a model is a bundle, a GGUF file, a checkpoint "
            "folder or a hub id"
        )
    if not path.exists() and _HUB_ID.fullmatch(name) and path.suffix != SUFFIX:
        return _bundle_of(name, name.replace("/", "--"))
    known = known_models.named(name)
    if known is not None or path.exists():
        return _Place(path=known or path)
    known_names = (*EMBEDDED, *map(known_models.called, known_models.paths()))
    raise ModelError(
        f"there is no model at {name}{output.did_you_mean(name, known_names)}; give a bundle made "
        "by `kvq export`, a GGUF file, a Hugging Face checkpoint folder, a hub id such as "
        "Qwen/Qwen3-0.6B, or a name that `kvq inspect` lists"
    )


def _bundle_of(source: str, name: str) -> _Place:
    folder = known_models.bundles_folder() / f"{name}-{_fingerprint(source)}"
    return _Place(path=folder, source=source, name=name)


def _embedded_checkpoint(name: str) -> str:
    spec = importlib.util.find_spec("kvq_models")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        if (Path(folder) / name / "config.json").exists():
            return str(Path(folder) / name)
    raise ModelError(
        f"this installation has no embedded model {name!r}; make a bundle with "
        "`kvq export CHECKPOINT_FOLDER -o NAME` and pass it with `-m NAME`"
    )


def _exported(destination: Path, source: str, name: str) -> Path:
    """The bundle of `source` in the cache folder, made now if it is not there yet."""
    from kvq_export.config import ExportOptions
    from kvq_export.export import export_model

    options = ExportOptions(name=name, quality=False)
    return made_once(
        destination,
        f"exporting {source} once into",
        lambda destination, progress: export_model(source, destination, options, progress).path,
    )


def made_once(destination: Path, note: str, make: Callable[[Path, output.Progress], Path]) -> Path:
    """The bundle at `destination`, made by `make(destination, progress)` if it is not there yet.

    Raises `ModelError` when the folder cannot be written.
    """
    if (destination / MANIFEST_FILE).exists():
        return destination
    output.print_note(f"{note} {destination}")
    progress = output.Progress()
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        return make(destination, progress)
    except BundleError:
        # Another process may have finished the same bundle meanwhile.
        if (destination / MANIFEST_FILE).exists():
            return destination
        raise
    except OSError as error:
        raise ModelError(f"{destination} cannot be written: {error.strerror}") from error
    finally:
        progress.clear()


def _fingerprint(source: str) -> str:
    """Changes with the bundle format and with a folder's files (names, sizes, times)."""
    from kvq_runtime.bundle import VERSION

    digest = hashlib.sha256(f"{VERSION} {source}".encode())
    folder = Path(source)
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]
