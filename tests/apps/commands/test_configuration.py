"""The user's file: what comes before what, and what is said of a row that cannot be used."""

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from kvq_apps.cli import main, parse
from kvq_apps.serve import instances
from kvq_apps.settings import configuration, flags, options
from kvq_runtime.machine import device

USER = """
[model]
threads = 3
temp = 0.5
"top-k" = 11
[kv]
bits = "8:4"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a folder of settings; the current folder is another."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "kvq").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


@pytest.fixture
def user_file(home: Path) -> Path:
    return home / "config" / "kvq" / "config.toml"


def parsed(*words: str, command: str = "run") -> Namespace:
    return parse([command, *words, *(["hi"] if command == "run" else [])])


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


def test_flag_environment_file_default(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parsed().threads, options.sampling(parsed()).top_k) == (None, 40)
    user_file.write_text(USER)
    assert (parsed().threads, parsed().temp, options.sampling(parsed()).top_k) == (3, 0.5, 11)
    monkeypatch.setenv("KVQ_THREADS", "5")
    assert (parsed().threads, parsed().temp) == (5, 0.5)
    assert parsed("--threads", "7").threads == 7
    assert not options.on_command_line(parsed(), "threads")
    assert options.on_command_line(parsed("--top-k", "0"), "top-k")


def test_a_file_of_a_checkout_has_no_meaning(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file.write_text("[model]\ntop-k = 3\n")
    Path(".kvq.toml").write_text('[model]\nthreads = 2\nname = "evil/model"\n[kv\n')
    arguments = parsed()
    assert (arguments.threads, arguments.model, arguments.top_k) == (None, None, 3)
    assert warnings(capsys) == []


@pytest.mark.parametrize(
    ("words", "environment", "user", "bits"),
    [
        ([], {}, 'bits = "8:4"', (8, 4)),
        ([], {}, 'bits = "8:4"\nvbits = 2', (8, 2)),
        ([], {"KVQ_VBITS": "8"}, 'bits = "4:2"', (4, 8)),
        ([], {"KVQ_KV": "2:2"}, "kbits = 8\nvbits = 4", (2, 2)),
        (["--kv", "8:8"], {"KVQ_KBITS": "4"}, "vbits = 4", (8, 8)),
    ],
)
def test_widths_refine_their_own_layer_or_a_later_one(
    words: list[str],
    environment: dict[str, str],
    user: str,
    bits: tuple[int, int],
    user_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user_file.write_text(f"[kv]\n{user}\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    widths = options.kv_bits(parsed(*words))
    assert (widths["k_bits"], widths["v_bits"]) == bits


def test_a_section_counts_for_its_command(user_file: Path) -> None:
    user_file.write_text('[chat]\nsystem = "Be brief."\n[serve]\nalias = ["a", "b"]\nport = 0\n')
    assert parsed().system is None
    assert parsed(command="chat").system == "Be brief."
    assert parsed(command="serve").alias == ["a", "b"]
    assert parsed(command="serve").port == 0


def test_a_switch_is_true_or_false(user_file: Path) -> None:
    user_file.write_text("[chat]\nno-log = true\ninline = false\n")
    arguments = parsed(command="chat")
    assert (arguments.no_log, arguments.inline) == (True, False)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("[kv]\nbudgt = 1", "2: [kv] has no key budgt; did you mean budget?"),
        ("[kv]\nsize = 1", "2: [kv] has no key size; known: kbits, vbits, bits, budget, offload"),
        ("\n\n[lsp]\ndrafts = 3", "4: [lsp] has no key drafts; known: none yet"),
        ("kv.budgt = 1", "1: [kv] has no key budgt"),
        ("[modl]\nthreads = 3", "1: there is no section modl; known: [model], [kv], [chat]"),
        ("kv = 3", "1: kv is a section; write [kv]"),
        ('[kv]\n\n"bits" = "9:9"', "3: --kv 9:9 is not possible: choose 8, 6, 4 or 2"),
        ("[kv]\nbits = [4]", "2: kv.bits needs text or a number"),
        ('[kv]\nbudget = "lots"', "2: --kv-budget 'lots' is not possible"),
        ('[kv]\npolicy = "best"', "2: --kv-policy 'best' is unknown; possible: "),
        ("[model]\nthreads = 0", "2: --threads 0 is not possible: give 1 or more"),
        ("[model]\nthreads = 1.5", "2: model.threads=1.5 is not possible: '1.5' is not a whole"),
        ("[model]\ntemp = true", "2: model.temp needs text or a number"),
        ("[model]\ntemp = -1", "2: --temp -1.0 is not possible: give 0 (greedy) or more"),
        ("[model]\ntop-p = nan", "2: --top-p nan is not possible"),
        ('[model]\nbackend = "cuda"', "2: model.backend=cuda is not possible: choose auto, onnx"),
        ("[chat]\nno-log = 1", "2: chat.no-log needs true or false"),
        ("[serve]\nport = 70000", "2: --port 70000 is not possible: give 0"),
        ("[serve]\nalias = [1.5, []]", "2: serve.alias needs text or a number"),
        ("[model]\nthreads = 0x1" + "0" * 5000, "2: model.threads has more digits than any number"),
        ("[model]\nthreads = 1" + "0" * 5000, " is not TOML: Exceeds the limit"),
        ("[kv\n", " is not TOML: "),
        ("\xff", " is not UTF-8 at byte 0"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_warning_with_its_line(
    row: str, words: str, user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file.write_bytes(row.encode("latin-1"))
    for command in ("run", "serve"):
        arguments = parsed(command=command)
        lines = warnings(capsys)
        assert len(lines) == 1
        colon = "" if words.startswith(" ") else ":"
        assert lines[0].startswith(f"warning: {user_file}{colon}{words}")
        # Nothing but the defaults is left.
        assert options.session_options(arguments) == {}
        assert arguments.threads is arguments.temp is arguments.backend is None


def test_a_bad_value_leaves_the_others(user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user_file.write_text("[model]\nthreads = -2\ntemp = 0.25\n")
    arguments = parsed()
    assert (arguments.threads, arguments.temp) == (None, 0.25)
    assert warnings(capsys) == [
        f"warning: {user_file}:2: --threads -2 is not possible: give 1 or more; "
        "this line is not used"
    ]


def test_a_model_beside_the_file(user_file: Path) -> None:
    user_file.write_text('[model]\nname = "./models/mine"\n')
    assert parsed().model == str(user_file.parent / "models/mine")


# What a file may be


def test_text_deeper_than_the_parser_goes_is_one_warning(
    user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file.write_text("a = " + "[" * 60000)
    parsed()
    (line,) = warnings(capsys)
    assert line.startswith(f"warning: {user_file} is not TOML: ")


def test_long_strings_are_read_and_their_lines_counted(user_file: Path) -> None:
    dots = "Dear reader, wait. " * 100
    user_file.write_text(f'[chat]\nsystem = """\n{dots}\n"""  # {dots}\n[model]\ntemp = 0.5\n')
    arguments = parsed(command="chat")
    assert (arguments.system, arguments.temp) == (f"{dots}\n", 0.5)
    assert configuration.load().values["temp"].origin == f"{user_file}:6"


def test_a_large_file_is_not_read(user_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with user_file.open("wb") as file:
        file.truncate(20 << 30)
    assert parsed().threads is None
    assert warnings(capsys) == [f"warning: {user_file} is larger than 64.0 KiB, and is not read"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_is_no_file_of_settings(
    kind: str, user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "pipe":
        os.mkfifo(user_file)
    else:
        user_file.symlink_to("/dev/zero")
    assert parsed().threads is None
    assert warnings(capsys) == [f"warning: {user_file} is no regular file, and is not read"]


def test_every_setting_is_of_a_known_section_and_read_back(user_file: Path) -> None:
    assert {row.partition(".")[0] for row in configuration.FLAG_OF} <= set(configuration.SECTIONS)
    sample = {"kv.bits": "4:2", "kv.budget": "64MiB", "kv.policy": "h2o", "model.draft": "auto"}
    sample |= {"kv.read": "25%", "kv.predict": "50%"}
    sample |= {"model.top-p": 1, "kv.kbits": 4, "kv.vbits": 4, "model.min-p": 0.1}
    rows: list[str] = []
    for row, name in configuration.FLAG_OF.items():
        flag = flags.FLAGS[name]
        usual = True if flag.switch else next(iter(flag.choices)) if flag.choices else 2
        rows.append(f"{row} = {json.dumps(sample.get(row, usual))}")
    user_file.write_text("\n".join(rows))
    settings = configuration.load()
    assert settings.warnings == ()
    assert {name: flag_value.origin for name, flag_value in settings.values.items()} == {
        name: f"{user_file}:{line}" for line, name in enumerate(configuration.FLAG_OF.values(), 1)
    }


def test_control_characters_of_a_file_do_not_reach_a_terminal(
    user_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file.write_text('[kv]\n"\\u001b[2J" = 1\n')
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    parsed()
    assert "[kv] has no key \ufffd[2J" in capsys.readouterr().err


# The doctor


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["doctor", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_doctor_names_the_origin_of_every_setting(
    user_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file.write_text(USER + '[serve]\napi-key = "hidden"\n')
    monkeypatch.setenv("KVQ_TEMP", "0.125")
    rows = {row["setting"]: row for row in doctor(capsys, "--config")["settings"]}
    assert rows.keys() == configuration.FLAG_OF.keys()
    shown = {name: (row["value"], row["origin"]) for name, row in rows.items()}
    assert shown["model.threads"] == (3, f"{user_file}:3")
    assert shown["model.temp"] == (0.125, "KVQ_TEMP")
    assert shown["model.top-k"] == (11, f"{user_file}:5")
    assert shown["kv.bits"] == ("8:4", f"{user_file}:7")
    assert shown["kv.budget"] == (None, "default")
    assert rows["kv.budget"]["shown"] == "what 8192 tokens need"
    assert (rows["kv.budget"]["flag"], rows["kv.budget"]["variable"]) == (
        "--kv-budget",
        "KVQ_KV_BUDGET",
    )
    assert shown["serve.api-key"] == ("(set)", f"{user_file}:9")
    assert main(["doctor", "--config"]) == 0
    table = capsys.readouterr().out
    assert "hidden" not in table
    assert f"model.threads 3 {user_file}:3 --threads KVQ_THREADS" in " ".join(table.split())


def test_doctor_names_the_places(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data", "state", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(home / name))
    paths = doctor(capsys, "--paths")
    assert paths["config"] == str(home / "config/kvq/config.toml")
    for name in ("data", "state", "cache"):
        assert paths[name] == str(home / name / "kvq")
    assert paths["bundles"] == str(home / "cache/kvq/bundles")


def test_doctor_says_whether_the_model_fits(
    bundle: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    folder = Path(shutil.copytree(bundle, home / "bundle"))
    assert doctor(capsys, "-m", "nano")["model"] == {
        "name": "nano",
        "state": "is exported on first use",
    }
    model = doctor(capsys, "-m", str(folder))["model"]
    assert (model["state"], model["kv"], model["context"]) == ("ok", "4:4", 512)
    assert model["fits"] is (device.probe().memory_free_bytes > 0 or None)
    (folder / "model.onnx").unlink()
    model = doctor(capsys, "-m", str(folder))["model"]
    assert model["state"].startswith("cannot be used: ")
    assert "model.onnx is missing" in model["state"]


def test_doctor_finds_editors_and_servers(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    editor = home / "bin" / "nvim"
    editor.parent.mkdir()
    editor.write_text("#!/bin/sh\n")
    editor.chmod(0o755)
    monkeypatch.setenv("PATH", str(editor.parent))
    here = instances.Instance(pid=os.getpid(), url="http://127.0.0.1:9", model="mine")
    report = doctor(capsys)
    assert (report["editors"], report["servers"]) == ({"nvim": str(editor)}, [])
    with instances.announce(here):
        assert doctor(capsys)["servers"] == [f"http://127.0.0.1:9 (mine, process {os.getpid()})"]
