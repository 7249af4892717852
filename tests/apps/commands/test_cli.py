"""The command line from outside: what it prints where, its exit codes, its lasting JSON keys."""

import io
import json
import re
import signal
import subprocess
import sys
from argparse import SUPPRESS, Action, Namespace, _SubParsersAction
from collections.abc import Callable, Iterator
from io import BytesIO, TextIOWrapper
from math import exp
from pathlib import Path
from typing import Any

import pytest

from environment import environment_in
from kvq import __version__
from kvq.errors import UsageError
from kvq.formats import format_bytes
from kvq_apps import flags, layers, options, output
from kvq_apps.cli import COMMANDS, build_parser, main
from kvq_apps.commands import run as run_command
from kvq_apps.owners import filled
from kvq_export.config import WeightFormat
from kvq_runtime.backends import BACKENDS
from kvq_runtime.session import Step

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 12


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return environment_in(tmp_path)


def kvq(
    *words: str, home: dict[str, str], stdin: bytes = b"", **extra: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvq_apps.cli", *words],
        input=stdin,
        env=home | extra,
        capture_output=True,
        timeout=120,
        check=False,
    )


def answer(finished: subprocess.CompletedProcess[bytes]) -> dict[str, object]:
    """The one object on stdout of a command that worked."""
    assert finished.returncode == 0, finished.stderr.decode()
    return json.loads(finished.stdout)


Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Ask:
    """Runs a command with `--json` in this process and returns its object."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*words: str, stdin: bytes = b"") -> dict[str, Any]:
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(stdin)))
        assert main([*words, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


# Starting up


def test_help_loads_nothing_heavy(home: dict[str, str]) -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from kvq_apps.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: code = end.code\n"
        "packages = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(code, *sorted(packages - sys.stdlib_module_names), file=sys.stderr)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], env=home, capture_output=True, text=True, check=True
    )
    assert finished.stderr.split() == ["0", "kvq", "kvq_apps"]
    assert all(f"    {name} " in finished.stdout for name in COMMANDS)


def test_version(home: dict[str, str]) -> None:
    for flag in ("--version", "-V"):
        finished = kvq(flag, home=home)
        assert (finished.returncode, finished.stdout) == (0, f"kvq {__version__}\n".encode())


def test_without_a_word_it_shows_its_help(home: dict[str, str]) -> None:
    bare, asked = kvq(home=home), kvq("--help", home=home)
    assert (bare.returncode, bare.stdout) == (0, asked.stdout)
    assert b"export" in bare.stdout


def test_flags_have_the_names_that_other_programs_gave_them(bundle: str, ask: Ask) -> None:
    found = ask("run", "-m", bundle, "--temperature", "0", "--max-tokens", "3", "The", "quick")
    assert found["new_tokens"] == 3
    assert found["text"] == ask("run", "-m", bundle, "--temp", "0", "-n", "3", "The quick")["text"]
    endless = ask("run", "-m", bundle, "--temp", "0", "-n", "-1", "--ctx-size", "50", "The quick")
    assert endless["prompt_tokens"] + endless["new_tokens"] >= 50


# They name another thing the command does, which no environment can ask for.
DEEDS = {"serve": {"--status", "--stop"}}


def flags_of(name: str) -> dict[str, Action]:
    """The long flags in the help of a command, without `--help`."""
    commands = next(
        action for action in build_parser(name)._actions if isinstance(action, _SubParsersAction)
    )
    return {
        option: action
        for action in commands.choices[name]._actions
        for option in action.option_strings[:1]
        if option != "--help" and option != "-h" and action.help != SUPPRESS
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_every_command_names_its_twin(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    of_command = flags_of(name).keys() - DEEDS.get(name, set())
    assert len(of_command) > 3
    for flag in of_command:
        assert flag.removeprefix("--") in flags.FLAGS
        twin = f"[KVQ_{flag.removeprefix('--').replace('-', '_').upper()}]"
        assert flag in shown
        assert twin in shown


def test_the_help_names_the_defaults_of_their_owners(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in flags.FLAGS.values():
        assert "{" not in filled(flag.default)
    assert filled(flags.FLAGS["group"].default) == str(WeightFormat().block)
    assert tuple(flags.FLAGS["backend"].choices or ()) == ("auto", *BACKENDS)
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "32, 64 or 128 (default: 64) [KVQ_GROUP]" in " ".join(capsys.readouterr().out.split())


def test_the_help_names_the_defaults_of_the_sampler() -> None:
    alone = Namespace(**dict.fromkeys(map(flags.field, flags.FLAGS)))
    default = options.sampling(alone)
    for flag, value in {
        "temp": default.temperature,
        "top-k": default.top_k,
        "top-p": default.top_p,
        "min-p": default.min_p,
        "repeat-penalty": default.repeat_penalty,
        "repeat-last-n": default.repeat_window_tokens,
    }.items():
        assert filled(flags.FLAGS[flag].default) == f"{value:g}"


def test_the_synonyms_of_the_cache_widths() -> None:
    arguments = build_parser("run").parse_args(["run", "-ctk", "8", "-ctv", "2", "hi"])
    assert (arguments.kbits, arguments.vbits) == (8, 2)
    long = build_parser("run").parse_args(["run", "--cache-type-k=4", "--cache-type-v=4", "hi"])
    assert (long.kbits, long.vbits) == (4, 4)


# Where a value comes from


def parsed(*words: str) -> Namespace:
    arguments = build_parser("run").parse_args(["run", *words, "hi"])
    layers.fill(arguments, layers.environment_layer)
    return arguments


def test_a_flag_beats_the_environment_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.sampling(parsed()).top_k == 40
    monkeypatch.setenv("KVQ_TOP_K", "7")
    assert options.sampling(parsed()).top_k == 7
    assert options.sampling(parsed("--top-k", "3")).top_k == 3
    assert not options.written(parsed(), "top-k")
    assert options.written(parsed("--top-k", "0"), "top-k")


@pytest.mark.parametrize(
    ("words", "environment", "bits"),
    [
        ([], {}, {}),
        (["--kv", "8:4"], {}, {"k_bits": 8, "v_bits": 4}),
        (["--kv", "fp"], {}, {"k_bits": 16, "v_bits": 16}),
        (["--kbits", "2"], {}, {"k_bits": 2}),
        (["--kv", "8:4", "--vbits", "2"], {}, {"k_bits": 8, "v_bits": 2}),
        (["--vbits", "8"], {"KVQ_KV": "4:4"}, {"k_bits": 4, "v_bits": 8}),
        (["--kv", "4:4"], {"KVQ_KBITS": "8"}, {"k_bits": 4, "v_bits": 4}),
        ([], {"KVQ_KV": "2", "KVQ_KBITS": "8"}, {"k_bits": 8, "v_bits": 2}),
    ],
)
def test_cache_widths(
    words: list[str],
    environment: dict[str, str],
    bits: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert options.kv_bits(parsed(*words)) == bits


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("KVQ_TEMP", "hot", "KVQ_TEMP=hot is not possible: 'hot' is not a number"),
        ("KVQ_JSON", "maybe", "KVQ_JSON=maybe is not possible: give 1 or 0"),
        ("KVQ_BACKEND", "cuda", "KVQ_BACKEND=cuda is not possible: choose auto, onnx, llama.cpp"),
    ],
)
def test_a_bad_value_names_its_variable(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        parsed()


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        (["hello"], None, (None, "hello")),
        (["hello"], "there", ("there", "hello")),
        (["here", "hello"], None, ("here", "hello")),
        (["here", "hello"], "there", ("here", "hello")),
        (["-m", "here", "hello"], "there", ("here", "hello")),
        (["-m", "here", "hello", "there", "you"], None, ("here", "hello there you")),
    ],
)
def test_model_and_prompt(
    words: list[str],
    variable: str | None,
    expected: tuple[str | None, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvq_apps.text_input.piped_input", lambda: "")
    if variable is not None:
        monkeypatch.setenv("KVQ_MODEL", variable)
    arguments = build_parser("run").parse_args(["run", *words])
    layers.fill(arguments, layers.environment_layer)
    assert run_command.model_and_prompt(arguments) == expected


# Running


RUN_KEYS = {
    *("text", "prompt_tokens", "new_tokens", "ttft_ms", "decode_tok_s"),
    *("kv_bytes_peak", "kv_budget", "finish_reason"),
}


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
    assert (report["kv"], report["context"]) == ("4:2", 512)


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
    found = ask(*words, "--json-schema", str(schema))
    assert found["finish_reason"] == "stop"
    assert set(json.loads(found["text"])) <= {1, "two"}
    assert re.fullmatch("<[0-9]{3}>", ask(*words, "--grammar", str(grammar))["text"])
    assert ask(*words, "--chat", "--regex", "yes|no", "--draft", "lookup")["text"] in ("yes", "no")


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
    assert b"3 new tokens at" in finished.stderr
    assert b"not quantised yet: it all fits in fp16, 0% evicted" in finished.stderr
    assert b"new tokens" not in finished.stdout


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

    monkeypatch.setattr("kvq_runtime.session.Session.generate", generate)
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
    assert message.startswith("error: nobody/nothing cannot be downloaded (")
    assert "HF_HUB_OFFLINE" in message


def test_environment_twins_reach_a_command(bundle: str, home: dict[str, str]) -> None:
    twins = {"KVQ_MODEL": bundle, "KVQ_PREDICT": "2", "KVQ_JSON": "1", "KVQ_KV": "8:8"}
    report = answer(kvq("run", "hi", home=home, **twins))
    assert (report["new_tokens"], report["kv"]) == (2, "8:8")


def test_the_reference_backend_agrees(bundle: str, ask: Ask) -> None:
    words = ("run", bundle, "The quick brown", "--temp", "0", "-n", "8", "--kv", "fp")
    report = ask(*words, "--backend", "reference")
    assert report["backend"] == "reference"
    assert report["text"] == ask(*words)["text"]


def test_a_slow_path_says_so_once(bundle: str, home: dict[str, str]) -> None:
    finished = kvq("run", bundle, "hi", "-n", "2", "--json", home=home, KVQ_NATIVE="0")
    assert answer(finished)["backend"] == "reference"
    assert finished.stderr.decode().count("slow reference backend") == 1
    assert len(finished.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_ends_quietly(bundle: str, home: dict[str, str]) -> None:
    words = ["run", bundle, "The", "-n", "400", "--temp", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", *words],
        env=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
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
    words = ["run", bundle, "The", "-n", "480", "--temp", "1", "--backend", "reference"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", *words],
        env=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 1
    assert rest.endswith(b"\n")
    assert complaint == b""


# Exporting, inspecting, evaluating


def test_export_prints_a_table_and_progress_apart(
    checkpoint: Path, home: dict[str, str], tmp_path: Path
) -> None:
    destination = tmp_path / "made"
    finished = kvq(
        *("export", str(checkpoint), "-o", str(destination), "--wbits", "8", "--kv", "8:4"),
        home=home,
    )
    assert finished.returncode == 0
    table = finished.stdout.decode()
    assert "8 bits, block 64" in table
    assert "8:4, 4 sink tokens" in table
    assert table.index("at 8:4 this model keeps ") < table.index("weights_and_kv.mean_kld")
    assert re.search(r"keeps \d+% of its first choices \(\d+% with an unquantised cache\)", table)
    assert b"100 %" in finished.stderr
    assert b"\x1b" not in finished.stderr + finished.stdout
    manifest = json.loads((destination / "kvq.json").read_text())
    assert manifest["weights"]["bits"] == 8
    assert (manifest["kv"]["k_bits"], manifest["kv"]["v_bits"]) == (8, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_export_leaves_no_half_bundle(
    number: signal.Signals, checkpoint: Path, home: dict[str, str], tmp_path: Path
) -> None:
    # It stops itself where half of the weights are written. A process whose parent ignores Ctrl-C
    # would ignore it too.
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvq_apps import output\n"
        "from kvq_apps.cli import main\n"
        "def stop(self, done, total, label=''):\n"
        f"    if done > total / 2: os.kill(os.getpid(), {int(number)})\n"
        "output.Progress.__call__ = stop\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    destination = tmp_path / "made"
    words = ("export", str(checkpoint), "-o", str(destination), "--no-quality", "--no-calibrate")
    finished = subprocess.run(
        [sys.executable, "-c", program, *words], env=home, capture_output=True, check=False
    )
    assert finished.returncode == (130 if number == signal.SIGINT else -number)
    assert b"Traceback" not in finished.stderr
    assert not destination.exists()
    assert list(tmp_path.glob(".made.*")) == [] or number == signal.SIGKILL
    again = kvq(*words, home=home)
    assert again.returncode == 0, again.stderr.decode()
    assert answer(kvq("inspect", str(destination), "--json", home=home))["name"] == "made"


def test_a_models_name_alone_is_a_prompt_and_that_is_said(
    bundle: str, home: dict[str, str]
) -> None:
    said = kvq("run", "-n", "1", "nano", home=home, KVQ_MODEL=bundle)
    assert said.returncode == 0
    assert b"nano is taken for the prompt; to run it: kvq run nano PROMPT" in said.stderr
    assert kvq("run", "-n", "1", "nanos", home=home, KVQ_MODEL=bundle).stderr == b""


def test_an_embedded_model_is_exported_by_its_name(ask: Ask, tmp_path: Path) -> None:
    found = ask("export", "nano", "-o", str(tmp_path / "n"), "--no-quality", "--no-calibrate")
    assert (found["path"], found["model_type"]) == (str(tmp_path / "n"), "llama")


def test_export_json(checkpoint: Path, home: dict[str, str], tmp_path: Path) -> None:
    words = ("export", str(checkpoint), "-o", str(tmp_path / "made"), "--no-quality", "--json")
    report = answer(kvq(*words, home=home))
    assert report["path"] == str(tmp_path / "made")
    assert report["quality"] is None
    assert report["weights"]["bits"] == 4


def test_a_checkpoint_is_exported_once_on_first_use(checkpoint: Path, home: dict[str, str]) -> None:
    words = ("run", "-m", str(checkpoint), "hi", "-n", "1", "--json")
    first, second = kvq(*words, home=home), kvq(*words, home=home)
    assert answer(first).keys() >= RUN_KEYS
    assert b"exporting" in first.stderr
    assert answer(second).keys() >= RUN_KEYS
    assert second.stderr == b""


def test_inspect_shows_the_manifest_and_bytes_per_token(
    bundle: str, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ask("inspect", bundle)
    manifest = json.loads((Path(bundle) / "kvq.json").read_text())
    assert manifest.items() <= report.items()
    # 2 layers of 2 KV heads of 64 channels: 32 + 16 bytes of codes and 4 + 4 of constants
    assert report["bytes_per_token"] == 2 * 2 * (32 + 16 + 2 + 2 + 0.25)
    assert report["fp16_bytes_per_token"] == 2 * 2 * 64 * 2 * 2
    assert main(["inspect", bundle]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "KV per token 209 bytes (1024 at 16 bits, 4.9 times as much)" in shown


EVAL_KEYS = {"task", "context", "kv", "policy", "kv_bytes", "value", "unit", "n"}


def test_eval_ppl(bundle: str, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    words = ("eval", bundle, str(tmp_path / "text"), "--task", "ppl", "--context", "100")
    report = ask(*words, "--max-tokens", "250")
    assert report.keys() >= EVAL_KEYS
    # two windows of 100 tokens, the second half of each scored
    assert (report["n"], report["windows"], report["context"]) == (100, 2, 100)
    assert report["unit"] == "perplexity"
    assert report["value"] == pytest.approx(exp(report["nats_per_token"]))


def test_eval_kld_is_zero_against_itself_and_grows_with_fewer_bits(
    bundle: str, ask: Ask, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(TEXT)
    words = ("eval", "-m", bundle, str(tmp_path / "text"), "--task", "kld", "--context", "400")
    exact = ask(*words, "--kv", "fp")
    assert (exact["value"], exact["same_top_1"], exact["unit"]) == (0.0, 1.0, "nats")
    coarse, fine = ask(*words, "--kv", "2:2"), ask(*words, "--kv", "8:8")
    assert 0 < fine["value"] < coarse["value"]
    assert coarse["kv_bytes"] < fine["kv_bytes"]


def test_eval_passkey(bundle: str, ask: Ask) -> None:
    words = ("eval", "-m", bundle, "--task", "passkey", "--context", "200,300", "--depths", "0,1")
    report = ask(*words, "--trials", "2")
    assert report.keys() >= EVAL_KEYS
    assert (report["n"], report["context"], report["unit"]) == (8, 300, "exact match")
    assert [(row["length"], row["depth"], row["trials"]) for row in report["rows"]] == [
        (length, depth, 2) for length in (200, 300) for depth in (0.0, 1.0)
    ]


def test_doctor_says_what_runs(home: dict[str, str]) -> None:
    report = answer(kvq("doctor", "--json", home=home))
    assert report["kvq"] == __version__
    assert report["backends"]["reference"] == "ok"
    assert report["paths"]["cache"] == home["XDG_CACHE_HOME"] + "/kvq"
    without = answer(kvq("doctor", "--json", home=home, KVQ_NATIVE="0"))
    assert not without["native"]["loaded"]
    assert "KVQ_NATIVE=0" in without["backends"]["onnx"]
    # Whatever else is installed, a bundle then runs on numpy.
    assert (report["backend"], without["backend"]) == ("onnx", "reference")
    assert report["runs"]["bundle"]["slower"] is None
    assert "KVQ_NATIVE=0" in without["runs"]["bundle"]["slower"]
    assert report["runs"]["gguf"] == without["runs"]["gguf"]


# Writing


class Terminal:
    """A stream that keeps what is written."""

    def __init__(self, *, tty: bool) -> None:
        self.text = ""
        self.tty = tty

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is buffered."""

    def isatty(self) -> bool:
        return self.tty


def test_progress_is_a_line_a_tenth_or_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def shown(terminal: Terminal) -> str:
        progress = output.Progress(terminal)
        for done in range(101):
            progress(done, 100, "work")
        progress.clear()
        return terminal.text

    lines = shown(Terminal(tty=False)).splitlines()
    assert lines == [f"{tenth * 10:3d} % work" for tenth in range(11)]
    bar = shown(Terminal(tty=True))
    assert "100% work" in bar
    assert bar.endswith("\r\x1b[K")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(Terminal(tty=True))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (64 << 20, "64.0 MiB"),
        (3 << 29, "1.50 GiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_an_interrupt_outside_a_loop_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvq_apps.commands.doctor.run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "\n"


def test_our_fault_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Namespace) -> int:
        raise ZeroDivisionError("a\nfault")

    monkeypatch.setattr("kvq_apps.commands.doctor.run", broken)
    assert main(["doctor", "--json"]) == 1
    shown = capsys.readouterr()
    message = "internal error: ZeroDivisionError: a fault (--debug shows where)"
    assert shown.err == f"error: {message}\n"
    assert json.loads(shown.out) == {"error": {"code": "internal", "message": message}}
    assert main(["doctor", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), "a\ufffd[31m\tb\n"), (io.StringIO(), "a\x1b[31m\tb\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        output.print_data("a\x1b[31m\tb")
        assert stream.getvalue() == shown


@pytest.mark.parametrize(
    ("words", "package"), [("serve", "uvicorn"), ("bench --suite chat", "textual")]
)
def test_a_missing_extra_is_named(words: str, package: str) -> None:
    """In an installation without it, which `None` among the modules stands for."""
    program = (
        "import sys; sys.modules[sys.argv[1]] = None; from kvq_apps.cli import main; "
        "sys.exit(main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", program, package, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    wanted = f"this needs {package}; install it with `pip install kvq-runtime[apps]`"
    assert done.stderr == f"error: {wanted}\n"
