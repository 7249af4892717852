"""`kvq bench --suite ttft`: what it says, never how fast it is."""

import json
from typing import Any

import pytest

from kvq import native_library
from kvq_apps.cli import main
from shelf import EIGHT, Shelf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
]


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(EIGHT, num_hidden_layers=4))


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_first_token_is_timed_both_ways(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", bundle, "--suite", "ttft", "--context", "150,200", "--repeat", "1")
    report = report_of(capsys, *words, "--kv-predict", "75%:tail=9", "--threads", "1")
    assert (report["num_layers"], report["predict"]) == (4, "75%:tail=9")
    for row, tokens in zip(report["rows"], (150, 200), strict=True):
        assert (row["prompt_tokens"], row["layers"]) == (tokens, 1)
        assert row["predicted_tokens"] == tokens - 13
        assert min(row["exact_ms"], row["predicted_ms"], row["ratio"], row["decode_ratio"]) > 0
    assert main([*words, "--threads", "1"]) == 0
    assert "layers computed" in capsys.readouterr().out
    assert main([*words, "--kv-predict", "off"]) == 2
    assert "predicts nothing" in capsys.readouterr().err
