"""The conversation on screen, drawn line by line: no widget per message, nothing off screen.

Rows are the blocks of all messages. A row that was never on screen has an estimated height; it is
measured when it comes into view, and what stands on screen stays where it is. The streaming
message is always the last one. What a reply thought is one line, and more only if unfolded.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.events import Resize
from textual.geometry import Size
from textual.message import Message as Event
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from kvq_apps.chat.blocks import Block, plain_blocks
from kvq_apps.chat.document import Document
from kvq_apps.chat.markdown import STYLES, Palette, draw, estimate, strip_text
from kvq_apps.chat.messages import Message, ReplyStats
from kvq_apps.chat.thoughts import thought_line
from kvq_models.thinking import KEPT, Piece, ThinkingReader

GUTTER_CELLS = 2
FOLLOW_ROWS = 2
NAMES = {"user": "you", "assistant": "kvq", "system": "system"}
# Kinds of blocks: the line of a thought, and parts of its text, which is drawn again as it grows.
_THOUGHT, _THOUGHT_TEXT = "thought", "thought text"
_THOUGHT_CHARACTERS = 2048
_TONES = ("user", "assistant", "note", "error", "header")
STATES = {
    "stopped": "stopped",
    "length": "cut: /more goes on",
    "failed": "failed",
    "interrupted": "interrupted",
}


@dataclass(slots=True, eq=False)
class Row:
    """A block of a message (None: its header line) and, once drawn, its strips."""

    message: Message
    block: Block | None
    height: int = 0
    strips: list[Strip] | None = None


class TranscriptView(ScrollView, can_focus=True):
    """Shows messages and follows the last one while it streams."""

    ALLOW_SELECT = True
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"transcript--{name}" for name in (*STYLES, *_TONES)}
    DEFAULT_CSS = """
    TranscriptView {
        overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; padding: 0 1;
        .transcript--text { color: $foreground; }
        .transcript--heading { color: $primary; text-style: bold; }
        .transcript--strong { text-style: bold; }
        .transcript--emphasis { text-style: italic; }
        .transcript--strike { text-style: strike; }
        .transcript--inline-code { color: $accent; }
        .transcript--link { color: $secondary; text-style: underline; }
        .transcript--quote { color: $text-muted; }
        .transcript--marker { color: $primary; }
        .transcript--table-line { color: $text-muted; }
        .transcript--code { background: $panel; color: $foreground; }
        .transcript--code-keyword { color: $primary; text-style: bold; }
        .transcript--code-string { color: $success; }
        .transcript--code-comment { color: $text-muted; text-style: italic; }
        .transcript--code-number { color: $warning; }
        .transcript--code-name { color: $secondary; }
        .transcript--user { color: $secondary; }
        .transcript--assistant { color: $primary; }
        .transcript--note { color: $text-muted; text-style: italic; }
        .transcript--error { color: $error; }
        .transcript--header { color: $text-muted; }
    }
    """

    class Unseen(Event):
        """Whether there is more below what is on screen has changed: see `unseen`."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.messages: list[Message] = []
        self.follow = True
        self.selected: Message | None = None
        self.unfolded = self.hides_thoughts = False
        self._reader = ThinkingReader(KEPT)
        self._rows: list[Row] = []
        self._ends: list[int] | None = []
        self._document: Document | None = None
        self._later: list[Message] = []
        self._tail: list[Strip] = []
        self._palette: dict[str, Style] = {}
        self._width = 0
        self._moving = False
        self.unseen = False

    # What is shown

    def show(self, messages: Sequence[Message]) -> None:
        """Shows `messages` alone, from their end."""
        self.messages, self._rows, self._document, self._tail = [], [], None, []
        self.selected = None
        self.follow = True
        for message in messages:
            self._append(message)
        self._changed()

    def add(self, message: Message) -> None:
        """Appends a message; one that is streaming is fed next."""
        self.finish()
        self._append(message)
        self._changed()

    def note(self, text: str, *, error: bool = False) -> None:
        """Appends a remark that belongs to the screen only; while a message streams, after it."""
        note = Message(role="error" if error else "note", text=text)
        if self._document is None:
            self.add(note)
        else:
            self._later.append(note)

    def feed(self, text: str) -> None:
        """Appends to the streaming message."""
        if self._document is None:
            return
        thinking = self._reader.thinking
        self._take(self._reader.feed(text))
        if thinking != self._reader.thinking:
            self.restate(self.messages[-1])

    def _take(self, pieces: Sequence[Piece]) -> None:
        """Appends what is thought and what is said to the streaming message."""
        assert self._document is not None
        closed: list[Block] = []
        for piece in pieces:
            if isinstance(piece, str):
                closed += self._document.feed(piece)
            else:
                self._think(self.messages[-1], piece.text)
        self._extend(self.messages[-1], closed)
        self.settle(closed=bool(closed))

    def settle(self, *, closed: bool = False) -> None:
        """Draws the streaming end again if it is time to."""
        if self._document is None or not self._width:
            return
        tail = self._document.tail(self._width, self._palette, closed=closed)
        if tail is not None:
            self._tail = tail
            self._changed()

    def finish(self) -> None:
        """Freezes the streaming message as it is."""
        if self._document is not None:
            self._take(self._reader.flush())
        document, self._document, self._tail = self._document, None, []
        if document is None:
            return
        self._extend(self.messages[-1], document.finish())
        later, self._later = self._later, []
        for note in later:
            self._append(note)
        self._changed()

    def restate(self, message: Message) -> None:
        """Draws the header of `message` again: its state, its branch or its cost changed."""
        for row in self._rows:
            if row.message is message and (row.block is None or row.block.kind == _THOUGHT):
                row.strips = None
        self._see()

    def unfold(self, *, shown: bool) -> None:
        """Shows what was thought, or one line of it; the first row on screen stays."""
        self.unfolded = shown
        top = self._row_at(round(self.scroll_y))
        self._ends = None
        for row in self._rows:
            if row.block is not None and row.block.kind == _THOUGHT_TEXT:
                row.strips = None
                row.height = self._estimate(row)
        self._changed()
        self._stay_at(top)

    @property
    def lines(self) -> list[str]:
        """Every line as it would be drawn, off-screen ones included."""
        self._measure(range(len(self._rows)))
        strips = [strip for row in self._rows for strip in row.strips or ()] + self._tail
        return [strip_text(strip) for strip in strips]

    def lines_since(self, created_s: float) -> list[str]:
        """The lines of the messages that are not older, as they are drawn."""
        if not self._width:
            return []
        self._measure(range(len(self._rows)))
        rows = [row for row in self._rows if row.message.created_s >= created_s]
        return [strip_text(strip) for row in rows for strip in row.strips or ()]

    # Choosing a message

    def select(self, step: int) -> None:
        """Selects the next message but `step` - 1, past the last one: none."""
        real = [message for message in self.messages if message.id]
        if not real:
            return
        index = real.index(self.selected) if self.selected in real else len(real)
        index = max(0, index + step)
        self.selected = real[index] if index < len(real) else None
        if self.selected is None:
            self.action_scroll_end()
        else:
            self._scroll_to_message(self.selected)
        self.refresh()

    def _scroll_to_message(self, message: Message) -> None:
        index = next(i for i, row in enumerate(self._rows) if row.message is message)
        ends = self._row_ends()
        self.follow = False
        self._move(ends[index - 1] if index else 0)
        self._see()

    # Scrolling

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Follows the end when the user scrolls to within two rows of it."""
        super().watch_scroll_y(old_value, new_value)
        if not self._moving:
            self.follow = self.max_scroll_y - new_value <= FOLLOW_ROWS
            self._see()

    def action_scroll_end(self) -> None:
        """Goes to the newest line and follows it."""
        self.follow = True
        self._changed()

    def action_scroll_home(self) -> None:
        """Goes to the first line."""
        self.follow = False
        self._move(0)
        self._see()

    def _on_resize(self, event: Resize) -> None:
        self._restyle()

    def notify_style_update(self) -> None:
        """Themes change every style."""
        super().notify_style_update()
        if self.is_mounted:
            self._restyle()

    def _restyle(self) -> None:
        """Forgets what was drawn for another width or theme; the first row on screen stays."""
        palette = {
            name.removeprefix("transcript--"): self.get_component_rich_style(name, partial=True)
            for name in self.COMPONENT_CLASSES
        }
        width = max(1, self.scrollable_content_region.width - GUTTER_CELLS)
        if (width, palette) == (self._width, self._palette):
            self._changed()
            return
        top = self._row_at(round(self.scroll_y))
        self._width, self._palette, self._ends = width, palette, None
        for row in self._rows:
            row.strips = None
            row.height = self._estimate(row)
        if self._document is not None:
            self._tail = self._document.tail(width, palette, closed=True) or []
        self._changed()
        self._stay_at(top)

    def _stay_at(self, top: int) -> None:
        """Has this row be the first on screen again, unless the end is followed."""
        if not self.follow and top < len(self._rows):
            self._move(self._row_ends()[top - 1] if top else 0)
            self._see()

    # Rows and their heights

    def _append(self, message: Message) -> None:
        self.messages.append(message)
        if message.role in NAMES:
            self._rows.append(Row(message, None, 2 if len(self._rows) else 1))
        if message.role == "assistant":
            document, self._reader = Document(), ThinkingReader(KEPT)
            pieces = self._reader.feed(message.text)
            streams = message.state == "streaming"
            pieces += [] if streams else self._reader.flush()
            blocks: list[Block] = []
            for piece in pieces:
                if isinstance(piece, str):
                    blocks += document.feed(piece)
                else:
                    self._think(message, piece.text)
            if streams:
                self._document = document
            else:
                blocks += document.finish()
        else:
            blocks = plain_blocks(message.text)
        self._extend(message, blocks)

    def _think(self, message: Message, text: str) -> None:
        """Appends to what `message` thought."""
        last = self._rows[-1]
        if last.block is None:
            line = Block(kind=_THOUGHT, source="", gap=False)
            self._extend(message, [line, Block(kind=_THOUGHT_TEXT, source="", gap=False)])
            last = self._rows[-1]
        assert last.block is not None
        *lines, rest = (last.block.source + text).split("\n")
        if len(last.block.source) > _THOUGHT_CHARACTERS and lines:
            last.block = replace(last.block, source="\n".join(lines))
            self._extend(message, [replace(last.block, source=rest)])
        else:
            last.block = replace(last.block, source=last.block.source + text)
        last.strips = None
        self._changed()

    def _extend(self, message: Message, blocks: Sequence[Block]) -> None:
        self._ends = None
        for block in blocks:
            row = Row(message, block)
            row.height = self._estimate(row)
            self._rows.append(row)

    def _estimate(self, row: Row) -> int:
        if row.block is None:
            return 2
        if row.block.kind == _THOUGHT:
            return 0 if self.hides_thoughts else 1
        if row.block.kind == _THOUGHT_TEXT and not self._shows_thoughts:
            return 0
        return estimate(row.block, self._width or 80)

    def _row_ends(self) -> list[int]:
        """Where each row ends, in lines from the top."""
        if self._ends is None or len(self._ends) != len(self._rows):
            self._ends = list(accumulate(row.height for row in self._rows))
        return self._ends

    def _row_at(self, line: int) -> int:
        return bisect_right(self._row_ends(), line)

    def _changed(self) -> None:
        """Rows or the tail changed: new size, and the end in view when following."""
        if not self._width or not self.is_attached:
            return
        if self.follow:
            self._measure_end()
        self._resize_virtual()
        if self.follow:
            self._move(self.max_scroll_y)
        self._see()

    def _measure_end(self) -> None:
        """Measures the rows of the last screen."""
        room = self.size.height - len(self._tail)
        index = len(self._rows)
        while index and room > 0:
            index -= 1
            self._measure(range(index, index + 1))
            room -= self._rows[index].height

    def _see(self) -> None:
        """Measures the rows in view; those above them push nothing that is on screen."""
        if self._width:
            top, height = round(self.scroll_y), self.size.height
            first, last = self._row_at(top), self._row_at(top + height)
            shift = self._measure(range(first, min(last + 1, len(self._rows))), above_line=top)
            self._resize_virtual()
            if shift:
                self._move(top + shift)
            self._tell_below()
        self.refresh()

    def _measure(self, indexes: range, above_line: int = 0) -> int:
        """Draws these rows; returns by how many lines what begins above a line has grown."""
        shift = 0
        for index in indexes:
            row = self._rows[index]
            if row.strips is not None:
                continue
            begins = self._row_ends()[index] - row.height
            row.strips = self._draw(row, first=index == 0)
            if len(row.strips) != row.height:
                if begins + shift < above_line:
                    shift += len(row.strips) - row.height
                row.height = len(row.strips)
                self._ends = None
        return shift

    def _draw(self, row: Row, *, first: bool) -> list[Strip]:
        if row.block is not None and row.block.kind in (_THOUGHT, _THOUGHT_TEXT):
            return self._draw_thought(row.message, row.block)
        if row.block is not None:
            if row.message.role in ("note", "error"):
                palette: Palette = {**self._palette, "text": self._palette[row.message.role]}
                return draw(row.block, self._width, palette)
            return draw(row.block, self._width, self._palette)
        header = self._header(row.message)
        return [header] if first else [Strip.blank(0), header]

    @property
    def _shows_thoughts(self) -> bool:
        return self.unfolded and not self.hides_thoughts

    def _draw_thought(self, message: Message, block: Block) -> list[Strip]:
        """The line of a thought, or a part of its text if that is unfolded."""
        palette: Palette = {**self._palette, "text": self._palette["note"]}
        if self.hides_thoughts:
            return []
        if block.kind == _THOUGHT_TEXT:
            plain = plain_blocks(block.source) if self._shows_thoughts else []
            return [strip for one in plain for strip in draw(one, self._width, palette)]
        known = {name: message.stats.get(name, 0) for name in ("thought_ms", "thought_tokens")}
        streams = message is self.messages[-1] and self._document is not None
        thinks = streams and self._reader.thinking
        text = "thinking" if thinks else thought_line(ReplyStats(**known))
        return draw(replace(block, kind="plain", source=text), self._width, palette)

    def _header(self, message: Message) -> Strip:
        text = Text(NAMES[message.role], self._palette[_tone(message)] + Style(bold=True), end="")
        if message.branches > 1:
            text.append(f"  {message.branch}/{message.branches}", self._palette["header"])
        if message.state in STATES:
            text.append(f"  {STATES[message.state]}", self._palette["error"])
        console = self.app.console  # pyright: ignore[reportUnknownMemberType]  an App of nothing said
        return Strip(list(text.render(console))).crop(0, self._width)

    def _resize_virtual(self) -> None:
        ends = self._row_ends()
        height = (ends[-1] if ends else 0) + len(self._tail)
        self.virtual_size = Size(self._width + GUTTER_CELLS, height)

    def _move(self, line: float) -> None:
        """Scrolls without being taken for the user."""
        self._moving = True
        try:
            self.scroll_to(y=line, animate=False, immediate=True, force=True)
        finally:
            self._moving = False

    def _tell_below(self) -> None:
        below = not self.follow and self.max_scroll_y - self.scroll_y > FOLLOW_ROWS
        if below != self.unseen:
            self.unseen = below
            self.post_message(self.Unseen())

    # Lines

    def render_line(self, y: int) -> Strip:
        """One line of the screen: the gutter of its message, then the text."""
        line = round(self.scroll_y) + y
        message, strip = self._line(line)
        base = self.rich_style
        if message is None or strip is None:
            return Strip.blank(self.size.width, base)
        strip = self._with_selection(strip, line).apply_style(base)
        strip = strip.adjust_cell_length(self._width, base).apply_offsets(0, line)
        mark = "▌ " if message is self.selected or message.role == "user" else "  "
        tone = base + self._palette[_tone(message)] + Style(bold=message is self.selected)
        return Strip.join([Strip([Segment(mark, tone)], GUTTER_CELLS), strip])

    def _line(self, line: int) -> tuple[Message | None, Strip | None]:
        ends = self._row_ends()
        index = bisect_right(ends, line)
        if index < len(self._rows):
            row = self._rows[index]
            offset = line - (ends[index] - row.height)
            strips = row.strips or ()
            if offset >= len(strips) or (row.block is None and offset < len(strips) - 1):
                return None, None
            return row.message, strips[offset]
        offset = line - (ends[-1] if ends else 0)
        if self.messages and offset < len(self._tail):
            return self.messages[-1], self._tail[offset]
        return None, None

    def _with_selection(self, strip: Strip, line: int) -> Strip:
        selection = self.text_selection
        span = None if selection is None else selection.get_span(line)
        if span is None:
            return strip
        start, end = span
        length = len(strip.text)
        end = length if end == -1 else min(end, length)
        cells = [strip.index_to_cell_position(index) for index in (min(start, length), end)]
        style = self.screen.get_component_rich_style("screen--selection")
        before, inside, after = strip.divide([*cells, strip.cell_length])
        return Strip.join([before, inside.apply_style(style), after])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text as it is on screen, without padding."""
        if selection.end is None:
            self._measure(range(len(self._rows)))
        lines: list[str] = []
        for row in self._rows:
            drawn = [strip_text(strip) for strip in row.strips or ()]
            lines += drawn + [""] * (row.height - len(drawn))
        lines += [strip_text(strip) for strip in self._tail]
        return selection.extract("\n".join(lines)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Draws the lines again with what is selected."""
        self.refresh()


def _tone(message: Message) -> str:
    """The style of a message's gutter and name."""
    return message.role if message.role in _TONES else "header"
