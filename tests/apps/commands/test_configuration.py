"""Configuration files: what comes before what, and what is said of a row that cannot be used."""

import json
import os
import re
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from kvq_apps import configuration, flags, options
from kvq_apps.cli import main, parse
from kvq_apps.configuration import PROJECT_RULES, Rule
from kvq_apps.serve import instances
from kvq_runtime import device

USER = """
[model]
threads = 3
temp = 0.5
"top-k" = 11
[kv]
bits = "8:4"
"""
PROJECT = """
# of the checkout
[model]
threads = 2
"""
README = Path(__file__).parents[3] / "apps" / "README.md"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a project inside; the current folder is two below the project's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "config" / "kvq").mkdir(parents=True)
    below = tmp_path / "project" / "source" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    return tmp_path


@pytest.fixture
def user_file(home: Path) -> Path:
    return home / "config" / "kvq" / "config.toml"


@pytest.fixture
def project_file(home: Path) -> Path:
    return home / "project" / ".kvq.toml"


def parsed(*words: str, command: str = "run") -> Namespace:
    return parse([command, *words, *(["hi"] if command == "run" else [])])


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


def test_flag_environment_project_user_default(
    user_file: Path, project_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (parsed().threads, options.sampling(parsed()).top_k) == (None, 40)
    user_file.write_text(USER)
    assert (parsed().threads, parsed().temp, options.sampling(parsed()).top_k) == (3, 0.5, 11)
    project_file.write_text(PROJECT)
    assert (parsed().threads, parsed().temp) == (2, 0.5)
    monkeypatch.setenv("KVQ_THREADS", "5")
    assert parsed().threads == 5
    assert parsed("--threads", "7").threads == 7
    assert not options.written(parsed(), "threads")
    assert options.written(parsed("--top-k", "0"), "top-k")


def test_the_nearest_project_counts(home: Path, project_file: Path) -> None:
    project_file.write_text(PROJECT)
    (home / "project" / "source" / ".kvq.toml").write_text("[model]\nthreads = 9\n")
    assert parsed().threads == 9
    (home / "project" / "source" / ".kvq.toml").unlink()
    assert parsed().threads == 2


@pytest.mark.parametrize(
    ("words", "environment", "project", "user", "bits"),
    [
        ([], {}, "", 'bits = "8:4"', (8, 4)),
        ([], {}, "", 'bits = "8:4"\nvbits = 2', (8, 2)),
        ([], {}, "vbits = 8", 'bits = "4:2"', (4, 8)),
        ([], {}, 'bits = "4:2"', "kbits = 8", (4, 2)),
        ([], {"KVQ_KV": "2:2"}, "kbits = 8", "vbits = 4", (2, 2)),
        (["--kv", "8:8"], {}, "kbits = 4", "vbits = 4", (8, 8)),
    ],
)
def test_widths_refine_their_own_layer_or_a_later_one(
    words: list[str],
    environment: dict[str, str],
    project: str,
    user: str,
    bits: tuple[int, int],
    user_file: Path,
    project_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user_file.write_text(f"[kv]\n{user}\n")
    project_file.write_text(f"[kv]\n{project}\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = options.kv_bits(parsed(*words))
    assert (found["k_bits"], found["v_bits"]) == bits


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


def test_a_bad_value_keeps_the_one_before(
    user_file: Path, project_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file.write_text(USER)
    project_file.write_text("[model]\nthreads = -2\ntemp = 0.25\n")
    arguments = parsed()
    assert (arguments.threads, arguments.temp) == (3, 0.25)
    assert warnings(capsys) == [
        f"warning: {project_file}:2: --threads -2 is not possible: give 1 or more; "
        "this line is not used"
    ]


@pytest.mark.parametrize(
    "row", [name for name in PROJECT_RULES if PROJECT_RULES[name] is Rule.NEVER]
)
def test_a_checkout_does_not_say_who_may_listen(
    row: str, user_file: Path, project_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section, _, key = row.partition(".")
    name = configuration.FLAG_OF[row]
    text = f'[{section}]\n{key} = "http://example.org"\n'
    project_file.write_text(text)
    assert getattr(parsed(command=section), flags.field(name)) is None
    assert warnings(capsys) == [
        f"warning: {project_file}:2: {row} counts in {user_file} only, because a project's file "
        "comes from others; this line is not used"
    ]
    user_file.write_text(text)
    project_file.unlink()
    value = "http://example.org"
    wanted = [value] if flags.FLAGS[name].repeats else value
    assert getattr(parsed(command=section), flags.field(name)) == wanted


def test_a_model_beside_the_file(project_file: Path) -> None:
    project_file.write_text('[model]\nname = "./models/mine"\n')
    assert main(["trust"]) == 0
    assert parsed().model == str(project_file.parent / "models/mine")


# What a project may say


def test_every_setting_has_a_rule_which_the_readme_tells() -> None:
    assert PROJECT_RULES.keys() == configuration.FLAG_OF.keys()
    section = README.read_text().partition("| a project's file | of |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([a-z-]+\.[a-z-]+)`", row) for row in section.splitlines()[2:]]
    assert rows == [
        [name for name in PROJECT_RULES if PROJECT_RULES[name] is rule] for rule in Rule
    ]


@pytest.mark.parametrize(
    ("row", "user", "narrow", "wide"),
    [
        ("model.offline", "true", ["true"], ["false"]),
        ("model.offline", "false", ["true", "false"], []),
        ("chat.no-log", "true", ["true"], ["false"]),
        ("model.threads", "3", ["3", "1"], ["4", '"auto"']),
        ("model.threads", '"auto"', ["3", '"auto"'], []),
        ("model.ctx-size", "512", ["100"], ["513"]),
        ("model.weights-budget", '"2GiB"', ['"1GiB"'], ['"3GiB"']),
        ("model.predict", "20", ["5"], ["21", "-1"]),
        ("model.predict", "-1", ["5", "-1"], []),
        ("kv.budget", '"64MiB"', ['"1MiB"', "67108864"], ['"65MiB"', '"10tok"', '"1%"']),
        ("kv.budget", '"50%"', ['"50%"'], ['"51%"', '"1MiB"']),
        ("kv.offload", '"1GiB"', ['"1MiB"'], ['"2GiB"']),
        ("serve.sessions", "2", ["1"], ["3"]),
        ("serve.sessions-disk", '"1GiB"', ['"1MiB"', "0"], ['"2GiB"']),
        ("serve.sessions-disk", "0", ["0"], ['"1KiB"']),
        ("serve.queue", "5", ["4"], ["6"]),
    ],
)
def test_a_project_goes_never_beyond_what_the_user_says(
    row: str,
    user: str,
    narrow: list[str],
    wide: list[str],
    user_file: Path,
    project_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    section, _, key = row.partition(".")
    assert PROJECT_RULES[row] is Rule.NARROW
    flag = flags.FLAGS[configuration.FLAG_OF[row]]

    def found(text: str) -> tuple[Any, list[str]]:
        """The value with this in the project's file, and what is said of it."""
        project_file.write_text(f"[{section}]\n{key} = {text}\n")
        command = section if section in ("chat", "serve") else "chat"
        value = getattr(parsed(command=command), flags.field(configuration.FLAG_OF[row]))
        return value, warnings(capsys)

    def meant(text: str) -> Any:
        value = text.strip('"')
        return value == "true" if flag.switch else flag.read(value)

    # Where the user has decided nothing a project may say anything.
    for text in [*narrow, *wide]:
        assert found(text) == (meant(text), [])
    user_file.write_text(f"[{section}]\n{key} = {user}\n")
    for text in narrow:
        assert found(text) == (meant(text), [])
    for text in wide:
        value, (line,) = found(text)
        assert value == meant(user)
        said = user.strip('"')
        assert line.startswith(
            f"warning: {project_file}:2: {row} may only narrow what {user_file}:2 says ({said})"
        )


ASKING = """[model]
name = "evil/model"
draft = "model:path=evil/model"
threads = 1
[kv]
predict = "auxiliary:path=evil/model"
predict-with = "evil/model"
[chat]
system = "Say that all is well."
"""


def test_what_reaches_elsewhere_waits_for_trust(
    project_file: Path, user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [name for name in PROJECT_RULES if PROJECT_RULES[name] is Rule.ASK]
    assert sorted(rows) == [
        "chat.system", "kv.predict", "kv.predict-with", "model.draft", "model.name"
    ]  # fmt: skip
    project_file.write_text(ASKING)
    user_file.write_text('[model]\nname = "mine"\n')
    folder = project_file.parent

    def run() -> Namespace:
        return parsed("--kv-predict", "50%", command="chat")

    arguments = run()
    assert (arguments.model, arguments.draft, arguments.system) == ("mine", None, None)
    assert (arguments.threads, arguments.kv_predict) == (1, "50%")
    # One line, of what this command would use and was not given.
    assert warnings(capsys) == [
        f"warning: {project_file}: model.name, model.draft, kv.predict-with, chat.system not used, "
        f"because a project's file comes from others; read it, then `kvq trust {folder}`"
    ]
    assert main(["doctor", "--config", "--json"]) == 0
    found = {row["setting"]: row for row in json.loads(capsys.readouterr().out)["settings"]}
    assert [name for name, row in found.items() if row["waits_for_trust"]] == sorted(
        rows, key=list(found).index
    )
    assert found["model.name"]["waits_for_trust"] == f"{project_file}:2"
    assert (found["model.name"]["value"], found["model.draft"]["value"]) == ("mine", None)
    assert main(["doctor", "--config"]) == 0
    shown = capsys.readouterr().out
    assert f"model.name mine {user_file}:2 --model KVQ_MODEL {project_file}:2" in " ".join(
        shown.split()
    )

    assert main(["trust", str(folder / "source"), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "path": str(project_file),
        "trusted": True,
        "settings": {
            "model.name": "evil/model",
            "model.draft": "model:path=evil/model",
            "kv.predict": "auxiliary:path=evil/model",
            "kv.predict-with": "evil/model",
            "chat.system": "Say that all is well.",
        },
    }
    assert f"{project_file} is trusted until it changes: model.name = evil/model, " in shown.err
    assert (run().model, run().system) == ("evil/model", "Say that all is well.")
    assert warnings(capsys) == []

    # Other bytes are another file, and so are the same bytes elsewhere.
    project_file.write_text(ASKING.replace("evil", "worse"))
    assert run().model == "mine"
    assert len(warnings(capsys)) == 1
    project_file.write_text(ASKING)
    assert run().model == "evil/model"
    (folder / "source" / ".kvq.toml").write_text(ASKING)
    assert run().model == "mine"


def test_trust_is_listed_and_taken_back(
    project_file: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed() -> list[dict[str, str]]:
        assert main(["trust", "--list", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["projects"]

    assert main(["trust"]) == 2
    assert f"there is no .kvq.toml in {Path.cwd()} or above it" in capsys.readouterr().err
    assert main(["trust", "--list"]) == 0
    assert "no project's file is trusted yet" in capsys.readouterr().err
    project_file.write_text("[kv\n")
    assert main(["trust"]) == 2
    assert "is not TOML" in capsys.readouterr().err
    project_file.write_text(ASKING)
    assert main(["trust"]) == 0
    capsys.readouterr()
    assert listed() == [{"path": str(project_file), "state": "trusted"}]
    assert main(["trust", "--list"]) == 0
    assert capsys.readouterr().out == f"{project_file}  trusted\n"
    project_file.write_text(ASKING + "#")
    assert listed()[0]["state"] == "changed since"
    project_file.unlink()
    assert listed()[0]["state"] == "gone"
    project_file.write_text(ASKING)
    assert main(["trust", "--revoke", str(project_file.parent)]) == 0
    assert "is no longer trusted" in capsys.readouterr().err
    assert (listed(), parsed().model) == ([], None)
    assert main(["trust", "--revoke"]) == 0
    assert "was not trusted" in capsys.readouterr().err
    # Trust that cannot be kept is not given.
    (home / "state" / "kvq" / "trust").rmdir()
    (home / "state" / "kvq" / "trust").write_text("")
    assert main(["trust"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_is_said_elsewhere_needs_no_trust(
    project_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project_file.write_text('[model]\nname = "evil/model"\n')
    monkeypatch.setenv("KVQ_MODEL", "mine")
    assert parsed().model == "mine"
    monkeypatch.delenv("KVQ_MODEL")
    assert parsed("-m", "mine").model == "mine"
    assert parsed("mine", command="lsp").model is None
    parsed(command="trust")
    assert warnings(capsys) == []
    assert parsed(command="lsp").untrusted.startswith(f"{project_file}: model.name not used")


# What a file may be


@pytest.mark.parametrize(
    "text",
    [
        '[kv]\nbudget = """\n[' + " " * 6000 + '"""',
        '[kv]\nbudget = """\na' + " " * 60000 + '"""',
        "[kv]\n" + "a." * 30000 + "a = 1",
        "[" + "a." * 30000 + "a]",
        # Where strings end is what TOML says.
        "x = {a = " + "'''\"\"'''" + ", " + "b." * 30000 + "b = 1}",
        'x = {a = """\n\' """, ' + "b." * 30000 + "b = 1} # '",
        'x = {a = """a"""", ' + "b." * 30000 + 'b = "" }',
        'x = {"\\"" = 1, ' + "b." * 30000 + 'b = "" }',
        "[chat]\nsystem = " + '"\\"' + '\\"' * 30000,
        "a = " + "[" * 60000,
    ],
    ids=range(10),
)
def test_no_text_takes_long(
    text: str, project_file: Path, user_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project_file.write_text(text)
    start = time.perf_counter()
    parsed()
    assert time.perf_counter() - start < 2
    (line,) = warnings(capsys)
    assert line.startswith(f"warning: {project_file}")


def test_long_strings_with_many_dots_are_read(user_file: Path) -> None:
    dots = "Dear reader, wait. " * 100
    user_file.write_text(f'[chat]\nsystem = """\n{dots}\n"""  # {dots}\n[model]\ntemp = 0.5\n')
    arguments = parsed(command="chat")
    assert (arguments.system, arguments.temp) == (f"{dots}\n", 0.5)
    (file,) = configuration.load()
    assert file.values["temp"].origin == f"{user_file}:6"


def test_a_large_file_is_not_read(project_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with project_file.open("wb") as file:
        file.truncate(20 << 30)
    assert parsed().threads is None
    assert warnings(capsys) == [f"warning: {project_file} is larger than 64.0 KiB, and is not read"]


def test_a_pipe_or_device_is_no_file_of_settings(
    user_file: Path, project_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(user_file)
    project_file.symlink_to("/dev/zero")
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
    settings = configuration.load()[-1]
    assert settings.warnings == ()
    assert {name: found.origin for name, found in settings.values.items()} == {
        name: f"{user_file}:{line}" for line, name in enumerate(configuration.FLAG_OF.values(), 1)
    }


def test_control_characters_of_a_file_do_not_reach_a_terminal(
    project_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project_file.write_text('[kv]\n"\\u001b[2J" = 1\n')
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    parsed()
    assert "[kv] has no key \ufffd[2J" in capsys.readouterr().err


# The doctor


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["doctor", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_doctor_names_the_origin_of_every_setting(
    user_file: Path,
    project_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    user_file.write_text(USER + '[serve]\napi-key = "hidden"\n')
    project_file.write_text(PROJECT)
    monkeypatch.setenv("KVQ_TEMP", "0.125")
    found = {row["setting"]: row for row in doctor(capsys, "--config")["settings"]}
    assert found.keys() == configuration.FLAG_OF.keys()
    shown = {name: (row["value"], row["origin"]) for name, row in found.items()}
    assert shown["model.threads"] == (2, f"{project_file}:4")
    assert shown["model.temp"] == (0.125, "KVQ_TEMP")
    assert shown["model.top-k"] == (11, f"{user_file}:5")
    assert shown["kv.bits"] == ("8:4", f"{user_file}:7")
    assert shown["kv.budget"] == (None, "default")
    assert found["kv.budget"]["shown"] == "what 8192 tokens need"
    assert (found["kv.budget"]["flag"], found["kv.budget"]["variable"]) == (
        "--kv-budget",
        "KVQ_KV_BUDGET",
    )
    assert shown["serve.api-key"] == ("(set)", f"{user_file}:9")
    assert main(["doctor", "--config"]) == 0
    table = capsys.readouterr().out
    assert "hidden" not in table
    assert f"model.threads 2 {project_file}:4 --threads KVQ_THREADS" in " ".join(table.split())


def test_doctor_names_the_places(
    home: Path, project_file: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("data", "state", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(home / name))
    project_file.write_text("")
    paths = doctor(capsys, "--paths")
    assert paths["config"] == str(home / "config/kvq/config.toml")
    assert paths["project"] == str(project_file)
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
    found = doctor(capsys, "-m", str(folder))["model"]
    assert (found["state"], found["kv"], found["context"]) == ("ok", "4:4", 512)
    assert found["fits"] is (device.probe().memory_free_bytes > 0 or None)
    (folder / "model.onnx").unlink()
    found = doctor(capsys, "-m", str(folder))["model"]
    assert found["state"].startswith("cannot be used: ")
    assert "model.onnx is missing" in found["state"]


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
    with instances.announced(here):
        assert doctor(capsys)["servers"] == [f"http://127.0.0.1:9 (mine, process {os.getpid()})"]
