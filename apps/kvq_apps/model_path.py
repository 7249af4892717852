"""From what a user calls a model to its files. Exports a checkpoint once, when it must."""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.errors import BundleError, ModelError, UnsupportedModelError
from kvq_apps import known_models, output
from kvq_apps.flags import told
from kvq_apps.output import LOG, TERMINAL, Teller
from kvq_apps.pulling import last_use, pulled
from kvq_models.embedded import INSTALL, embedded_folder, installed_names
from kvq_models.embedded import NAMES as EMBEDDED
from kvq_runtime.gguf_format import SUFFIX, is_gguf
from kvq_runtime.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from kvq_apps.pulling.wanted import Wanted
    from kvq_runtime.backends import ModelFiles

DEFAULT = "default"
# The model of the catalogue that is asked for where none is here.
FIRST = "smollm2-135m"
# The backend that runs a GGUF file as it is; for any other the file is exported once.
FILE_BACKEND = "llama.cpp"
# Their files say that they are regular.
_MADE_UP = frozenset({Path("/proc"), Path("/sys")})
CONFIG = "config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str | None, backend: str = "auto", tell: Teller = TERMINAL) -> Path:
    """The bundle folder or GGUF file that `name` means to `backend`.

    `name` is an embedded model, `default` or `nano`; else what was pulled or exported under that
    name; else a path to one of them or to a checkpoint folder; else a hub id, or a name of the
    catalogue, which is pulled after asking. What lies in the current folder takes no name over:
    `./NAME` means it. None is the model pulled last, or else `default`, as a note then says, or
    where that is not installed the first of the catalogue. A checkpoint, and a GGUF file of an
    architecture that kvq computes, is exported into the user's cache folder the first time, with
    progress told to `tell`; llama.cpp is given the file itself. Raises `ModelError` naming what is
    possible, also for a path to a device or a pipe.
    """
    if name is None:
        _tell_unnamed(tell)
    place = _locate(name)
    _tell_which(name, place.path, tell)
    path = _ready(place, backend, tell)
    last_use.note(path)
    return path


def _tell_unnamed(tell: Teller) -> None:
    """Says which model runs when none is named; one that is pulled now says so itself."""
    if (latest := pulled.latest()) is not None:
        tell.note(f"model: {latest}, the one pulled last")
    elif embedded_folder(DEFAULT):
        tell.note(
            f"model: {DEFAULT}, the small one that comes with kvq; `kvq pull {FIRST}` brings a "
            "larger one"
        )


def _ready(place: "_Place", backend: str, tell: Teller) -> Path:
    """The files that `backend` runs of a model at `place`, made now if they are not there yet."""
    if place.wanted is not None:
        from kvq_apps.pulling.pull import pull_asked

        return pull_asked(place.wanted, tell).path
    if place.source is not None:
        return _exported(place.path, place.source, place.name, tell)
    if is_gguf(place.path) or (place.path / MANIFEST_FILE).exists():
        known_models.remember(place.path)
    if is_gguf(place.path) and backend != FILE_BACKEND:
        return _computed(place.path, tell)
    return place.path


def model_files(name: str | None, backend: str, tell: Teller = TERMINAL) -> "ModelFiles":
    """What an engine is made of: the files of `resolve_model`, checked.

    For the backend `float` a checkpoint folder stays as it is, with a note. Raises
    `ModelError`, `BundleError`.
    """
    from kvq_runtime.engine import open_files

    folder = None if name is None else Path(name).expanduser()
    here = folder is not None and (folder / "config.json").exists()
    if folder is None or backend != "float" or not here or (folder / MANIFEST_FILE).exists():
        return open_files(resolve_model(name, backend, tell))
    from kvq_export.unquantized import Unquantized

    tell.note(f"{name}: the checkpoint's own weights, unquantised, in numpy: slow")
    return Unquantized.of(folder)


def library_files(name: str | None, backend: str) -> "ModelFiles":
    """As `model_files`, for a program that imports kvq: it prints nothing and asks nobody."""
    return model_files(name, backend, LOG)


def pull_missing(name: str | None) -> None:
    """Pulls the model of the catalogue that `name` means, after asking, if it is not here.

    For what shows a screen or starts a thread before it opens the model.
    """
    from kvq_models.catalogue import catalogue

    name = default_name() if name is None else name
    wanted = _locate(name).wanted if name in catalogue() else None
    if wanted is not None:
        from kvq_apps.pulling.pull import pull_asked

        pull_asked(wanted, TERMINAL)


def default_name() -> str:
    """The model that runs when none is named: the one pulled last, else the embedded one.

    Where neither is here it is one to pull.
    """
    return pulled.latest() or (DEFAULT if embedded_folder(DEFAULT) else FIRST)


def resolve_checkpoint(name: str) -> str:
    """The checkpoint folder or hub id that `name` means: itself, or an embedded model's folder."""
    return _embedded_checkpoint(name) if name in EMBEDDED else name


def ready_model(name: str | None) -> Path | None:
    """As `resolve_model`, but None for a checkpoint that is not exported yet."""
    place = _locate(name)
    made_of = place.source or place.wanted
    ready = made_of is None or (place.path / MANIFEST_FILE).exists()
    return place.path if ready else None


def known_names() -> dict[str, Path]:
    """The models that were made or run, by what means each: its name, else its path."""
    names = [*EMBEDDED, *(name for name, _ in known_models.named())]
    name_of: dict[Path, str] = {}
    for name in names:
        with suppress(ModelError):
            name_of[_locate(name).path.resolve()] = name
    return {name_of.get(path.resolve(), str(path)): path for path in known_models.paths()}


def is_name(name: str) -> bool:
    """Whether `name` means a model wherever it is said, also where a file is called so."""
    return _named(name) is not None


def _tell_which(name: str | None, path: Path, tell: Teller) -> None:
    """Notes that a name is not the model of that name in the current folder."""
    if name is None or not is_name(name):
        return
    here = Path(name)
    model_here = here.is_file() or any((here / one).exists() for one in (MANIFEST_FILE, CONFIG))
    if model_here and here.resolve() != path.resolve():
        tell.note(f"{name} is the model at {path}; for the one here give ./{name}")


def check_regular(path: Path) -> None:
    """Raises `ModelError` where a model at `path` would be read from no file with bytes of its own.

    That is a device, a pipe, or what the system makes up while it is read (`/proc/self/mem`).
    """
    try:
        for file in [path, *(path.iterdir() if path.is_dir() else ())]:
            made_up = _MADE_UP.intersection(file.resolve().parents)
            if file.exists() and (made_up or not (file.is_file() or file.is_dir())):
                raise ModelError(
                    f"{file} is a device, a pipe or another file that the system makes up while it "
                    "is read; a model is a regular file, or a folder of them"
                )
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: a loop of links; ValueError: a zero byte.
        raise ModelError(f"{path} cannot be read: {error}") from error


def lasting_name(name: str | None) -> str:
    """What means the same model as `name`, in any folder: an embedded model, a hub id or a path."""
    place = _locate(name)
    if place.source is None:
        return str(place.path.resolve())
    return place.name if place.name in EMBEDDED else place.source


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A model's files; of a checkpoint `source` the bundle called `name` that is made of it.

    `wanted` is what to pull where the files are not there yet.
    """

    path: Path
    source: str | None = None
    name: str = ""
    wanted: "Wanted | None" = None


def _locate(name: str | None) -> _Place:
    name = default_name() if name is None else name
    if (named := _named(name)) is not None:
        return named
    path = Path(name).expanduser()
    check_regular(path)
    if (path / MANIFEST_FILE).exists() or (path.is_file() and is_gguf(path)):
        return _Place(path=path)
    if (path / CONFIG).exists():
        called = path.resolve().name.replace(known_models.HUB_SLASH, "-")
        return _bundle_of(str(path.resolve()), called)
    if path.is_file():
        raise ModelError(
            f"{name} is a file, and no GGUF file; a model is a bundle, a GGUF file, a checkpoint "
            "folder or a hub id"
        )
    if path.exists():
        return _Place(path=path)
    if _is_hub_id(name):
        return _of_hub(name)
    from kvq_apps.pulling import wanted

    missing = wanted.in_catalogue(name)
    if missing is not None:
        return _Place(path=known_models.pulled_folder(name), wanted=missing)
    made = (known for known, _ in known_models.named())
    known_names = (*installed_names(), *made, *wanted.names())
    raise ModelError(
        f"there is no model at {name}{output.did_you_mean(name, known_names)}; give a bundle made "
        "by `kvq export`, a GGUF file, a Hugging Face checkpoint folder, a hub id such as "
        "Qwen/Qwen3-0.6B, or a name that `kvq models` or `kvq pull --list` shows"
    )


def _named(name: str) -> _Place | None:
    """The embedded model of this name, or what was pulled or made under it.

    Of several that were made it is the one in the current folder, else the newest.
    """
    if name in EMBEDDED:
        return _bundle_of(_embedded_checkpoint(name), name)
    if (here := pulled.pulled(name)) is not None:
        return _Place(path=here)
    if _is_hub_id(name) and (_of_hub(name).path / MANIFEST_FILE).exists():
        return _of_hub(name)
    found = [path for called, path in known_models.made() if called == name]
    if not found:
        return None
    here = Path(name).resolve()
    return _Place(path=Path(name) if here in found else found[0])


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(SUFFIX)


def _of_hub(name: str) -> _Place:
    return _bundle_of(name, name.replace("/", known_models.HUB_SLASH))


def _bundle_of(source: str, name: str) -> _Place:
    folder = known_models.bundles_folder() / f"{name}-{_fingerprint(source)}"
    return _Place(path=folder, source=source, name=name)


def _embedded_checkpoint(name: str) -> str:
    folder = embedded_folder(name)
    if folder is None:
        raise ModelError(
            f"the embedded model {name!r} is not installed; `{INSTALL}` brings it, and "
            "`kvq pull --list` shows others"
        )
    return str(folder)


def _exported(destination: Path, source: str, name: str, tell: Teller) -> Path:
    """The bundle of `source` in the cache folder, made now if it is not there yet."""

    def export(destination: Path, progress: output.Progress) -> Path:
        # Half a second of imports, which a bundle that is there does not wait for.
        from kvq_export.config import ExportOptions
        from kvq_export.export import export_model

        options = ExportOptions(name=name, quality=False)
        return export_model(source, destination, options, progress).path

    return made_once(destination, f"exporting {source} once into", export, tell)


def _computed(file: Path, tell: Teller) -> Path:
    """The bundle made of a GGUF file, or the file itself where kvq does not compute the model."""
    place = _bundle_of(str(file.resolve()), file.stem)
    try:
        bundle = _exported(place.path, str(file), place.name, tell)
    except UnsupportedModelError as error:
        tell.note(f"llama.cpp is to run {file.name}, kvq cannot: {told(error)}")
        return file
    tell.note(
        f"{file.name} runs on kvq's own kernels; --backend {FILE_BACKEND} gives it to llama.cpp"
    )
    return bundle


def made_once(
    destination: Path,
    note: str,
    make: Callable[[Path, output.Progress], Path],
    tell: Teller = TERMINAL,
) -> Path:
    """The bundle at `destination`, made by `make(destination, progress)` if it is not there yet.

    Raises `ModelError` when the folder cannot be written.
    """
    if (destination / MANIFEST_FILE).exists():
        return destination
    tell.note(f"{note} {destination}")
    progress = tell.progress()
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
    """Changes with the bundle format and with the files there (names, sizes, times)."""
    from kvq_runtime.manifest import VERSION

    digest = hashlib.sha256(f"{VERSION} {source}".encode())
    folder = Path(source)
    # A hub id is no path, whatever lies in the current folder.
    there = folder.is_absolute()
    files = sorted(folder.iterdir()) if there and folder.is_dir() else [folder][: folder.is_file()]
    for file in files if there else ():
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:12]
