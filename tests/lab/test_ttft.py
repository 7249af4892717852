"""`kvq bench --suite ttft` and `kvq eval --task predict`: what they say, never how fast it is."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from kvq import native
from kvq.errors import UsageError
from kvq_apps import options
from kvq_apps.bench.plot import check_plot
from kvq_apps.cli import main
from kvq_export import prediction
from kvq_export.config import ExportOptions
from shelf import EIGHT, Shelf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.available(), reason=native.why_not()),
]


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(EIGHT, num_hidden_layers=4))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_first_token_is_timed_both_ways(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", bundle, "--suite", "ttft", "--context", "150,200", "--repeat", "1")
    found = told(capsys, *words, "--kv-predict", "75%:tail=9", "--threads", "1")
    assert (found["num_layers"], found["predict"]) == (4, "75%:tail=9")
    for row, tokens in zip(found["rows"], (150, 200), strict=True):
        assert (row["prompt_tokens"], row["layers"]) == (tokens, 1)
        assert row["predicted_tokens"] == tokens - 13
        assert min(row["exact_ms"], row["predicted_ms"], row["ratio"], row["decode_ratio"]) > 0
    assert main([*words, "--threads", "1"]) == 0
    assert "layers computed" in capsys.readouterr().out
    assert main([*words, "--kv-predict", "off"]) == 2
    assert "predicts nothing" in capsys.readouterr().err


def test_quality_is_told_for_every_number_of_layers(
    bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 90)
    words = ["eval", bundle, str(text), "--task", "predict", "--context", "200", "--limit", "2"]
    plot = tmp_path / "plot.svg"
    drawn = _can_draw(plot)
    found = told(capsys, *words, "--kv", "fp", *(["--plot", str(plot)] if drawn else []))
    assert (found["n"], found["context"], found["following_tokens"]) == (2, 200, 64)
    assert [(row["layers"], row["maps"]) for row in found["rows"]] == [
        (1, "own"), (2, "own"), (3, "own"),
    ]  # fmt: skip
    klds = [row["kld"] for row in found["rows"]]
    # What enters the last layer is its own: nothing is lost.
    assert klds[0] > klds[1] > klds[2] >= 0
    assert klds[2] < 1e-3
    for row in found["rows"]:
        way = found["no_prompt_nll"] - found["exact_nll"]
        lost = row["nll"] - found["exact_nll"]
        assert row["share"] == pytest.approx(lost / way if way > 0 else 0)
        assert row["time_saved"] < 1
    assert plot.exists() == drawn
    found = told(capsys, *words, "--kv-predict", "prefix:sink=2,tail=200")
    assert [row["kld"] for row in found["rows"]] == [0, 0, 0]  # all of it is computed
    assert main([*words, "--kv-predict", "off"]) == 2
    assert "off predicts nothing" in capsys.readouterr().err
    text.write_text("short")
    assert main(words) == 2
    assert "no text has 264 tokens" in capsys.readouterr().err


def test_a_model_that_reads_prompts_has_its_row(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = shelf.bundle(ExportOptions(quality=False, calibrate=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "FIT_TOKENS", 600)
        patch.setattr(prediction, "PASSAGES", 1)
        source, out = str(shelf.checkpoint(num_hidden_layers=3)), str(tmp_path / "read")
        words = ("export", source, "-o", out, "--no-quality", "--no-calibrate", "--json")
        assert main([*words, "--kv-predict-with", str(small)]) == 0
    capsys.readouterr()
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 90)
    asked = ("eval", out, str(text), "--task", "predict", "--context", "200", "--limit", "1")
    found = told(capsys, *asked, "--kv-predict-with", str(small))
    assert [(row["layers"], row["maps"]) for row in found["rows"]] == [
        (1, "own"), (2, "own"), (0, "auxiliary"),
    ]  # fmt: skip
    assert found["rows"][2]["kld"] > 0
    assert found["auxiliary_nll"] != found["exact_nll"]
    with pytest.raises(UsageError, match=r"auxiliary, not for .*50%"):
        options.predictor(Namespace(kv_predict="50%", kv_predict_with=str(small)))


def _can_draw(path: Path) -> bool:
    try:
        check_plot(path)
    except Exception:  # noqa: BLE001  whatever keeps it from drawing
        return False
    return True
