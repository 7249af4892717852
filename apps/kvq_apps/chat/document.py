"""One message's text on the way to the screen: frozen blocks, and a tail that is drawn again.

Blocks that are closed are drawn once per width. The open end is drawn at most every 66 ms and never
for more than a tenth of the time; an open fence keeps the strips of its lines and is highlighted
at most every 250 ms.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, perf_counter

from rich.text import Text
from textual.strip import Strip

from kvq_apps.chat.blocks import Block, BlockScanner
from kvq_apps.chat.markdown import Palette, code_line, draw
from kvq_apps.chat.visible import visible

TAIL_INTERVAL_S = 0.066
HIGHLIGHT_INTERVAL_S = 0.25
SHARE = 10


class Document:
    """A streamed markdown text: feed it, `settle` it, then finish it."""

    def __init__(self) -> None:
        self._scanner = BlockScanner()
        self._tail = Tail()
        self._next_settle_s = 0.0

    def feed(self, text: str) -> list[Block]:
        """The blocks that `text` closes, to be drawn when they are on screen."""
        return self._scanner.feed(text)

    def finish(self) -> list[Block]:
        """The last blocks; nothing follows them."""
        return self._scanner.finish()

    def tail(self, width: int, palette: Palette, *, closed: bool) -> list[Strip] | None:
        """Strips of the open end, or None while it is too early to draw them again.

        After a block was `closed` they are always new: the old ones may show it too.
        """
        now = monotonic()
        if now < self._next_settle_s and not closed:
            return None
        started = perf_counter()
        strips = self._tail.draw(self._scanner.tail(), width, palette)
        spent = perf_counter() - started
        self._next_settle_s = now + max(TAIL_INTERVAL_S, SHARE * spent)
        return strips


class Tail:
    """Draws the open end of a text again and again, reusing an open fence's lines."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._strips: list[Strip] = []
        self._look: tuple[object, ...] = ()
        self._next_highlight_s = 0.0

    def draw(self, blocks: Sequence[Block], width: int, palette: Palette) -> list[Strip]:
        """Strips of `blocks`, in full or from the lines kept."""
        strips: list[Strip] = []
        for block in blocks:
            grows = block.kind == "fence" and "\n" in block.source
            strips += (self._fence if grows else draw)(block, width, palette)
        return strips

    def _fence(self, block: Block, width: int, palette: Palette) -> list[Strip]:
        """All lines but the last are kept: only the last can have grown since."""
        *lines, last = visible(block.source).expandtabs(4).split("\n")
        look = (width, id(palette), block.language, block.gap)
        changed = look != self._look or lines[: len(self._lines)] != self._lines
        now = monotonic()
        if changed or now >= self._next_highlight_s:
            self._strips = draw(replace(block, source="\n".join(lines)), width, palette)
            spent = monotonic() - now
            self._next_highlight_s = now + max(HIGHLIGHT_INTERVAL_S, SHARE * spent)
        else:
            for line in lines[len(self._lines) :]:
                self._strips += code_line(Text(line, end=""), width, palette["code"])
        self._look, self._lines = look, lines
        return self._strips + code_line(Text(last, end=""), width, palette["code"])
