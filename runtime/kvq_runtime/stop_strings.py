"""Ends a stream of text: at a stop string, or where its block ends. Knows text only, no tokens."""

from collections.abc import Iterable

from kvq.errors import UsageError


class StopStrings:
    """Passes text on until one of `stops` appears; a stop string itself is never passed on.

    Text that could be the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if "" in self._stops:
            raise UsageError("an empty stop string would stop before the first character; drop it")
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Text that is safe to show after `text` arrived; sets `found` when a stop appeared."""
        if not self._stops:
            return text
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops]
        hits = [(place, -len(stop), stop) for place, stop in places if place >= 0]
        if hits:
            place, _, self.found = min(hits)
            shown, self._held = self._held[:place], ""
            return shown
        undecided = self._undecided()
        cut = len(self._held) - undecided
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        shown, self._held = self._held, ""
        return shown

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins some stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class IndentLimit:
    """Passes text on until a line begins with fewer than `spaces` spaces or tabs.

    It ends an infilled text where its block ends: llama-server's `n_indent`. The spaces of a line
    are held back until its first other character decides; blank lines pass. The text's first line
    continues a line that exists already and is never judged.
    """

    def __init__(self, spaces: int) -> None:
        self._spaces = spaces
        self._held = ""
        self._in_margin = False
        self.reached = False

    def feed(self, text: str) -> str:
        """Text that is safe to show after `text` arrived; sets `reached` where the block ends."""
        if self._spaces == 0:
            return text
        shown: list[str] = []
        for character in text:
            if not self._in_margin or character == "\n":
                shown.append(self._held + character)
                self._held = ""
                self._in_margin = character == "\n"
            elif character in " \t":
                self._held += character
            elif len(self._held) < self._spaces:
                self.reached, self._held = True, ""
                break
            else:
                shown.append(self._held + character)
                self._held, self._in_margin = "", False
        return "".join(shown)

    def flush(self) -> str:
        """The spaces still held back, once no more text will come."""
        shown, self._held = self._held, ""
        return shown
