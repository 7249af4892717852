"""Files that change whole or not at all."""

import os
import stat
import time
from pathlib import Path

import pytest

from kvq.files import replace_file


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
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"file", *left} - {".file-0123abcd"}
