"""Finds the files of a model by the name a user gives, and exports a checkpoint the first time."""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.errors import BundleError, ModelError, UnsupportedModelError, UsageError, reason_of
from kvq.files import path_of
from kvq.formats import format_bytes
from kvq_apps.names import known_models, pull_records
from kvq_apps.names.model_names import is_hub_id, local_name
from kvq_apps.terminal import output
from kvq_apps.terminal.output import TERMINAL, Reporter
from kvq_models.catalogue import EMBEDDED, INSTALL, catalogue, embedded_folder, installed_names
from kvq_runtime.bundle.gguf_format import SUFFIX, is_gguf
from kvq_runtime.bundle.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from kvq_apps.names.pull_request import PullRequest
    from kvq_runtime.backends import ModelFiles

DEFAULT = "default"
# The model of the catalogue that is offered where no model is here.
FIRST = "smollm2-135m"
# This backend runs a GGUF file as it is; for any other the file is exported once.
FILE_BACKEND = "llama.cpp"
# Rises when GGUF files are read in another way, so that their bundles are made again.
GGUF_READING = 3
# The size of kvq's layout of a GGUF file, as a share of the file, and the seconds for each byte.
_LAYOUT_SHARE, _LAYOUT_S = 1.1, 0.012e-6
# Files in these folders look regular.
_VIRTUAL = frozenset({Path("/proc"), Path("/sys")})
CONFIG = "config.json"


def resolve_model(name: str | None, backend: str = "auto", reporter: Reporter = TERMINAL) -> Path:
    """Returns the bundle folder or GGUF file that `name` means to `backend`.

    `name` is an embedded model, `default` or `nano`; else a model that was pulled or exported under
    that name; else a path to such a model or to a checkpoint folder; else a hub id, or a name of
    the catalogue, which is pulled after asking. A known name never means a file in the current
    folder; `./NAME` does. None means the model pulled last, else `default`, as a note then says,
    else the first model of the catalogue. A checkpoint, and a GGUF file of an architecture that kvq
    computes, is exported into the user's cache folder the first time; `reporter` shows the
    progress. llama.cpp gets the GGUF file itself. Raises a `ModelError` that says what is possible,
    also for a path to a device or a pipe.
    """
    if name is None:
        _report_default(reporter)
    place = _locate(name)
    _report_local_model(name, place.path, reporter)
    path = _prepare(place, backend, reporter)
    known_models.note_use(path)
    return path


def _report_default(reporter: Reporter) -> None:
    """Notes which model runs when none is named; a pull has notes of its own."""
    if (latest := pull_records.latest_name()) is not None:
        reporter.note(f"model: {latest}, the one pulled last")
    elif embedded_folder(DEFAULT):
        reporter.note(
            f"model: {DEFAULT}, the small one that comes with kvq; `kvq pull {FIRST}` brings a "
            "larger one"
        )


def _prepare(place: "_Place", backend: str, reporter: Reporter) -> Path:
    """Returns the files that `backend` runs of the model at `place`, making them if needed."""
    if place.request is not None:
        from kvq_apps.names.pulling import pull_with_consent

        return pull_with_consent(place.request, reporter).path
    if place.source is not None:
        return _export_once(place.path, place.source, place.name, reporter)
    if not is_gguf(place.path) or backend == FILE_BACKEND:
        return place.path
    path = _gguf_bundle(place.path, reporter)
    if path != place.path:
        known_models.remember(place.path)
    return path


def model_files(name: str | None, backend: str, reporter: Reporter = TERMINAL) -> "ModelFiles":
    """Returns the checked files of a model for an engine; see `resolve_model` for the name.

    Raises `ModelError`, `BundleError`.
    """
    from kvq_runtime.engine import open_files

    files = open_files(resolve_model(name, backend, reporter))
    # Only now, since what cannot be opened is not listed as a model.
    known_models.remember(files.path)
    return files


def pull_missing(name: str | None) -> None:
    """Pulls the model of the catalogue that `name` means, after asking, if it is not here.

    Commands that show a screen or start a thread call this first.
    """
    name = default_name() if name is None else name
    request = _locate(name).request if name in catalogue() else None
    if request is not None:
        from kvq_apps.names.pulling import pull_with_consent

        pull_with_consent(request, TERMINAL)


def default_name() -> str:
    """Returns the model that runs when none is named: the one pulled last, else the embedded one.

    If neither is here this is a model to pull.
    """
    return pull_records.latest_name() or (DEFAULT if embedded_folder(DEFAULT) else FIRST)


def resolve_checkpoint(name: str) -> str:
    """Returns the checkpoint folder of an embedded model, else `name` itself."""
    return _embedded_checkpoint(name) if name in EMBEDDED else name


def ready_model(name: str | None) -> Path | None:
    """Returns the path as `resolve_model` does, but None where a bundle is not made yet."""
    place = _locate(name)
    made_of = place.source or place.request
    ready = made_of is None or (place.path / MANIFEST_FILE).exists()
    return place.path if ready else None


def known_names() -> dict[str, Path]:
    """Returns the models that were made or run by the word that means each: a name, else a path."""
    chosen_names = (name for name, _ in known_models.named_models())
    names = [*known_models.opened_files(), *EMBEDDED, *chosen_names]
    name_of: dict[Path, str] = {}
    for name in names:
        with suppress(ModelError):
            name_of[_locate(name).path.resolve()] = name
    return {name_of.get(path.resolve(), str(path)): path for path in known_models.paths()}


def listed_path(name: str) -> Path:
    """Returns the path of the listed model with this name or path, which may be deleted already.

    Raises `UsageError` for a model that is not listed.
    """
    path = path_of(name).resolve()
    rows = known_names()
    gone = {known_models.exported_name(model): model for model in known_models.missing()}
    pulled_path = known_models.pulled_folder(local_name(name))
    candidates = (rows.get(name), pulled_path, gone.get(name), path)
    known = {model.resolve() for model in (*rows.values(), *gone.values())}
    for candidate in candidates:
        if candidate is not None and candidate.resolve() in known:
            return candidate
    raise UsageError(
        f"there is no model {name!r} here{output.did_you_mean(name, rows)}; `kvq models` lists all"
    )


def other_meaning(path: Path) -> str | None:
    """Returns, in words, another model that the name of a new export at `path` already means."""
    name = known_models.exported_name(path)
    if name in EMBEDDED:
        return "the embedded model"
    named = _named(name)
    if named is not None:
        return None if named.path.resolve() == path.resolve() else f"the model at {named.path}"
    return "a model of the catalogue" if name in catalogue() else None


def is_name(name: str) -> bool:
    """Says whether `name` means a model in every folder, even where a file has this name."""
    return _named(name) is not None


def _report_local_model(name: str | None, path: Path, reporter: Reporter) -> None:
    """Notes that `name` does not mean the model of that name in the current folder."""
    if name is None or not is_name(name):
        return
    here = Path(name)
    model_here = here.is_file() or any((here / file).exists() for file in (MANIFEST_FILE, CONFIG))
    if model_here and here.resolve() != path.resolve():
        reporter.note(f"{name} is the model at {path}; for the one here give ./{name}")


def check_regular(path: Path) -> None:
    """Raises `ModelError` where a model at `path` would be read from a file that is not regular.

    That is a device, a pipe, or a file that the system makes up, such as `/proc/self/mem`.
    """
    try:
        for file in [path, *(path.iterdir() if path.is_dir() else ())]:
            # A link that leads to itself cannot be resolved, and does no harm.
            if not file.exists():
                continue
            is_virtual = _VIRTUAL.intersection(file.resolve().parents)
            if is_virtual or not (file.is_file() or file.is_dir()):
                raise ModelError(
                    f"{file} is a device, a pipe or another file that the system makes up while it "
                    "is read; a model is a regular file, or a folder of them"
                )
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error


def lasting_name(name: str | None) -> str:
    """Returns a name or path that means the same model as `name` in any folder."""
    place = _locate(name)
    if place.source is None:
        return str(place.path.resolve())
    return place.name if place.name in EMBEDDED else place.source


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Holds the path of a model's files.

    With a checkpoint `source`, the path is of the bundle called `name` that is made from it.
    `request` says what to pull where the files are not here yet.
    """

    path: Path
    source: str | None = None
    name: str = ""
    request: "PullRequest | None" = None


def _locate(name: str | None) -> _Place:
    name = default_name() if name is None else name
    if (named := _named(name)) is not None:
        return named
    path = path_of(name, ModelError)
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
    if (place := _without_path(name)) is not None:
        return place
    from kvq_apps.names import pull_request

    made = (known for known, _ in known_models.named_models())
    known_names = (*installed_names(), *made, *known_models.opened_files(), *pull_request.names())
    raise ModelError(
        f"there is no model at {name}{output.did_you_mean(name, known_names)}; give a bundle made "
        "by `kvq export`, a GGUF file, a Hugging Face checkpoint folder, a hub id such as "
        "Qwen/Qwen3-0.6B, or a name that `kvq models` or `kvq pull --list` shows"
    )


def _without_path(name: str) -> _Place | None:
    """Returns what a word means that is no path: a hub id, a model to pull, an opened GGUF file."""
    if _is_hub_id(name):
        return _of_hub(name)
    from kvq_apps.names import pull_request

    missing = pull_request.in_catalogue(name)
    if missing is not None:
        return _Place(path=known_models.pulled_folder(name), request=missing)
    opened = known_models.opened_files().get(name)
    return None if opened is None else _Place(path=opened)


def _named(name: str) -> _Place | None:
    """Returns the embedded, pulled or exported model called `name`."""
    if name in EMBEDDED:
        return _bundle_of(_embedded_checkpoint(name), name)
    if (here := pull_records.pulled_bundle(name)) is not None:
        return _Place(path=here)
    if _is_hub_id(name) and (_of_hub(name).path / MANIFEST_FILE).exists():
        return _of_hub(name)
    made = known_models.exported_models().get(name)
    return None if made is None else _Place(path=made)


def _is_hub_id(name: str) -> bool:
    return is_hub_id(name) and not name.endswith(SUFFIX)


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


def _export_once(
    destination: Path,
    source: str,
    name: str,
    reporter: Reporter,
    note: str = "",
    *,
    fits_cache: bool = True,
) -> Path:
    """Returns the bundle of `source` in the cache folder; makes it, after a note, if needed."""

    def export(destination: Path, progress: output.ProgressBar) -> Path:
        # These imports take half a second, which an existing bundle does not need.
        from kvq_export.config import ExportOptions
        from kvq_export.export import export_model

        options = ExportOptions(name=name, quality=False, fit_cache=fits_cache)
        return export_model(source, destination, options, progress).path

    return make_once(destination, note or f"exporting {source} once into", export, reporter)


def _gguf_bundle(file: Path, reporter: Reporter) -> Path:
    """Returns the bundle of a GGUF file, or the file itself where kvq cannot compute the model."""
    place = _place_of_gguf(file)
    num_bytes = round(file.stat().st_size * _LAYOUT_SHARE)
    note = (
        f"reading {file.name} for the first time: its weights are put into kvq's own layout, which "
        f"takes about {output.rough_duration(num_bytes * _LAYOUT_S)} and "
        f"{format_bytes(num_bytes)} of disk; later starts take seconds. The folder:"
    )
    fresh = not (place.path / MANIFEST_FILE).exists()
    try:
        if fresh:
            _require_space(place.path.parent, num_bytes)
        bundle = _export_once(place.path, str(file), place.name, reporter, note, fits_cache=False)
    except UnsupportedModelError as error:
        from kvq_apps.settings.flags import format_error

        reporter.note(f"llama.cpp is to run {file.name}, kvq cannot: {format_error(error)}")
        return file
    reporter.note(
        f"{file.name} runs on kvq's own kernels; --backend {FILE_BACKEND} gives it to llama.cpp"
    )
    if fresh:
        reporter.note(f"`kvq models fit {file}` once makes the cache of this model more exact")
    return bundle


def _place_of_gguf(file: Path) -> _Place:
    """Returns the place of the bundle of a GGUF file, which need not exist."""
    return _bundle_of(str(file.resolve()), file.stem)


def bundle_of_gguf(file: Path) -> Path | None:
    """Returns the bundle of a GGUF file, or None if the file was not run yet."""
    path = _place_of_gguf(file).path
    return path if (path / MANIFEST_FILE).exists() else None


def _require_space(folder: Path, num_bytes: int) -> None:
    """Raises `ModelError` where the disk of the cache folder has fewer bytes free."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ModelError(
            f"running this file on kvq's own kernels takes {format_bytes(num_bytes)} of disk "
            f"beside it, and the disk of {folder} has {format_bytes(free)} free; make room, or set "
            "XDG_CACHE_HOME to a folder on a larger disk"
        )


def make_once(
    destination: Path,
    note: str,
    make: Callable[[Path, output.ProgressBar], Path],
    reporter: Reporter = TERMINAL,
) -> Path:
    """Returns the bundle at `destination`; calls `make(destination, progress)` if there is none.

    Raises `ModelError` when the folder cannot be written.
    """
    if (destination / MANIFEST_FILE).exists():
        return destination
    reporter.note(f"{note} {destination}")
    progress = reporter.progress()
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        return make(destination, progress)
    except BundleError:
        # Another process may have finished the same bundle in the meantime.
        if (destination / MANIFEST_FILE).exists():
            return destination
        raise
    except OSError as error:
        raise ModelError(f"{destination} cannot be written: {error.strerror}") from error
    finally:
        progress.clear()


def _fingerprint(source: str) -> str:
    """Returns a hash that changes with the bundle format, how GGUF files are read, and the files.

    Of the files it covers names, sizes and times.
    """
    from kvq_runtime.bundle.manifest import VERSION

    folder = Path(source)
    reading = f"{VERSION}.{GGUF_READING}" if folder.suffix == SUFFIX else VERSION
    # Names of files need not be UTF-8.
    digest = hashlib.sha256(os.fsencode(f"{reading} {source}"))
    # A hub id is no path, whatever lies in the current folder.
    there = folder.is_absolute()
    files = sorted(folder.iterdir()) if there and folder.is_dir() else [folder][: folder.is_file()]
    for file in files if there else ():
        status = file.stat()
        digest.update(os.fsencode(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0"))
    return digest.hexdigest()[:12]
