"""`kvq lsp` with a completer that needs no model: what editors' plugins are tested against.

Run as a program it is the real language server. It goes on with lines that it knows, wherever a
line's end is the beginning of one, and appends each call to the file that FAKE_LSP_CALLS names.
FAKE_LSP_LOADS names a file without which the model goes on loading.
"""

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvq_apps.completion.document import LineChange, NamedText, TextDocument
from kvq_apps.completion.edit_history import EditedLines, NextEdit
from kvq_apps.completion.suggestions import Completion, Suggestion
from kvq_apps.lsp.language_server import LanguageServer

KNOWN = (
    "greet(name, loudly=True)",
    "greet_all(names)",
    "green = 1",
    "plural(\n    one,\n    two,\n)",
    "call(argument)",
    "caf\u00e9 = '\U0001f44b'",
)


class KnownLines:
    """Completes the lines above."""

    def complete(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        other_parts: Sequence[NamedText] = (),
        **_: object,
    ) -> Completion:
        line, column = place
        row = document.line(line)
        before, after = row[:column], row[column:]
        names = [name for name, _ in other_parts]
        _append({"before": before, "after": after, "pid": os.getpid(), "others": names})
        drafts = tuple(Suggestion(text=text, logprob=-1.0) for text in _goes_on(before, after))
        return Completion(
            drafts=drafts, reused_tokens=len(document.text), encoded_tokens=2, ms=11.0,
            why_not=None if drafts else "filtered",
        )  # fmt: skip

    def read(self, *_: object, **__: object) -> bool:
        return True

    def next_edit(
        self,
        document: TextDocument,
        place: tuple[int, int],
        *,
        uri: str,
        edits: Sequence[EditedLines],
        **_: object,
    ) -> NextEdit:
        """A word that the last edit replaced is replaced everywhere else."""
        if not edits or not (words := edits[-1].removed_words()):
            return NextEdit(why_not="nothing else changes")
        new = re.findall(r"\w+", edits[-1].new)[re.findall(r"\w+", edits[-1].old).index(words[0])]
        changes = [
            LineChange(number, (line,), (re.sub(rf"\b{words[0]}\b", new, line),))
            for number, line in enumerate(document.lines())
            if re.search(rf"\b{words[0]}\b", line)
        ]
        return NextEdit(changes=tuple(changes))

    def close(self) -> None:
        pass


def _goes_on(before: str, after: str) -> list[str]:
    endings = []
    for known in KNOWN:
        sizes = [size for size in range(2, len(known)) if before.endswith(known[:size])]
        if sizes:
            endings.append(known[max(sizes) :].removesuffix(after))
    return endings


def _append(call: dict[str, str | int | list[str]]) -> None:
    if name := os.environ.get("FAKE_LSP_CALLS"):
        with open(name, "a", encoding="utf-8") as file:
            file.write(json.dumps(call) + "\n")


def _load() -> KnownLines:
    gate = os.environ.get("FAKE_LSP_LOADS")
    while gate is not None and not Path(gate).exists():
        time.sleep(0.01)
    return KnownLines()


if __name__ == "__main__":
    server = LanguageServer(sys.stdin.buffer, sys.stdout.buffer, _load, lambda line: None)
    sys.exit(server.run())
