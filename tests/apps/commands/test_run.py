"""`kvq run` from outside: what it prints where, its endings, its lasting JSON keys."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from command_line import RUN_KEYS, Ask, answer, kvq, started
from kvq_apps.cli import main
from kvq_runtime.session.session import Step
from shelf import Shelf


def test_run_prints_text_only_on_stdout(bundle: str, home: dict[str, str]) -> None:
    words = ("run", "-m", bundle, "--temp", "0", "-n", "12")
    plain = kvq(*words, "The quick", home=home)
    assert plain.returncode == 0
    assert plain.stdout.endswith(b"\n")
    assert plain.stderr == b""
    report = answer(kvq(*words, "The quick", "--json", home=home))
    assert report["text"].encode() == plain.stdout.removesuffix(b"\n")


@pytest.mark.parametrize("draft", ["", "auto", "lookup:min_ngram=1", "suffix:min_ngram=1"])
def test_a_draft_changes_the_numbers_and_not_the_text(draft: str, ask: Ask, bundle: str) -> None:
    words = ("run", bundle, "The quick the quick the quick", "--temp", "0", "-n", "60")
    plain = ask(*words, "--draft", "none")
    drafted = ask(*words, *(["--draft", draft] if draft else []))
    assert drafted["text"] == plain["text"]
    assert (plain["drafted_tokens"], plain["accepted_tokens"]) == (0, 0)
    assert plain["tokens_per_round"] == 1
    assert 0 <= drafted["accepted_tokens"] <= drafted["drafted_tokens"]
    if "min_ngram=1" in draft:
        assert drafted["drafted_tokens"] > 0
    assert drafted["tokens_per_round"] >= 1


def test_run_json_holds_the_lasting_keys(bundle: str, ask: Ask) -> None:
    report = ask("run", bundle, "The quick", "-n", "5")
    assert report.keys() >= RUN_KEYS
    assert report["new_tokens"] == 5
    assert report["finish_reason"] == "length"
    assert 0 < report["kv_bytes"] <= report["kv_bytes_peak"] <= report["kv_budget"]
    assert (report["mean_k_bits"], report["mean_v_bits"], report["evicted_share"]) == (16, 16, 0)
    assert (report["kv"], report["context"]) == ("4:4", 512)


def test_a_seed_repeats_a_run(bundle: str, ask: Ask) -> None:
    def text(seed: str) -> str:
        return ask("run", bundle, "The", "-n", "16", "--temp", "1.5", "--seed", seed)["text"]

    assert text("1") == text("1") != text("2")


def test_piped_text_goes_before_the_prompt(bundle: str, ask: Ask) -> None:
    def tokens(*words: str, stdin: bytes = b"") -> int:
        return ask("run", "-m", bundle, "-n", "1", *words, stdin=stdin)["prompt_tokens"]

    assert tokens("-", stdin=b"abc xyz") == tokens("abc xyz")
    assert tokens("xyz", stdin=b"abc\n") == tokens("abc\n\nxyz")


def test_system_uses_the_chat_template(bundle: str, ask: Ask) -> None:
    def tokens(*words: str) -> int:
        return ask("run", bundle, "hi", "-n", "1", *words)["prompt_tokens"]

    assert tokens() < tokens("--chat") < tokens("--system", "be brief")


def test_a_stop_string_ends_the_text(bundle: str, ask: Ask) -> None:
    words = ("run", bundle, "The quick", "--temp", "0", "-n", "24")
    text = ask(*words)["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    report = ask(*words, "--stop", stop)
    assert report["text"] == text[: text.index(stop)]
    assert report["finish_reason"] == "stop"


def test_an_answer_is_held_to_a_form(bundle: str, ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    schema, grammar = tmp_path / "schema.json", tmp_path / "digits.gbnf"
    schema.write_text(
        '{"type": "array", "items": {"enum": [1, "two"]}, "minItems": 2, "maxItems": 3}'
    )
    grammar.write_text('root ::= "<" [0-9]{3} ">"')
    words = ("run", bundle, "The quick", "-n", "99")
    report = ask(*words, "--json-schema", str(schema))
    assert report["finish_reason"] == "stop"
    assert set(json.loads(report["text"])) <= {1, "two"}
    assert re.fullmatch("<[0-9]{3}>", ask(*words, "--grammar", str(grammar))["text"])
    assert ask(*words, "--chat", "--regex", "yes|no", "--draft", "lookup")["text"] in ("yes", "no")


def test_what_an_answer_is_not_held_to_is_said(
    bundle: str, home: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"const": 1}, "uniqueItems": true}')
    process = kvq("run", bundle, "hi", "-n", "9", "--json-schema", str(schema), home=home)
    assert f"not held to a part of {schema}: /uniqueItems: not followed" in process.stderr.decode()


@pytest.mark.parametrize(
    ("words", "context", "budget_bytes"),
    [
        (["--kv-budget", "1MiB"], 512, 1 << 20),
        (["--kv-budget", "90%"], 512, 512 * 1024 * 9 // 10),
        (["--kv", "fp", "--kv-budget", "200tok"], 200, None),
        (["--ctx-size", "300"], 300, None),
    ],
)
def test_budgets(
    words: list[str], context: int, budget_bytes: int | None, bundle: str, ask: Ask
) -> None:
    report = ask("run", bundle, "hi", "-n", "1", *words)
    assert report["context"] == context
    assert report["kv_budget"] == (budget_bytes or report["kv_budget"])
    assert report["kv_bytes_peak"] <= report["kv_budget"]


def test_a_float_cache_in_bytes_decides_the_context(bundle: str, ask: Ask) -> None:
    report = ask("run", bundle, "hi", "-n", "1", "--kv", "fp", "--kv-budget", "256KiB")
    # 1 KiB per token, and the tables and scratch beside them
    assert 100 < report["context"] < 256
    assert report["kv_budget"] == 256 << 10
    whole = ask("run", bundle, "hi", "-n", "1", "--kv", "fp", "--kv-budget", "64MiB")
    assert whole["context"] == 512


def test_usage_goes_to_stderr(bundle: str, home: dict[str, str]) -> None:
    finished = kvq("run", bundle, "hi", "-n", "3", "-u", home=home)
    speed, cache = finished.stderr.decode().splitlines()[-2:]
    assert re.fullmatch(
        r"3 tokens in [\d.]+ m?s \([\d,]+ a second\), the first after [\d.]+ m?s; "
        r"the prompt's \d+ read at [\d,]+ a second\.",
        speed,
    )
    assert re.fullmatch(
        r"Cache: [\d.]+ KiB of [\d.]+ KiB, which holds all 512 tokens of its context at 4 bits\. "
        r"This text: still at 16 bits, none given up\.",
        cache,
    )
    assert b" a second" not in finished.stdout
    more = kvq("run", bundle, "hi", "-n", "3", "-v", home=home).stderr.decode()
    assert "\nmemory read: " in more
    assert "None" not in more


def test_what_was_given_up_is_told_in_a_line(bundle: str, home: dict[str, str]) -> None:
    words = ("run", bundle, "The quick brown fox jumps over it. " * 27, "-n", "3", "--kv-budget")
    report = answer(kvq(*words, "192KiB", "--json", home=home))
    assert report["budget_tokens"] < report["prompt_tokens"] < report["context"] == 512
    share = f"{report['evicted_share'] * 100:.0f} %"
    finished = kvq(*words, "192KiB", home=home)
    summary = (
        f"holds {report['budget_tokens']} of 512 tokens at 8 bits; when it is full, older ones go "
        f"down to 2 bits, at which {report['full_tokens']} fit; of longer texts some are given up"
    )
    assert report["budget_tokens"] < report["full_tokens"] < 512
    assert (report["kv"], report["full_kv"]) == ("8:8", "2:2")
    assert finished.stderr.decode().splitlines() == [
        f"kvq: the prompt has {report['prompt_tokens']} tokens; the cache of 192.0 KiB {summary}",
        f"kvq: {share} of the text was given up to fit 192.0 KiB; "
        "give more with --kv-budget, and see --usage",
    ]
    assert b"given up" not in kvq(*words, "1MiB", home=home).stderr
    used = kvq(*words, "192KiB", "-u", home=home).stderr
    assert b"given up to fit" not in used
    assert f"192.0 KiB, which {summary}. This text: ".encode() in used
    assert f" on average, {share} of the text given up.".encode() in used


def test_json_lines_while_it_streams(bundle: str, home: dict[str, str]) -> None:
    words = ("run", bundle, "The quick", "-n", "12", "--temp", "0", "--json")
    whole = answer(kvq(*words, home=home))
    streamed = kvq(*words, "--stream", home=home)
    assert streamed.returncode == 0
    *pieces, last = map(json.loads, streamed.stdout.splitlines())
    assert last.keys() >= RUN_KEYS
    assert "".join(piece["text"] for piece in pieces) == last["text"] == whole["text"]
    assert all(piece.keys() == {"text"} and piece["text"] for piece in pieces)
    assert len(pieces) > 1


FENCED = "Here:\n\n```python\nx = 1\n```\nand\n```\ny\n```\n"


@pytest.mark.parametrize(
    ("text", "words", "printed", "noted"),
    [
        (FENCED, ["--extract"], "x = 1\n", ""),
        (FENCED, ["-x", "--stream"], "x = 1\n", ""),
        (FENCED, ["--no-stream"], FENCED, ""),
        (FENCED, [], FENCED, ""),
        ("none", ["-x"], "none\n", "the answer has no block of code; this is the whole of it\n"),
        ("none", ["--no-stream"], "none\n", ""),
        ("a\n```\ncut of", ["-x"], "cut of\n", ""),
    ],
)
def test_what_is_printed_of_an_answer(
    text: str,
    words: list[str],
    printed: str,
    noted: str,
    bundle: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ask: Ask,
) -> None:
    def generate(*_: object, **__: object) -> Iterator[Step]:
        for index, character in enumerate(text):
            last = index == len(text) - 1
            yield Step(
                token=1, text=character, logprob=None, finish_reason="length" if last else None
            )

    monkeypatch.setattr("kvq_runtime.session.session.Session.generate", generate)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))
    assert main(["run", bundle, "hi", *words]) == 0
    assert capsys.readouterr() == (printed, noted)
    if "-x" in words and "--stream" not in words:
        report = ask("run", bundle, "hi", *words)
        assert report["text"] == text
        assert report["code"] == (None if noted else printed.rstrip("\n"))


def test_offline_asks_no_hub(home: dict[str, str], tmp_path: Path) -> None:
    words = ("run", "-m", "nobody/nothing", "hi", "--offline")
    finished = kvq(*words, home=home, HF_HOME=str(tmp_path), HF_ENDPOINT="http://127.0.0.1:9")
    assert finished.returncode == 2
    message = finished.stderr.decode().splitlines()[-1]
    assert message == (
        "error: nobody/nothing is not on this machine, and --offline (HF_HUB_OFFLINE) asks no "
        "network: leave it out, or give a checkpoint folder"
    )


def test_environment_twins_reach_a_command(bundle: str, home: dict[str, str]) -> None:
    twins = {"KVQ_MODEL": bundle, "KVQ_PREDICT": "2", "KVQ_JSON": "1", "KVQ_KV": "8:8"}
    report = answer(kvq("run", "hi", home=home, **twins))
    assert (report["new_tokens"], report["kv"]) == (2, "8:8")


@pytest.mark.slow
def test_the_reference_backend_agrees(shelf: Shelf, ask: Ask) -> None:
    """Of a trained model: one of random weights has tokens that are as likely as others."""
    trained = str(shelf.embedded("nano"))
    words = ("run", trained, "The quick brown", "--temp", "0", "-n", "8", "--kv", "fp")
    report = ask(*words, "--backend", "float")
    assert report["backend"] == "float"
    assert report["text"] == ask(*words)["text"]


def test_a_reader_that_goes_away_ends_quietly(bundle: str, home: dict[str, str]) -> None:
    words = ["run", bundle, "The", "-n", "400", "--temp", "1"]
    with started(*words, home=home) as process:
        process.stdout.read(1)
        process.stdout.close()
        complaint = process.stderr.read()
        assert process.wait(60) in (0, 141)
    assert complaint == b""


@pytest.mark.parametrize(
    ("line", "codes", "words"),
    [
        ("doctor --paths --json | head -1", {"0 0", "141 0"}, "{"),
        ("--help | head -1", {"0 0", "141 0"}, "usage: kvq"),
        ("doctor --paths >&-", {"0"}, ""),
        ("run - <&-", {"2"}, "standard input is closed; pipe text in, or name a file"),
    ],
)
def test_pipes_and_closed_streams(
    line: str, codes: set[str], words: str, home: dict[str, str]
) -> None:
    finished = subprocess.run(
        ["bash", "-c", f'"$0" -m kvq_apps.cli {line}; echo "${{PIPESTATUS[@]}}"', sys.executable],
        env=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout.splitlines()[-1] in codes
    shown = finished.stdout + finished.stderr
    assert words in shown
    assert "internal error" not in shown
    assert "Traceback" not in shown
    assert "Exception ignored" not in shown


def test_interrupting_prints_what_exists_and_ends_with_130(
    bundle: str, home: dict[str, str]
) -> None:
    words = ["run", bundle, "The", "-n", "480", "--temp", "1", "--backend", "float"]
    with started(*words, home=home) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 1
    assert rest.endswith(b"\n")
    assert complaint == b""


@pytest.mark.parametrize(
    ("out", "err", "apart"), [(False, False, ""), (True, True, ""), (False, True, "\n")]
)
def test_usage_begins_a_line_of_its_own(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    *, out: bool, err: bool, apart: str,
) -> None:  # fmt: skip
    """Where stdout is a pipe and stderr a terminal, the end of the answer's line may come late."""
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: out)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: err)
    assert main(["run", "-m", bundle, "-n", "4", "--usage", "The quick"]) == 0
    assert re.match(rf"{apart}\d+ tokens in ", capsys.readouterr().err)
