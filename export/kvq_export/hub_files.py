"""Files of the Hugging Face hub on this machine: asked for once, shown on their way, checked.

huggingface_hub downloads them into its own cache, and goes on where a connection broke. The hub has
a few seconds to say what it holds; after that, what lies in the cache must do. A weight file that
arrives is compared with the SHA-256 that the hub tells of it.
"""

import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from kvq.errors import BackendError, KvqError, ModelError, argument
from kvq.settings import is_offline
from kvq_export.writer import Progress
from kvq_runtime.file_hashes import file_sha256

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
    "README.md",
    "LICENSE*",
)
# How long the hub may take to say what a repository holds, and how often the bar is drawn.
ANSWER_SECONDS = 5.0
_LOOK_SECONDS = 0.2

# A type, and the number of a part, at the end of a GGUF file's name.
_GGUF_END = re.compile(
    r"(?:^|[-._/])(?P<type>(?:IQ|Q|TQ)\d\w*|BF16|F16|F32)"
    r"(?P<part>-(?P<number>\d{5})-of-\d{5})?\.gguf$",
    re.IGNORECASE,
)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file of a repository; `blob` names it in the cache, `sha256` is told of large ones only."""

    name: str
    num_bytes: int
    blob: str
    sha256: str | None


# Which of a repository's files are wanted. Raises `ModelError` when it has not what was asked for.
_Choice = Callable[[Sequence[HubFile]], Sequence[HubFile]]


def unseen(done: int, total: int, label: str) -> None:
    """The progress nobody watches."""


def fetch_checkpoint(hub_id: str, progress: Progress) -> Path:
    """The folder with the checkpoint `hub_id`. Raises `ModelError` and `BackendError`."""

    def choose(files: Sequence[HubFile]) -> Sequence[HubFile]:
        if all(file.name != CONFIG_FILE for file in files):
            raise ModelError(
                f"{hub_id} on the hub has no {CONFIG_FILE}, so it is no checkpoint"
                + _types_told(hub_id, files)
            )
        return [file for file in files if any(fnmatch(file.name, one) for one in PATTERNS)]

    paths = _fetch(hub_id, choose, progress)
    return next(path.parent for name, path in paths.items() if name == CONFIG_FILE)


def fetch_gguf(hub_id: str, quantization: str, progress: Progress) -> Path:
    """The GGUF file of type `quantization` (Q4_K_M) in a repository, the first of its parts.

    Raises `ModelError`, also where the repository has none or several models of that type, and
    `BackendError`.
    """

    def choose(files: Sequence[HubFile]) -> Sequence[HubFile]:
        ends = {file: end for file in files if (end := _GGUF_END.search(file.name))}
        fits = [file for file, end in ends.items() if end["type"].upper() == quantization.upper()]
        models = {file.name[: ends[file].end("type")] for file in fits}
        if len(models) != 1:
            found = f"{len(models)} models" if models else "no GGUF file"
            raise ModelError(
                f"{hub_id} on the hub has {found} of type {quantization}"
                + _types_told(hub_id, files)
            )
        return fits

    paths = _fetch(hub_id, choose, progress)
    return paths[min(paths)]


def fetch_file(hub_id: str, name: str, progress: Progress) -> Path:
    """One file of a repository. Raises `ModelError` and `BackendError`."""

    def choose(files: Sequence[HubFile]) -> Sequence[HubFile]:
        found = [file for file in files if file.name == name]
        if not found:
            raise ModelError(f"{hub_id} on the hub has no file {name}" + _types_told(hub_id, files))
        return found

    return _fetch(hub_id, choose, progress)[name]


def _types_told(hub_id: str, files: Sequence[HubFile]) -> str:
    """What else can be asked of the repository."""
    types = sorted({end["type"].upper() for file in files if (end := _GGUF_END.search(file.name))})
    if not types:
        return f"; see https://huggingface.co/{hub_id}"
    return f"; of its GGUF files ask for one as hf.co/{hub_id}:TYPE, with {', '.join(types)}"


def _fetch(hub_id: str, choose: _Choice, progress: Progress) -> dict[str, Path]:
    """The chosen files by their names, here and checked; of a silent hub what the cache has."""
    try:
        import huggingface_hub
        from huggingface_hub import HfApi, errors
    except ImportError as error:
        raise BackendError(
            f"{hub_id} is not a folder, and downloading it needs huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    try:
        files = choose(_within(ANSWER_SECONDS, lambda: _listed(HfApi(), hub_id)))
    except (KvqError, errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise _refused(hub_id, error) from error
    except Exception as error:  # noqa: BLE001  each version has its own HTTP client's errors
        return _cached(hub_id, choose, error)
    huggingface_hub.utils.disable_progress_bars()
    try:
        with _watched(hub_id, files, progress):
            return {file.name: _download(hub_id, file) for file in files}
    except (KvqError, errors.RepositoryNotFoundError) as error:
        raise _refused(hub_id, error) from error
    except Exception as error:
        raise _unreached(hub_id, error) from error


def _listed(hub: Any, hub_id: str) -> list[HubFile]:
    """What the repository holds, as the hub says now."""
    found = hub.model_info(hub_id, files_metadata=True, timeout=ANSWER_SECONDS)
    return [
        HubFile(
            name=file.rfilename,
            num_bytes=file.size or 0,
            blob=(file.lfs.sha256 if file.lfs else file.blob_id) or "",
            sha256=file.lfs.sha256 if file.lfs else None,
        )
        for file in found.siblings or ()
    ]


def _hub() -> Any:
    """The client of the hub, which gives not all that its functions take a type."""
    import huggingface_hub

    return huggingface_hub


def _cached(hub_id: str, choose: _Choice, why: Exception) -> dict[str, Path]:
    """The chosen files where an earlier download left them. Raises `ModelError` with `why`."""
    from huggingface_hub import errors

    try:
        folder = Path(_hub().snapshot_download(hub_id, local_files_only=True))
    except (errors.LocalEntryNotFoundError, OSError):
        raise _unreached(hub_id, why) from why
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = [HubFile(name=name, num_bytes=0, blob="", sha256=None) for name in sorted(names)]
    try:
        return {file.name: folder / file.name for file in choose(files)}
    except ModelError:
        raise _unreached(hub_id, why) from why


def _download(hub_id: str, file: HubFile) -> Path:
    """The file in the hub's cache; what was not there before is checked."""
    from huggingface_hub import try_to_load_from_cache

    before = try_to_load_from_cache(hub_id, file.name)
    path = Path(_hub().hf_hub_download(hub_id, file.name, etag_timeout=ANSWER_SECONDS))
    if file.sha256 is None or before == str(path):
        return path
    found = file_sha256(path)
    if found != file.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ModelError(
            f"{file.name} of {hub_id} was damaged on its way: its SHA-256 is {found}, the hub says "
            f"{file.sha256}; it was deleted, so run again to download it anew"
        )
    return path


@contextmanager
def _watched(hub_id: str, files: Sequence[HubFile], progress: Progress) -> Generator[None]:
    """While inside, `progress` is told the bytes of `files` that have come, by their cache."""
    from huggingface_hub import constants

    blobs = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}" / "blobs"
    total = sum(file.num_bytes for file in files)
    names = {file.blob for file in files if file.blob}
    ended = threading.Event()

    def come() -> int:
        there = blobs.iterdir() if blobs.is_dir() else ()
        return sum(_size(path) for path in there if path.name.partition(".")[0] in names)

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            progress(min(come(), total), total, f"downloading {hub_id}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(total, total, f"downloading {hub_id}")


def _size(path: Path) -> int:
    """Bytes of a file that may have been renamed a moment ago."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer:
    """What `ask` gives, or its error; `TimeoutError` when it takes longer.

    A system without a network can look a name up for half a minute, which no timeout of a
    connection ends.
    """
    answers: list[_Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001  raised again where it was asked
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:.0f} seconds")
    return answers[0]


def _refused(hub_id: str, error: Exception) -> KvqError:
    """What the hub's answer means for who asked."""
    from huggingface_hub import errors

    if isinstance(error, KvqError):
        return error
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{hub_id} asks for consent: accept its terms on https://huggingface.co/{hub_id} "
            "and log in with `hf auth login`"
        )
    return ModelError(
        f"there is no folder {hub_id} here and no public model {hub_id} on the hub; check "
        "the name, or log in with `hf auth login` for a private one"
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
