"""The language server over real pipes: frames, life cycle, positions, cancels, stable drafts.

Of the checks of an editor's server: framing (LSP-1), errors and life (2, 3, 4), positions (5, with
`test_document`), changes (6), tokens (7, `test_document`), rapid requests and cancels (10, 11),
stable drafts (12), typing through (13), ranges (14), odd files (16), slow readers (17), loading
(18), two documents, settings and renames (20, 21, 22). Elsewhere: the state of the cache (8,
`tests/runtime/test_edits.py`, `tests/kvq/test_edits.py`), times (9, `kvq bench --suite edit`),
content (15, `test_document`), a server that dies and exactness (19, 23, `test_complete`), `/infill`
(29, `tests/apps/serve`). 25 to 28 and 30 are the plugins'.
"""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from environment import environment_in
from kvq_apps.completion.document import Document
from kvq_apps.completion.engine import Completion, Draft
from kvq_apps.lsp.frames import RpcError, read_frames
from kvq_apps.lsp.server import LanguageServer

URI = "file:///a.py"
PATIENCE_S = 120.0


class FakeCompleter:
    """Says what stands before the cursor; waits at a gate, where it can be cancelled."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, int]]] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def complete(
        self, document: Document, place: tuple[int, int], *, cancel: Callable[[], bool]
    ) -> Completion:
        self.calls.append((document.text, place))
        self.begun.release()
        while not self.gate.wait(0.005):
            if cancel():
                return Completion(drafts=(), why_not="cancelled")
        if self.fails:
            raise RuntimeError("the engine broke")
        before = document.line(place[0])[: place[1]]
        texts = (f"<{before}>", f"second {len(self.calls)}")
        return Completion(drafts=tuple(Draft(text=text, logprob=-1.0) for text in texts))

    def refresh(self, max_tokens: int, cancel: Callable[[], bool]) -> int:
        return 0

    def close(self) -> None:
        pass


class Client:
    """An editor on two pipes."""

    def __init__(
        self,
        completer: FakeCompleter,
        loads: threading.Event | None = None,
        load: Callable[[], FakeCompleter] | None = None,
    ) -> None:
        ours, self._to = os.pipe()
        self._from, theirs = os.pipe()
        self.log: list[str] = []
        self.code: int | None = None

        def wait() -> FakeCompleter:
            if loads is not None:
                assert loads.wait(PATIENCE_S)
            return completer

        def serve() -> None:
            with open(ours, "rb") as source, open(theirs, "wb") as sink:
                self.code = LanguageServer(source, sink, load or wait, self.log.append).run()

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        self._reader = open(self._from, "rb")  # noqa: SIM115  closed in `close`
        self._number = 0

    def raw(self, data: bytes) -> None:
        os.write(self._to, data)

    def send(self, method: str, params: Any = None, number: Any = None) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        message |= {} if params is None else {"params": params}
        message |= {} if number is None else {"id": number}
        body = json.dumps(message).encode()
        self.raw(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def read(self) -> dict[str, Any]:
        return next(read_frames(self._reader, self.log.append))

    def ask(self, method: str, params: Any = None) -> dict[str, Any]:
        self._number += 1
        self.send(method, params, self._number)
        answer = self.read()
        assert answer["id"] == self._number
        return answer

    def open(self, text: str, *encodings: str) -> None:
        general = {"general": {"positionEncodings": list(encodings)}} if encodings else {}
        self.ask("initialize", {"capabilities": general})
        self.send("initialized", {})
        self.send(
            "textDocument/didOpen", {"textDocument": {"uri": URI, "version": 1, "text": text}}
        )

    def change(self, version: int, line: int, start: int, end: int, text: str) -> None:
        places = {
            "start": {"line": line, "character": start}, "end": {"line": line, "character": end}
        }  # fmt: skip
        self.send(
            "textDocument/didChange",
            {
                "textDocument": {"uri": URI, "version": version},
                "contentChanges": [{"range": places, "text": text}],
            },
        )

    def complete(self, line: int, character: int) -> dict[str, Any]:
        return self.ask("textDocument/inlineCompletion", at(line, character))

    def ended(self) -> int | None:
        """The server's exit code."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.code

    def close(self) -> int | None:
        """Goes without a word."""
        if not self._reader.closed:
            os.close(self._to)
            self.ended()
            self._reader.close()
        return self.code


def at(line: int, character: int, kind: int = 2, **context: Any) -> dict[str, Any]:
    return {
        "textDocument": {"uri": URI},
        "position": {"line": line, "character": character},
        "context": {"triggerKind": kind} | context,
    }


def texts(answer: dict[str, Any]) -> list[str]:
    return [item["insertText"] for item in answer["result"]["items"]]


@pytest.fixture
def completer() -> FakeCompleter:
    return FakeCompleter()


@pytest.fixture
def editor(completer: FakeCompleter) -> Iterator[Client]:
    client = Client(completer)
    yield client
    completer.gate.set()
    client.close()


def ready(client: Client, line: int, character: int) -> dict[str, Any]:
    """The first answer of a server that has loaded."""
    while True:
        answer = client.complete(line, character)
        if answer["result"] is not None:
            return answer


def test_frames_come_through_however_they_are_cut() -> None:
    body = json.dumps({"id": 1, "method": "m", "params": {"t": "\u4f60\U0001f44b"}}).encode()
    frames = (
        b"garbage\r\n\r\n"
        + b"content-type: x\r\ncontent-length: %d\r\nX: y\r\n\r\n" % len(body) + body
        + b"Content-Length: 3\r\n\r\n{]}" + b"Content-Length: 2\r\n\r\n[]"
        + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"Content-Length: 99\r\n\r\nshort"
    )  # fmt: skip
    log: list[str] = []
    found = list(read_frames(io.BytesIO(frames), log.append))
    kinds = [one.code if isinstance(one, RpcError) else one["id"] for one in found]
    assert kinds == [1, -32700, -32600, 1]
    assert len(log) == 1


def test_the_life_of_a_server(editor: Client) -> None:
    assert editor.ask("textDocument/inlineCompletion", at(0, 0))["error"]["code"] == -32002
    offered = editor.ask("initialize", {"capabilities": {}})["result"]["capabilities"]
    assert offered["positionEncoding"] == "utf-16"
    assert offered["inlineCompletionProvider"] == {}
    assert offered["textDocumentSync"] == {"openClose": True, "change": 2}
    assert editor.ask("initialize", {})["error"]["code"] == -32600
    assert editor.ask("nosuch/method")["error"]["code"] == -32601
    assert editor.ask("textDocument/inlineCompletion", {})["error"]["code"] == -32602
    editor.raw(b"Content-Length: 1\r\n\r\n{")
    assert editor.read()["error"]["code"] == -32700
    editor.send("$/unknown", {})
    editor.send("textDocument/didChange", {"nonsense": 1})
    assert editor.ask("shutdown")["result"] is None
    assert editor.ask("textDocument/inlineCompletion", at(0, 0))["error"]["code"] == -32600
    editor.send("exit")
    assert editor.ended() == 0


def test_an_editor_that_vanishes_ends_the_server(editor: Client) -> None:
    assert editor.close() == 1


@pytest.mark.parametrize(
    ("encoding", "column"), [("utf-8", 9), ("utf-16", 6), ("utf-32", 5), (None, 6)]
)
def test_positions_are_counted_as_the_client_counts(
    encoding: str | None, column: int, editor: Client, completer: FakeCompleter
) -> None:
    editor.open("x\n\u00e9 \U0001f44b ab(c)\n", *([encoding] if encoding else []))
    (item, _) = ready(editor, 1, column)["result"]["items"]
    assert completer.calls[-1][1] == (1, 5)
    # The word that ends at the cursor is replaced by itself and what goes on from it.
    assert item["insertText"] == "a<\u00e9 \U0001f44b a>"
    assert item["range"] == {
        "start": {"line": 1, "character": column - 1}, "end": {"line": 1, "character": column}
    }  # fmt: skip


def test_drafts_stay_until_the_next_edit(editor: Client, completer: FakeCompleter) -> None:
    editor.open("one\n  two\n")
    first = ready(editor, 1, 2)
    # The line is blank before the cursor: its indentation is replaced with it.
    assert texts(first) == ["  <  >", "  second 1"]
    assert editor.complete(1, 2)["result"] == first["result"]
    assert len(completer.calls) == 1
    editor.change(2, 0, 0, 3, "1")
    assert texts(editor.complete(1, 2)) == ["  <  >", "  second 2"]
    assert completer.calls[-1][0] == "1\n  two\n"
    explained = editor.ask(
        "workspace/executeCommand", {"command": "kvq.explain", "arguments": [URI]}
    )
    assert [one["text"] for one in explained["result"]["drafts"]] == ["<  >", "second 2"]
    # What the editor's own list has chosen must be how an item begins.
    chosen = at(0, 1, selectedCompletionInfo={"text": "1<"})
    editor.change(3, 0, 1, 1, "")
    assert texts(editor.ask("textDocument/inlineCompletion", chosen)) == ["1<1>"]


def test_the_newest_request_wins_and_each_gets_one_answer(
    editor: Client, completer: FakeCompleter
) -> None:
    editor.open("a\n")
    ready(editor, 0, 0)
    completer.begun.acquire()
    completer.gate.clear()
    editor.change(2, 0, 0, 0, "b")
    editor.send("textDocument/inlineCompletion", at(0, 1), 101)
    assert completer.begun.acquire(timeout=PATIENCE_S)
    editor.change(3, 0, 1, 1, "c")
    editor.send("textDocument/inlineCompletion", at(0, 2), 102)
    superseded = editor.read()
    assert (superseded["id"], superseded["result"]) == (101, None)
    assert completer.begun.acquire(timeout=PATIENCE_S)
    editor.send("$/cancelRequest", {"id": 102})
    cancelled = editor.read()
    assert (cancelled["id"], cancelled["error"]["code"]) == (102, -32800)
    editor.send("$/cancelRequest", {"id": 102})
    completer.gate.set()
    assert texts(editor.complete(0, 2))[0] == "bc<bc>"


def test_what_fails_is_logged_and_nothing_is_shown(
    editor: Client, completer: FakeCompleter
) -> None:
    editor.open("a\n")
    ready(editor, 0, 1)
    completer.fails = True
    editor.change(2, 0, 0, 0, "b")
    assert editor.complete(0, 1)["result"] is None
    assert any("the engine broke" in line for line in editor.log)
    completer.fails = False
    assert editor.complete(0, 1)["result"] is not None
    assert editor.ask("workspace/executeCommand", {"command": "kvq.toggle"})["result"] is False
    assert editor.complete(0, 0)["result"] is None
    why = editor.ask("workspace/executeCommand", {"command": "kvq.explain", "arguments": [URI]})
    assert why["result"]["whyNot"] == "completion is switched off"


def test_while_the_model_loads_the_answer_is_nothing(completer: FakeCompleter) -> None:
    loads = threading.Event()
    editor = Client(completer, loads)
    editor.open("a\n")
    assert editor.complete(0, 1)["result"] is None
    why = editor.ask("workspace/executeCommand", {"command": "kvq.explain", "arguments": [URI]})
    assert why["result"]["whyNot"] == "the model is loading"
    loads.set()
    assert texts(ready(editor, 0, 1))[0] == "a<a>"
    editor.close()


def test_a_model_that_cannot_be_loaded_is_no_model_that_loads() -> None:
    def load() -> FakeCompleter:
        raise OSError("no such bundle")

    editor = Client(FakeCompleter(), load=load)
    editor.open("a\n")
    reason, wanted = "", "there is no model: no such bundle"
    for _ in range(100_000):
        assert editor.complete(0, 1)["result"] is None
        why = editor.ask("workspace/executeCommand", {"command": "kvq.explain", "arguments": [URI]})
        if (reason := why["result"]["whyNot"]) == wanted:
            break
    assert reason == wanted
    editor.close()


def test_a_document_that_is_no_source_text_is_left_alone(
    editor: Client, completer: FakeCompleter
) -> None:
    editor.open("a\n")
    ready(editor, 0, 1)
    editor.send(
        "textDocument/didOpen",
        {"textDocument": {"uri": URI, "version": 2, "text": "x" * 30_000}},
    )
    assert editor.complete(0, 1)["result"] is None
    assert len(completer.calls) == 1


def test_the_command_completes_with_the_embedded_model(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", "lsp", "--threads", "1", "--drafts", "2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment_in(tmp_path),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    frames = read_frames(process.stdout, print)

    def ask(number: int, method: str, params: Any) -> Any:
        body = json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        process.stdin.write(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        process.stdin.flush()
        return None if number == 0 else next(frames)["result"]

    ask(1, "initialize", {"capabilities": {}})
    text = "import os\n\ndef read(path):\n    with open(\n"
    opened = {"textDocument": {"uri": URI, "version": 1, "text": text}}
    body = json.dumps({"jsonrpc": "2.0", "method": "textDocument/didOpen", "params": opened})
    process.stdin.write(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
    result, number = None, 1
    while result is None:
        number += 1
        time.sleep(0.02)
        result = ask(number, "textDocument/inlineCompletion", at(3, 14))
        assert number < 5_000
    assert 1 <= len(result["items"]) <= 2
    assert all(item["insertText"].strip() for item in result["items"])
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 1  # the editor went without a word
    process.stdout.close()


def started(completer: FakeCompleter, text: str, **asked: Any) -> Client:
    """An editor whose document is open; `asked` goes into `initialize`."""
    client = Client(completer)
    client.ask("initialize", {"capabilities": {}} | asked)
    client.send("initialized", {})
    client.send("textDocument/didOpen", {"textDocument": {"uri": URI, "version": 1, "text": text}})
    return client


def why_not(client: Client, uri: str = URI) -> str:
    explain = {"command": "kvq.explain", "arguments": [uri]}
    return client.ask("workspace/executeCommand", explain)["result"]["whyNot"]


def test_typing_a_draft_asks_no_engine(editor: Client, completer: FakeCompleter) -> None:
    """LSP-13."""
    editor.open("ab\nrest\n")
    assert texts(ready(editor, 0, 2)) == ["ab<ab>", "absecond 1"]
    calls = len(completer.calls)
    editor.change(2, 0, 2, 2, "<a")
    assert texts(editor.complete(0, 4)) == ["ab>"]
    editor.change(3, 0, 4, 4, "b")
    assert texts(editor.complete(0, 5)) == ["ab>"]
    editor.change(4, 0, 4, 5, "")  # and back
    assert texts(editor.complete(0, 4)) == ["ab>"]
    assert len(completer.calls) == calls
    editor.change(5, 0, 4, 4, "X")
    assert texts(editor.complete(0, 5))[0] == "aX<ab<aX>"
    assert len(completer.calls) == calls + 1
    # A change of another line makes drafts of another text.
    editor.change(6, 1, 0, 0, "y")
    editor.change(7, 0, 5, 5, "<")
    editor.complete(0, 6)
    assert len(completer.calls) == calls + 2


def test_editors_without_inline_completion_may_ask_for_a_list(completer: FakeCompleter) -> None:
    client = started(completer, "ab\n", initializationOptions={"fallbackCompletion": True})
    answer = None
    while answer is None:
        answer = client.ask("textDocument/completion", at(0, 2))["result"]
    first = answer["items"][0]
    assert first["textEdit"]["newText"] == "ab<ab>"
    assert first["textEdit"]["range"]["start"] == {"line": 0, "character": 0}
    assert answer["isIncomplete"] is True
    client.close()
    plain = started(completer, "ab\n")
    assert plain.ask("textDocument/completion", at(0, 2))["error"]["code"] == -32601
    plain.close()


def test_settings_are_pulled_and_a_bad_one_stays_as_it_was(completer: FakeCompleter) -> None:
    """LSP-21."""
    pulls = {"workspace": {"configuration": True}}
    client = started(completer, "ab\n", capabilities=pulls)

    def answer_pull(value: object) -> None:
        asked = client.read()
        assert asked["method"] == "workspace/configuration"
        assert asked["params"] == {"items": [{"section": "kvq"}]}
        reply = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": [value]}).encode()
        client.raw(b"Content-Length: %d\r\n\r\n%s" % (len(reply), reply))

    answer_pull({"drafts": 1})
    assert len(texts(ready(client, 0, 2))) == 1
    client.send("workspace/didChangeConfiguration", {"settings": {"kvq": {"drafts": 2}}})
    answer_pull(None)
    assert len(texts(client.complete(0, 2))) == 2
    client.send("workspace/didChangeConfiguration", {"settings": {"kvq": {"drafts": "x"}}})
    answer_pull({"ignore": ["*.py"]})
    assert client.complete(0, 2)["result"] is None
    assert why_not(client) == "this file is ignored"
    assert [line for line in client.log if "drafts" in line] == [
        "drafts = 'x' is not possible and stays 2"
    ]
    client.close()


@pytest.mark.parametrize(
    ("uri", "text", "says"),
    [
        ("file:///home/me/.env", "KEY=1\n", "this file is ignored"),
        ("file:///home/me/server.pem", "x\n", "this file is ignored"),
        ("git:/a.py?ref", "x\n", "git: documents are left alone"),
        ("file:///a.bin", "x\0y\n", "the document is no text"),
        ("file:///a.py", "x" * 1_000_000, "the line is too long"),
    ],
)
def test_odd_files_are_left_alone_with_a_reason(
    uri: str, text: str, says: str, completer: FakeCompleter
) -> None:
    """LSP-16."""
    client = started(completer, "a\n")
    ready(client, 0, 1)
    calls = len(completer.calls)
    client.send("textDocument/didOpen", {"textDocument": {"uri": uri, "version": 1, "text": text}})
    asked = at(0, 1) | {"textDocument": {"uri": uri}}
    assert client.ask("textDocument/inlineCompletion", asked)["result"] is None
    assert why_not(client, uri) == says
    assert len(completer.calls) == calls
    # A file of 10 MB is completed like any other.
    long = {"uri": "untitled:Untitled-1", "version": 1, "text": "line of text\n" * 800_000}
    client.send("textDocument/didOpen", {"textDocument": long})
    asked = at(400_000, 4) | {"textDocument": {"uri": long["uri"]}}
    assert texts(client.ask("textDocument/inlineCompletion", asked))[0] == "line<line>"
    client.close()


def test_loading_is_progress_that_ends(completer: FakeCompleter) -> None:
    """LSP-18."""
    loads = threading.Event()
    client = Client(completer, loads)
    client.ask("initialize", {"capabilities": {"window": {"workDoneProgress": True}}})
    client.send("initialized", {})
    create = client.read()
    assert create["method"] == "window/workDoneProgress/create"
    reply = json.dumps({"jsonrpc": "2.0", "id": create["id"], "result": None}).encode()
    client.raw(b"Content-Length: %d\r\n\r\n%s" % (len(reply), reply))
    begin = client.read()
    assert begin["params"]["value"]["kind"] == "begin"
    loads.set()
    assert client.read()["params"] == {"token": "kvq-loading", "value": {"kind": "end"}}
    client.close()


def test_a_reader_that_does_not_read_stops_nobody(completer: FakeCompleter) -> None:
    """LSP-17: far more than a pipe holds is answered, and the changes are all taken."""
    client = started(completer, "a\n")
    ready(client, 0, 1)
    for number in range(3000):
        client.change(number + 2, 0, 0, 0, "b")
        client.send("workspace/executeCommand", {"command": "kvq.explain", "arguments": [URI]}, 7)
    client.send("textDocument/inlineCompletion", at(0, 3001), 8)
    answers = [client.read() for _ in range(3001)]
    assert [one["id"] for one in answers] == [7] * 3000 + [8]
    assert texts(answers[-1])[0].startswith("b" * 3000 + "a<")
    client.close()


def test_a_file_renamed_or_open_twice_is_another_document(completer: FakeCompleter) -> None:
    """LSP-20, LSP-22: documents are apart; what is cached is found by its tokens, not its name."""
    client = started(completer, "a\n")
    ready(client, 0, 1)
    client.send("textDocument/didClose", {"textDocument": {"uri": URI}})
    assert client.complete(0, 1)["result"] is None
    other = {"uri": "file:///b.py", "version": 1, "text": "a\n"}
    client.send("textDocument/didOpen", {"textDocument": other})
    client.send("textDocument/didOpen", {"textDocument": other | {"uri": URI, "text": "zz\n"}})
    asked = at(0, 1) | {"textDocument": {"uri": other["uri"]}}
    assert texts(client.ask("textDocument/inlineCompletion", asked))[0] == "a<a>"
    assert texts(client.complete(0, 2))[0] == "zz<zz>"
    client.close()


def test_idle_time_makes_what_is_stale_exact_until_somebody_asks(completer: FakeCompleter) -> None:
    left, cancels = [3], []

    def refresh(max_tokens: int, cancel: Callable[[], bool]) -> int:
        cancels.append(cancel())
        left[0] -= 1
        done.set()
        return max(0, left[0])

    done = threading.Event()
    completer.refresh = refresh  # type: ignore[method-assign]
    client = started(completer, "a\n")
    ready(client, 0, 1)
    assert done.wait(PATIENCE_S)
    while left[0] > 0:
        done.clear()
        assert done.wait(PATIENCE_S)
    client.change(2, 0, 0, 0, "b")
    assert client.complete(0, 2)["result"] is not None
    assert cancels[0] is False
    client.close()


def test_a_server_whose_editor_died_ends(tmp_path: Path) -> None:
    """LSP-3: its process is gone, its pipes are not."""
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvq_apps.cli", "lsp", "--server", "http://127.0.0.1:9"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    asked = {"id": 1, "method": "initialize", "params": {"processId": parent.pid}}
    body = json.dumps({"jsonrpc": "2.0"} | asked).encode()
    process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    process.stdin.flush()
    assert next(read_frames(process.stdout, print))["id"] == 1
    parent.communicate(b"\n")
    assert process.wait(PATIENCE_S) == 1
    process.stdin.close()
    process.stdout.close()
