"""`kvq bench --peer llama-bench=COMMAND`: what it is asked, and what of its answer counts."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from kvq.errors import BackendError
from kvq_apps.bench.engines import check_peers
from kvq_apps.cli import main
from kvq_export.config import ExportOptions, WeightFormat
from kvq_export.write.random_bundle import random_bundle
from kvq_models.registry import family_for
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.bundle.gguf_file import GgufFile
from kvq_runtime.bundle.manifest import GGUF_FILE
from tiny_shape import COMMON

# A step takes 2 ms, an eighth more for each of its repetitions, and a prompt 1 ms a token.
PROGRAM = """#!{python}
import json, sys
words = sys.argv[1:]
if words == ["--help"]:
    print("usage: llama-bench\\n  -d, {depth} <n>\\n  {behind}<pp,tg>")
    sys.exit({help_status})
given = dict(zip(words[::2], words[1::2]))
with open({log!r}, "a") as file:
    print(json.dumps(given), file=file)
if given.get("-ctk") == "q4_0" and {fails}:
    print("warming up", "error: failed to load model", sep="\\n", file=sys.stderr)
    sys.exit(1)
steps = int(given.get("-gp", "0,0").split(",")[1]) or int(given["-n"])
each = 2e6 * steps if steps else 1e6 * int(given["-p"])
samples = [each * (1 + times / 8) for times in range(int(given["-r"]))]
print("a line of a library's")
print({answer})
"""
ANSWER = 'json.dumps([{"build_commit": "8cf427ff", "samples_ns": samples}])'

Make = Callable[..., str]


@pytest.fixture
def program(tmp_path: Path) -> Make:
    def make(**values: Any) -> str:
        defaults = {
            "python": sys.executable, "depth": "--n-depth", "behind": "-gp ", "help_status": 0,
            "fails": False, "log": str(tmp_path / "asked"), "answer": ANSWER, "name": "llama-bench",
        } | values  # fmt: skip
        path = tmp_path / "a folder" / defaults.pop("name")
        path.parent.mkdir(exist_ok=True)
        path.write_text(PROGRAM.format(**defaults))
        path.chmod(0o755)
        return f"llama-bench='{path}'"

    return make


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    config_json = COMMON | {"model_type": "llama"}
    config = family_for(config_json).config(config_json)
    options = ExportOptions(weights=WeightFormat())
    return random_bundle(config, tmp_path_factory.mktemp("bench") / "llama", options=options)


def measured(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    """What `kvq bench --json` says; of a failure the message."""
    base = ["--threads", "2", "--context", "20", "--repeat", "2", "--prefill", "16", "--json"]
    assert main(["bench", *words, *base]) == status
    captured = capsys.readouterr()
    return captured.err if status else json.loads(captured.out)


def command_lines(tmp_path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def test_what_the_program_says_is_the_time(
    bundle: Bundle, program: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = measured(capsys, str(bundle.path), "--peer", program())
    peers = [row for row in data["rows"] if row["engine"] == "llama-bench"]
    assert [row["kv"] for row in peers] == ["f16", "q8_0", "q4_0"]
    for row in peers:
        # Of three samples, the first of which is what warms up, too.
        assert (row["decode_ms"], row["decode_min_ms"]) == pytest.approx((2.25, 2.0))
        assert row["decode_samples"] == 6
        assert (row["ttft_ms"], row["prefill_tok_s"]) == pytest.approx((16.0, 1000.0))
        assert row["pass_ms"] == row["attention_ms"] == {}
        assert row["weight_bytes_read"] > 0
    # Two KV heads of 64 in two layers, K and V.
    assert [row["kv_bytes"] for row in peers] == [20 * 2 * 2 * n for n in (256, 136, 72)]
    runs = command_lines(tmp_path)
    steps = [run for run in runs if run["-n"] != "0"]
    assert len(steps) == 2 * 3
    for run in runs:
        assert (run["-t"], run["-ngl"], run["-fa"], run["-d"]) == ("2", "0", "1", "20")
        assert run["-ctk"] == run["-ctv"]
        assert GgufFile.open(run["-m"]).architecture == "llama"
    assert {(run["-p"], run["-n"], run["-r"]) for run in runs} == {
        ("0", "8", "3"),
        ("16", "0", "1"),
    }


def test_a_fork_that_knows_no_depth_generates_behind_a_prompt(
    bundle: Bundle, program: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it is told of its own, types of the cache among it, goes as it is."""
    peer = program(depth="--poll", help_status=1) + " -rtr 1 -ctk q8_KV"
    data = measured(capsys, str(bundle.path), "--peer", peer)
    (row,) = [row for row in data["rows"] if row["engine"] == "llama-bench"]
    assert (row["kv"], row["decode_ms"]) == ("q8_KV", pytest.approx(2.25))
    assert row["ttft_ms"] is row["prefill_tok_s"] is None
    assert row["prefill_skipped"] == "this llama-bench knows no --n-depth"
    for run in command_lines(tmp_path):
        assert (run["-gp"], run["-p"], run["-n"]) == ("20,8", "0", "0")
        assert (run["-rtr"], run["-ctk"]) == ("1", "q8_KV")
        assert not {"-ctv", "-d"} & set(run)


def test_two_programs_are_told_apart_by_their_paths(
    bundle: Bundle, program: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = program(), program(name="fork")
    data = measured(capsys, str(bundle.path), "--peer", f"{first} -ctk f16,{second} -ctk f16")
    engines = [row["engine"] for row in data["rows"]]
    assert engines == ["kvq", f"{first} -ctk f16", f"{second} -ctk f16"]


def test_a_file_that_is_given_is_what_the_program_runs(
    program: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    from exported_gguf import export

    source = tiny.make_checkpoint("llama", tmp_path / "source")
    file = export(source, "q8_0").path / GGUF_FILE
    measured(capsys, str(file), "--peer", program())
    assert {run["-m"] for run in command_lines(tmp_path)} == {str(file)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fails": True}, "ended with status 1: error: failed to load model (it ran "),
        ({"answer": "'[]'"}, "answers what is not understood: "),
        ({"answer": "'none'"}, "answers what is not understood: "),
        ({"answer": "json.dumps([{'samples_ns': 'many'}])"}, "answers what is not understood"),
        ({"answer": "json.dumps([{'samples_ns': []}])"}, "measured nothing"),
    ],
)
def test_what_it_does_not_say_is_told(
    bundle: Bundle,
    program: Make,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    message: str,
) -> None:
    message_text = measured(capsys, str(bundle.path), "--peer", program(**values), status=2)
    assert message in message_text


def test_what_is_no_such_program_is_refused(program: Make) -> None:
    with pytest.raises(BackendError, match="no/such is no program; give the path of a llama-bench"):
        check_peers(["llama-bench=no/such"])
    other = program(depth="--depth", behind="-g ")
    with pytest.raises(BackendError, match="--help knows no --n-depth and no -gp"):
        check_peers([other])
