"""What Windows lacks is missed nowhere, shown in a process without it, as far as Linux can be one.

Modules and names are gone and `sys.platform` says win32, once what is not kvq's is imported.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from environment import environment_in
from kvq_apps.chat.chat_settings import ChatSettings
from kvq_apps.commands import chat
from kvq_apps.names import known_models
from kvq_apps.processes import is_alive
from kvq_export.config import ExportOptions
from kvq_export.export import export_model

PROGRAM = """
import importlib, os, pkgutil, signal, socket, sys
# Of others: what they import later, they would import for Windows.
import asyncio, concurrent.futures.process, ctypes, http.server, logging.handlers, multiprocessing
import sqlite3, starlette.applications, subprocess, tempfile, uvicorn.protocols.http.h11_impl
import huggingface_hub, jinja2, llguidance, ml_dtypes, numpy, numpy.random, onnx_ir, onnxruntime
import huggingface_hub.hf_api, huggingface_hub.file_download
import textual.app, textual.widgets, textual.drivers.linux_driver, tokenizers, unittest.mock
import importlib.resources, shutil, webbrowser
import kvq.native  # its library is of Linux

pair, unix = socket.socketpair, socket.AF_UNIX
socket.socketpair = lambda: pair(unix)  # it is there on Windows, too
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for owner, names in (
    (socket, ["AF_UNIX"]),
    (signal, ["SIGHUP", "SIGTSTP", "SIGCONT", "SIGKILL", "SIGUSR1", "SIGWINCH", "SIGALRM"]),
    (os, ["fork", "getuid", "geteuid", "getpgrp", "getppid", "killpg", "setsid", "uname", "mkfifo",
          "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"]),
):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)

def refused(*_, **__):
    raise OSError("a required privilege is not held by the client")

os.symlink = refused
subprocess.Popen.kill = subprocess.Popen.terminate  # as on Windows
sys.platform = "win32"
"""
IMPORT_ALL = """
sys.modules["ray"] = None  # it may be there or not, and would not be Windows'
sys.modules["torch"] = None
found = []
for root in ("kvq", "kvq_models", "kvq_runtime", "kvq_specdraft", "kvq_export", "kvq_apps"):
    package = importlib.import_module(root)
    for module in pkgutil.walk_packages(package.__path__, f"{root}."):
        if "libkvq" not in module.name and module.name != "kvq_apps.chat.inline":
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if str(error.name).partition(".")[0] not in ("ray", "torch"):
                    raise
            found.append(module.name)
print(len(found), [module for module in ("fcntl",) if sys.modules.get(module)])
"""
RUN = """
from kvq_apps.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


def child(home: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program, *words],
        env=environment_in(home), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
def test_every_module_can_be_imported(tmp_path: Path) -> None:
    done = child(tmp_path, IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    count, _, modules = done.stdout.partition(" ")
    assert int(count) > 300
    assert modules == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("run -m {bundle} -n 3 --json hello", 0, '"new_tokens": 3'),
        ("chat -m {bundle} -n 3 --no-log", 0, ""),
        ("export {checkpoint} -o {home}/made --no-quality --no-calibrate", 0, "made"),
        ("doctor", 0, "finding servers needs a system with file locks"),
        ("serve --status", 2, "finding servers needs a system with file locks"),
        ("serve -m {bundle} --socket {home}/s", 2, "this system has no unix sockets; use an addr"),
        ("complete -m {bundle} {home}/a.py:1 --json", 0, '"drafts"'),
    ],
)
def test_a_command_works_or_says_why_not(
    words: str, code: int, says: str, bundle: str, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("import os\n")
    arguments = words.format(bundle=bundle, checkpoint=checkpoint, home=tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + RUN, *arguments],
        env=environment_in(tmp_path), input="hello\n", capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert says in done.stdout + done.stderr
    assert done.returncode == code, done.stdout + done.stderr


def test_a_server_answers_at_an_address(bundle: str, tmp_path: Path) -> None:
    words = ("serve", "-m", bundle, "--port", "0", "--json", "--sessions", "1")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + RUN, *words],
        env=environment_in(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        url = next(match[1] for line in server.stdout if (match := re.search(r'"(http.*)"', line)))
        body = json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0}).encode()
        request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=60) as reply:
                assert json.load(reply)["usage"]["prompt_tokens"] > 0
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def test_where_no_links_can_be_made_a_model_is_found_by_its_name(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "symlink_to", refuses)
    options = ExportOptions(quality=False, calibrate=False)
    for name in ("one", "two"):
        made = export_model(checkpoint, tmp_path / name, options).path
        known_models.remember(made, made=True)
        known_models.remember(made, made=True)
    assert dict(known_models.exported_models()) == {
        name: tmp_path / name for name in ("one", "two")
    }
    (tmp_path / "one").rename(tmp_path / "gone")
    assert dict(known_models.exported_models()) == {"two": tmp_path / "two"}
    other = export_model(checkpoint, tmp_path / "three", options).path
    known_models.remember(other, made=True)
    assert len(list((tmp_path / "kvq/made").iterdir())) == 2


def test_a_chat_below_the_command_line_takes_the_screen_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []

    class App:
        return_code = 0

        def __init__(self, *_: object, driver_class: object, **__: object) -> None:
            started.append(driver_class)

        def run(self, *, mouse: bool) -> None:
            started.append(mouse)

    monkeypatch.setattr("kvq_apps.chat.chat_app.ChatApp", App)
    monkeypatch.setattr("kvq_apps.chat.chat_app.NoteHandler", lambda _: logging.NullHandler())
    monkeypatch.setitem(sys.modules, "termios", None)
    arguments = Namespace(inline=True)
    assert chat._on_screen(None, ChatSettings(), arguments) == 0  # type: ignore[arg-type]
    assert started == [None, True]
    assert "--inline needs a terminal of Linux or macOS" in capsys.readouterr().err


def refuses(*_: object) -> None:
    raise OSError("a required privilege is not held by the client")


def test_a_process_is_known_to_be_there_or_gone() -> None:
    assert is_alive(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not is_alive(child.pid)
