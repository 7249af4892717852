"""What the shells complete: the scripts are run by the shells themselves where they are there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvq.config import PAGE_WIDTHS
from kvq_apps.cli import COMMANDS, SHELLS, build_parser, main
from kvq_apps.settings.shell_completion import SCRIPTS, offers

# The program that the shells ask, with models that nobody has made.
PROGRAM = """
import sys
from kvq_apps.cli import main
from kvq_apps.names import model_path, pull_request
model_path.known_names = lambda: {"nano": None, "qwen3": None}
pull_request.names = lambda: ["smollm2-135m", "llama3.2:1b"]
sys.exit(main(sys.argv[1:]))
"""
# Types the line and prints what is offered for its last word.
ASK = """
kvq() { "$PYTHON" -c "$PROGRAM" "$@"; }
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_kvq
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PROGRAM", PROGRAM)


@pytest.fixture
def script(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Path:
    shell = request.param
    with pytest.raises(SystemExit) as end:
        main(["--completion", shell])
    assert end.value.code == 0
    path = tmp_path / f"kvq.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def bash(script: Path, *words: str) -> set[str]:
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("bash is not installed")
    finished = subprocess.run(
        [shell, "--norc", "-c", ASK, "bash", str(script), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stderr == ""
    return set(finished.stdout.split())


def flags_of(name: str) -> set[str]:
    command = build_parser(name).command
    assert command is not None
    return command.spellings


def completed(line: str) -> dict[str, str]:
    """What may stand at the end of `line`, and what it means."""
    rows = offers(line, build_parser, {name: summary for name, (_, summary) in COMMANDS.items()})
    return {word: text for word, _, text in (row.partition("\t") for row in rows)}


def test_every_flag_is_offered_and_says_what_it_does() -> None:
    for name in COMMANDS:
        texts = completed(f"kvq {name} -")
        assert texts.keys() == flags_of(name) - {"--engine"}
        assert all(texts.values())
    assert completed("kvq run --predi")["--predict"] == (
        "new tokens at most, -1: until the context is full"
    )
    assert completed("kvq run --kv=8:")["--kv=8:2"] == ""
    assert completed("kvq run --chat --temp 0  -m nan").keys() == {"nano"}
    assert completed("kvq run ") == {}


def test_flags_are_offered_before_anything_slow_is_loaded() -> None:
    code = (
        "import sys; from kvq_apps.cli import main\ntry: main(['--complete-line', 'kvq run -'])\n"
    )
    code += "finally: assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_offers_commands_flags_and_choices(script: Path) -> None:
    assert bash(script, "kvq", "") == set(COMMANDS)
    assert bash(script, "kvq", "e") == {"embed", "export", "eval"}
    assert bash(script, "kvq", "--") == {"--help", "--version", "--completion"}
    assert bash(script, "kvq", "--completion", "") == set(SHELLS)
    assert bash(script, "kvq", "run", "--kv") == {
        "--kv",
        "--kv-budget",
        "--kv-offload",
        "--kv-policy",
        "--kv-predict",
        "--kv-predict-with",
        "--kv-read",
    }
    assert bash(script, "kvq", "run", "--backend", "f") == {"float"}
    assert bash(script, "kvq", "export", "--format", "") == {"onnx", "gguf", "both"}
    assert bash(script, "kvq", "run", "-m", "") == {"default", "nano", "qwen3"}
    assert bash(script, "kvq", "inspect", "q") == {"qwen3"}
    assert bash(script, "kvq", "pull", "s") == {"smollm2-135m"}
    assert bash(script, "kvq", "pull", "llama3.2:") == {"1b"}
    assert bash(script, "kvq", "models", "") == {"rm", "fit", "default", "nano", "qwen3"}
    assert bash(script, "kvq", "run", "--kv-policy", "s") == {"snapkv", "streaming"}
    # A colon begins a word of the shell, which then replaces only what follows it.
    assert bash(script, "kvq", "run", "--kv", "8") == {f"8:{bits}" for bits in PAGE_WIDTHS}
    assert bash(script, "kvq", "run", "--kv", "4:") == set(map(str, PAGE_WIDTHS))
    assert bash(script, "kvq", "run", "--kv=f") == {"fp"}
    # Nothing of ours: the shell then offers files.
    assert bash(script, "kvq", "export", "") == set()
    assert bash(script, "kvq", "run", "--json-schema", "") == set()
    assert bash(script, "kvq", "run", "-") == flags_of("run")


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_registers_the_function(script: Path) -> None:
    shell = shutil.which("bash") or pytest.skip("bash is not installed")
    finished = subprocess.run(
        [shell, "--norc", "-c", 'source "$1"; complete -p kvq', "bash", str(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == "complete -o default -F _kvq kvq\n"


@pytest.mark.parametrize("script", ["zsh", "fish"], indirect=True)
def test_zsh_and_fish_read_the_script(script: Path) -> None:
    shell = shutil.which(script.suffix[1:])
    if shell is None:
        pytest.skip(f"{script.suffix[1:]} is not installed")
    finished = subprocess.run(
        [shell, "-n", str(script)], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes(script: Path) -> None:
    shell = shutil.which("fish") or pytest.skip("fish is not installed")

    def offered(line: str) -> set[str]:
        models = "function kvq; $PYTHON -c $PROGRAM $argv; end"
        ask = f"{models}; source $argv[1]; complete -C $argv[2]"
        finished = subprocess.run(
            [shell, "--no-config", "-c", ask, str(script), line],
            capture_output=True,
            text=True,
            check=True,
            cwd=script.parent,
        )
        assert finished.stderr == ""
        return {answer.split("\t")[0] for answer in finished.stdout.splitlines()}

    assert offered("kvq e") == {"embed", "export", "eval"}
    assert offered("kvq run --kv 8:") == {f"8:{bits}" for bits in PAGE_WIDTHS}
    assert offered("kvq run --kv-policy s") == {"snapkv", "streaming"}
    assert offered("kvq export --format ") == {"onnx", "gguf", "both"}
    assert offered("kvq run -m q") == {"qwen3"}


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_completes(script: Path) -> None:
    shell = shutil.which("zsh") or pytest.skip("zsh is not installed")
    # The shell's own terminal, for its completion works in a line editor alone; a widget prints
    # what the line became, so that nothing has to be read from a screen.
    start = f"""
        zmodload zsh/zpty; zpty asked {shell} -f -i
        zpty -w asked 'PS1=; autoload -U compinit; compinit -D -u; setopt no_list_ambiguous'
        zpty -w asked 'kvq() {{ $PYTHON -c $PROGRAM "$@" }}; source {script}; cd {script.parent}'
        zpty -w asked 'show() {{ zle expand-or-complete; print -r -- "<$BUFFER>"; BUFFER= }}'
        zpty -w asked 'zle -N show; bindkey "^T" show'
        for line in $@; do
            zpty -w -n asked $line$'\\x14'; zpty -r asked answer "*<$line*>*"
            print -r -- ${{${{answer##*<}}%%>*}}
        done"""
    lines = [
        "kvq ex",
        "kvq run --kv 8:2",
        "kvq run --kv-policy sn",
        "kvq run -m q",
        "kvq run --predi",
    ]
    finished = subprocess.run(
        [shell, "-f", "-c", start, "zsh", *lines],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert finished.stdout.splitlines() == [
        "kvq export ", "kvq run --kv 8:2 ", "kvq run --kv-policy snapkv ", "kvq run -m qwen3 ",
        "kvq run --predict ",
    ]  # fmt: skip


def test_the_shells_of_the_flag_are_those_with_a_script() -> None:
    assert set(SHELLS) == set(SCRIPTS)
