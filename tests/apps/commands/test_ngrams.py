"""`kvq ngrams` on files of one's own, and who chooses by them."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvq_apps.cli import main
from kvq_apps.names.engine import Engine
from kvq_apps.names.ngram_file import ngram_file
from kvq_specdraft.ngrams import Ngrams
from shelf import Shelf


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two texts, and with what is no text of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    (folder / "inner").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.py").write_text("def f():\n    return 1\n")
    (folder / "inner" / "b.txt").write_text("The quick brown fox\n")
    (folder / ".hidden").write_text("secret")
    (folder / ".git" / "c").write_text("secret")
    (folder / "data").write_bytes(b"\xff\xfe\x00")
    return folder


def test_ones_own_files_are_counted_shown_and_removed(
    files: Path, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(shelf.bundle())

    def run(*words: str) -> dict[str, object]:
        assert main(["ngrams", *words, "-m", model, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert run()["text_tokens"] == 0
    built = run("build", str(files))
    with Engine.open(model) as engine:
        ids = [
            engine.tokenizer.encode((files / name).read_text()) for name in ("a.py", "inner/b.txt")
        ]
        path = ngram_file(engine.tokenizer)
        assert built == {
            "path": str(path), "bytes": path.stat().st_size, "text_tokens": sum(map(len, ids))
        }  # fmt: skip
        known = Ngrams.open(path)
        after = known.probabilities(ids[0][:3], np.array(ids[0][3:4]))
        # 3- and 4-gram know nothing else there, the 2-gram a little.
        assert 0.19 < after[0] <= 0.2
        # Superposed drafts choose by them without being told where they are.
        assert engine.writer("superposed:tau=1.0").ngrams == str(path)
        assert engine.writer("superposed:ngrams=").ngrams == ""
        assert run("build", str(files / "a.py"))["text_tokens"] == len(ids[0])
        # Where nothing is text, what was counted stays; nobody waits for a pipe to be written.
        os.mkfifo(files / "inner" / "pipe")
        (files / "inner" / "b.txt").unlink()
        assert main(["ngrams", "build", str(files / "inner"), "-m", model]) == 2
        assert "no text file" in capsys.readouterr().err
        assert run()["text_tokens"] == len(ids[0])
        assert run("remove")["bytes"] == 0
        assert not path.exists()
        assert engine.writer("superposed").ngrams == ""


def counted(shelf: Shelf, capsys: pytest.CaptureFixture[str], *paths: Path) -> int:
    """The tokens that `kvq ngrams build` counts there."""
    words = ["ngrams", "build", *map(str, paths), "-m", str(shelf.bundle()), "--json"]
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)["text_tokens"]


def tokens(shelf: Shelf, *texts: str) -> int:
    with Engine.open(shelf.bundle()) as engine:
        return sum(len(engine.tokenizer.encode(text)) for text in texts)


def test_no_link_leads_out_of_the_tree(
    files: Path, shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "shadow").write_text("root:secret")
    count = counted(shelf, capsys, files)
    (files / "shadow").symlink_to(secret / "shadow")
    (files / "elsewhere").symlink_to(secret)
    (files / "copy.py").symlink_to(files / "a.py")
    (files / "memory").symlink_to("/proc/self/mem")
    os.mkfifo(files / "pipe.py")
    assert counted(shelf, capsys, files) == count
    # A link that somebody names is meant.
    assert counted(shelf, capsys, files / "shadow") == tokens(shelf, "root:secret")
    assert main(["ngrams", "build", "/dev/zero", "-m", str(shelf.bundle())]) == 2
    assert "no text file" in capsys.readouterr().err


def test_virtual_environments_and_what_git_ignores_are_left_out(
    files: Path, shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "env" / "lib").mkdir(parents=True)
    (files / "env" / "pyvenv.cfg").write_text("home = /usr")
    (files / "env" / "lib" / "theirs.py").write_text("theirs = 1")
    plain = tokens(shelf, "def f():\n    return 1\n", "The quick brown fox\n")
    (files / ".git" / "c").unlink()
    (files / ".git").rmdir()
    assert counted(shelf, capsys, files) == plain
    assert counted(shelf, capsys, files / "env") > 0

    (files / "inner" / "node modules" / "deep").mkdir(parents=True)
    (files / "inner" / "node modules" / "deep" / "a.js").write_text("theirs")
    (files / "inner" / "out.txt").write_text("made by a program")
    (files / "inner" / "kept.txt").write_text("mine")
    (files / ".gitignore").write_text("*.txt\n!kept.txt\n!b.txt\nnode modules/\n")
    all_of_it = tokens(shelf, "theirs", "made by a program", "mine")
    assert counted(shelf, capsys, files) == plain + all_of_it
    # The checkout's own configuration starts nothing.
    ran = tmp_path / "ran"
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {ran}\n")
    monitor.chmod(0o755)
    for words in (["init", "-q"], ["config", "core.fsmonitor", str(monitor)]):
        subprocess.run(["git", *words], cwd=files, check=True)
    mine = plain + tokens(shelf, "mine")
    assert counted(shelf, capsys, files) == mine
    # Also from inside the checkout, and from outside.
    inner = tokens(shelf, "The quick brown fox\n", "mine")
    assert counted(shelf, capsys, files / "inner") == inner
    assert counted(shelf, capsys, files / ".." / "own" / "inner", tmp_path / "own") == mine + inner
    assert counted(shelf, capsys, tmp_path / "own" / "..") >= mine
    assert not ran.exists()


def test_a_git_that_does_not_answer_is_named(
    files: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / ".gitignore").write_text("a.py")
    words = ["ngrams", "build", str(files), "-m", str(shelf.bundle()), "--json"]
    # Its .git is empty: git says so.
    assert main(words) == 0
    shown = capsys.readouterr()
    assert f"{files}: git does not say what .gitignore names (fatal: not a git rep" in shown.err
    whole = json.loads(shown.out)["text_tokens"]
    monkeypatch.setenv("PATH", str(files))
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "No such file or directory: 'git'" in shown.err
    assert json.loads(shown.out)["text_tokens"] == whole


def test_a_cache_folder_that_cannot_be_written_is_named(
    files: Path, shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(shelf.bundle())
    folder = tmp_path / "cache" / "kvq" / "ngrams"
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    assert main(["ngrams", "build", str(files), "-m", model]) == 2
    assert f"error: {folder} cannot be made: File exists" in capsys.readouterr().err
    assert main(["ngrams", "remove", "-m", model]) == 2
    assert "cannot be removed: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("grow",), "possible: build, show, remove"),
        (("build",), "needs files or folders"),
        (("show", "x"), "takes no paths"),
        (("build", "/nowhere/at/all"), "does not exist"),
    ],
)
def test_wrong_words_are_refused(
    words: tuple[str, ...], says: str, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ngrams", *words, "-m", str(shelf.bundle())]) == 2
    assert says in capsys.readouterr().err
