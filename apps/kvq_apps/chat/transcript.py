"""The conversation on screen, drawn line by line: no widget per message, nothing off screen.

Rows are the blocks of all messages. A row that was never on screen has an estimated height. It is
measured when it comes into view, and the lines on screen keep their place. The streaming message is
always the last one. A reply's thought is one line, and more only if unfolded.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.events import Resize
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from kvq_apps.chat.markdown import STYLES, Palette, draw, estimate, strip_text
from kvq_apps.chat.markdown_blocks import MarkdownBlock, plain_blocks
from kvq_apps.chat.messages import Message, ReplyStats, thought_line
from kvq_apps.chat.streamed_markdown import StreamedMarkdown
from kvq_models.thinking import KEPT, Piece, ThinkingReader

GUTTER_CELLS = 2
FOLLOW_ROWS = 2
NAMES = {"user": "you", "assistant": "kvq", "system": "system"}
_THOUGHT_CHARACTERS = 2048
# A longer message of the user, usually a paste, shows only its first lines.
LONG_LINES, FIRST_LINES = 20, 6
# Longer calls and results show only their beginning.
SHORT_CHARACTERS, FOLDED_CHARACTERS = 160, 40
_TONES = ("user", "assistant", "note", "error", "header")
STATES = {
    "stopped": "stopped",
    "length": "cut: /more goes on",
    "failed": "failed",
    "interrupted": "interrupted",
}


@dataclass(slots=True, eq=False)
class MessageRow:
    """Holds a block of a message (None: its header line) and, once drawn, its strips.

    Plain text has the style `tone`. A row with `unfolded` is shown only while that is what the
    transcript is. Of a thought, the row without it is the line that stands for the thought.
    """

    message: Message
    block: MarkdownBlock | None
    tone: str = "text"
    unfolded: bool | None = None
    thought: bool = False
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

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.messages: list[Message] = []
        self.follow = True
        self.selected: Message | None = None
        self.unfolded = self.hides_thoughts = False
        self._reader = ThinkingReader(KEPT)
        self._rows: list[MessageRow] = []
        self._ends: list[int] | None = []
        self._streaming: StreamedMarkdown | None = None
        self._pending_notes: list[Message] = []
        self._tail: list[Strip] = []
        self._palette: dict[str, Style] = {}
        self._width = 0
        self._moving = False

    @property
    def has_more_below(self) -> bool:
        """Tells whether lines below the screen are not followed."""
        return not self.follow and self.max_scroll_y - self.scroll_y > FOLLOW_ROWS

    # What is shown

    def show(self, messages: Sequence[Message]) -> None:
        """Shows `messages` alone, from their end."""
        self.messages, self._rows, self._streaming, self._tail = [], [], None, []
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
        if self._streaming is None:
            self.add(note)
        else:
            self._pending_notes.append(note)

    def feed(self, text: str) -> None:
        if self._streaming is None:
            return
        thinking = self._reader.thinking
        self._feed_pieces(self._reader.feed(text))
        if thinking != self._reader.thinking:
            self.redraw_header(self.messages[-1])

    def _feed_pieces(self, pieces: Sequence[Piece]) -> None:
        """Appends thoughts and text to the streaming message."""
        assert self._streaming is not None
        closed = self._blocks_of(self.messages[-1], pieces, self._streaming)
        self._extend(self.messages[-1], closed)
        self.settle(closed=bool(closed))

    def settle(self, *, closed: bool = False) -> None:
        """Draws the tail again if it is time to."""
        if self._streaming is None or not self._width:
            return
        tail = self._streaming.draw_tail(self._width, self._palette, closed=closed)
        if tail is not None:
            self._tail = tail
            self._changed()

    def finish(self) -> None:
        if self._streaming is not None:
            self._feed_pieces(self._reader.flush())
        markdown, self._streaming, self._tail = self._streaming, None, []
        if markdown is None:
            return
        self._extend(self.messages[-1], markdown.finish())
        self._append_calls(self.messages[-1])
        later, self._pending_notes = self._pending_notes, []
        for note in later:
            self._append(note)
        self._changed()

    def redraw_header(self, message: Message) -> None:
        """Draws the header of `message` again: its state, its branch or its cost changed."""
        for row in self._rows:
            if row.message is message and (row.block is None or row.thought):
                row.strips = None
        self._measure_view()

    def unfold(self, *, shown: bool) -> None:
        """Shows thoughts and all of long messages, or folds both; the first row on screen stays."""
        self.unfolded = shown
        top = self._row_at(round(self.scroll_y))
        self._ends = None
        for row in self._rows:
            if row.unfolded is not None:
                row.strips, row.height = None, self._estimate(row)
        self._changed()
        self._stay_at(top)

    def lines_since(self, created_s: float) -> list[str]:
        """Returns the lines of the messages since `created_s` as drawn, also those off screen."""
        if not self._width:
            return []
        self._measure(range(len(self._rows)))
        rows = [row for row in self._rows if row.message.created_s >= created_s]
        strips = [strip for row in rows for strip in row.strips or ()] + self._tail
        return [strip_text(strip) for strip in strips]

    # Choosing a message

    def select(self, step: int) -> None:
        """Selects the message `step` further; past the last one none."""
        selectable = [message for message in self.messages if message.id]
        if not selectable:
            return
        index = selectable.index(self.selected) if self.selected in selectable else len(selectable)
        index = max(0, index + step)
        self.selected = selectable[index] if index < len(selectable) else None
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
        self._measure_view()

    # Scrolling

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Follows the end when the user scrolls to within two rows of it."""
        super().watch_scroll_y(old_value, new_value)
        if not self._moving:
            self.follow = self.max_scroll_y - new_value <= FOLLOW_ROWS
            self._measure_view()

    def action_scroll_end(self) -> None:
        """Goes to the newest line and follows it."""
        self.follow = True
        self._changed()

    def action_scroll_home(self) -> None:
        self.follow = False
        self._move(0)
        self._measure_view()

    def _on_resize(self, event: Resize) -> None:
        self._restyle()

    def notify_style_update(self) -> None:
        """Draws all again: a theme changes every style."""
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
            row.strips, row.height = None, self._estimate(row)
        if self._streaming is not None:
            self._tail = self._streaming.draw_tail(width, palette, closed=True) or []
        self._changed()
        self._stay_at(top)

    def _stay_at(self, top: int) -> None:
        """Scrolls back to the row `top`, unless the end is followed."""
        if not self.follow and top < len(self._rows):
            self._move(self._row_ends()[top - 1] if top else 0)
            self._measure_view()

    # Rows and their heights

    def _append(self, message: Message) -> None:
        self.messages.append(message)
        if message.role in NAMES:
            self._add_row(message, None)
        if message.role == "assistant":
            markdown, self._reader = StreamedMarkdown(), ThinkingReader(KEPT)
            streams = message.state == "streaming"
            pieces = [*self._reader.feed(message.text), *(() if streams else self._reader.flush())]
            self._extend(message, self._blocks_of(message, pieces, markdown))
            if streams:
                self._streaming = markdown
            else:
                self._extend(message, markdown.finish())
                self._append_calls(message)
        elif message.role == "user":
            self._append_question(message)
        elif message.role == "tool":
            self._append_folded(message, "result: ", message.text)
        else:
            self._extend(message, plain_blocks(message.text))

    def _append_question(self, message: Message) -> None:
        """Appends what the user wrote; of a long text all but its beginning is folded."""
        lines = message.text.split("\n")
        first = FIRST_LINES if len(lines) > LONG_LINES else len(lines)
        self._extend(message, plain_blocks("\n".join(lines[:first])))
        if first < len(lines):
            more = plain_blocks(f"… {len(lines) - first} more lines; Ctrl+O shows them")
            self._add_row(message, more[0], tone="note", unfolded=False)
            for block in plain_blocks("\n".join(lines[first:])):
                self._add_row(message, block, unfolded=True)

    def _append_calls(self, message: Message) -> None:
        for call in message.calls:
            self._append_folded(message, f"calls {call.name} ", call.arguments)

    def _append_folded(self, message: Message, head: str, text: str) -> None:
        """Appends `text`; of a long one a line with its beginning, which unfolds to all of it."""
        folded = len(text) > SHORT_CHARACTERS or "\n" in text
        beginning = " ".join(text.split())[:FOLDED_CHARACTERS] if folded else text
        more = f" … {len(text)} characters, Ctrl+O" * folded
        line = plain_blocks(f"{head}{beginning}{more}")[0]
        self._add_row(message, line, tone="note", unfolded=False if folded else None)
        for block in plain_blocks(f"{head}{text}") if folded else ():
            self._add_row(message, block, tone="note", unfolded=True)

    def _blocks_of(
        self, message: Message, pieces: Sequence[Piece], markdown: StreamedMarkdown
    ) -> list[MarkdownBlock]:
        """Returns the blocks that the text in `pieces` closes; appends the thoughts in them."""
        blocks: list[MarkdownBlock] = []
        for piece in pieces:
            if isinstance(piece, str):
                blocks += markdown.feed(piece)
            else:
                self._append_thought(message, piece.text)
        return blocks

    def _append_thought(self, message: Message, text: str) -> None:
        """Appends to the thought of `message`."""
        empty = MarkdownBlock(kind="plain", source="", gap=False)
        if self._rows[-1].block is None:
            self._add_row(message, empty, tone="note", thought=True)
            self._add_row(message, empty, tone="note", thought=True, unfolded=True)
        last = self._rows[-1]
        assert last.block is not None
        *lines, rest = (last.block.source + text).split("\n")
        if len(last.block.source) > _THOUGHT_CHARACTERS and lines:
            last.block = replace(empty, source="\n".join(lines))
            block = replace(empty, source=rest)
            self._add_row(message, block, tone="note", thought=True, unfolded=True)
        else:
            last.block = replace(empty, source=last.block.source + text)
        last.strips = None
        self._changed()

    def _extend(self, message: Message, blocks: Sequence[MarkdownBlock]) -> None:
        tone = message.role if message.role in ("note", "error") else "text"
        for block in blocks:
            self._add_row(message, block, tone=tone)

    def _add_row(self, message: Message, block: MarkdownBlock | None, **options: Any) -> None:
        row = MessageRow(message, block, **options)
        row.height = self._estimate(row)
        self._rows.append(row)
        self._ends = None

    def _is_shown(self, row: MessageRow) -> bool:
        if row.thought and self.hides_thoughts:
            return False
        return row.unfolded is None or row.unfolded == self.unfolded

    def _estimate(self, row: MessageRow) -> int:
        if not self._is_shown(row):
            return 0
        if row.block is None:
            return 2 if self._rows else 1
        return estimate(row.block, self._width or 80)

    def _row_ends(self) -> list[int]:
        """Returns where each row ends, in lines from the top."""
        if self._ends is None or len(self._ends) != len(self._rows):
            self._ends = list(accumulate(row.height for row in self._rows))
        return self._ends

    def _row_at(self, line: int) -> int:
        return bisect_right(self._row_ends(), line)

    def _changed(self) -> None:
        """Updates the size after rows or the tail changed; scrolls to the end when following."""
        if not self._width or not self.is_attached:
            return
        if self.follow:
            self._measure_end()
        self._resize_virtual()
        if self.follow:
            self._move(self.max_scroll_y)
        self._measure_view()

    def _measure_end(self) -> None:
        """Measures the rows of the last screen."""
        room = self.size.height - len(self._tail)
        index = len(self._rows)
        while index and room > 0:
            index -= 1
            self._measure(range(index, index + 1))
            room -= self._rows[index].height

    def _measure_view(self) -> None:
        """Measures the rows in view; rows above them do not move what is on screen."""
        if self._width:
            top, height = round(self.scroll_y), self.size.height
            first, last = self._row_at(top), self._row_at(top + height)
            shift = self._measure(range(first, min(last + 1, len(self._rows))), above_line=top)
            self._resize_virtual()
            if shift:
                self._move(top + shift)
        self.refresh()

    def _measure(self, indexes: range, above_line: int = 0) -> int:
        """Draws these rows; returns by how many lines the rows above `above_line` have grown."""
        shift = 0
        for index in indexes:
            row = self._rows[index]
            if row.strips is not None:
                continue
            row_start = self._row_ends()[index] - row.height
            row.strips = self._draw(row, first=index == 0)
            if len(row.strips) != row.height:
                if row_start + shift < above_line:
                    shift += len(row.strips) - row.height
                row.height = len(row.strips)
                self._ends = None
        return shift

    def _draw(self, row: MessageRow, *, first: bool) -> list[Strip]:
        if not self._is_shown(row):
            return []
        if row.block is None:
            header = self._header(row.message)
            return [header] if first else [Strip.blank(0), header]
        block = row.block
        if row.thought and row.unfolded is None:
            block = replace(block, source=self._thought_line(row.message))
        palette: Palette = {**self._palette, "text": self._palette[row.tone]}
        return draw(block, self._width, palette)

    def _thought_line(self, message: Message) -> str:
        streams = message is self.messages[-1] and self._streaming is not None
        stats = {name: message.stats.get(name, 0) for name in ("thought_ms", "thought_tokens")}
        return (
            "thinking" if streams and self._reader.thinking else thought_line(ReplyStats(**stats))
        )

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
        """Scrolls, but not as if the user did."""
        self._moving = True
        try:
            self.scroll_to(y=line, animate=False, immediate=True, force=True)
        finally:
            self._moving = False

    # Lines

    def render_line(self, y: int) -> Strip:
        """Draws one line of the screen: the gutter of its message, then the text."""
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
        """Returns the selected text as it is on screen, without padding."""
        if selection.end is None:
            self._measure(range(len(self._rows)))
        lines: list[str] = []
        for row in self._rows:
            drawn = [strip_text(strip) for strip in row.strips or ()]
            lines += drawn + [""] * (row.height - len(drawn))
        lines += [strip_text(strip) for strip in self._tail]
        return selection.extract("\n".join(lines)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()


def _tone(message: Message) -> str:
    """Returns the style of a message's gutter and name."""
    return message.role if message.role in _TONES else "header"
