"""Ends an infilled text where its block ends: llama-server's `n_indent`. Knows text only."""


class IndentLimit:
    """Passes text on until a line begins with fewer than `spaces` spaces or tabs.

    The spaces of a line are held back until its first other character decides; blank lines pass.
    The text's first line continues a line that exists already and is never judged.
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
