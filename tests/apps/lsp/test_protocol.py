"""The language server over real pipes: frames, errors, its life, its output, what it follows.

The checks of an editor's server and their tests, here and elsewhere:

1 to 4, 6: this file. 10 to 14, 16 to 18, 20 to 22: `test_requests`. 5, 7, 15:
`completion/test_document`. 8: `tests/kvq/test_edits`, `tests/runtime/test_edits`. 9: `kvq bench
--suite edit`; `lab/test_edit_bench` asserts what it measures. 19: `test_remote_completer`. 23:
`completion/test_complete` and `kvq eval --task edit`. 24: `tests/hostile/test_typing`, for long
`long.py --edits 100000`. 25, 26: `npm test` in `apps/editors/vscode`, which `editors/test_vscode`
runs; 30: that file. 27, 28: `editors/test_neovim`. 29: `serve/test_serve_text`.
"""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvq_apps import cli
from kvq_apps.commands.lsp import take_editor_options
from kvq_apps.lsp.connection import MOST_BYTES, Connection, RpcError, read_frames
from kvq_apps.settings import options
from language_client import (
    PATIENCE_S,
    URI,
    Client,
    GatedCompleter,
    ProcessClient,
    ThreadClient,
    at,
    texts,
)

BODY = json.dumps({"id": 1, "method": "m", "params": {"t": "\u4f60\U0001f44b"}}).encode()
FRAME = b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Pieces(io.RawIOBase):
    """A stream that is read in these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = [memoryview(piece) for piece in pieces if piece]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._pieces:
            return 0
        count = min(len(buffer), len(self._pieces[0]))
        buffer[:count] = self._pieces[0][:count]
        self._pieces[0] = self._pieces[0][count:]
        if not self._pieces[0]:
            self._pieces.pop(0)
        return count


def kinds(*pieces: bytes, log: Callable[[str], None] = print) -> list[Any]:
    """The numbers of the messages in a stream, or the code of what is none."""
    frames = read_frames(io.BufferedReader(Pieces(*pieces)), log)
    return [frame.code if isinstance(frame, RpcError) else frame["id"] for frame in frames]


@pytest.mark.parametrize("number", ["[" * 800 + "]" * 800, "[1]", '{"a": 1}', "1.5", "NaN"])
def test_an_id_that_cannot_be_said_back_is_answered_with_an_error(number: str) -> None:
    def framed(text: str) -> bytes:
        return b"Content-Length: %d\r\n\r\n%s" % (len(text), text.encode())

    def handle(method: str, params: Any, number: Any) -> Any:
        if method == "deep":
            raise RecursionError
        return "heard"

    sink = io.BytesIO()
    messages = [
        f'{{"method": "m", "id": {number}}}',
        f'{{"result": 1, "id": {number}}}',
        f'{{"method": "deep", "id": 2, "params": {{"a": {number}}}}}',
        '{"method": "m", "id": "last"}',
    ]
    connection = Connection(io.BytesIO(b"".join(map(framed, messages))), sink, print)
    assert not connection.serve(handle)
    connection.close()
    sink.seek(0)
    answers = [answer for answer in read_frames(sink, print) if not isinstance(answer, RpcError)]
    refused = (None, -32600)
    assert [(answer["id"], answer.get("error", {}).get("code")) for answer in answers] == [
        refused, refused, (2, -32602), ("last", None)
    ]  # fmt: skip


def test_frames_come_through_however_they_are_cut() -> None:
    """LSP-1."""
    frames = (
        b"garbage\r\n\r\n"
        + b"content-type: x\r\ncontent-length: %d\r\nX: y\r\n\r\n" % len(BODY) + BODY
        + b"Content-Length: 3\r\n\r\n{]}" + b"Content-Length: 2\r\n\r\n[]"
        + b"Content-Length: 0\r\n\r\n" + FRAME + b"Content-Length: 99\r\n\r\nshort"
    )  # fmt: skip
    log: list[str] = []
    assert kinds(frames, log=log.append) == [1, -32700, -32600, -32700, 1]
    assert log == ["a line between messages is left out"]
    for place in range(1, len(frames)):
        assert kinds(frames[:place], frames[place:]) == [1, -32700, -32600, -32700, 1]
    assert kinds(*(bytes([byte]) for byte in FRAME + FRAME)) == [1, 1]


def test_long_messages_are_read_and_too_long_ones_left_out() -> None:
    """LSP-1: what follows a message of more than the most is read as if it had not been."""
    long = b'{"id": 2, "text": "%s"}' % (b"x" * 50_000_000)
    header = b"Content-Length: %d\r\n\r\n"
    assert kinds(header % len(long), long, FRAME) == [2, 1]
    size = MOST_BYTES + 1
    assert kinds(header % size, bytes(size), FRAME) == [-32600, 1]


def test_what_is_wrong_has_its_code_and_ends_nothing(
    editor: ThreadClient, completer: GatedCompleter
) -> None:
    """LSP-2: the rows of the table, in their order; nothing but answers comes back."""
    complete = "textDocument/inlineCompletion"
    assert editor.ask(complete, at(0, 0))["error"]["code"] == -32002
    offered = editor.ask("initialize", {"capabilities": {}})["result"]["capabilities"]
    assert offered["positionEncoding"] == "utf-16"
    assert offered["inlineCompletionProvider"] == {}
    assert offered["textDocumentSync"] == {"openClose": True, "change": 2}
    assert editor.ask("initialize", {})["error"]["code"] == -32600
    editor.send("initialized", {})
    # Line ends of the protocol, and no others.
    editor.open("a\x0cb\u2028c\u0085\nd\n")
    editor.ready(1, 1)
    editor.change(2, 1, 1, 1, "e")
    assert texts(editor.complete(1, 2))[0] == "de<de>"
    assert completer.calls[-1][0] == "a\x0cb\u2028c\u0085\nde\n"
    for wrong in ({}, {"textDocument": {"uri": URI}}, {**at(0, 0), "position": {"line": "x"}}):
        assert editor.ask(complete, wrong)["error"]["code"] == -32602
    assert texts(editor.ask(complete, at(1, 2, kind=9)))[0] == "de<de>"
    editor.raw(b"Content-Length: 1\r\n\r\n{")
    answer = editor.read()
    assert (answer["id"], answer["error"]["code"]) == (None, -32700)
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "nosuch/method"}).encode()
    editor.raw(b"content-length: %d\r\nContent-Type: x\r\n\r\n%s" % (len(body), body))
    answer = editor.read()
    assert (answer["id"], answer["error"]["code"]) == (7, -32601)
    editor.changes(2, [{"text": "x"}], "file:///unknown.py")
    editor.send("$/unknown", {})
    editor.send("$/cancelRequest", {"id": "unknown"})
    editor.send("textDocument/didPartiallyAcceptCompletion", {"item": {}})
    endless = b'{"method": "textDocument/didChange", "params": {"textDocument": '
    endless += b'{"uri": "file:///a.py", "version": 1e999}, "contentChanges": []}}'
    editor.raw(b"Content-Length: %d\r\n\r\n%s" % (len(endless), endless))
    assert editor.ask("workspace/executeCommand", {"command": "rm"})["error"]["code"] == -32602
    assert any("unknown.py, which is not open" in line for line in editor.log)
    assert editor.ask("shutdown")["result"] is None
    assert editor.ask(complete, at(0, 0))["error"]["code"] == -32600
    editor.send("exit")
    assert editor.ended() == 0


@pytest.mark.parametrize("last_words", [(), ("exit",)])
def test_an_editor_that_leaves_without_shutdown_is_an_error(
    last_words: tuple[str, ...], editor: ThreadClient
) -> None:
    """LSP-2, LSP-3: the end of input, and `exit` alone."""
    for word in last_words:
        editor.send(word)
    assert editor.close() == 1


def test_a_server_whose_editor_died_ends(tmp_path: Path) -> None:
    """LSP-3: its process is gone, its pipes are not."""
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    client = ProcessClient(tmp_path, "--server", "http://127.0.0.1:9")
    client.start(None, processId=parent.pid)
    parent.communicate(b"\n")
    assert client.process.wait(PATIENCE_S) == 1
    client.close()


def test_a_server_that_is_ended_says_nothing(tmp_path: Path) -> None:
    """LSP-3: by a signal, and without a trace on its log. It starts no process of its own."""
    words = "--server", "http://127.0.0.1:9"
    log = tmp_path / "log"
    client = ProcessClient(tmp_path, *words, log=log)
    client.start("a\n")
    children = Path(f"/proc/{client.process.pid}/task/{client.process.pid}/children")
    if children.exists():
        assert children.read_text() == ""
    client.process.send_signal(signal.SIGTERM)
    assert client.process.wait(PATIENCE_S) == -signal.SIGTERM
    client.close()
    assert log.read_text() == ""


def test_a_server_ends_though_nobody_reads_its_answers(tmp_path: Path) -> None:
    """LSP-3: more than a pipe holds waits to be read when the editor goes."""
    client = ProcessClient(tmp_path, "--server", "http://127.0.0.1:9")
    for number in range(2000):
        client.send("nosuch/method", number=number)
    assert client.close() == 1


def test_a_server_begins_before_anything_slow_is_loaded() -> None:
    """LSP-30: that makes it ready soon: after 70 ms when it was measured."""
    slow = "numpy", "tokenizers", "onnxruntime"
    check = "import sys, kvq_apps.cli, kvq_apps.commands.lsp, kvq_apps.lsp.language_server as _; "
    check += f"print({{*{slow!r}}} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "set()\n"


NOISY = """
import os, subprocess, sys
from kvq_apps.names import engine
def noisy(*words, **options):
    print("python prints", flush=True)
    os.write(1, b"native code prints\\n")
    subprocess.run(["echo", "a child prints"])
    raise OSError("no model here")
engine.open_engine = noisy
from kvq_apps.cli import main
sys.exit(main(["lsp"]))
"""


def test_frames_alone_are_written_and_no_text_is_logged(tmp_path: Path) -> None:
    """LSP-4: whatever a library prints goes where the log goes, and no document does."""
    log = tmp_path / "log"
    client = ProcessClient(tmp_path, command=("-c", NOISY), log=log)
    client.start("SECRET = 1\n")
    while True:
        assert client.complete(0, 3)["result"] is None
        if client.why_not() == "there is no model: no model here":
            break
    client.changes(2, [{"range": "SECRET", "text": "SECRET"}])
    client.changes(2, [{"text": ["SECRET"]}])
    client.send("textDocument/didOpen", {"textDocument": {"uri": 3, "text": "SECRET"}})
    client.raw(b"SECRET\r\n\r\n")
    assert client.ask("shutdown")["result"] is None
    assert client.log == []
    client.close()
    output = log.read_text()
    for line in ("python prints", "native code prints", "a child prints", "no model here"):
        assert line in output
    assert "SECRET" not in output


OPENS_NO_MODEL = """
import sys
from kvq_apps.names import engine
def refuse(name, **options):
    raise OSError(f"asked for {name}")
engine.open_engine = refuse
from kvq_apps.cli import main
sys.exit(main(["lsp", *sys.argv[1:]]))
"""


def test_an_editor_names_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a checkout holds does not."""
    monkeypatch.chdir(tmp_path)
    Path(".kvq.toml").write_text('[model]\nname = "evil/model"\n')

    def model_of(*words: str, **editor: Any) -> str:
        client = ProcessClient(tmp_path, *words, command=("-c", OPENS_NO_MODEL))
        client.start("x", initializationOptions=editor)
        while True:
            assert client.complete(0, 0)["result"] is None
            if (why_not := client.why_not()).startswith("there is no model: asked for "):
                client.close()
                return why_not.removeprefix("there is no model: asked for ")

    assert model_of() == "None"
    assert model_of(model="editor's", drafts=2) == "editor's"
    assert model_of("-m", "flag's", model="editor's") == "flag's"
    assert model_of("word's", model="editor's") == "word's"


OPENS_NO_SESSION = """
import sys
from kvq_apps.names import engine
from kvq_apps.commands import lsp
def refuse(*_, next_edits, **options):
    raise OSError(f"a session for next edits: {next_edits}")
engine.open_engine = lambda *_, **options: None
lsp.engine_options.completion_engine = refuse
from kvq_apps.cli import main
sys.exit(main(["lsp"]))
"""


@pytest.mark.parametrize(("choice", "opens"), [("off", False), ("always", True), (None, True)])
def test_next_edits_that_are_off_take_no_session(
    choice: str | None, opens: bool, tmp_path: Path
) -> None:
    client = ProcessClient(tmp_path, command=("-c", OPENS_NO_SESSION))
    client.start("x", initializationOptions={} if choice is None else {"nextEdit": choice})
    while True:
        assert client.complete(0, 0)["result"] is None
        if (why_not := client.why_not()).startswith("there is no model: "):
            break
    client.close()
    assert why_not.endswith(f"a session for next edits: {opens}")


def test_an_editors_options_come_before_the_environment_and_after_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVQ_KBITS", "2")
    monkeypatch.setenv("KVQ_KV_BUDGET", "1MiB")
    lines: list[str] = []

    def options_of(*words: str, **editor: Any) -> dict[str, Any]:
        arguments = cli.parse(["lsp", *words])
        names = {name.replace("_", "-"): value for name, value in editor.items()}
        take_editor_options(arguments, names, lines.append)
        return options.session_options(arguments) | {"exact": arguments.exact}

    defaults = {"k_bits": 2, "kv_budget": "1MiB", "exact": False}
    assert options_of(model=None, unknown=1) == defaults
    assert options_of(kv="8:4", exact=True) == {
        "k_bits": 8, "v_bits": 4, "kv_budget": "1MiB", "exact": True
    }  # fmt: skip
    assert options_of("--vbits", "2", kv="8:4", kv_budget="2MiB", ctx_size=64) == {
        "k_bits": 8, "v_bits": 2, "kv_budget": "2MiB", "context_tokens": 64, "exact": False
    }  # fmt: skip
    assert options_of("--kv", "4:4", kv="8:4")["k_bits"] == 4
    assert lines == []
    assert (
        options_of(kv="9:9", ctx_size="many", exact=1, kv_policy=[], kv_budget="lots") == defaults
    )
    assert [line.partition(" is not possible")[0] for line in lines] == [
        "--kv 9:9",
        "--kv-budget 'lots'",
        "kv-policy needs text or a number; it stays as it was",
        "ctx-size=many",
        "exact needs true or false; it stays as it was",
    ]


class Followed:
    """A document, and the text that the server holds of it."""

    def __init__(self, editor: Client, completer: GatedCompleter) -> None:
        self._editor, self._completer = editor, completer
        self.version = 1

    def change(self, *changes: dict[str, Any]) -> str:
        """Makes changes, and asks where nothing was asked since: what the completer is given."""
        self.version += 10
        self._editor.changes(self.version, changes)
        assert texts(self._editor.complete(0, 0))[0] == "<>"
        return self._completer.calls[-1][0]


def test_documents_are_followed(editor: ThreadClient, completer: GatedCompleter) -> None:
    """LSP-6."""
    editor.start("one\ntwo\n")
    editor.ready(0, 0)
    document = Followed(editor, completer)
    # Versions may leave some out; what lies past the end is the end.
    places = {"start": {"line": 1, "character": 99}, "end": {"line": 99, "character": 99}}
    assert document.change({"range": places, "text": "!"}) == "one\ntwo!"
    # A thousand changes at once, each in the text that the one before it left.
    start = {"line": 0, "character": 0}
    front = {"range": {"start": start, "end": start}}
    many = [front | {"text": str(number % 10)} for number in range(1000)]
    assert document.change(*many) == "9876543210" * 100 + "one\ntwo!"
    # All of the text, and opened twice without a word between.
    assert document.change({"text": "new\n"}, front | {"text": "a "}) == "a new\n"
    editor.open("again\n", version=document.version)
    assert document.change() == "again\n"
    # Changes of what is closed are none.
    editor.send("textDocument/didClose", {"textDocument": {"uri": URI}})
    editor.change(document.version + 1, 0, 0, 0, "x")
    assert editor.complete(0, 0)["result"] is None
    editor.open("third\n")
    assert document.change() == "third\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda editor: editor.change(1, 0, 0, 0, "x"),  # a version that was already there
        lambda editor: editor.changes(5, [{"range": {"start": {}}, "text": "x"}]),
        lambda editor: editor.changes(5, [{"text": None}]),
        lambda editor: editor.changes(None, [{"text": "x"}, {"range": {}, "text": "x"}]),
    ],
)
def test_a_text_that_was_lost_is_not_guessed(
    change: Callable[[Client], None], editor: ThreadClient, completer: GatedCompleter
) -> None:
    """LSP-6: a change that cannot be made ends completions until all of the text comes."""
    editor.start("one\n")
    editor.ready(0, 0)
    change(editor)
    assert editor.complete(0, 0)["result"] is None
    assert "changes came out of order" in editor.why_not()
    editor.change(6, 0, 0, 0, "y")
    assert editor.complete(0, 1)["result"] is None
    editor.changes(7, [{"text": "whole\n"}])
    assert texts(editor.complete(0, 5))[0] == "whole<whole>"
