"""`kvq embed`: vectors of files and of lines, as an array and as lines of JSON."""

import json
from pathlib import Path

import numpy as np
import pytest

from embedders import make_embedder
from kvq_apps.cli import main
from kvq_runtime.engine import Engine
from shelf import EIGHT, Shelf

pytestmark = pytest.mark.usefixtures("own_state")
TEXTS = ["A page of keys", "one, two", "zwölf"]


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.exported(shelf.once("embedder", "last", make_embedder), EIGHT))


@pytest.fixture(scope="module")
def vectors(bundle: str) -> np.ndarray:
    with Engine.open(bundle, threads=1) as engine:
        return engine.embed(TEXTS, session={"kv": "fp"})


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text(TEXTS[0])
    lines = [json.dumps(TEXTS[1]), "", json.dumps({"text": TEXTS[2], "id": 7})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]


def test_an_array_has_a_row_for_each_text(
    bundle: str,
    files: list[str],
    vectors: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.npy"
    assert main(["embed", bundle, *files, "--out", str(out), "--kv", "fp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"texts": 3, "dimensions": 128, "out": str(out)}
    written = np.load(out)
    assert written.dtype == np.float32
    np.testing.assert_allclose(written, vectors, atol=1e-5)


def test_lines_name_the_places_of_their_texts(
    bundle: str,
    files: list[str],
    vectors: np.ndarray,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With -m every word is a file, and without --out the lines go to the output."""
    words = [*files, "--dimensions", "8", "--kv", "fp"]
    assert main(["embed", "-m", bundle, *words]) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in shown.splitlines()]
    places = [(row["file"], row.get("line")) for row in rows]
    assert places == [(files[0], None), (files[1], 1), (files[1], 3)]
    cut = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose([row["embedding"] for row in rows], cut, atol=1e-5)
    out = tmp_path / "out.jsonl"
    assert main(["embed", bundle, *words, "--out", str(out)]) == 0
    assert out.read_text() == shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.txt", "--out", "x.csv"], "ends with neither .npy nor .jsonl"),
        (["a.txt", "--out", "none/x.npy"], "there is no folder none"),
        (["a.txt", "--prompt-name", "code"], "--prompt-name code is not possible"),
        (["a.txt", "--dimensions", "999"], "--dimensions 999 is not possible: give 1 to 128"),
        (["a.txt", "--ctx-size", "4"], "the context holds 4"),
        (["empty.jsonl"], "there is no line to make a vector of"),
        (["wrong.jsonl"], "wrong.jsonl, line 2 is no string, and no object with a text"),
        (["torn.jsonl"], "torn.jsonl, line 1 is not JSON"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str],
    message: str,
    bundle: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXTS[0])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "wrong.jsonl").write_text('"a"\n{"texts": 1}\n')
    (tmp_path / "torn.jsonl").write_text('{"text": ')
    assert main(["embed", "-m", bundle, *words]) != 0
    assert message in capsys.readouterr().err
