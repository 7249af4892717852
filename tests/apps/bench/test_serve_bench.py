"""`kvq bench --suite serve`: what it counts and refuses, on a real server; never how fast."""

import json

import numpy as np
import pytest

from kvq.errors import UsageError
from kvq_apps.bench import chats
from kvq_apps.bench import serve_bench as serving
from kvq_apps.bench.chats import ChatsJob
from kvq_apps.bench.serve_bench import BOTH, CHAT, COMPLETIONS, ServeJob, p95
from kvq_apps.cli import main
from kvq_runtime.backends import SequencePass
from kvq_runtime.backends.onnx import OnnxBackend
from shelf import Shelf


@pytest.fixture(scope="module")
def bundle(shelf: Shelf) -> str:
    return str(shelf.bundle(max_position_embeddings=4096))


@pytest.mark.slow
def test_every_phase_is_measured(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: list[int] = []
    complete = serving.LoadClient.complete

    def counted(*arguments: object) -> list[float]:
        seconds = complete(*arguments)  # type: ignore[arg-type]
        counts.append(len(seconds))
        return seconds

    monkeypatch.setattr(serving.LoadClient, "complete", counted)
    quick = {"every_s": 0.025, "chat_s": 0.25, "completion_tokens": 3}
    monkeypatch.setattr(serving, "ServeJob", lambda **options: ServeJob(**{**options, **quick}))
    words = ["--suite", "serve", "--context", "20", "--repeat", "2", "--threads", "1", "--json"]
    assert main(["bench", bundle, "--kv", "4:2", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    facts = (data["suite"], data["kv"], data["context"], data["threads"], data["model"])
    assert facts == ("serve", "4:2", 20, 1, "bundle")
    assert data.keys() >= {"machine", "chat_tokens", "kv_budget", "every_s"}
    rows = {row["load"]: row for row in data["rows"]}
    # warming up, then each phase twice
    _, alone, beside, alone_too, beside_too = counts
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


@pytest.mark.slow
def test_what_the_suite_cannot_do_is_refused(
    bundle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", bundle, "--suite", "serve", "--peer", "transformers"]) == 2
    assert "--suite serve knows no --peer" in capsys.readouterr().err
    # refused in the server's own thread
    assert main(["bench", bundle, "--suite", "serve", "--kv-budget", "1KiB"]) == 2
    assert "cannot hold" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--repeat 0 is not possible"):
        ServeJob(repeat=0)


# Chats at once, without a server


@pytest.mark.usefixtures("tiny_shape")
def test_chats_at_once_write_what_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A round takes a second by this clock.
    looks: list[float] = []
    monkeypatch.setattr(chats, "perf_counter", lambda: looks.append(len(looks)) or looks[-1])
    passes: list[list[int]] = []
    forward = OnnxBackend.forward

    def counted(
        backend: OnnxBackend, rows: tuple[SequencePass, ...], *, rope_long: bool
    ) -> list[np.ndarray]:
        if len(looks) % 2:
            passes.append([len(part.ids) for part in rows])
        return forward(backend, rows, rope_long=rope_long)

    monkeypatch.setattr(OnnxBackend, "forward", counted)
    words = ["--suite", "serve", "--shape", "tiny", "--chats", "4,1", "--context", "65"]
    words += ["--repeat", "3", "--threads", "1", "--kv", "8:8"]
    assert main(["bench", *words, "--json"]) == 0, capsys.readouterr().err
    data = json.loads(capsys.readouterr().out)
    facts = (data["suite"], data["kv"], data["context"], data["new_tokens"])
    assert facts == ("serve", "8:8", 65, 64)
    assert data["rows"] == [
        {"chats": 1, "tok_s": 64.0, "ratio": 1.0},
        {"chats": 4, "tok_s": 256.0, "ratio": 4.0},
    ]
    # Prompts are read before the clock starts; then a pass holds a row of each chat that writes.
    assert {rows for round_rows in passes for rows in round_rows} == {1}
    assert sum(map(len, passes)) == 3 * (1 + 4) * 64
    assert 3 * 56 <= passes.count([1] * 4) <= 3 * 64

    words[words.index("--repeat") + 1] = "1"
    assert main(["bench", *words]) == 0
    out = capsys.readouterr().out
    assert "4              256.0           64.0  4.00 x" in out
    assert "answers of 64 tokens after 65" in out


@pytest.mark.usefixtures("tiny_shape")
def test_chats_that_cannot_be_measured_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--suite", "serve", "--shape", "tiny", "--context", "65", "--repeat", "1"]
    # refused in the pool's own thread
    assert main([*words, "--chats", "1,4", "--kv-budget", "1KiB"]) == 2
    assert "cannot hold" in capsys.readouterr().err
    assert main(words) == 2
    assert "add --chats 1,4" in capsys.readouterr().err
    assert main([*words, "--chats", "0"]) == 2
    assert "--chats 0 is not possible: give 1 to 64" in capsys.readouterr().err
    assert main([*words, "--chats", "1", "--kv-read", "25%"]) == 2
    assert "knows no --kv-read" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--context 64 is not possible: give 65"):
        ChatsJob(chats=(1,), context=64)


def test_of_a_hundred_values_the_ninety_fifth() -> None:
    assert p95([float(value) for value in range(100, 0, -1)]) == 95.0
    assert p95([3.0]) == 3.0
