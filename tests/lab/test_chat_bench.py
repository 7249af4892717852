"""`kvq bench --suite chat`: what it streams, types and opens, counted; no time is asserted."""

import json

import pytest

from kvq_apps import cli
from kvq_apps.chat.blocks import BlockScanner
from kvq_lab import chat_app
from kvq_lab.chat_app import hard_words

pytestmark = pytest.mark.slow


def test_the_stream_has_what_is_slow_to_draw() -> None:
    words = list(hard_words(20_000))
    assert len(words) == 20_000
    text = "".join(words)
    scanner = BlockScanner()
    blocks = [*scanner.feed(text), *scanner.finish()]
    assert sum(block.kind == "item" for block in blocks) >= 400
    fences = [block for block in blocks if block.kind == "fence"]
    assert max(block.source.count("\n") for block in fences) == 399
    tables = [block for block in blocks if block.source.startswith("| a | b |")]
    assert max(block.source.count("\n") for block in tables) == 101
    assert max(len(block.source.split()) for block in blocks if block.kind == "markdown") >= 300


def test_every_number_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--context", "200", "--repeat", "2", "--json"]
    assert cli.main(["bench", "--suite", "chat", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["suite"], data["tokens"], data["openings"]) == ("chat", 200, 2)
    assert data["echoes"] >= 1
    # A key whose echo is never seen counts with the patience.
    assert 0 < data["echo_p50_ms"] < chat_app.PATIENCE_S * 1e3
    assert 0 < data["busy_share"] <= 1
    assert 0 < data["open_p50_ms"] <= data["open_max_ms"]
    chat_app.print_report(data)
    assert "key to echo" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--context", "0"], ["--repeat", "0"]):
        assert cli.main(["bench", "--suite", "chat", *words]) == 2
        assert f"{words[0]} 0 is not possible" in capsys.readouterr().err
