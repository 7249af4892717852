"""`kvq eval --task drafts`: places, scores, and the table on a tiny model."""

import json
from pathlib import Path

import pytest

from kvq.errors import DataError
from kvq_apps.cli import main
from kvq_apps.evaluation.several import (
    CANDIDATE_PLACES,
    CANDIDATES,
    Place,
    Scores,
    _overlap,
    _score,
    clearly_best,
    places,
)
from kvq_runtime.alternatives import Alternative
from kvq_runtime.bundle import Bundle
from kvq_runtime.named_engine import Engine
from shelf import Shelf

pytestmark = pytest.mark.slow

TEXT = "def area(width, height):\n    return width * height\n\n\nprint(area(3, 4))\n" * 6


def test_places_are_the_same_for_the_same_seed_and_never_cross_texts(shelf: Shelf) -> None:
    tokenizer = Bundle.open(shelf.bundle()).tokenizer()
    texts = [TEXT, TEXT.upper(), "short"]
    wanted = {"count": 20, "context": 30, "length": 5}
    found = places(tokenizer, texts, **wanted, seed=1)
    assert found == places(tokenizer, texts, **wanted, seed=1)
    assert found != places(tokenizer, texts, **wanted, seed=2)
    assert len(set(found)) > 10
    whole = [" ".join(map(str, tokenizer.encode(text))) for text in texts]
    for place in found:
        assert (len(place.before), len(place.after)) == (30, 5)
        assert any(" ".join(map(str, (*place.before, *place.after))) in text for text in whole)
    with pytest.raises(DataError, match=r"30 \+ 5 tokens"):
        places(tokenizer, ["short"], **wanted, seed=1)


def test_the_best_draft_counts(shelf: Shelf) -> None:
    tokenizer = Bundle.open(shelf.bundle()).tokenizer()

    def draft(text: str, *logprobs: float) -> Alternative:
        ids = tuple(tokenizer.encode(text))
        return Alternative(ids=ids, logprobs=logprobs, text=text, finish_reason="length")

    truth = tuple(tokenizer.encode("height)\nx"))
    scores = Scores()
    found = [draft("width", -1.0, -2.0), draft("height)  \nother", -4.0)]
    _score(scores, found, Place((), truth), tokenizer, 1.5)
    assert scores.exact == [True]  # the first line, without the white space at its end
    assert scores.leading == [len(tokenizer.encode("height)"))]
    assert scores.logprob == [-3.0]
    assert 0.5 < scores.similarity[0] < 1
    assert scores.row("m", 2)["ms_ratio"] == 1.5
    same = [draft("abc"), draft("abc"), draft("xyz")]
    assert _overlap(same) == pytest.approx(1 / 3, abs=0.34)
    assert _overlap(same[:2]) == 1.0


def test_only_what_is_clearly_better_is_recorded() -> None:
    base = [0.1, 0.5, 0.3, 0.4]
    by_one = [0.3, 0.7, 0.5, 0.61]
    by_luck = [2.0, 0.5, 0.3, 0.4]
    assert clearly_best({"a": base, "b": by_luck}) == "a"
    assert clearly_best({"a": base, "b": by_luck, "c": by_one}) == "c"
    assert clearly_best({"a": by_one, "b": base}) == "a"


def test_an_export_records_the_method_and_auto_follows_it(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("kvq_apps.evaluation.several.clearly_best", lambda _: "branches:kind=beam")
    path = str(tmp_path / "made")
    words = ["export", str(shelf.checkpoint()), "-o", path, "--no-calibrate", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["quality"]["drafts"]
    assert (found["method"], found["places"]) == ("branches:kind=beam", CANDIDATE_PLACES)
    assert set(found["similarity"]) == set(CANDIDATES)
    with Engine.open(path, threads=1) as engine:
        assert engine.model.drafts_method == "branches:kind=beam"
        assert engine.tokenizer is not None
        written = {}
        for method in ("auto", "branches:kind=beam", "branches"):
            with engine.session(kv="fp", draft_tokens=100) as session:
                session.prefill(range(1, 20))
                written[method] = [one.ids for one in session.drafts(3, 6, method=method)]
    assert written["auto"] == written["branches:kind=beam"] != written["branches"]


def test_the_table(shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.py"
    text.write_text(TEXT)
    command = ["eval", "--task", "drafts", "-m", str(shelf.bundle()), str(text), "--json"]
    asked = ["--limit", "4", "--context", "24", "--predict", "4", "--drafts", "1,3"]
    assert main([*command, *asked]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["n"], report["context"], report["length"]) == (4, 24, 4)
    rows = {(row["method"], row["k"]): row for row in report["rows"]}
    greedy = rows["greedy", 1]
    assert greedy["ms_ratio"] == 1.0
    for method in ("branches", "superposed"):
        for key in ("similarity", "leading", "exact", "logprob"):
            # One draft is the greedy one; of more the best is at least as near.
            assert rows[method, 1][key] == pytest.approx(greedy[key])
            assert rows[method, 3][key] >= greedy[key] - 1e-9
    assert rows["branches", 3]["drafts"] == 3
    with_method = ["--drafts-method", "branches:kind=beam", "--drafts", "2"]
    assert main([*command, *asked[:6], *with_method]) == 0
    assert [row["method"] for row in json.loads(capsys.readouterr().out)["rows"]] == [
        "greedy", "branches:kind=beam"
    ]  # fmt: skip
    assert main([*command, "--drafts-method", "nosuch"]) == 2
    assert "possible: auto, branches, spliced, superposed" in capsys.readouterr().err
    assert main([*command, "--limit", "-1"]) == 2
    assert "--limit -1 is not possible: give 1 or more" in capsys.readouterr().err
