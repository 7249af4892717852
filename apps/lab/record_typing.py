"""Writes the typing sessions that `kvq bench --suite edit` replays: `python record_typing.py`.

A session is what somebody does in an editor with `program.txt`: letters with a wrong one now and
then, jumps, pastes, deleted blocks, undo, a rename. The same every time.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

from kvq_lab.typing_sessions import KEY, PROGRAM, TEXTS, copies_of

# One wrong letter in so many.
WRONG_EVERY = 12
# A file of about 17 500 tokens, 284 keys and 8 events that are none.
COPIES, LONG_EVENTS = 12, 292
SMALL = "abcdefghijklmnopqrstuvwxyz"


class Recorder:
    """Records a text in an editor: actions become events (kind, cursor after it, edits)."""

    def __init__(self, text: str, seed: int) -> None:
        self.text = text
        self.cursor = 0
        self.events: list[list[Any]] = []
        self._chance = random.Random(seed)
        self._before: list[tuple[str, int]] = []

    def after(self, anchor: str) -> "Recorder":
        """Moves the cursor behind the first `anchor`; the next event begins there."""
        self.cursor = self.text.index(anchor) + len(anchor)
        self._note("jump", [])
        return self

    def type(self, text: str) -> "Recorder":
        """Types key by key; an editor indents after a line end. Wrong letters are taken back."""
        for number, key in enumerate(KEY.findall(text), 1):
            if key in SMALL and number % WRONG_EVERY == 0:
                self._put("key", self.cursor, 0, self._chance.choice(SMALL))
                self._put("key", self.cursor - 1, 1, "")
            self._put("key", self.cursor, 0, key)
        return self

    def paste(self, text: str) -> "Recorder":
        """Inserts all of `text` at once."""
        self._put("paste", self.cursor, 0, text)
        return self

    def delete(self, first: str, stop: str) -> "Recorder":
        """Deletes from the first `first` up to the next `stop`; the cursor stays there."""
        start = self.text.index(first)
        self._put("delete", start, self.text.index(stop, start) - start, "")
        return self

    def rename(self, old: str, new: str) -> "Recorder":
        """Renames wherever the name stands, as a language server does it."""
        places = [match.start() for match in re.finditer(rf"\b{old}\b", self.text)]
        edits = [[place, len(old), new] for place in reversed(places)]
        self._before.append((self.text, self.cursor))
        self.cursor += (len(new) - len(old)) * sum(place < self.cursor for place in places)
        self._note("rename", edits)
        return self

    def undo(self) -> "Recorder":
        """Brings back the text before the last edit."""
        text, cursor = self._before.pop()
        start = next(
            (i for i, (a, b) in enumerate(zip(self.text, text, strict=False)) if a != b),
            min(len(self.text), len(text)),
        )
        stop, end = len(self.text), len(text)
        while min(stop, end) > start and self.text[stop - 1] == text[end - 1]:
            stop, end = stop - 1, end - 1
        self.cursor = cursor
        self._note("undo", [[start, stop - start, text[start:end]]])
        return self

    def save(self, name: str, about: str, copies: int = 1, *, folder: Path = TEXTS) -> None:
        """Writes the session, an event a line."""
        rows = ",\n".join(json.dumps(event) for event in self.events)
        head = json.dumps({"about": about, "copies": copies})[:-1]
        (folder / f"{name}.json").write_text(f'{head}, "events": [\n{rows}\n]}}\n', "utf-8")

    def _put(self, kind: str, start: int, removed: int, text: str) -> None:
        self._before.append((self.text, self.cursor))
        self.cursor = start + len(text)
        self._note(kind, [[start, removed, text]])

    def _note(self, kind: str, edits: list[list[Any]]) -> None:
        for start, removed, text in edits:
            self.text = self.text[:start] + text + self.text[start + removed :]
        self.events.append([kind, self.cursor, edits])


def record(folder: Path = TEXTS) -> None:
    """Writes all sessions."""
    text = PROGRAM.read_text("utf-8")
    typing = Recorder(text, 1).after("return tool.queue[0] if tool.queue else None\n")
    typing.type(
        "\n    def borrowed_by(self, person: str) -> list[Tool]:"
        '\n        """What a person has, the first due first."""'
        "\n        found = [tool for tool in self.tools.values() if tool.borrower == person]"
        "\n        return sorted(found, key=lambda tool: tool.due or datetime.date.max)\n"
    )
    typing.save("typing", "a method is written letter by letter", folder=folder)

    jumping = Recorder(text, 2)
    jumping.after("MOST_RENEWALS = 2\n").type("MOST_WAITING = 5\n")
    jumping.after("return tool.queue.index(person)\n").type("        if len(tool.queue)")
    jumping.type(" >= MOST_WAITING:\n            raise ShedError(")
    jumping.paste('f"{MOST_WAITING} neighbours wait for {name} already")\n')
    jumping.after("    def late(").delete("        found = []\n", "\n\ndef read_shed").undo()
    jumping.after('hint = f"; did you mean {near[0]}?"').type(" # nosec").undo().undo()
    jumping.after("import csv\n").type("import logging\n")
    jumping.after("COLUMNS = (").paste('"bought", ').undo()
    jumping.after("self.tools[tool.name] = tool\n").type("        log.info(")
    jumping.paste('"%s is in the shed", tool.name)\n')
    jumping.delete("    def wait_for", "    def late").after("beside.replace(path)\n").type("\n\n")
    jumping.save("jumping", "bursts at many places, pastes, deleted blocks, undo", folder=folder)

    renaming = Recorder(text, 3).after("if tool.borrower != person")
    renaming.rename("borrower", "holder").type(" and person")
    renaming.rename("LOAN_DAYS", "DAYS_OF_A_LOAN").after("tool.queue.popleft()\n")
    renaming.type("        tool.lent += 1\n").after("    renewals: int = 0\n")
    renaming.type("    lent: int = 0\n").rename("late", "overdue_tools").undo()
    renaming.rename("find", "tool_called").after("def give_back(self, ").type("today, ")
    renaming.save("renaming", "names change wherever they stand", folder=folder)

    long = Recorder(copies_of(text, COPIES), 4)
    for number in (6, 1, 11):
        long.after(f'class Shed{number}:\n    """All tools').type(
            " and whatever else neighbours lend"
        )
        long.type(" in the street they live in, by")
        long.after(f"def read_shed{number}(").type("place: Path, ")
    long.paste("today: datetime.date, ").delete("    def late", "\n\ndef read_shed0")
    long.type("    # every tool is somewhere, and somebody waits for it")
    del long.events[LONG_EVENTS:]
    long.save("whole_file", "typing and jumping in a long file", COPIES, folder=folder)


if __name__ == "__main__":
    record()
