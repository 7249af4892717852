"""Ends a stream of text at a stop string, or where its block ends."""

import re
from collections.abc import Iterable

from kvq.errors import UsageError


class StopStrings:
    """Passes text on until one of `stops` appears; a stop string itself is never passed on.

    Text that could be the beginning of a stop string waits until this is decided. `match` is the
    stop string that appeared, if one did.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if "" in self._stops:
            raise UsageError("an empty stop string would stop before the first character; drop it")
        # At one place the longest is the one that ends the text.
        longest_first = sorted(self._stops, key=len, reverse=True)
        self._longest = len(longest_first[0]) if longest_first else 0
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._buffer = ""
        self.match: str | None = None

    def feed(self, text: str) -> str:
        """Returns the text that is safe to show after `text` arrived; may set `match`."""
        if not self._stops:
            return text
        self._buffer += text
        if stop := self._pattern.search(self._buffer):
            self.match = stop[0]
            shown, self._buffer = self._buffer[: stop.start()], ""
            return shown
        undecided = self._undecided() if self._longest > 1 else 0
        cut = len(self._buffer) - undecided
        shown, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return shown

    def flush(self) -> str:
        """Returns the text that still waits, once no more will come."""
        shown, self._buffer = self._buffer, ""
        return shown

    def _undecided(self) -> int:
        """Returns the length of the longest end of the waiting text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._buffer)), 0, -1):
            end = self._buffer[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class IndentLimit:
    """Passes text on until a line begins with fewer than `spaces` spaces or tabs.

    It ends an infilled text where its block ends, like llama-server's `n_indent`. The spaces of a
    line wait until its first other character decides. Blank lines pass. The text's first line
    continues a line that exists already and is never judged.
    """

    def __init__(self, spaces: int) -> None:
        self._spaces = spaces
        self._margin: list[str] = []
        self._in_margin = False
        self.reached = False

    def feed(self, text: str) -> str:
        """Returns the text that is safe to show after `text` arrived; may set `reached`."""
        if self._spaces == 0:
            return text
        shown: list[str] = []
        for character in text:
            if not self._in_margin or character == "\n":
                shown += [*self._margin, character]
                self._margin = []
                self._in_margin = character == "\n"
            elif character in " \t":
                self._margin.append(character)
            elif len(self._margin) < self._spaces:
                self.reached, self._margin = True, []
                break
            else:
                shown += [*self._margin, character]
                self._margin, self._in_margin = [], False
        return "".join(shown)

    def flush(self) -> str:
        """Returns the spaces that still wait, once no more text will come."""
        shown, self._margin = "".join(self._margin), []
        return shown
