"""Files that change whole or not at all."""

import os
import stat
import time
from pathlib import Path

import pytest

from kvq.errors import DataError
from kvq.files import read_regular, replace_file


@pytest.mark.parametrize("private", [True, False])
def test_a_new_file_takes_the_place_of_the_old(tmp_path: Path, private: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replace_file(path, private=private) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert (stat.S_IMODE(path.stat().st_mode) == 0o600) == private
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with replace_file(path) as stream:
            stream.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_place_that_cannot_be_written_is_the_callers_to_tell(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replace_file(tmp_path / "absent" / "file"):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), replace_file(tmp_path / "folder") as stream:
        stream.write(b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_process_left_of_the_file_goes_after_a_day(tmp_path: Path) -> None:
    day_s = 24 * 60 * 60
    left = {
        ".file-0123abcd": 2 * day_s,  # the only one that is this file's and old
        ".file-4567abcd": day_s // 2,
        ".other-0123abcd": 2 * day_s,
        ".file-notes": 2 * day_s,
        ".xfile-0123abcd": 2 * day_s,
        "file-0123abcd": 2 * day_s,
    }
    for name, age_s in left.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    with replace_file(tmp_path / "file") as stream:
        stream.write(b"new")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"file", *left} - {".file-0123abcd"}


def test_a_file_is_read_whole_up_to_what_it_may_have(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    assert read_regular(path, 8, through_links=False, private=True) == b"12345678"
    with pytest.raises(DataError, match="larger than 7 bytes"):
        read_regular(path, 7)
    path.write_bytes(b"")
    assert read_regular(path, 1 << 62) == b""
    assert read_regular(Path("/proc/self/comm"), 64) != b""


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "sparse"])
def test_what_is_no_file_of_that_size_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(100 << 30)
    with pytest.raises((DataError, OSError), match=r"no regular file|larger than 1\.0 MiB"):
        read_regular(path, 1 << 20)


def test_a_link_and_another_users_file_are_refused_where_they_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"content")
    link.symlink_to(path)
    assert read_regular(link, 100) == b"content"
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(link, 100, through_links=False)
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    assert read_regular(path, 100) == b"content"
    with pytest.raises(DataError, match="another user"):
        read_regular(path, 100, private=True)
