"""`kvq chat` from outside: on pipes, in a pseudo-terminal, in tmux, and killed in the middle."""

import base64
import json
import os
import pty
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from itertools import count
from pathlib import Path

import pytest

from environment import environment_in
from kvq_apps.chat.history import History
from shelf import Shelf

LONG_S = 300.0  # only a hang takes so long: what is waited for stays once it is there
KVQ = (sys.executable, "-m", "fake_chat", "chat")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return environment_in(tmp_path) | {"TERM": "xterm-256color"}


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
    listing = json.loads(piped("--search", "word5", "--json", home=home).stdout)
    assert [chat["title"] for chat in listing["chats"]] == ["Größe 👋"]
    again = piped("-c", "--json", "--engine", "fake:tokens=3", home=home, stdin=b"more")
    answer = json.loads(again.stdout)
    assert (answer["text"], answer["finish_reason"]) == ("You asked: **more**\n\n", "stop")
    assert answer["chat"] == listing["chats"][0]["id"]
    exported = Path(home["XDG_DATA_HOME"]) / "chat.jsonl"
    assert piped("--export", str(exported), home=home).returncode == 0
    assert piped("--export", "-", home=home).stdout == exported.read_bytes()
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


@pytest.mark.slow
def test_a_chat_on_a_pipe_goes_on_with_its_model(home: dict[str, str], shelf: Shelf) -> None:
    first = str(shelf.bundle(max_position_embeddings=1024))
    other = str(shelf.bundle(max_position_embeddings=1024, rope_theta=500_000.0))
    words = ("--json", "-n", "3", "--threads", "1")

    def model() -> str:
        (chat,) = json.loads(piped("--list", "--json", home=home).stdout)["chats"]
        return chat["model"]

    assert piped("-m", first, *words, home=home, stdin=b"hi").returncode == 0
    assert model() == first
    assert f"  {Path(first).name}  hi" in piped("--list", home=home).stdout.decode()
    # What the environment or a file says of the model is for new chats.
    elsewhere = home | {"KVQ_MODEL": "/no/such/model"}
    again = piped("-c", *words, home=elsewhere, stdin=b"and now?")
    assert again.returncode == 0, again.stderr
    assert b"written with" not in again.stderr
    reply = piped("-c", "-m", other, *words, home=home, stdin=b"and now?")
    assert b"this chat was written with bundle; bundle goes on with it\n" in reply.stderr
    assert json.loads(reply.stdout)["model"] == "bundle"
    assert model() == other


def test_a_reply_on_a_pipe_is_cut_with_a_word(home: dict[str, str]) -> None:
    finished = piped("--engine", "fake:tokens=9", "-n", "4", home=home, stdin=b"hi")
    cut = b"the reply was cut at its limit of 4 tokens; --predict N allows more\n"
    assert (finished.returncode, finished.stderr) == (0, cut)
    long = json.loads(
        piped("--engine", "fake:tokens=9000", "--json", home=home, stdin=b"hi").stdout
    )
    assert (long["new_tokens"], long["finish_reason"]) == (2048, "length")
    whole = ("--engine", "fake:tokens=3000", "-n", "-1", "--json")
    assert json.loads(piped(*whole, home=home, stdin=b"hi").stdout)["new_tokens"] == 3000


# A pseudo-terminal


class Terminal:
    """A process on a terminal of its own; what it prints gathers in `output`."""

    def __init__(self, command: list[str], home: dict[str, str], stdout: int | None = None) -> None:
        self._master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command, env=home, stdin=terminal, stdout=terminal if stdout is None else stdout,
            stderr=terminal, start_new_session=True, close_fds=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - takes no lock
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

    def hang_up(self) -> None:
        """Goes away, as a window that is closed."""
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._master >= 0:
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

    def written() -> str:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            rows = db.execute("SELECT text FROM chunk ORDER BY message_id, seq").fetchall()
        db.close()
        return "".join(text for (text,) in rows)

    terminal.until(lambda: b"word4" in terminal.output and "word6" in written())
    terminal.process.send_signal(signal.SIGKILL)
    terminal.process.wait()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    history = History(path)
    question, answer = history.branch(history.chats()[0].id)
    assert (question.text, answer.state) == ("tell me", "interrupted")
    assert answer.text.startswith("You asked: **tell me**\n\nword4 word5 word6")
    history.close()


def test_a_dumb_terminal_is_answered_line_by_line(
    home: dict[str, str], opened: list[Terminal]
) -> None:
    terminal = Terminal([*KVQ, "--engine", "fake:tokens=5"], home | {"TERM": "dumb"})
    opened.append(terminal)
    terminal.until(lambda: terminal.output.endswith(b"> "))
    terminal.type("one\n")
    terminal.until(lambda: b"word4" in terminal.output and terminal.output.endswith(b"> "))
    terminal.type("/more\n")
    terminal.until(lambda: b"there is no reply to go on with" in terminal.output)
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
    terminal = Terminal([*KVQ, "--engine", "fake:tokens=20,hold_at=12"], home, stdout=writer)
    os.close(writer)
    opened.append(terminal)
    terminal.until(lambda: b"> " in terminal.output)
    terminal.type("one\n")
    received = b""
    while b"word10" not in received:
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
    # Alt+Up and y hand the message to the terminal's clipboard.
    terminal.type("\x1b[1;3A")
    copied = b"\x1b]52;c;" + base64.b64encode(b"You asked: **hi**\n\nword3 word4 ")
    # Until the transcript has the focus the key is text for the prompt.
    terminal.until(lambda: terminal.type("y") or copied in terminal.output)
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


RESTORED = (b"\x1b[?1049", b"\x1b[?1000", b"\x1b[?1004", b"\x1b[?2004")


def left_as_it_was(output: bytes) -> bool:
    """Whether main screen, mouse, focus, paste and cursor are the shell's again."""
    switched = all(output.rfind(code + b"l") > output.rfind(code + b"h") >= 0 for code in RESTORED)
    return switched and output.rfind(b"\x1b[?25h") > output.rfind(b"\x1b[?25l") >= 0


@pytest.mark.parametrize("engine", ["fake:tokens=5", "fake:tok_ms=100000000"])
def test_a_terminated_chat_leaves_the_terminal_as_it_was(
    engine: str, home: dict[str, str], opened: list[Terminal]
) -> None:
    stuck = "ms" in engine
    terminal = Terminal([*KVQ, "--engine", engine], home)
    opened.append(terminal)
    terminal.until(lambda: b"ready" in terminal.output)
    terminal.type("hi\r")
    terminal.until(lambda: (b"answering" if stuck else b"word4") in terminal.output)
    terminal.process.send_signal(signal.SIGTERM)
    # An engine that is stuck for a day does not keep it.
    terminal.until(lambda: terminal.process.poll() is not None)
    terminal.until(lambda: left_as_it_was(terminal.output))
    assert terminal.process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in terminal.output
    history = History(history_of(home))
    question, answer = history.branch(history.chats()[0].id)
    assert (question.text, answer.state) == ("hi", "interrupted" if stuck else "done")
    assert (history.snapshot(history.chats()[0].id) is None) == stuck
    history.close()


def test_a_closed_terminal_ends_the_chat_and_keeps_it(
    home: dict[str, str], opened: list[Terminal]
) -> None:
    terminal = Terminal([*KVQ, "--engine", "fake:tokens=5"], home)
    opened.append(terminal)
    terminal.until(lambda: b"ready" in terminal.output)
    terminal.type("hi\r")
    terminal.until(lambda: b"word4" in terminal.output)
    terminal.hang_up()
    terminal.process.wait(LONG_S)
    assert terminal.process.returncode == 128 + signal.SIGHUP
    history = History(history_of(home))
    chat = history.chats()[0].id
    assert [message.state for message in history.branch(chat)] == ["done", "done"]
    kept = history.snapshot(chat)
    assert kept is not None
    assert json.loads(Path(kept.path).read_text())["tokens"]
    history.close()


# tmux: what a person sees


class Tmux:
    """A shell on a terminal of 90 x 26 that a person could sit at."""

    def __init__(self, folder: Path, home: dict[str, str]) -> None:
        self._command = ["tmux", "-u", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._home = home
        self._tmux("new-session", "-d", "-s", "t", "-x", "90", "-y", "26", "sh")

    def run(self, *words: str) -> None:
        """Starts the chat from the shell."""
        self.type(" ".join([*KVQ, *words]) + "; echo left with $?")
        self.keys("Enter")
        self.until("ready")

    def type(self, text: str) -> None:
        """Types text."""
        self._tmux("send-keys", "-t", "t", "-l", text)

    def keys(self, *names: str) -> None:
        """Presses keys."""
        self._tmux("send-keys", "-t", "t", *names)

    def paste(self, path: Path) -> None:
        """Pastes a file."""
        self._tmux("load-buffer", str(path))
        self._tmux("paste-buffer", "-p", "-t", "t")

    def resize(self, columns: int, rows: int) -> None:
        """Gives the terminal another size."""
        self._tmux("resize-window", "-t", "t", "-x", str(columns), "-y", str(rows))

    def screen(self) -> str:
        """What is on the screen."""
        return self._tmux("capture-pane", "-p", "-t", "t")

    def until(self, *parts: str, gone: str = "", again: str = "") -> str:
        """The screen once it has these parts, and not the one that is to go.

        What stays for a while only is asked for `again`, by its key.
        """
        end = time.monotonic() + LONG_S
        for look in count(1):
            screen = self.screen()
            if all(part in screen for part in parts) and not (gone and gone in screen):
                return screen
            assert time.monotonic() < end, screen
            if again and look % 100 == 0:
                self.keys(again)
            time.sleep(0.05)
        raise AssertionError

    def close(self) -> None:
        """Ends the terminal and what runs on it."""
        self._tmux("kill-server")

    def _tmux(self, *words: str) -> str:
        command = [*self._command, *words]
        return subprocess.run(
            command, env=self._home, capture_output=True, text=True, check=True
        ).stdout


@pytest.fixture
def editor(tmp_path: Path) -> Path:
    """An editor that writes a word under what is there; it fails once there is a file `fail`."""
    path = tmp_path / "editor"
    path.write_text(f'#!/bin/sh\nprintf "\\nby the editor" >> "$1"\n[ ! -e {tmp_path}/fail ]\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def tmux(home: dict[str, str], tmp_path: Path, editor: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    terminal = Tmux(tmp_path, home | {"VISUAL": str(editor)})
    yield terminal
    terminal.close()


@pytest.mark.slow
def test_a_conversation_in_tmux(tmux: Tmux, home: dict[str, str], tmp_path: Path) -> None:
    tmux.run("--engine", "fake:tok_ms=1,tokens=101,hold_at=101,context=100000")
    tmux.type("你好 👋 e\u0301")
    tmux.until("你好 👋 e\u0301")
    tmux.keys("M-Enter")
    tmux.type("line two")
    tmux.until("│ line two")
    tmux.keys("Enter")
    tmux.until("You asked: 你好 👋 e\u0301", "word99", "answering")
    tmux.keys("C-c")
    tmux.until("word99", "ready")
    paste = tmp_path / "paste"
    paste.write_text("pasted words of a line\n" * 9000 + "the very last")
    assert paste.stat().st_size > 200_000
    tmux.paste(paste)
    tmux.until("[paste 1: 9001 lines")
    tmux.resize(40, 12)
    tmux.keys("Enter")
    tmux.until("word99", "answering", "Esc stop the reply")
    tmux.resize(120, 40)
    tmux.until("You asked: pasted words of a line", "word99", "answering", "Esc stop the reply")
    tmux.keys("Escape")
    tmux.until("word99", "ready")
    tmux.keys("C-q")
    tmux.until("left with 0")
    history = History(history_of(home))
    messages = history.branch(history.chats()[0].id)
    assert messages[0].text == "你好 👋 e\u0301\nline two"
    assert messages[2].text == paste.read_text()
    assert [answer.state for answer in messages[1::2]] == ["stopped", "stopped"]
    history.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("--inline",)], ids=["screen", "inline"])
def test_the_background_and_the_editor_in_tmux(
    mode: tuple[str, ...], tmux: Tmux, tmp_path: Path
) -> None:
    tmux.run(*mode, "--engine", "fake:tokens=20")
    tmux.type("draft")
    tmux.until("│ draft")
    tmux.keys("C-z")
    tmux.until("Stopped", gone="│ draft")
    tmux.type("fg; echo left with $?")
    tmux.keys("Enter")
    tmux.until("│ draft", "ready")
    tmux.keys("C-g")
    tmux.until("│ draft", "│ by the editor", "ready")
    (tmp_path / "fail").touch()
    tmux.keys("C-g")
    # What the editor wrote before it failed is not taken, the draft is kept. The note's one word
    # in capitals, since the path before it decides where its lines break.
    screen = tmux.until("EDITOR", "│ draft", "│ by the editor", again="C-g")
    assert screen.count("by the editor") == 1
    tmux.keys("Enter")
    tmux.until("You asked: draft", "word19")
    tmux.keys("C-q")
    tmux.until("left with 0")


@pytest.mark.slow
def test_below_the_command_line_in_tmux(tmux: Tmux) -> None:
    tmux.type("echo what stood here before")
    tmux.keys("Enter")
    tmux.run("--inline", "--engine", "fake:tokens=90")
    screen = tmux.until("what stood here before", "ready", "Write a message")
    assert screen.index("here before") < screen.index("Write a message")
    tmux.type("hello")
    tmux.keys("Enter")
    tmux.until("You asked: hello", "word89", "│ Write a message", "ready")
    # In half the room the prompt and the meter are still there.
    tmux.resize(60, 14)
    screen = tmux.until("word89", "│ Write a message", "ready")
    assert screen.index("word89") < screen.index("Write a message") < screen.index("ready")
    tmux.keys("F1")
    tmux.until("Ctrl+J, Shift+Enter")
    tmux.keys("Escape")
    tmux.until("│ Write a message", gone="Ctrl+J")
    tmux.keys("C-q")
    # What was said stays in the terminal, the screen around it does not.
    screen = tmux.until("left with 0", gone="Write a message")
    assert "word89" in screen
    assert "ready" not in screen
