"""kvq sends nothing: what its processes look up, connect to and leave behind is watched."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench_bundles import need
from environment import environment_in

ROOT = Path(__file__).parents[2]
SOURCES = ("kvq", "models", "runtime", "specdraft", "export", "apps")
# ONNX Runtime 1.32 looks its collector's name up where a process has lived for eight seconds.
IDLE_S = 10
COMMAND = f"""
import sys, time
from kvq_apps.cli import main
code = main(sys.argv[1:])
time.sleep({IDLE_S})
raise SystemExit(code)
"""
# An embedded model, which is exported first.
RUN_FLAGS = ("-m", "nano", "-n", "4", "--backend", "onnx", "def f")
Watched = Callable[..., str]


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library which, preloaded, writes down and refuses what leaves this machine."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs Linux and g++")
    library = tmp_path_factory.mktemp("watcher") / "network.so"
    source = ROOT / "tests/support/network.cpp"
    command = ["g++", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def watched(watcher: Path, home: Path, tmp_path: Path) -> Watched:
    """Runs a program in a new home and says what it asked for beyond this machine."""
    log = tmp_path / "asked"
    watching = {"HOME": str(home), "LD_PRELOAD": str(watcher), "KVQ_NETWORK_LOG": str(log)}

    def run(program: str, *words: str) -> str:
        log.touch()
        started = [sys.executable, "-c", program, *words]
        finished = subprocess.run(
            started, env=_environment(home) | watching, capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0, finished.stderr
        return log.read_text()

    return run


def _environment(home: Path) -> dict[str, str]:
    environment = environment_in(home)
    # What this process has set for its children is theirs to set.
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    return environment


def foreign_files(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file() and "kvq" not in path.parts]


def test_the_watcher_sees_what_leaves(watched: Watched) -> None:
    program = """
import socket
for ask in (lambda: socket.create_connection(("collector.invalid", 443)),
            lambda: socket.socket().connect(("192.0.2.1", 80)),
            lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.2", 80)),
            lambda: socket.create_server(("127.0.0.1", 0)).close()):
    try:
        ask()
    except OSError:
        pass
"""
    assert watched(program) == (
        "getaddrinfo collector.invalid\nconnect 192.0.2.1\nsendto 192.0.2.2\n"
    )


@pytest.mark.slow
def test_a_run_and_a_benchs_peer_send_nothing_and_leave_nothing_of_others(
    watched: Watched, home: Path, bundle: str
) -> None:
    """Both at once, for most of it is waiting."""
    need("transformers")
    run = ("run", *RUN_FLAGS)
    bench = ("bench", bundle, "--context", "20", "--repeat", "1", "--peer", "transformers")
    with ThreadPoolExecutor() as pool:
        assert set(pool.map(lambda words: watched(COMMAND, *words), (run, bench))) == {""}
    assert foreign_files(home) == []
    assert list(home.rglob("model.onnx")), "the embedded model was not run"


@pytest.mark.slow
def test_no_system_call_of_a_run_leaves_this_machine(home: Path, tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    command = [
        strace, "-f", "--seccomp-bpf", "-e", "trace=connect,sendto,sendmsg,sendmmsg",
        "-o", str(trace), sys.executable, "-c", COMMAND, "run", *RUN_FLAGS,
    ]  # fmt: skip
    environment = _environment(home) | {"HOME": str(home)}
    finished = subprocess.run(command, env=environment, capture_output=True, check=False)
    if b"PTRACE" in finished.stderr:
        pytest.skip("processes may not be traced here")
    assert finished.returncode == 0, finished.stderr
    calls = trace.read_text()
    assert "exited with 0" in calls
    assert re.findall(r"^.*AF_INET.*$", calls, re.MULTILINE) == []
    assert foreign_files(home) == []


def test_onnx_runtime_is_imported_in_one_place() -> None:
    runtime_module = "runtime/kvq_runtime/machine/onnx_runtime.py"
    direct = re.compile(
        r"^\s*(import|from) onnxruntime\b|(import_module|importorskip|__import__)\(.*onnxruntime",
        re.MULTILINE,
    )
    files = [path for folder in (*SOURCES, "tests") for path in (ROOT / folder).rglob("*.py")]
    importers = {
        path.relative_to(ROOT).as_posix() for path in files if direct.search(path.read_text())
    }
    assert importers == set()
    assert [
        path.relative_to(ROOT).as_posix()
        for path in files
        if re.search(r"import_module\(_?(PACKAGE|STATE)\)", path.read_text())
    ] == [runtime_module]


def test_the_readme_promises_it() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "kvq sends nothing" in text
    assert "download a model that you named" in text
    assert "keeps ONNX Runtime from reporting" in text
