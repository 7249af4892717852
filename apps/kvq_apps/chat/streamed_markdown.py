"""The text of one streaming message: closed blocks, and a tail that is drawn again.

A closed block is drawn once per width. The tail is drawn at most every 66 ms and for at most a
tenth of the time. An open fence keeps the strips of its lines and is highlighted at most every 250
ms.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, perf_counter

from textual.strip import Strip

from kvq_apps.chat.markdown import Palette, code_line, draw
from kvq_apps.chat.markdown_blocks import BlockScanner, MarkdownBlock
from kvq_apps.terminal.output import visible

TAIL_INTERVAL_S = 0.066
HIGHLIGHT_INTERVAL_S = 0.25
PAUSE_FACTOR = 10


class StreamedMarkdown(BlockScanner):
    """Scans a streamed text and draws its tail often; the lines of an open fence are reused."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._strips: list[Strip] = []
        self._look: tuple[object, ...] = ()
        self._next_highlight_s = self._next_draw_s = 0.0

    def draw_tail(self, width: int, palette: Palette, *, closed: bool) -> list[Strip] | None:
        """Draws the tail, or returns None while it is too early to draw it again.

        After a block was `closed` it is always drawn: the old strips may show that block, too.
        """
        now = monotonic()
        if now < self._next_draw_s and not closed:
            return None
        started = perf_counter()
        strips = self.draw_blocks(self.tail(), width, palette)
        duration_s = perf_counter() - started
        self._next_draw_s = now + max(TAIL_INTERVAL_S, PAUSE_FACTOR * duration_s)
        return strips

    def draw_blocks(
        self, blocks: Sequence[MarkdownBlock], width: int, palette: Palette
    ) -> list[Strip]:
        """Draws `blocks`, in full or from the kept lines."""
        strips: list[Strip] = []
        for block in blocks:
            grows = block.kind == "fence" and "\n" in block.source
            strips += (self._fence if grows else draw)(block, width, palette)
        return strips

    def _fence(self, block: MarkdownBlock, width: int, palette: Palette) -> list[Strip]:
        """Keeps all lines but the last, which alone may have grown."""
        *lines, last = visible(block.source).expandtabs(4).split("\n")
        look = (width, id(palette), block.language, block.gap)
        changed = look != self._look or lines[: len(self._lines)] != self._lines
        now = monotonic()
        if changed or now >= self._next_highlight_s:
            self._strips = draw(replace(block, source="\n".join(lines)), width, palette)
            duration_s = monotonic() - now
            self._next_highlight_s = now + max(HIGHLIGHT_INTERVAL_S, PAUSE_FACTOR * duration_s)
        else:
            for line in lines[len(self._lines) :]:
                self._strips += code_line(line, width, palette["code"])
        self._look, self._lines = look, lines
        return self._strips + code_line(last, width, palette["code"])
