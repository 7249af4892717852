"""The language server over real pipes: frames, life cycle, positions, cancels, stable drafts."""

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

    def __init__(self, completer: FakeCompleter, loads: threading.Event | None = None) -> None:
        ours, self._to = os.pipe()
        self._from, theirs = os.pipe()
        self.log: list[str] = []
        self.code: int | None = None

        def load() -> FakeCompleter:
            if loads is not None:
                assert loads.wait(PATIENCE_S)
            return completer

        def serve() -> None:
            with open(ours, "rb") as source, open(theirs, "wb") as sink:
                self.code = LanguageServer(source, sink, load, self.log.append).run()

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
        result = ask(number, "textDocument/inlineCompletion", at(3, 14))
        assert number < 50_000
        time.sleep(0.01)
    assert 1 <= len(result["items"]) <= 2
    assert all(item["insertText"].strip() for item in result["items"])
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 1  # the editor went without a word
    process.stdout.close()
