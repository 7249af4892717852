"""A user types, jumps, pastes, undoes and reloads in a `kvq lsp` with the embedded model.

What the server holds must not grow with what was done; `long.py --edits` does it for long (LSP-24).
"""

import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvq_apps.completion.document import Position, TextDocument
from kvq_lab.typing_sessions import PROGRAM
from language_client import ProcessClient, at
from shelf import Shelf

WORDS = ("-m", "nano", "--threads", "1", "--drafts", "2", "--predict", "4", "--ctx-size", "4096")
KEYS = "etaoin srhld()[]=.,:_0\u00e9\u4f60\U0001f44b"
MOST_CHARACTERS, FIRST_CHARACTERS = 3_500, 2_000


class Typist:
    """Edits at random, as an editor does, and asks after every few edits."""

    def __init__(self, home: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.client = ProcessClient(home, *WORDS)
        self.requests = self.encoded = 0
        self._version = 1
        self._place = (0, 0)
        self._before = ""
        self.client.start(None)
        self._open()

    def _open(self) -> None:
        """Opens another file of the same length, in place of the one that was open."""
        whole = PROGRAM.read_text("utf-8")
        start = self.chance.randrange(max(1, len(whole) - FIRST_CHARACTERS))
        self._document = TextDocument(whole[start : start + FIRST_CHARACTERS])
        self.client.open(self._document.text, version=self._version)

    def edit(self) -> None:
        """Makes one change; most are typing."""
        self._version += 1
        kind = self.chance.random()
        if kind < 0.001:
            self.client.send("textDocument/didClose", {"textDocument": at(0, 0)["textDocument"]})
            self._open()
        elif kind < 0.02:
            self._whole(self._before or self._document.text)
        else:
            self._part(kind)

    def _whole(self, text: str) -> None:
        """Sends all of the text, as an undo of many things or a formatter does."""
        self._before = self._document.text
        self._document = TextDocument(text)
        self.client.changes(self._version, [{"text": text}])

    def _part(self, kind: float) -> None:
        line, column = self._place
        if 0.04 < kind < 0.07:
            line = self.chance.randrange(self._document.num_lines)
            column = self.chance.randrange(len(self._document.line(line)) + 1)
        line = min(line, self._document.num_lines - 1)
        column = min(column, len(self._document.line(line)))
        start = end = Position(line, self._document.units(line, column))
        text = self.chance.choice(KEYS)
        if kind < 0.03 or len(self._document.text) > MOST_CHARACTERS:
            start, end, text = Position(line, 0), Position(line + self.chance.randrange(9), 0), ""
        elif kind < 0.04:
            text = "\n".join("    pasted = 1" for _ in range(self.chance.randrange(1, 9)))
        elif kind < 0.25 and column:
            start, text = Position(line, self._document.units(line, column - 1)), ""
        elif kind < 0.29:
            text = self.chance.choice(["\n", "\r\n    "])
        self._document.replace(start, end, text)
        self.client.changes(
            self._version,
            [{"range": {"start": start._asdict(), "end": end._asdict()}, "text": text}],
        )
        ended = text.rpartition("\n")[2]
        broken = len(text.splitlines()) - (not text.endswith("\n")) if "\n" in text else 0
        column = len(ended) if broken else max(0, column + len(text) - (start != end))
        self._place = line + broken, column

    def ask(self) -> None:
        """Sends a request, of which one in five is given up at once; then reads what it cost."""
        line = min(self._place[0], self._document.num_lines - 1)
        column = min(self._place[1], len(self._document.line(line)))
        place = at(line, self._document.units(line, column))
        self.requests += 1
        self.client.send("textDocument/inlineCompletion", place, self.requests)
        if self.chance.random() < 0.2:
            self.client.send("$/cancelRequest", {"id": self.requests})
        answer = self.client.read()
        assert answer["id"] == self.requests
        assert "error" not in answer or answer["error"]["code"] == -32800, answer
        report = self.client.command("explain", place["textDocument"]["uri"])
        self.encoded += report["encodedTokens"] if report else 0


def series(home: Path, edits: int, every: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields, after every so many edits, what the server holds and what requests cost since."""
    typist = Typist(home, seed)
    typist.client.ready(0, 0)
    before = 0, 0
    for number in range(1, edits + 1):
        typist.edit()
        if number % 4 == 0:
            typist.ask()
        if number % every == 0:
            new, encoded = typist.requests - before[0], typist.encoded - before[1]
            before = typist.requests, typist.encoded
            yield {"edits": number, "tokens_a_request": encoded / new} | usage(typist.client)
    assert typist.client.close() == 1


def usage(client: ProcessClient) -> dict[str, int]:
    """Returns what the server's process holds: resident KiB, descriptors, threads."""
    folder = Path(f"/proc/{client.process.pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "kib": resource.getpagesize() // 1024 * pages,
        "descriptors": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
    }


@pytest.mark.slow
def test_what_a_server_holds_does_not_grow_with_edits(shelf: Shelf, tmp_path: Path) -> None:
    """Checks LSP-24 for a moment: after the first third only libraries keep more."""
    shelf.used_before(tmp_path / "cache", ["nano"])
    rows = list(series(tmp_path, edits=240, every=80))
    assert [row["edits"] for row in rows] == [80, 160, 240]
    for row in rows[1:]:
        assert row["kib"] < 1.05 * rows[0]["kib"]
        assert row["descriptors"] == rows[0]["descriptors"]
        assert row["threads"] == rows[0]["threads"]
        assert row["tokens_a_request"] < 300
