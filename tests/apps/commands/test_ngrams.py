"""`kvq ngrams` on files of one's own, and who chooses by them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvq_apps.cli import main
from kvq_apps.engine import Engine
from kvq_apps.ngram_file import ngram_file
from kvq_specdraft.ngrams import Ngrams
from shelf import Shelf


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two texts, and with what is no text of one's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = tmp_path / "own"
    (own / "inner").mkdir(parents=True)
    (own / ".git").mkdir()
    (own / "a.py").write_text("def f():\n    return 1\n")
    (own / "inner" / "b.txt").write_text("The quick brown fox\n")
    (own / ".hidden").write_text("secret")
    (own / ".git" / "c").write_text("secret")
    (own / "data").write_bytes(b"\xff\xfe\x00")
    return own


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
