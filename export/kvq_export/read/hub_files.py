"""Fetches files of the Hugging Face hub: asked for once, shown on their way, checked.

They lie in huggingface_hub's own cache. The hub has a few seconds to say what it has; after that,
what lies in the cache must do. A weight file that arrives is compared with the SHA-256 that the hub
gives for it.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvq.errors import BackendError, ModelError, argument
from kvq.formats import format_bytes
from kvq.json_values import is_array, is_object
from kvq.settings import is_offline
from kvq_export.phases import Progress
from kvq_export.read.hub_cache import CachedRepository, is_plain_name
from kvq_export.read.hub_client import (
    COMMIT,
    DownloadMeter,
    HubRefusedError,
    HubUnreachedError,
    Sink,
    read_json,
    receive,
    reporting,
)
from kvq_export.read.sentence_transformers import EMBEDDING_FILES
from kvq_runtime.bundle.file_hashes import file_sha256

CONFIG_FILE = "config.json"
# Weights as safetensors and what reads text; no pickles, no code.
PATTERNS = (
    CONFIG_FILE,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    *EMBEDDING_FILES,
    "README.md",
    "LICENSE*",
)
# A type, and the number of a part, at the end of a GGUF file's name.
_GGUF_END = re.compile(
    r"(?:^|[-._/])(?P<type>(?:IQ|Q|TQ)\d\w*|BF16|F16|F32)"
    r"(?P<part>-(?P<number>\d{5})-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """Describes a file of a repository; large ones have a `sha256`, most a `blob` (a git hash)."""

    name: str
    num_bytes: int
    blob: str | None = None
    sha256: str | None = None


# Chooses files of a repository. Raises `ModelError` where it has not what was asked for.
_Choice = Callable[[Sequence[HubFile]], Sequence[HubFile]]


def fetch_checkpoint(hub_id: str, progress: Progress) -> Path:
    """Returns the folder of the checkpoint `hub_id`. Raises `ModelError` and `BackendError`."""

    def choose(files: Sequence[HubFile]) -> Sequence[HubFile]:
        if all(file.name != CONFIG_FILE for file in files):
            raise ModelError(
                f"{hub_id} on the hub has no {CONFIG_FILE}, so it is no checkpoint"
                + _other_types(hub_id, files)
            )
        return [file for file in files if any(fnmatch(file.name, pattern) for pattern in PATTERNS)]

    paths = _fetch(hub_id, choose, progress)
    return next(path.parent for name, path in paths.items() if name == CONFIG_FILE)


def fetch_gguf(hub_id: str, quantization: str, progress: Progress) -> Path:
    """Returns the GGUF file of type `quantization` (Q4_K_M) in a repository, or its first part.

    Raises `ModelError`, also where the repository has none or several models of that type, and
    `BackendError`.
    """

    def choose(files: Sequence[HubFile]) -> Sequence[HubFile]:
        ends = {file: end for file in files if (end := _GGUF_END.search(file.name))}
        fits = [file for file, end in ends.items() if end["type"].upper() == quantization.upper()]
        models = {file.name[: ends[file].end("type")] for file in fits}
        if len(models) != 1:
            count = f"{len(models)} models" if models else "no GGUF file"
            raise ModelError(
                f"{hub_id} on the hub has {count} of type {quantization}"
                + _other_types(hub_id, files)
            )
        return fits

    paths = _fetch(hub_id, choose, progress)
    return paths[min(paths)]


def fetch_file(hub_id: str, name: str, progress: Progress) -> Path:
    """Returns one file of a repository. Raises `ModelError` and `BackendError`."""

    def choose(files: Sequence[HubFile]) -> Sequence[HubFile]:
        matches = [file for file in files if file.name == name]
        if not matches:
            types = _other_types(hub_id, files)
            raise ModelError(f"{hub_id} on the hub has no file {name}{types}")
        return matches

    return _fetch(hub_id, choose, progress)[name]


def _other_types(hub_id: str, files: Sequence[HubFile]) -> str:
    """Says what else can be asked of the repository."""
    types = sorted({end["type"].upper() for file in files if (end := _GGUF_END.search(file.name))})
    if not types:
        return f"; see https://huggingface.co/{hub_id}"
    return f"; of its GGUF files ask for one as hf.co/{hub_id}:TYPE, with {', '.join(types)}"


def _fetch(hub_id: str, choose: _Choice, progress: Progress) -> dict[str, Path]:
    """Returns the chosen files by their names, checked; without a hub those of the cache."""
    unknown = (
        f"there is no folder {hub_id} here and no public model {hub_id} on the hub; check the "
        "name, or log in with `hf auth login` for a private one"
    )
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ModuleNotFoundError as error:
        raise BackendError(
            f"{hub_id} is not a folder, and downloading it needs huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    try:
        validate_repo_id(hub_id)
    except HFValidationError as error:
        raise ModelError(unknown) from error
    repository = CachedRepository.of(hub_id)
    try:
        commit, files = _list_files(hub_id)
    except HubRefusedError as error:
        raise _refused(hub_id, error, unknown) from error
    except HubUnreachedError as error:
        return _cached(hub_id, repository, choose, error)
    files = [_checked(hub_id, file) for file in choose(files)]
    try:
        return _download_all(hub_id, repository, commit, files, progress)
    except HubRefusedError as error:
        raise _refused(
            hub_id, error, f"the hub lists files of {hub_id} that it does not give; try again later"
        ) from error
    except HubUnreachedError as error:
        raise _unreached(hub_id, error) from error
    except OSError as error:
        raise ModelError(
            f"{repository.folder} cannot be written: {error.strerror or error}; make room there, "
            "or name another folder by HF_HOME"
        ) from error


def _list_files(hub_id: str) -> tuple[str, list[HubFile]]:
    """Returns the commit of the repository, and its files, as the hub says now."""
    from huggingface_hub import constants

    if is_offline():
        raise HubUnreachedError("offline")
    answer = read_json(f"{constants.ENDPOINT}/api/models/{quote(hub_id)}?blobs=true")
    rows = answer.get("siblings") if is_object(answer) else None
    if not is_object(answer) or not is_array(rows):
        raise HubUnreachedError("the hub answers with no list of files")
    commit = answer.get("sha")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise ModelError(f"the hub names a commit {str(commit)[:60]!r} of {hub_id}, which is none")
    return commit, [_of_row(hub_id, row) for row in rows]


def _of_row(hub_id: str, row: object) -> HubFile:
    """Reads a row of the hub's list. Raises `ModelError`."""
    name: Any = row.get("rfilename") if is_object(row) else None
    if not is_object(row) or not isinstance(name, str):
        raise ModelError(f"the hub's list of the files of {hub_id} has a row without a name")
    size, large = row.get("size"), row.get("lfs")
    return HubFile(
        name=name,
        num_bytes=size if type(size) is int else -1,
        blob=_hash(hub_id, row.get("blobId"), COMMIT),
        sha256=_hash(hub_id, large.get("sha256"), _SHA256) if is_object(large) else None,
    )


def _hash(hub_id: str, value: object, form: re.Pattern[str]) -> str | None:
    """Reads a hash that the hub may give for a file. Raises `ModelError`."""
    if value is None:
        return None
    if isinstance(value, str) and form.fullmatch(value):
        return value
    raise ModelError(
        f"the hub's list of the files of {hub_id} has a hash {str(value)[:60]!r}, which is none"
    )


def _checked(hub_id: str, file: HubFile) -> HubFile:
    """Returns the file, which can be given a path and room. Raises `ModelError` for any other."""
    if not is_plain_name(file.name):
        raise ModelError(
            f"the hub lists a file {file.name[:60]!r} of {hub_id}, a name that none here can have"
        )
    if file.num_bytes < 0:
        raise ModelError(f"the hub does not say how large {file.name} of {hub_id} is")
    return file


def _cached(
    hub_id: str, repository: CachedRepository, choose: _Choice, why: Exception
) -> dict[str, Path]:
    """Returns the chosen files that an earlier download left. Raises `ModelError` with `why`."""
    commit = repository.last_commit()
    if commit is None:
        raise _unreached(hub_id, why) from why
    files = [HubFile(name=name, num_bytes=0) for name in repository.names(commit)]
    try:
        return {file.name: repository.file(commit, file.name) for file in choose(files)}
    except ModelError:
        raise _unreached(hub_id, why) from why


def _download_all(
    hub_id: str,
    repository: CachedRepository,
    commit: str,
    files: Sequence[HubFile],
    progress: Progress,
) -> dict[str, Path]:
    """Downloads what is missing of some files; returns their paths by their names."""
    paths = {file.name: repository.file(commit, file.name) for file in files}
    missing = [file for file in files if not _is_here(repository, commit, file)]
    total, label = sum(file.num_bytes for file in files), f"downloading {hub_id}"
    needed = sum(file.num_bytes for file in missing)
    _require_room(hub_id, repository.cache, needed)
    meter = DownloadMeter(num_bytes=total - needed)
    with reporting(meter, lambda done: progress(min(done, total), total, label)):
        for file in missing:
            _download(hub_id, repository, commit, file, meter)
    progress(total, total, label)
    with suppress(OSError):  # a cache may be for reading only
        repository.remember(commit)
    return paths


def _is_here(repository: CachedRepository, commit: str, file: HubFile) -> bool:
    """Tells whether a file is in the cache; content that came with another commit gets its name."""
    path = repository.file(commit, file.name)
    if repository.has_file(path, file.num_bytes):
        return True
    key = file.sha256 or file.blob
    blob = None if key is None else repository.blob(key)
    if blob is None or not repository.has_file(blob, file.num_bytes):
        return False
    if file.sha256 is not None and file_sha256(blob) != file.sha256:
        return False
    repository.link(path, blob)
    return True


def _download(
    hub_id: str, repository: CachedRepository, commit: str, file: HubFile, meter: DownloadMeter
) -> None:
    """Writes one file into the cache, whole and checked or not at all."""
    from huggingface_hub import constants

    url = f"{constants.ENDPOINT}/{quote(hub_id)}/resolve/{commit}/{quote(file.name)}"
    key = file.sha256 or file.blob or hashlib.sha256(f"{commit}/{file.name}".encode()).hexdigest()
    blob = repository.blob(key)
    with repository.written(blob) as stream:
        sink = Sink(stream)
        receive(url, sink, file.num_bytes, meter)
        if file.sha256 not in (None, sink.sha256()):
            raise ModelError(
                f"{file.name} of {hub_id} was damaged on its way: its SHA-256 is {sink.sha256()}, "
                f"the hub says {file.sha256}; it was not kept, so run again to download it anew"
            )
    repository.link(repository.file(commit, file.name), blob)


def _require_room(hub_id: str, folder: Path, num_bytes: int) -> None:
    """Raises `ModelError` where the disk has no room for a download."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise ModelError(
            f"{hub_id} takes {format_bytes(num_bytes)}, and the disk of {folder} has "
            f"{format_bytes(free)} free; make room, or name another folder by HF_HOME"
        )


def _refused(hub_id: str, error: HubRefusedError, otherwise: str) -> ModelError:
    """Returns what a refusal means for the user: terms that are not accepted, or `otherwise`."""
    if error.code != "GatedRepo":
        return ModelError(otherwise)
    return ModelError(
        f"{hub_id} asks for consent: accept its terms on https://huggingface.co/{hub_id} "
        "and log in with `hf auth login`"
    )


def _unreached(hub_id: str, error: Exception) -> ModelError:
    if is_offline():
        return ModelError(
            f"{hub_id} is not on this machine, and {argument('offline')} (HF_HUB_OFFLINE) asks no "
            "network: leave it out, or give a checkpoint folder"
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(
        f"{hub_id} cannot be downloaded ({reason}) and is not in the local cache; connect to the "
        "network and run again (files that came whole are kept), or give a checkpoint folder"
    )
