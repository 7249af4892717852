"""Cuts a growing markdown text into blocks that never change again. Draws nothing.

A block is closed by a hard break: a blank line outside a fence and a list item, a fence's end, the
next top-level list item, or anything that begins another block. What a block is depends on the
text before its end alone, so a text cut into any pieces gives the blocks of the whole.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

BLOCK_CHARACTERS = 32 * 1024
LINE_CHARACTERS = 8 * 1024

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_HEADING = re.compile(r" {0,3}#{1,6}(\s|$)")
_RULE = re.compile(r" {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$")
_UNDERLINE = re.compile(r" {0,3}(?:=+|-+)[ \t]*$")
_QUOTE = re.compile(r" {0,3}>")
_ITEM = re.compile(r"( {0,3})([-*+]|(\d{1,9})[.)])(?:( +)(?=\S)|[ \t]|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A closed part of a text. `gap`: a blank line goes before it.

    `kind` is markdown, fence, item or plain (shown as written); `number` is that of an ordered
    list's item, `language` that of a fence, whose `source` is the code alone.
    """

    kind: str
    source: str
    gap: bool = True
    number: int | None = None
    language: str = ""


@dataclass(slots=True)
class _Open:
    """The block being read. An item's lines from `indent` on belong to it."""

    kind: str
    lines: list[str] = field(default_factory=list[str])
    characters: int = 0
    gap: bool = True
    marker: str = ""
    number: int | None = None
    indent: int = 0
    language: str = ""
    blanks: int = 0
    inner_fence: str = ""


class BlockScanner:
    """Takes a text in pieces and hands out its closed blocks."""

    def __init__(self) -> None:
        self._partial = ""
        self._half_break = False
        self._chopped = False
        self._open: _Open | None = None
        self._last: Block | None = None
        self._last_marker = ""
        self._blank_before = False

    def feed(self, text: str) -> list[Block]:
        """The blocks that `text` closes."""
        if self._half_break:
            text = "\r" + text
        self._half_break = text.endswith("\r")
        text = text[:-1] if self._half_break else text
        self._partial += text.replace("\r\n", "\n").replace("\r", "\n")
        *lines, self._partial = self._partial.split("\n")
        closed = [block for line in lines for block in self._whole_line(line)]
        while len(self._partial) > LINE_CHARACTERS:
            closed += self._piece(self._partial[:LINE_CHARACTERS])
            self._partial = self._partial[LINE_CHARACTERS:]
        return closed

    def tail(self) -> list[Block]:
        """What the text so far would end with, were it over: the blocks not closed yet."""
        draft = BlockScanner()
        draft.__dict__.update(self.__dict__)
        if self._open is not None:
            draft._open = replace(self._open, lines=list(self._open.lines))
        return draft.finish()

    def finish(self) -> list[Block]:
        """The last blocks; an open fence ends here."""
        closed = self.feed("\n") if self._half_break else []
        if self._partial or self._chopped:
            partial, self._partial = self._partial, ""
            closed += self._whole_line(partial)
        return [*closed, *self._close()]

    def _whole_line(self, line: str) -> Iterator[Block]:
        while len(line) > LINE_CHARACTERS:
            yield from self._piece(line[:LINE_CHARACTERS])
            line = line[LINE_CHARACTERS:]
        if self._chopped:
            yield from self._piece(line)
            self._chopped = False
        else:
            yield from self._line(line)

    def _piece(self, text: str) -> Iterator[Block]:
        """Part of a line too long to be markdown: code in a fence, otherwise shown as written."""
        if self._open is not None and self._open.kind == "fence":
            yield from self._in_fence(text, may_end=False)
        elif text:
            yield from self._close()
            yield self._closed(Block(kind="plain", source=text, gap=not self._chopped))
        self._chopped = True

    def _line(self, line: str) -> Iterator[Block]:
        block = self._open
        if block is not None and block.kind == "fence":
            yield from self._in_fence(line, may_end=True)
        elif block is not None and block.kind == "item":
            if self._stays_in_item(block, line):
                self._add(line)
            else:
                yield from self._close()
                yield from self._first_line(line)
        elif not line.strip():
            yield from self._close()
            self._blank_before = True
        elif block is not None and not _interrupts(line, block.lines):
            self._add(line)
            if _UNDERLINE.match(line) and not _QUOTE.match(block.lines[0]):
                yield from self._close()
        else:
            yield from self._close()
            yield from self._first_line(line)
        if self._open is not None and self._open.characters >= BLOCK_CHARACTERS:
            yield from self._close()

    def _first_line(self, line: str) -> Iterator[Block]:
        """Begins the block that `line` is the first of; no block is open."""
        if not line.strip():
            self._blank_before = True
        elif (fence := _fence(line)) is not None:
            self._open = _Open("fence", marker=fence[1], language=_language(fence[2]))
        elif _RULE.match(line) is None and (item := _ITEM.match(line)) is not None:
            self._begin_item(item)
            self._add(line)
        else:
            self._open = _Open("markdown")
            self._add(line)
            if _HEADING.match(line) or _RULE.match(line):
                yield from self._close()

    def _begin_item(self, item: re.Match[str]) -> None:
        marker = item[2][-1]
        after = len(item[4] or " ")
        indent = len(item[1]) + len(item[2]) + (1 if after > 4 else after)
        last = self._last
        follows = last is not None and last.kind == "item" and self._last_marker == marker
        number = None if item[3] is None else int(item[3])
        if follows and last is not None and last.number is not None:
            number = last.number + 1
        gap = not follows or self._blank_before
        self._open = _Open("item", marker=marker, number=number, indent=indent, gap=gap)
        self._open.inner_fence = _inner_fence("", item.string[indent:])

    def _stays_in_item(self, block: _Open, line: str) -> bool:
        if not line.strip():
            block.blanks += 1
            return True
        blanks, block.blanks = block.blanks, 0
        inside = len(line) - len(line.lstrip(" ")) >= block.indent
        if inside:
            block.inner_fence = _inner_fence(block.inner_fence, line[block.indent :])
            return True
        begins = _ITEM.match(line) is not None or _begins_block(line)
        lazy = not blanks and not block.inner_fence and not begins
        if not lazy:
            block.blanks = blanks
        return lazy

    def _in_fence(self, line: str, *, may_end: bool) -> Iterator[Block]:
        assert self._open is not None
        end = _FENCE.match(line) if may_end else None
        if end is not None and end[1].startswith(self._open.marker) and not end[2].strip():
            yield from self._close()
        else:
            self._open.lines.append(line)

    def _add(self, line: str) -> None:
        assert self._open is not None
        self._open.lines.append(line)
        self._open.characters += len(line) + 1

    def _close(self) -> Iterator[Block]:
        """Closes the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return
        source = "\n".join(block.lines)
        self._last_marker = block.marker
        yield self._closed(
            Block(
                kind=block.kind,
                source=source if block.kind == "fence" else source.rstrip("\n"),
                gap=block.gap,
                number=block.number,
                language=block.language,
            )
        )
        self._blank_before = block.blanks > 0

    def _closed(self, block: Block) -> Block:
        first, self._last = self._last is None, block
        self._blank_before = False
        return replace(block, gap=False) if first else block


def plain_blocks(text: str) -> list[Block]:
    """Blocks that show `text` as written, short enough to be drawn one by one."""
    lines = [
        line[first : first + LINE_CHARACTERS]
        for line in text.split("\n")
        for first in range(0, max(1, len(line)), LINE_CHARACTERS)
    ]
    return [
        Block(kind="plain", source="\n".join(lines[first : first + 64]), gap=False)
        for first in range(0, len(lines), 64)
    ]


def code_fences(text: str) -> list[str]:
    """The code of every fence in a markdown text, in order."""
    scanner = BlockScanner()
    blocks = [*scanner.feed(text), *scanner.finish()]
    return [block.source for block in blocks if block.kind == "fence"]


def _fence(line: str) -> re.Match[str] | None:
    found = _FENCE.match(line)
    # After backticks another backtick means inline code, not a fence.
    return None if found is None or (found[1][0] == "`" and "`" in found[2]) else found


def _language(info: str) -> str:
    return info.strip().partition(" ")[0][:40]


def _inner_fence(inside: str, line: str) -> str:
    """The marker of the fence open inside an item after `line`, or nothing."""
    found = _FENCE.match(line)
    if found is None:
        return inside
    if inside:
        ends = found[1].startswith(inside) and not found[2].strip()
        return "" if ends else inside
    return "" if _fence(line) is None else found[1]


def _begins_block(line: str) -> bool:
    """Whether `line` begins a block even right after a paragraph."""
    item = _ITEM.match(line)
    interrupts = item is not None and item[3] in (None, "1") and item.end() < len(line)
    heads = _HEADING.match(line) or _RULE.match(line) or _QUOTE.match(line)
    return interrupts or heads is not None or _fence(line) is not None


def _interrupts(line: str, before: list[str]) -> bool:
    """Whether `line` ends the paragraph or quote that holds the lines `before`."""
    if _QUOTE.match(before[0]):
        return not _QUOTE.match(line) and _begins_block(line)
    return _begins_block(line) and not _UNDERLINE.match(line)
