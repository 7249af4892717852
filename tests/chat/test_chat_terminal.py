"""`kvq chat` from outside: on pipes, in a pseudo-terminal, in tmux, and killed in the middle."""

import json
import os
import pty
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvq_apps.chat.history import History

LONG_S = 60.0
KVQ = (sys.executable, "-m", "kvq_apps.cli", "chat")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose folders are the test's own."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVQ_")}
    clean.pop("NO_COLOR", None)
    folders = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("DATA", "CACHE", "CONFIG")}
    roots = os.pathsep.join(path for path in sys.path if path)
    return clean | folders | {"PYTHONPATH": roots, "TERM": "xterm-256color"}


def piped(
    *words: str, home: dict[str, str], stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*KVQ, *words], input=stdin, env=home, capture_output=True, timeout=LONG_S, check=False
    )


def history_of(home: dict[str, str]) -> Path:
    return Path(home["XDG_DATA_HOME"]) / "kvq" / "chats.sqlite3"


# Pipes


def test_a_message_on_a_pipe_is_answered_without_escapes(home: dict[str, str]) -> None:
    finished = piped("--engine", "fake:tokens=6", home=home, stdin="Größe 👋".encode())
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.decode() == "You asked: **Größe 👋**\n\nword4 word5 \n"
    assert finished.stderr == b""
    listed = piped("--list", home=home).stdout.decode()
    assert listed.count("\n") == 1
    assert "2 messages" in listed
    assert "Größe 👋" in listed
    found = json.loads(piped("--search", "word5", "--json", home=home).stdout)
    assert [chat["title"] for chat in found["chats"]] == ["Größe 👋"]
    again = piped("-c", "--json", "--engine", "fake:tokens=3", home=home, stdin=b"more")
    answer = json.loads(again.stdout)
    assert (answer["text"], answer["finish_reason"]) == ("You asked: **more**\n\n", "stop")
    assert answer["chat"] == found["chats"][0]["id"]
    exported = Path(home["XDG_DATA_HOME"]) / "chat.jsonl"
    assert piped("--export", str(exported), home=home).returncode == 0
    assert [json.loads(line)["role"] for line in exported.read_text().splitlines()] == [
        "user", "assistant", "user", "assistant"
    ]  # fmt: skip
    imported = piped("--import", str(exported), home=home).stdout.decode().strip()
    assert imported in piped("--list", home=home).stdout.decode()


@pytest.mark.parametrize(
    ("words", "stdin", "says"),
    [
        ((), b"", "there is no message on standard input"),
        ((), b"\xff\xfe", "standard input is not valid UTF-8"),
        (("--predict", "0"), b"x", "--predict 0 is not possible"),
        (("--cid", "nowhere"), b"x", "there is no chat nowhere"),
        (("--engine", "fake:broken"), b"x", "there is no model here"),
        (("--engine", "fake:nosuch=1"), b"x", "the fake engine has no 'nosuch'"),
        (("--export", "/no/such/folder/x"), b"", "there is no such chat"),
        (("--import", "/no/such/file"), b"", "/no/such/file cannot be read"),
        (("--server", "ftp://x"), b"x", "--server 'ftp://x' is not possible"),
        (("a", "-m", "b"), b"x", "the model is given twice"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: tuple[str, ...], stdin: bytes, says: str, home: dict[str, str]
) -> None:
    engine = () if "--engine" in words or "--server" in words else ("--engine", "fake:tokens=3")
    finished = piped(*words, *engine, home=home, stdin=stdin)
    assert finished.returncode == 2
    assert finished.stdout == b""
    assert finished.stderr.count(b"\n") == 1
    assert says in finished.stderr.decode()


def test_an_error_in_the_middle_keeps_what_came(home: dict[str, str]) -> None:
    finished = piped("--engine", "fake:fail_at=3", home=home, stdin=b"hi")
    assert finished.returncode == 2
    assert finished.stdout == b"You asked: \n"
    assert b"failed as it was told" in finished.stderr
    history = History(history_of(home))
    assert history.branch(history.chats()[0].id)[-1].state == "failed"
    history.close()


# A pseudo-terminal


class Terminal:
    """A process on a terminal of its own; what it prints gathers in `output`."""

    def __init__(self, command: list[str], home: dict[str, str], stdout: int | None = None) -> None:
        self._master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command, env=home, stdin=terminal, stdout=terminal if stdout is None else stdout,
            stderr=terminal, start_new_session=True, close_fds=True,
        )  # fmt: skip
        os.close(terminal)
        self.output = b""

    def type(self, text: str) -> None:
        """Sends keys."""
        os.write(self._master, text.encode())

    def until(self, condition: Callable[[], object]) -> None:
        """Reads until `condition` holds."""
        end = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < end, self.output[-2000:]
            self.read()

    def read(self) -> None:
        """Takes what is there, waiting a moment for it."""
        if select.select([self._master], [], [], 0.02)[0]:
            try:
                self.output += os.read(self._master, 65536)
            except OSError:
                time.sleep(0.02)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    """Terminals that are closed at the end."""
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


def test_kill_in_the_middle_of_an_answer_loses_nothing(
    home: dict[str, str], opened: list[Terminal]
) -> None:
    terminal = Terminal([*KVQ, "--engine", "fake:tok_ms=5,tokens=100000"], home)
    opened.append(terminal)
    terminal.until(lambda: b"ready" in terminal.output)
    terminal.type("tell me\r")
    path = history_of(home)

    def chunks() -> int:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            count = db.execute("SELECT count(*) FROM chunk").fetchone()[0]
        db.close()
        return count

    terminal.until(lambda: chunks() >= 4)
    shown = terminal.output
    terminal.process.send_signal(signal.SIGKILL)
    terminal.process.wait()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    history = History(path)
    question, answer = history.branch(history.chats()[0].id)
    assert (question.text, answer.state) == ("tell me", "interrupted")
    assert answer.text.startswith("You asked: **tell me**\n\nword4 word5 word6")
    assert b"word4" in shown
    history.close()


def test_a_dumb_terminal_is_answered_line_by_line(
    home: dict[str, str], opened: list[Terminal]
) -> None:
    terminal = Terminal([*KVQ, "--engine", "fake:tokens=5"], home | {"TERM": "dumb"})
    opened.append(terminal)
    terminal.until(lambda: terminal.output.endswith(b"> "))
    terminal.type("one\n")
    terminal.until(lambda: b"word4" in terminal.output and terminal.output.endswith(b"> "))
    terminal.type("/nosuch\n")
    terminal.until(lambda: b"/nosuch is not a command" in terminal.output)
    terminal.type("/new\n/quit\n")
    terminal.until(lambda: terminal.process.poll() is not None)
    assert terminal.process.returncode == 0
    assert b"\x1b" not in terminal.output


def test_answers_go_down_a_pipe_without_escapes(
    home: dict[str, str], opened: list[Terminal]
) -> None:
    reader, writer = os.pipe()
    terminal = Terminal([*KVQ, "--engine", "fake:tok_ms=20,tokens=2000"], home, stdout=writer)
    os.close(writer)
    opened.append(terminal)
    terminal.until(lambda: b"> " in terminal.output)
    terminal.type("one\n")
    received = b""
    while b"word9" not in received:
        received += os.read(reader, 4096)
    # Ctrl+C stops the reply; the chat goes on.
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.until(lambda: terminal.output.count(b"> ") >= 2)
    terminal.type("/quit\n")
    terminal.until(lambda: terminal.process.poll() is not None)
    os.close(reader)
    assert b"\x1b" not in received + terminal.output
    history = History(history_of(home))
    assert history.branch(history.chats()[0].id)[-1].state == "stopped"
    history.close()


def test_no_color_has_no_colours(home: dict[str, str], opened: list[Terminal]) -> None:
    terminal = Terminal([*KVQ, "--engine", "fake:tokens=5"], home | {"NO_COLOR": "1"})
    opened.append(terminal)
    terminal.until(lambda: b"ready" in terminal.output)
    terminal.type("hi\r")
    terminal.until(lambda: b"word4" in terminal.output)
    terminal.type("\x11")
    terminal.until(lambda: terminal.process.poll() is not None)
    assert terminal.process.returncode == 0
    # Shades of grey are what is left of a theme; no channel may differ from the others.
    for part in terminal.output.split(b"[")[1:]:
        numbers = part.split(b"m")[0].split(b";")
        for index in range(len(numbers) - 4):
            if numbers[index] in (b"38", b"48") and numbers[index + 1] == b"2":
                assert len(set(numbers[index + 2 : index + 5])) == 1
    # The terminal is left as it was: main screen, cursor on.
    assert terminal.output.rfind(b"\x1b[?1049l") > terminal.output.rfind(b"\x1b[?1049h") >= 0
    assert terminal.output.rfind(b"\x1b[?25h") > terminal.output.rfind(b"\x1b[?25l")


# tmux: what a person sees


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_conversation_in_tmux(home: dict[str, str], tmp_path: Path) -> None:
    socket = str(tmp_path / "tmux")
    lasting = ("set", "-g", "remain-on-exit", "on")

    def tmux(*words: str) -> str:
        command = ["tmux", "-u", "-S", socket, "-f", "/dev/null", *words]
        return subprocess.run(command, env=home, capture_output=True, text=True, check=True).stdout

    def screen() -> str:
        return tmux("capture-pane", "-p", "-t", "t")

    def until(part: str, *, gone: bool = False) -> None:
        end = time.monotonic() + LONG_S
        while (part in screen()) == gone:
            assert time.monotonic() < end, screen()
            time.sleep(0.05)

    program = " ".join([*KVQ, "--engine", "fake:tok_ms=2,tokens=40,context=100000"])
    tmux("new-session", "-d", "-s", "t", "-x", "90", "-y", "26", "sh", ";", *lasting)
    try:
        tmux("respawn-pane", "-k", "-t", "t", f"{program}; echo left with $?")
        until("ready")
        tmux("send-keys", "-t", "t", "-l", "你好 👋 e\u0301")
        until("你好 👋 e\u0301")
        tmux("send-keys", "-t", "t", "M-Enter")
        tmux("send-keys", "-t", "t", "-l", "line two")
        until("│ line two")
        tmux("send-keys", "-t", "t", "Enter")
        until("You asked: 你好 👋 e\u0301")
        until("word39")
        paste = tmp_path / "paste"
        paste.write_text("pasted words of a line\n" * 9000 + "the very last")
        assert paste.stat().st_size > 200_000
        tmux("load-buffer", str(paste))
        tmux("paste-buffer", "-p", "-t", "t")
        until("the very last")
        tmux("resize-window", "-t", "t", "-x", "40", "-y", "12")
        tmux("send-keys", "-t", "t", "Enter")
        until("stop the reply")
        tmux("resize-window", "-t", "t", "-x", "120", "-y", "40")
        until("You asked: pasted words of a line")
        until("word39")
        tmux("send-keys", "-t", "t", "C-c")
        until("press Ctrl+C again to quit")
        tmux("send-keys", "-t", "t", "C-c")
        until("left with 0")
    finally:
        tmux("kill-server")
    history = History(history_of(home))
    messages = history.branch(history.chats()[0].id)
    assert messages[0].text == "你好 👋 e\u0301\nline two"
    assert messages[2].text == paste.read_text()
    history.close()
