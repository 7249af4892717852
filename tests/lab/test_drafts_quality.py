"""`kvq eval --task drafts`: places, scores, and the table on a tiny model."""

import json
from pathlib import Path

import pytest

from kvq.errors import DataError
from kvq_apps.cli import main
from kvq_lab.drafts_quality import Place, Scores, places
from kvq_runtime.answer.alternatives import Alternative
from kvq_runtime.bundle.bundle import Bundle
from shelf import Shelf

TEXT = "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))\n" * 6


def test_places_are_the_same_for_the_same_seed_and_never_cross_texts(shelf: Shelf) -> None:
    tokenizer = Bundle.open(shelf.bundle()).tokenizer()
    texts = [TEXT, TEXT.upper(), "short"]
    request = {"count": 20, "context": 30, "length": 5}
    chosen = places(tokenizer, texts, **request, seed=1)
    assert chosen == places(tokenizer, texts, **request, seed=1)
    assert chosen != places(tokenizer, texts, **request, seed=2)
    assert len(set(chosen)) > 10
    encoded = [" ".join(map(str, tokenizer.encode(text))) for text in texts]
    for place in chosen:
        assert (len(place.before), len(place.after)) == (30, 5)
        whole = " ".join(map(str, (*place.before, *place.after)))
        assert any(whole in text for text in encoded)
    with pytest.raises(DataError, match=r"30 \+ 5 tokens"):
        places(tokenizer, ["short"], **request, seed=1)


def test_the_best_draft_counts(shelf: Shelf) -> None:
    tokenizer = Bundle.open(shelf.bundle()).tokenizer()

    def draft(text: str) -> Alternative:
        ids = tuple(tokenizer.encode(text))
        return Alternative(ids=ids, logprobs=(), text=text, ends=(), finish_reason="length")

    truth = "height)\nx"
    place = Place((), tuple(tokenizer.encode(truth)))
    scores = Scores()
    scores.add([draft("width"), draft("height)  \nother")], truth, place, 1.5)
    scores.add([draft("depth")], truth, place, 0.5)
    # The first line, without the white space at its end.
    assert scores.exact == [True, False]
    assert scores.leading[0] == len(tokenizer.encode("height)"))
    assert 0 < scores.similarity[1] < 0.5 < scores.similarity[0] < 1
    assert scores.ratio == [1.5, 0.5]


@pytest.mark.slow
def test_the_task_on_the_command_line(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.py"
    text.write_text(TEXT)
    command = ["eval", "--task", "drafts", "-m", str(shelf.bundle()), str(text), "--json"]
    command += ["--limit", "4", "--context", "24", "--predict", "4"]
    assert main([*command, "--drafts", "1,3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["task"], report["context"], report["n"]) == ("drafts", 24, 4)
    assert report["unit"] == "similarity"
    rows = {(row["method"], row["k"]): row for row in report["rows"]}
    assert rows["greedy", 1]["ms_ratio"] == 1.0
    assert report["value"] == rows["branches", 3]["similarity"]
    for method in ("branches", "superposed"):
        for key in ("similarity", "leading", "exact"):
            # A draft alone is the greedy one; of more the best is at least as near.
            assert rows[method, 1][key] == pytest.approx(rows["greedy", 1][key])
            assert rows[method, 3][key] >= rows["greedy", 1][key] - 1e-9
    assert main([*command, "--drafts-method", "superposed:tau=0.5", "--drafts", "2"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["greedy", "superposed:tau=0.5"]
    assert main([*command, "--drafts-method", "nosuch"]) == 2
    assert "possible: branches, superposed" in capsys.readouterr().out
