"""Recorded typing sessions: a file, and what somebody did with it. Knows no tokens and no model.

`apps/lab/record_typing.py` writes the recordings.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent / "texts"
PROGRAM = TEXTS / "program.txt"
# Files that fit a context of 2048 tokens, and one that does not.
SHORT, LONG = ("typing", "jumping", "renaming"), "whole_file"
# An editor indents after a line end.
KEY = re.compile(r"\n[ \t]*|.")


@dataclass(frozen=True, slots=True)
class Moment:
    """Holds the text around the cursor after an event, or when it is opened.

    `kind` is open, key, jump, paste, delete, undo or rename.
    """

    kind: str
    prefix: str
    suffix: str


@dataclass(frozen=True, slots=True)
class TypingSession:
    """Holds a file's text, and the events: [kind, cursor after it, [[start, removed, text]]]."""

    name: str
    text: str
    events: list[Any]

    @classmethod
    def read(cls, name: str) -> "TypingSession":
        """Reads one of those that ship."""
        recorded = json.loads((TEXTS / f"{name}.json").read_text("utf-8"))
        text = PROGRAM.read_text("utf-8")
        if recorded["copies"] > 1:
            text = copies_of(text, recorded["copies"])
        return cls(name, text, recorded["events"])

    def moments(self) -> Iterator[Moment]:
        """Yields the file as it was opened, then after each event."""
        text = self.text
        yield Moment("open", "", text)
        for kind, cursor, edits in self.events:
            for start, removed, new in edits:
                text = text[:start] + new + text[start + removed :]
            yield Moment(kind, text[:cursor], text[cursor:])


def copies_of(text: str, count: int) -> str:
    """Makes a long file: `text` again and again, the names of each copy its own."""
    renamed = [re.sub(r"\b(Shed|Tool|\w+_shed)\b", rf"\g<1>{n}", text) for n in range(count)]
    return "\n\n".join(renamed)
