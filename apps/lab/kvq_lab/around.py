"""What an editor waits for beside the model: changes and requests of `kvq lsp` without an engine.

The server runs as it does in an editor, over two pipes; its completer makes prompts and finds what
has changed in them, as the real one does, and answers at once.
"""

import os
import threading
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvq_apps.completion.blocks import BlockTokenizer
from kvq_apps.completion.completion_engine import NEAR_CHARACTERS
from kvq_apps.completion.document import Document
from kvq_apps.completion.drafts import Completion, Suggestion
from kvq_apps.lsp.connection import framed, read_frames
from kvq_apps.lsp.server import LanguageServer
from kvq_lab.typing_sessions import PROGRAM, copies_of
from kvq_models.infilling import infill_prompt
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.hunks import hunks

LINES = (5_000, 100_000)
KEYS = 40
CONTEXT = 16_384
_URI = "file:///bench.py"


class _NoEngine:
    """Everything `CompletionEngine` does but passes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode = BlockTokenizer(tokenizer).encode
        self._held: list[int] = []

    def complete(
        self, document: Document, place: tuple[int, int], *, cancel: Callable[[], bool]
    ) -> Completion:
        prefix, suffix = document.around(place, CONTEXT * NEAR_CHARACTERS)
        ids = infill_prompt(
            self._tokenizer, prefix, suffix, CONTEXT, self._encode, step=CONTEXT // 8,
            suffix_first=False,
        )  # fmt: skip
        hunks(self._held, ids)
        self._held = ids
        return Completion(drafts=(Suggestion(text="draft", logprob=0.0),))

    def read(self, *_: object, **__: object) -> bool:
        return True

    def close(self) -> None:
        pass


class _Editor:
    """A client that waits for every answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ours, self._to = os.pipe()
        self._from, theirs = os.pipe()

        def serve() -> None:
            with open(ours, "rb") as source, open(theirs, "wb") as sink:
                LanguageServer(source, sink, lambda: _NoEngine(tokenizer), lambda _: None).run()

        self._server = threading.Thread(target=serve)
        self._server.start()
        self._reader = open(self._from, "rb")  # noqa: SIM115  closed in `close`
        self._frames = read_frames(self._reader, lambda _: None)

    def send(self, method: str, params: object, number: int | None = None) -> None:
        message = {"method": method, "params": params}
        with open(self._to, "wb", closefd=False) as file:
            file.write(framed(message | ({} if number is None else {"id": number})))

    def ask(self, method: str, params: object, number: int = 1) -> Any:
        self.send(method, params, number)
        while True:
            answer = next(self._frames)
            assert isinstance(answer, dict)
            if answer.get("id") == number and "method" not in answer:
                return answer.get("result")

    def close(self) -> None:
        os.close(self._to)
        self._server.join()
        self._reader.close()


def measure(tokenizer: Tokenizer, lines: Sequence[int] = LINES) -> list[dict[str, Any]]:
    """A row for each length of a file."""
    program = PROGRAM.read_text("utf-8")
    per_copy = program.count("\n") + 2
    return [_measured(tokenizer, copies_of(program, -(-count // per_copy))) for count in lines]


def _measured(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    editor, line = _Editor(tokenizer), text.count("\n") // 2
    editor.ask("initialize", {"capabilities": {}})
    editor.send("textDocument/didOpen", {"textDocument": {"uri": _URI, "version": 0, "text": text}})
    asked = {"textDocument": {"uri": _URI}, "context": {"triggerKind": 2}}
    explain = {"command": "kvq.explain", "arguments": [_URI]}
    while editor.ask("textDocument/inlineCompletion", asked | {"position": _at(line, 0)}) is None:
        pass
    changes: list[float] = []
    answers: list[float] = []
    for key in range(KEYS):
        place = _at(line, key)
        since = perf_counter()
        editor.send(
            "textDocument/didChange",
            {
                "textDocument": {"uri": _URI, "version": key + 1},
                "contentChanges": [{"range": {"start": place, "end": place}, "text": "x"}],
            },
        )
        # Answered by the thread that took the change, after it.
        editor.ask("workspace/executeCommand", explain)
        changes.append(perf_counter() - since)
        since = perf_counter()
        answer = asked | {"position": _at(line, key + 1)}
        assert editor.ask("textDocument/inlineCompletion", answer) is not None
        answers.append(perf_counter() - since)
    editor.close()
    return {
        "lines": text.count("\n") + 1,
        "change_ms": 1e3 * median(changes),
        "change_p95_ms": 1e3 * float(np.percentile(changes, 95)),
        "answer_ms": 1e3 * median(answers),
        "answer_p95_ms": 1e3 * float(np.percentile(answers, 95)),
    }


def _at(line: int, character: int) -> dict[str, int]:
    return {"line": line, "character": character}
