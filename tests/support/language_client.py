"""An editor for tests of `kvq lsp`: what it sends and reads, in a thread or as a process."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from environment import environment_in
from kvq_apps.completion.document import NamedText, TextDocument
from kvq_apps.completion.edit_history import EditedLines, NextEdit
from kvq_apps.completion.suggestions import Completion, Steps, Suggestion
from kvq_apps.lsp.connection import RpcError, read_frames
from kvq_apps.lsp.language_server import LanguageServer

URI = "file:///a.py"
PATIENCE_S = 120.0


class GatedCompleter:
    """Says what stands before the cursor; waits at a gate, where it can be cancelled."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, int]]] = []
        self.expected: list[tuple[str, tuple[int, int]]] = []
        self.other_parts: list[Sequence[NamedText]] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.steps: Steps = ()
        self.next_edits: list[NextEdit] = []
        self.edits: list[tuple[str, tuple[int, int], list[tuple[str, str]]]] = []

    def complete(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        cancel: Callable[[], bool],
    ) -> Completion:
        self.other_parts.append(other_parts)
        self.calls.append((document.text, place))
        self.begun.release()
        while not self.gate.wait(0.005):
            if cancel():
                return Completion(drafts=(), why_not="cancelled")
        if self.fails:
            raise RuntimeError("the engine broke")
        before = document.line(place[0])[: place[1]]
        texts = (f"<{before}>", f"second {len(self.calls)}")
        drafts = (Suggestion(text=text, logprob=-1.0, steps=self.steps) for text in texts)
        return Completion(drafts=tuple(drafts))

    def read(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        cancel: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> bool:
        self.expected.append((document.text, place))
        return True

    def next_edit(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        uri: str,
        edits: Sequence[EditedLines],
        form: str,
        cancel: Callable[[], bool],
    ) -> NextEdit:
        """The next of `next_edits`, for which the gate is closed as for completions."""
        self.edits.append((form, place, [(edit.old, edit.new) for edit in edits]))
        self.begun.release()
        while not self.gate.wait(0.005):
            if cancel():
                return NextEdit(why_not="cancelled")
        return self.next_edits.pop(0)

    def close(self) -> None:
        pass


class Client:
    """One end of two pipes, at whose other end a language server reads and writes."""

    def __init__(self, to: int, source: BinaryIO) -> None:
        self.log: list[str] = []
        self._to, self._source = to, source
        self._frames = read_frames(source, self.log.append)
        self._number = 0

    def raw(self, data: bytes) -> None:
        """Writes bytes."""
        while data:
            data = data[os.write(self._to, data) :]

    def send(self, method: str, params: Any = None, number: Any = None) -> None:
        """A request, or a notification without a number."""
        message: dict[str, Any] = {"method": method}
        message |= {} if params is None else {"params": params}
        self.send_message(message | ({} if number is None else {"id": number}))

    def send_message(self, message: dict[str, Any]) -> None:
        """One frame."""
        body = json.dumps({"jsonrpc": "2.0"} | message).encode()
        self.raw(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    def read(self) -> dict[str, Any]:
        """The next message of the server."""
        message = next(self._frames)
        assert not isinstance(message, RpcError)
        return message

    def ask(self, method: str, params: Any = None) -> dict[str, Any]:
        """A request and its answer, which is the next message."""
        self._number += 1
        self.send(method, params, self._number)
        answer = self.read()
        assert answer["id"] == self._number
        return answer

    def start(self, text: str | None, **options: Any) -> None:
        """Initializes, with `options` besides, and opens a document of `text`."""
        self.ask("initialize", {"capabilities": {}} | options)
        self.send("initialized", {})
        if text is not None:
            self.open(text)

    def open(self, text: str, uri: str = URI, version: int = 1) -> None:
        """Opens a document."""
        item = {"uri": uri, "version": version, "text": text}
        self.send("textDocument/didOpen", {"textDocument": item})

    def change(self, version: int, line: int, start: int, end: int, text: str) -> None:
        """Puts `text` in place of units of one line."""
        places = {
            "start": {"line": line, "character": start}, "end": {"line": line, "character": end}
        }  # fmt: skip
        self.changes(version, [{"range": places, "text": text}])

    def changes(self, version: int, changes: Sequence[Any], uri: str = URI) -> None:
        """Changes of a document, one after the other."""
        item = {"uri": uri, "version": version}
        self.send("textDocument/didChange", {"textDocument": item, "contentChanges": changes})

    def complete(self, line: int, character: int, kind: int = 2) -> dict[str, Any]:
        """The answer to a request for completions."""
        return self.ask("textDocument/inlineCompletion", at(line, character, kind))

    def ready(self, line: int, character: int) -> dict[str, Any]:
        """The first answer of a server that has loaded, where what is unlikely is shown too."""
        while True:
            answer = self.complete(line, character, 1)
            if answer["result"] is not None:
                return answer

    def command(self, name: str, *arguments: Any) -> Any:
        """What a command of the server answers."""
        request = {"command": f"kvq.{name}", "arguments": list(arguments)}
        return self.ask("workspace/executeCommand", request)["result"]

    def why_not(self, uri: str = URI) -> str:
        """Why the last completion of a document was none."""
        return self.command("explain", uri)["whyNot"]


class ThreadClient(Client):
    """A client of a server in a thread of this process; `load` makes its completer."""

    def __init__(self, load: Callable[[], Any]) -> None:
        ours, to = os.pipe()
        from_server, theirs = os.pipe()
        self.code: int | None = None

        def serve() -> None:
            with open(ours, "rb") as source, open(theirs, "wb") as sink:
                self.code = LanguageServer(source, sink, load, self.log.append).run()

        super().__init__(to, open(from_server, "rb"))  # noqa: SIM115  closed in `close`
        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def ended(self) -> int | None:
        """The server's exit code."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.code

    def close(self) -> int | None:
        """Goes without a word."""
        if not self._source.closed:
            os.close(self._to)
            self.ended()
            self._source.close()
        return self.code


class ProcessClient(Client):
    """A client of a `kvq lsp` with these words, or of another program's process."""

    def __init__(
        self,
        home: Path,
        *words: str,
        command: Sequence[str] = ("-m", "kvq_apps.cli", "lsp"),
        log: Path | None = None,
    ) -> None:
        """`log`: the file that gets its standard error."""
        with open(os.devnull if log is None else log, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *command, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment_in(home),
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin = self.process.stdin
        super().__init__(self._stdin.fileno(), self.process.stdout)

    def close(self) -> int:
        """Goes without a word; the exit code."""
        self._stdin.close()
        code = self.process.wait(PATIENCE_S)
        self._source.close()
        return code


def at(line: int, character: int, kind: int = 2, uri: str = URI, **context: Any) -> dict[str, Any]:
    """The parameters of a request at a place."""
    return {
        "textDocument": {"uri": uri},
        "position": {"line": line, "character": character},
        "context": {"triggerKind": kind} | context,
    }


def texts(answer: dict[str, Any]) -> list[str]:
    """What the items of an answer insert."""
    return [item["insertText"] for item in answer["result"]["items"]]
