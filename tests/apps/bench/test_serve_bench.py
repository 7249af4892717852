"""`kvq bench --suite serve`: what it counts and refuses, on a real server; never how fast."""

import json
from pathlib import Path

import pytest

from kvq.errors import UsageError
from kvq_apps.bench import serving
from kvq_apps.bench.serving import BOTH, CHAT, COMPLETIONS, ServeJob, p95
from kvq_apps.cli import main
from shelf import Shelf


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(max_position_embeddings=4096))


def test_every_phase_is_measured(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[int] = []
    complete = serving._Asker.complete

    def counted(*arguments: object) -> list[float]:
        taken = complete(*arguments)  # type: ignore[arg-type]
        asked.append(len(taken))
        return taken

    monkeypatch.setattr(serving._Asker, "complete", counted)
    quick = {"every_s": 0.025, "chat_s": 0.25, "completion_tokens": 3}
    monkeypatch.setattr(serving, "ServeJob", lambda **given: ServeJob(**{**given, **quick}))
    words = ["--suite", "serve", "--context", "20", "--repeat", "2", "--threads", "1", "--json"]
    assert main(["bench", bundle, "--kv", "4:2", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    facts = (data["suite"], data["kv"], data["context"], data["threads"], data["model"])
    assert facts == ("serve", "4:2", 20, 1, "bundle")
    assert data.keys() >= {"machine", "chat_tokens", "kv_budget", "every_s"}
    rows = {row["load"]: row for row in data["rows"]}
    # warming up, then each phase twice
    _, alone, beside, alone_too, beside_too = asked
    assert rows[COMPLETIONS]["completions"] == alone + alone_too == 20
    assert rows[BOTH]["completions"] == beside + beside_too >= 2
    assert rows[CHAT]["completions"] == 0
    assert rows[COMPLETIONS]["chat_token_ms"] is None
    slowdown = rows[BOTH]["chat_token_ms"] / rows[CHAT]["chat_token_ms"] - 1
    assert data["chat_slowdown"] == pytest.approx(slowdown)
    for name in (COMPLETIONS, BOTH):
        assert 0 < rows[name]["completion_p50_ms"] <= rows[name]["completion_p95_ms"]


def test_the_table_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"chat_token_ms": None, "completion_p50_ms": 12.34, "completion_p95_ms": 40.0}
    serving.print_report(
        {
            "rows": [{"load": COMPLETIONS, "completions": 7, **row}],
            "model": "tiny",
            "kv": "4:2",
            "threads": 2,
            "chat_slowdown": 0.125,
            "completion_tokens": 8,
            "every_s": 0.5,
        }
    )
    out = capsys.readouterr().out
    assert "completions alone  -              12.3               40.0    7" in out
    assert "the chat slows by 12.5% beside 8 tokens completed every 0.5 s" in out


def test_what_the_suite_cannot_do_is_refused(
    bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", bundle, "--suite", "serve", "--peer", "onnxruntime"]) == 2
    assert "--suite serve knows no --peer" in capsys.readouterr().err
    # refused in the server's own thread
    assert main(["bench", bundle, "--suite", "serve", "--kv-budget", "1KiB"]) == 2
    assert "cannot hold" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--repeat 0 is not possible"):
        ServeJob(repeat=0)


def test_of_a_hundred_values_the_ninety_fifth() -> None:
    assert p95([float(value) for value in range(100, 0, -1)]) == 95.0
    assert p95([3.0]) == 3.0
