"""Commands on a GGUF file: run, inspect, eval, bench, doctor."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvq_apps.cli import main
from kvq_apps.names import model_path
from kvq_runtime.backends import llama_library

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from tiny_gguf import write_gguf

Make = Callable[..., Path]


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def tried(make: Make, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns a file that needs no trial."""
    monkeypatch.setattr(llama_library, "check", lambda file: None)
    return str(make())


ON_LLAMA = ("--backend", "llama.cpp")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts every architecture as one that kvq cannot compute, so llama.cpp gets the file."""
    monkeypatch.setattr(model_path, "_gguf_bundle", lambda file, _: file)


def test_run_streams_and_reports(tried: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("run", "-m", tried, "def add(", "-n", "8", "--temp", "0", "--json", "--threads", "1")
    words += ON_LLAMA
    assert main(list(words)) == 0
    captured = capfd.readouterr()
    report = json.loads(captured.out)
    assert captured.err == ""
    assert (report["model"], report["backend"], report["kv"]) == ("tiny", "llama.cpp", "8:8")
    assert report["kv_policy"] == "none"
    assert report["new_tokens"] <= 8
    assert report["kv_budget"] == report["kv_bytes_peak"] == 1024 * 544


def test_inspect_shows_metadata_and_bytes(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "inspect", str(make(kind="Q5_1")), "--json")
    report = json.loads(out)
    assert code == 0
    assert report["metadata"]["general.architecture"] == "llama"
    assert report["metadata"]["tokenizer.ggml.tokens"] == "[384 values]"
    assert report["weights"]["types"]["Q5_1"]["tensors"] == 16
    assert report["bytes_per_token_at"] == {"fp": 1024, "8:8": 544, "4:4": 288}
    assert (report["bytes_per_token"], report["context_length"]) == (544, 1024)
    code, out, _ = command(capsys, "inspect", str(make(kind="Q5_1")), "-v")
    assert code == 0
    assert "KV per token, 4:4" in out


def test_inspect_lets_no_text_of_a_stranger_at_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "one.gguf", keys={"general.name": "\x1b[2Jname\nnext"})
    code, out, _ = command(capsys, "inspect", str(path), "-v")
    assert code == 0
    assert "\x1b" not in out
    assert "\ufffd[2Jname next" in out


@pytest.mark.usefixtures("refused")
def test_eval_and_bench_take_a_file(
    tried: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(first, second):\n    return first + second\n" * 20)
    words = ("eval", "-m", tried, "--task", "kld", "--context", "64", str(text), "--json")
    code, out, err = command(capsys, *words, "--threads", "1")
    assert code == 0, err
    report = json.loads(out)
    assert (report["kv"], report["backend"]) == ("8:8", "llama.cpp")
    assert 0 < report["value"] < 0.05
    words = ("bench", tried, "--context", "40,80", "--kv", "8:8,fp,8:4", "--json", "--repeat", "1")
    code, out, err = command(capsys, *words, "--threads", "1", "--prefill", "8")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [(row["engine"], row["kv"], row["context"], row["kv_bytes"]) for row in rows] == [
        ("llama.cpp", kv, context, context * num_bytes)
        for context in (40, 80)
        for kv, num_bytes in (("8:8", 544), ("fp", 1024), ("8:4", 416))
    ]
    code, _, err = command(capsys, "bench", tried, "--peer", "transformers")
    assert code == 2
    assert "has no ONNX graph, and peers run on its weights" in err
    code, _, err = command(capsys, "bench", tried, "--kv-policy", "h2o", "--kv-budget", "9%")
    assert code == 2
    assert "has no ONNX graph, and llama.cpp's cache gives nothing up" in err


def test_doctor_shows_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = command(capsys, "doctor", "--json")
    report = json.loads(out)
    assert report["backends"]["llama.cpp"] == "ok"
    assert report["packages"]["llama-cpp-python"].count(".") == 2


@pytest.mark.usefixtures("refused")
def test_without_the_extra_a_file_says_what_to_install(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else find(name)
    )
    for words in (["run", "-m", str(make()), "hello"], ["bench", str(make())]):
        code, _, err = command(capsys, *words)
        assert code == 2
        assert 'llama-cpp-python is not installed; pip install "kvq-runtime[gguf]"' in err
    _, out, _ = command(capsys, "doctor", "--json")
    assert 'pip install "kvq-runtime[gguf]"' in json.loads(out)["backends"]["llama.cpp"]
    code, out, _ = command(capsys, "inspect", str(make()))
    assert code == 0
