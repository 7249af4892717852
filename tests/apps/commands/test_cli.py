"""The command line from outside: what it prints where, its exit codes, its lasting JSON keys."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
from argparse import SUPPRESS, Action, ArgumentError, Namespace
from math import exp
from pathlib import Path

import numpy as np
import pytest

from command_line import RUN_KEYS, Ask, answer, kvq
from kvq import __version__, native_library
from kvq.errors import UsageError
from kvq.settings import environment_name
from kvq_apps import cli
from kvq_apps.cli import COMMANDS, _set_up_logging, build_parser, main
from kvq_apps.commands import run as run_command
from kvq_apps.evaluation.measurement import log_softmax
from kvq_apps.evaluation.text import kl_divergence, windows
from kvq_apps.settings import flags, options, sources
from kvq_apps.settings.flag_values import with_component_values
from kvq_apps.settings.parsers import Parser
from kvq_apps.terminal import output
from kvq_export.config import BLOCK
from kvq_runtime.backends import BACKENDS
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.engine import Engine
from tiny import make_llama_checkpoint, transformers_logits

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 12


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


@pytest.mark.slow
def test_a_checkpoint_is_exported_once_and_no_exporter_is_loaded_again(
    checkpoint: Path, home: dict[str, str]
) -> None:
    program = (
        "import sys\n"
        "from kvq_apps.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(sum(name.startswith('kvq_export') for name in sys.modules), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    words = ["run", "-m", str(checkpoint), "-n", "1", "--json", "The"]
    first, second = [
        subprocess.run(
            [sys.executable, "-c", program, *words],
            env=home, capture_output=True, text=True, check=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    assert "exporting" in first.stderr
    assert int(first.stderr.split()[-1]) > 10
    assert second.stderr == "0\n"
    assert all(json.loads(process.stdout).keys() >= RUN_KEYS for process in (first, second))


def test_version(home: dict[str, str]) -> None:
    for flag in ("--version", "-V"):
        finished = kvq(flag, home=home)
        assert (finished.returncode, finished.stdout) == (0, f"kvq {__version__}\n".encode())


def test_without_a_word_it_shows_its_help(home: dict[str, str]) -> None:
    bare, help_flag = kvq(home=home), kvq("--help", home=home)
    assert (bare.returncode, bare.stdout) == (0, help_flag.stdout)
    assert b"export" in bare.stdout


def test_flags_have_the_names_that_other_programs_gave_them(bundle: str, ask: Ask) -> None:
    report = ask("run", "-m", bundle, "--temperature", "0", "--max-tokens", "3", "The", "quick")
    assert report["new_tokens"] == 3
    assert report["text"] == ask("run", "-m", bundle, "--temp", "0", "-n", "3", "The quick")["text"]
    endless = ask("run", "-m", bundle, "--temp", "0", "-n", "-1", "--ctx-size", "50", "The quick")
    assert endless["prompt_tokens"] + endless["new_tokens"] >= 50


# They name another thing the command does, which no environment can ask for.
DEEDS = {"serve": {"--status", "--stop"}}


def flags_of(name: str) -> dict[str, Action]:
    """The long flags in the help of a command, without those that print it."""
    command = build_parser(name).command
    assert command is not None
    return {
        option: action
        for action in command.actions
        for option in action.option_strings[:1]
        if option not in ("-h", "--help-all") and action.help != SUPPRESS
    }


def help_of(name: str, capsys: pytest.CaptureFixture[str], *, whole: bool) -> str:
    """What the command prints; `whole`: with every flag, where it has many."""
    flag = "--help-all" if whole and "--help-all" in spellings(name) else "--help"
    with pytest.raises(SystemExit) as end:
        main([name, flag])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def spellings(name: str) -> set[str]:
    command = build_parser(name).command
    assert command is not None
    return command.spellings


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_every_command_names_its_twin(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(name, capsys, whole=True)
    of_command = flags_of(name).keys() - DEEDS.get(name, set())
    assert len(of_command) >= 3
    for flag in of_command:
        assert flag.removeprefix("--") in flags.FLAGS
        twin = f"[KVQ_{flag.removeprefix('--').replace('-', '_').upper()}]"
        assert flag in shown
        assert twin in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_with_many_flags_shows_the_common_ones(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(name, capsys, whole=False)
    named = {flag for flag in flags.FLAGS if f"[{environment_name(flag)}]" in shown}
    every = {flag[2:] for flag in flags_of(name)} & flags.FLAGS.keys()
    common = {flag for flag in every if flags.FLAGS[flag].common}
    assert named == (common if "--help-all" in spellings(name) else every)
    assert len(named) < cli.MOST_FLAGS


def test_the_help_names_the_defaults_of_their_owners(capsys: pytest.CaptureFixture[str]) -> None:
    # The laboratory, where it is, adds rows when an owner is looked up.
    for flag in [*flags.FLAGS.values()]:
        assert "{" not in with_component_values(flag.default)
    assert with_component_values(flags.FLAGS["group"].default).endswith(f"else {BLOCK}")
    assert tuple(flags.FLAGS["backend"].choices or ()) == ("auto", *BACKENDS)
    shown = help_of("export", capsys, whole=True)
    assert "else 64) [KVQ_GROUP]" in shown


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
        assert with_component_values(flags.FLAGS[flag].default) == f"{value:g}"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_parser_remembers_every_flag_that_argparse_has(name: str) -> None:
    parser = build_parser(name)
    assert parser.command is not None
    assert parser.command.spellings == parser.command._option_string_actions.keys()
    assert parser.spellings == parser._option_string_actions.keys()


def test_a_synonym_gives_way_to_a_flag_that_is_there() -> None:
    parser = Parser()
    parser.add_argument_group("some").add_argument("--here", "-x")
    action = parser.add_mutually_exclusive_group().add_argument("--there", "-x", "-y")
    assert (action.option_strings, parser.parse_args(["-x", "3"]).here) == (["--there", "-y"], "3")
    with pytest.raises(ArgumentError, match="conflicting option string: --here"):
        parser.add_argument("--here")


def test_the_synonyms_of_the_cache_widths() -> None:
    arguments = build_parser("run").parse_args(["run", "-ctk", "8", "-ctv", "2", "hi"])
    assert (arguments.kbits, arguments.vbits) == (8, 2)
    long = build_parser("run").parse_args(["run", "--cache-type-k=4", "--cache-type-v=4", "hi"])
    assert (long.kbits, long.vbits) == (4, 4)


# Where a value comes from


def parsed(*words: str) -> Namespace:
    arguments = build_parser("run").parse_args(["run", *words, "hi"])
    sources.fill(arguments, sources.environment_source)
    return arguments


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
    monkeypatch.setattr("kvq_apps.terminal.text_input.piped_input", lambda: "")
    if variable is not None:
        monkeypatch.setenv("KVQ_MODEL", variable)
    arguments = build_parser("run").parse_args(["run", *words])
    sources.fill(arguments, sources.environment_source)
    assert run_command.model_and_prompt(arguments) == expected


# Exporting, inspecting, evaluating


@pytest.mark.slow
def test_export_prints_a_table_and_progress_apart(
    checkpoint: Path, home: dict[str, str], tmp_path: Path
) -> None:
    destination = tmp_path / "made"
    finished = kvq(
        *("export", str(checkpoint), "-o", str(destination), "--wbits", "8", "--kv", "8:4", "-v"),
        home=home,
    )
    assert finished.returncode == 0
    table = finished.stdout.decode()
    assert "matrices 8/64/symmetric" in table
    assert "8:4, 4 sink tokens" in table
    assert table.index("verdict") < table.index("weights_and_kv.mean_kld")
    kept = r"activations keep \d+% of the checkpoint's first choices, a cache at 8:4 \d+% of theirs"
    assert (said := re.search(kept, table))
    assert said[0] in kvq("inspect", str(destination), "-v", home=home).stdout.decode()
    assert b"100 %" in finished.stderr
    # The tiny checkpoint has a chat template.
    assert f"try: kvq run -m {destination} --chat " in finished.stderr.decode()
    assert b"\x1b" not in finished.stderr + finished.stdout
    manifest = json.loads((destination / "kvq.json").read_text())
    assert [*manifest["weights"]["formats"]] == ["8/64/symmetric"]
    assert (manifest["kv"]["k_bits"], manifest["kv"]["v_bits"]) == (8, 4)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_export_leaves_no_half_bundle(
    number: signal.Signals, checkpoint: Path, home: dict[str, str], tmp_path: Path
) -> None:
    # It stops itself where half of the weights are written. A process whose parent ignores Ctrl-C
    # would ignore it too.
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvq_apps.terminal import output\n"
        "from kvq_apps.cli import main\n"
        "def stop(self, done, total, label=''):\n"
        f"    if done > total / 2: os.kill(os.getpid(), {int(number)})\n"
        "output.ProgressBar.__call__ = stop\n"
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
    report = ask("export", "nano", "-o", str(tmp_path / "n"), "--no-quality", "--no-calibrate")
    assert (report["path"], report["model_type"]) == (str(tmp_path / "n"), "llama")


@pytest.mark.slow
def test_export_ends_with_how_good_it_is_and_what_is_next(
    checkpoint: Path, home: dict[str, str], tmp_path: Path
) -> None:
    made = tmp_path / "made"
    finished = kvq("export", str(checkpoint), "-o", str(made), "--wbits", "8", home=home)
    (line,) = finished.stdout.decode().splitlines()
    assert re.fullmatch(
        rf"{made} is ready: [\d.]+ KiB, made in [\d.]+ m?s; in \d+% of places it says next what "
        r"the original model would \(\d+% before the cache's part\)\.",
        line,
    )
    *progress, last = finished.stderr.decode().splitlines()
    assert last == f"try: kvq run -m {made} --chat " + (
        '"What is photosynthesis? Answer in one sentence."  (-v: every number)'
    )
    shares = [int(row.partition("%")[0]) for row in progress]
    assert shares == sorted(set(shares))
    assert shares[-1] == 100


def test_export_json(checkpoint: Path, ask: Ask, tmp_path: Path) -> None:
    words = ("export", str(checkpoint), "-o", str(tmp_path / "made"))
    report = ask(*words, "--wbits", "4", "--no-quality", "--no-calibrate")
    assert report["path"] == str(tmp_path / "made")
    assert report["quality"] is None
    assert [*report["weights"]["formats"]] == [
        "8/64/symmetric", "4/64/zero_point", "4/32/super_minimum"
    ]  # fmt: skip


def test_inspect_shows_the_manifest_and_bytes_per_token(
    bundle: str, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ask("inspect", bundle)
    manifest = json.loads((Path(bundle) / "kvq.json").read_text())
    assert manifest.items() <= report.items()
    # 2 layers of 2 KV heads of 64 channels: 32 + 32 bytes of codes and 4 + 4 of constants
    assert report["bytes_per_token"] == 2 * 2 * (32 + 32 + 2 + 2 + 0.25)
    assert report["fp16_bytes_per_token"] == 2 * 2 * 64 * 2 * 2
    assert main(["inspect", bundle, "-v"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "KV per token 273 bytes (1024 at 16 bits, 3.8 times as much)" in shown
    assert "None" not in shown
    assert main(["inspect", bundle, "--estimate"]) == 0
    first, memory, cache = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"bundle \(llama\): [\d.]+ KiB of weights, nothing is damaged\.", first)
    assert re.match(r"It takes [\d.]+ KiB of memory: .* for 512 tokens at 4 bits\. Does", memory)
    assert cache.endswith("otherwise, and holds all 512 tokens of its context at 4 bits.")


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


def test_eval_weights_compares_a_bundle_with_its_checkpoint(
    checkpoint: Path,
    bundle: str,
    ask: Ask,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    words = ("eval", "--task", "weights", "--checkpoint", str(checkpoint), "--context", "300")
    made = ("-m", bundle, str(text))
    rounded, both = ask(*words, *made), ask(*words, *made, "--kv", "2:2")
    assert (rounded["kv"], rounded["windows"]) == ("fp", 1)
    assert 1e-6 < rounded["value"] < both["value"]
    nats: list[np.ndarray] = []
    with Engine.open(bundle) as engine:
        ids = engine.tokenizer.encode(TEXT)
        start = engine.tokenizer.control.start
        for window in windows(ids, start, 300):
            with engine.session(kv="fp", context_tokens=300) as session:
                actual = np.concatenate(list(session.logits(window)))
            expected = transformers_logits(checkpoint, np.array(window))
            both_logs = (log_softmax(logits[149:299]) for logits in (expected, actual))
            nats.append(kl_divergence(*both_logs))
    assert rounded["value"] == pytest.approx(np.concatenate(nats).mean(), rel=1e-2)
    other = make_llama_checkpoint(tmp_path / "other", vocab_size=300)
    assert main([*words[:4], str(other), *made]) == 2
    assert "it has 300 tokens" in capsys.readouterr().err


def test_a_share_of_the_budget_means_the_same_everywhere(
    bundle: str, ask: Ask, tmp_path: Path
) -> None:
    """Of what the whole context of the session takes in fp16, whoever opens it."""
    (tmp_path / "text").write_text("A quick brown fox jumps. " * 60)
    share = ("--kv-budget", "40%")
    reports = [
        ask("run", "-m", bundle, "hi", "-n", "1", "--ctx-size", "512", *share),
        ask("run", "-m", bundle, "hi", "-n", "1", *share),  # the model's, which is 512
        ask("eval", "-m", bundle, str(tmp_path / "text"), "--task", "ppl", "--context", "512",
            *share),
    ]  # fmt: skip
    shape = Bundle.open(bundle).config.cache_classes[0].shape
    assert [each["kv_budget"] for each in reports] == [
        int(0.4 * 512 * shape.float_bytes_per_token)
    ] * 3


def test_eval_facts(bundle: str, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("The mill stands by the water. Nobody grinds flour there. " * 80)
    words = ("eval", "-m", bundle, str(tmp_path / "text"), "--task", "facts", "--depths", "0.2")
    report = ask(*words, "--context", "300,400", "--seed", "7")
    assert (report["unit"], report["n"], report["context"]) == ("facts found", 4, 400)
    assert 0 <= report["value"] <= 1
    rows = [(row["length"], row["depth"], row["trials"]) for row in report["rows"]]
    assert rows == [(300, 0.2, 1), (300, 0.7, 1), (400, 0.2, 1), (400, 0.7, 1)]
    # A random model expects any name as little as any other.
    assert report["answer_nats"] > 3


def test_eval_says_which_word_is_no_file(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = "nosuch.txt: no such file"
    for words, error in (
        (("nosuch.txt",), f"{said}, and no model is called so"),
        ((bundle, "nosuch.txt"), said),
        (("-m", bundle, "nosuch.txt"), said),
    ):
        assert main(["eval", "--task", "kld", *words]) == 2
        assert capsys.readouterr().err == f"error: {error}\n"
    # A model that is there, and no text, is asked for one.
    assert main(["eval", "--task", "kld", bundle]) == 2
    assert "--task kld needs a text" in capsys.readouterr().err


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
    assert report["backends"]["float"] == "ok"
    assert report["paths"]["cache"] == home["XDG_CACHE_HOME"] + "/kvq"
    assert report["backend"] == "onnx"
    assert report["runs"]["bundle"]["slower"] is None
    assert report["built_in"]["ahead_bytes"] == 8 << 10
    assert report["built_in"]["maker"] in report["built_in"]["reason"]
    finished = kvq("doctor", home=home)
    assert finished.stderr.decode().splitlines()[-1] == "ready"
    said = finished.stdout.decode().splitlines()
    assert said[0].startswith(f"kvq {__version__} runs models on kvq's own kernels (")
    assert said[-1] == "Everything that was found: kvq doctor -v"
    everything = kvq("doctor", "-v", home=home).stdout.decode()
    assert "runs.bundle.backend" in everything
    assert "None" not in everything


def test_doctor_says_how_to_get_the_library_that_is_missing(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native_library, "library_path", lambda: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    native_library.load.cache_clear()
    try:
        assert main(["doctor"]) == 0
        printed = capsys.readouterr()
        assert "cannot run a model here" in printed.out
        assert "pip install" in printed.err.splitlines()[-1]
        assert main(["run", "-m", "nano", "hi", "-n", "1"]) == 2
        assert "pip install" in capsys.readouterr().err
    finally:
        monkeypatch.undo()
        native_library.load.cache_clear()


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
        progress = output.ProgressBar(terminal)
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


def test_a_warning_takes_the_line_of_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(tty=True)
    monkeypatch.setattr("sys.stderr", terminal)
    cli._set_up_logging(debug=False)
    progress = output.ProgressBar(terminal)
    progress(1, 2, "work")
    logging.getLogger("kvq_export").warning("silence")
    logging.getLogger("kvq_export").warning("still")
    assert terminal.text.endswith(" 50% work\r\x1b[Kkvq: silence\nkvq: still\n")
    progress(2, 2, "work")
    assert terminal.text.endswith("100% work")
    progress.clear()


def test_progress_says_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output, "monotonic", lambda: now)
    terminal = Terminal(tty=False)
    progress = output.ProgressBar(terminal)
    for share in (0.0, 0.1, 0.5, 0.95, 1.0):
        now = 100 + 600 * share
        progress(share, 1, "work")
    # A new task begins anew.
    progress(0.0, 1, "more")
    assert terminal.text.splitlines() == [
        "  0 % work",
        " 10 % work, about 9 min left",
        " 50 % work, about 5 min left",
        " 90 % work, about 30 s left",
        "100 % work",
        "  0 % more",
    ]


@pytest.mark.parametrize(
    ("seconds", "exact", "rough"),
    [
        (0.012, "12 ms", "5 s"),
        (1.24, "1.2 s", "5 s"),
        (44.4, "44 s", "45 s"),
        (250, "4 min 10 s", "4 min"),
        (7500, "2 h 5 min", "2 h"),
    ],
)
def test_times_are_told_as_people_say_them(seconds: float, exact: str, rough: str) -> None:
    assert output.duration(seconds) == exact
    assert output.rough_duration(seconds) == rough


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


class Screen(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Screen(), "a\ufffd[31m\tb\n"), (io.StringIO(), "a\x1b[31m\tb\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        output.print_data("a\x1b[31m\tb")
        assert stream.getvalue() == shown


# One of each kind: escape, C1, delete, override, isolate, mark, separator, unseen, half a letter.
HOSTILE = "\x1b\x9b\x7f\u202e\u2066\u200f\u061c\u2028\u200b\ufeff\ud800\U000e0041"


def test_whatever_is_printed_is_harmless_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    output.print_data(HOSTILE)
    output.print_note(HOSTILE)
    output.print_error(UsageError(HOSTILE), HOSTILE, as_json=False)
    output.print_table([(HOSTILE,)], header=(HOSTILE,))
    monkeypatch.setenv("NO_COLOR", "1")
    output.print_aside(HOSTILE)
    output.ProgressBar(screen)(1, 1, HOSTILE)
    _set_up_logging(debug=False)
    logging.getLogger("kvq").warning(HOSTILE)
    shown = screen.getvalue()
    assert not set(HOSTILE) & set(shown)
    assert shown.count("\ufffd") >= 6 * (len(HOSTILE) - 1)
    # Joiners are a part of texts, not of names.
    output.print_data("a\u200db")
    output.print_note("a\u200db")
    assert screen.getvalue().endswith("a\u200db\na\ufffdb\n")


def test_json_escapes_what_is_not_harmless_and_says_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = {"name": HOSTILE + "\u200dé你"}
    for show in (output.print_json, output.print_json_line):
        show(value)
        shown = capsys.readouterr().out
        assert json.loads(shown) == value
        assert not set(HOSTILE) & set(shown)
        assert "\\u202e" in shown
        assert "é你" in shown


def test_columns_of_wide_letters_stand_in_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table([("模型", "a"), ("name", "b"), ("cafe\u0301", "c"), ("two\nlines", "d")])
    assert capsys.readouterr().out.splitlines() == [
        "模型       a",
        "name       b",
        "cafe\u0301       c",
        "two lines  d",
    ]


@pytest.mark.parametrize(
    "words", [["--\x1b[2J"], ["run", "--\x1b[2J"], ["\x1b[2J"], ["run", "-n", "\x1b"]]
)
def test_what_was_typed_is_repeated_without_its_escapes(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(words) == 2
    assert "error: " in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


@pytest.mark.parametrize(("words", "package"), [("serve", "uvicorn"), ("serve", "starlette")])
def test_a_missing_extra_is_named(words: str, package: str) -> None:
    """In an installation without it, which `None` among the modules stands for."""
    program = (
        "import sys; sys.modules[sys.argv[1]] = None; from kvq_apps.cli import main; "
        "sys.exit(main(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", program, package, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    message = f'this needs {package}; install it with `pip install "kvq-runtime[apps]"`'
    assert done.stderr == f"error: {message}\n"
