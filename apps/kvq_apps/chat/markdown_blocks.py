"""Cuts a growing markdown text into blocks that never change again. Draws nothing.

A block is what markdown-it calls one at the top level; of a list it is an item. It is closed when
the next one begins. A block depends only on the text before its end, so any cutting of the text
into pieces gives the same blocks.
"""

import re
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

from markdown_it import MarkdownIt

from kvq_apps.terminal.output import storable

# A longer block ends at its next line, unless it is a fence; a longer line is cut.
BLOCK_CHARACTERS = 32 * 1024
LINE_CHARACTERS = 8 * 1024
PLAIN_LINES = 64
_FENCE = re.compile(r"(?P<indent> {0,3})(?P<mark>`{3,}|~{3,})(?P<info>.*)")
_LISTS = ("bullet_list_open", "ordered_list_open")


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkdownBlock:
    """Holds a closed part of a text. `gap`: a blank line goes before it.

    `kind` is markdown, fence, item or plain (shown as written). `number` is that of an ordered
    list's item. `language` is that of a fence, whose `source` is the code alone.
    """

    kind: str
    source: str
    gap: bool = True
    number: int | None = None
    language: str = ""


def markdown_parser() -> MarkdownIt:
    """Returns a parser for texts of a model: no HTML, and nothing vanishes from the screen."""
    # Definitions of link targets would vanish, so they stay text.
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 20})
    return parser.enable(["table", "strikethrough"]).disable(["reference", "html_block"])


@cache
def _block_parser() -> MarkdownIt:
    parser = markdown_parser()
    parser.core.ruler.enableOnly(["normalize", "block"])
    return parser


class BlockScanner:
    """Takes a text in pieces, with line feeds as line breaks, and returns its closed blocks."""

    def __init__(self) -> None:
        self._pending = ""
        # Those of the block that the pending text begins with.
        self._gap = False
        self._number: int | None = None
        # The block that whole lines have begun, or none.
        self._open: list[MarkdownBlock] = []

    def feed(self, text: str) -> list[MarkdownBlock]:
        """Returns the blocks that `text` closes."""
        start = self._pending.rfind("\n") + 1
        lines = _short_lines(self._pending[start:] + text)
        self._pending = self._pending[:start] + "\n".join(lines)
        return list(self._close()) if len(lines) > 1 else []

    def tail(self) -> list[MarkdownBlock]:
        """Returns the blocks not closed yet, as if the text ended here."""
        return copy(self).finish()

    def finish(self) -> list[MarkdownBlock]:
        """Returns the last blocks; an open fence ends here."""
        return [*self.feed("\n"), *self._open]

    def _close(self) -> Iterator[MarkdownBlock]:
        """Yields the blocks that whole lines of the pending text close, and drops their text."""
        while True:
            whole = self._pending.rfind("\n") + 1
            limit = self._pending.find("\n", BLOCK_CHARACTERS) + 1
            blocks = self._blocks(self._pending[: limit or whole])
            if limit and [block.kind for _, block in blocks] == ["fence"]:
                blocks = self._blocks(self._pending[:whole])[:2]
            elif limit and len(blocks) < 2:
                yield from (block for _, block in blocks)
                self._pending, self._number = self._pending[limit:], None
                self._gap = not blocks or blocks[0][1].kind != "plain"
                continue
            self._open = [block for _, block in blocks[-1:]]
            if len(blocks) < 2:
                return
            yield from (block for _, block in blocks[:-1])
            start, block = blocks[-1]
            self._pending = "\n".join(self._pending.split("\n")[start:])
            self._gap, self._number = block.gap, block.number
            if not limit:
                return

    def _blocks(self, text: str) -> list[tuple[int, MarkdownBlock]]:
        """Returns the blocks of the pending text `text`, each with the number of its first line."""
        blocks: list[tuple[int, MarkdownBlock]] = []
        lines, begins_list, number = text.split("\n"), False, self._number
        for token in _block_parser().parse(text):
            if token.type in _LISTS and token.level == 0:
                begins_list, number = True, self._number if not blocks else None
            is_item = token.type == "list_item_open" and token.level == 1
            if token.map is None or not (is_item or token.level == 0) or token.type in _LISTS:
                continue
            start, end = token.map
            block = MarkdownBlock(
                kind="markdown",
                source="\n".join(lines[start:end]).rstrip("\n"),
                gap=begins_list or not is_item or not lines[start - 1].strip(),
            )
            if token.type == "fence":
                language = token.info.strip().partition(" ")[0][:40]
                code = token.content.removesuffix("\n")
                block = replace(block, kind="fence", source=code, language=language)
            elif is_item:
                number = int(token.info) if token.info and number is None else number
                block = replace(block, kind="item", number=number)
                number = None if number is None else number + 1
            if token.type != "fence" and max(map(len, lines[start:end])) >= LINE_CHARACTERS:
                block = replace(block, kind="plain")
            blocks.append((start, block if blocks else replace(block, gap=self._gap)))
            begins_list = False
        return blocks


def code_fences(text: str) -> list[str]:
    """Returns the code of every fence in a markdown text, in order; an open one ends with it.

    It reads lines and not blocks: models indent a fence in a list, and then not its code.
    """
    fences: list[list[str]] = []
    indent = mark = ""
    for line in storable(text).removesuffix("\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if mark and fence and fence["mark"].startswith(mark) and not fence["info"].strip():
            mark = ""
        elif mark:
            fences[-1].append(line.removeprefix(indent))
        # After backticks another backtick means inline code, not a fence.
        elif fence and not (fence["mark"][0] == "`" and "`" in fence["info"]):
            indent, mark = fence["indent"], fence["mark"]
            fences.append([])
    return ["\n".join(lines) for lines in fences]


def plain_blocks(text: str) -> list[MarkdownBlock]:
    """Returns blocks that show `text` as written, short enough to be drawn one by one."""
    lines = _short_lines(text)
    return [
        MarkdownBlock(kind="plain", source="\n".join(lines[first : first + PLAIN_LINES]), gap=False)
        for first in range(0, len(lines), PLAIN_LINES)
    ]


def _short_lines(text: str) -> list[str]:
    """Returns the lines of a text, longer ones in pieces."""
    return [
        line[first : first + LINE_CHARACTERS]
        for line in text.split("\n")
        for first in range(0, max(1, len(line)), LINE_CHARACTERS)
    ]
