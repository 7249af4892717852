"""Draws a block of markdown as strips of a given width. Keeps nothing.

The text is data: no HTML, no escape codes of links, no markup but markdown. What the model wrote is
styled or shown as it is. Styles come by name from a palette, so themes decide all colours.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from kvq_apps.chat.markdown_blocks import MarkdownBlock, markdown_parser
from kvq_apps.terminal.output import visible

Palette = Mapping[str, Style]

STYLES = (
    "text", "heading", "strong", "emphasis", "strike", "inline-code", "link", "quote", "marker",
    "table-line", "code", "code-keyword", "code-string", "code-comment", "code-number",
    "code-name",
)  # fmt: skip
HIGHLIGHT_CHARACTERS = 64 * 1024
# Longer lines of prose are hard to read; code and tables may be wider.
PROSE_CELLS = 100
_LISTS = ("bullet_list", "ordered_list")
# Matches two characters of one word.
_WORD = re.compile(r"\w\w")
# Characters per cell that are looked at: a letter and its combining marks.
_MARKS = 4
_CONSOLE = Console(width=80, color_system=None, force_terminal=False)


def draw(block: MarkdownBlock, width: int, palette: Palette) -> list[Strip]:
    """Draws `block` as strips of at most `width` cells, with a blank strip first for a gap."""
    width = max(1, width)
    if block.kind == "fence":
        lines = _fence(block, width, palette)
    elif block.kind == "plain":
        lines = _plain(block.source, width, palette["text"])
    else:
        tree = SyntaxTreeNode(_parser().parse(visible(block.source)))
        lists = [node for node in tree.children if node.type in _LISTS]
        if block.kind == "item" and len(lists) == len(tree.children) == 1:
            lines = _list(lists[0], width, palette, first=block.number)
        else:
            lines = _stacked(tree.children, width, palette)
    return [Strip.blank(0)] * block.gap + [_strip(line) for line in lines]


def estimate(block: MarkdownBlock, width: int) -> int:
    """Estimates how many strips `draw` would return, without drawing."""
    width = max(1, width if block.kind == "fence" else min(width, PROSE_CELLS))
    source = block.source
    lines = source.count("\n") + 1
    wrapped = lines + max(0, len(source) - lines * width // 2) // width
    return max(1, wrapped) + (block.gap is True) + (block.kind == "fence" and bool(block.language))


def _plain(text: str, width: int, style: Style) -> list[Text]:
    """Draws `text` as written, with every character; wraps words."""
    lines = visible(text).expandtabs(4).split("\n")
    return [part for line in lines for part in _wrapped(Text(line, style), min(width, PROSE_CELLS))]


def _fence(block: MarkdownBlock, width: int, palette: Palette) -> list[Text]:
    """Draws lines of code on a background of their own, below the name of their language."""
    lines = _code(visible(block.source), block.language, width, palette)
    if not block.language:
        return lines
    style = palette["code-comment"] + palette["code"]
    name = Text(f" {visible(block.language)}", style, end="")
    name.truncate(width, pad=True)
    return [name, *lines]


def _code(code: str, language: str, width: int, palette: Palette) -> list[Text]:
    lines = code.expandtabs(4).split("\n")
    texts = _highlighted(lines, language, palette) or [Text(line) for line in lines]
    return [part for text in texts for part in _code_line(text, width, palette["code"])]


def _code_line(text: Text, width: int, style: Style) -> list[Text]:
    """Draws one line of code with a margin, folded where it is too long; keeps every character."""
    text.style = style
    return [
        Text.assemble(
            " ", part, " " * max(0, width - 1 - cell_len(part.plain)), style=style, end=""
        )
        for part in folded(text, max(1, width - 2))
    ]


def code_line(line: str, width: int, style: Style) -> list[Strip]:
    """Draws one line of code as `draw` draws it in a fence of no language."""
    return [_strip(part) for part in _code_line(Text(line, end=""), width, style)]


_parser = cache(markdown_parser)


def _strip(text: Text) -> Strip:
    return Strip([segment for segment in text.render(_CONSOLE) if segment.text])


def _wrapped(text: Text, width: int) -> list[Text]:
    """Wraps into lines of at most `width` cells, between words where possible."""
    width = max(1, width)
    if not {"\n", "\t"} & set(text.plain) and cell_len(text.plain) <= width:
        return [text]
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        lines += line.wrap(_CONSOLE, width, tab_size=4) if line.plain else [line]
    for line in lines:
        line.end = ""
    return lines


def folded(text: Text, width: int) -> list[Text]:
    """Folds code into lines of `width` cells, between words if possible; every character stays."""
    plain, ends = text.plain, list[int]()
    start = 0
    while cell_len(plain[start : start + width + 1]) > width or len(plain) - start > width + 1:
        # A character takes up to two cells; combining marks take none and may be many.
        fits = max(1, len(chop_cells(plain[start : start + _MARKS * width], width)[0]))
        start = _word_start(plain, start, start + fits)
        if start == len(plain):
            break
        ends.append(start)
    return list(text.divide(ends))


def _word_start(plain: str, start: int, stop: int) -> int:
    """Returns where the word across `stop` begins, or `stop` when it is the first after `start`."""
    place = stop
    while start < place < len(plain) and _WORD.match(plain[place - 1 : place + 1]):
        place -= 1
    return stop if not plain[start:place].strip() else place


def _lines_of(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    draw_node = _NODES.get(node.type, _shown_as_written)
    return draw_node(node, width, palette)


def _stacked(nodes: Sequence[SyntaxTreeNode], width: int, palette: Palette) -> list[Text]:
    """Stacks the lines of several nodes with blank lines between; list items stay together."""
    lines: list[Text] = []
    for index, node in enumerate(nodes):
        if index and not _tight(nodes[index - 1], node):
            lines.append(_blank())
        lines += _lines_of(node, width, palette)
    return lines


def _tight(before: SyntaxTreeNode, after: SyntaxTreeNode) -> bool:
    if after.type in _LISTS and before.type == "paragraph":
        return before.map is not None and after.map is not None and before.map[1] == after.map[0]
    return False


def _blank() -> Text:
    return Text("", end="")


def _list(
    node: SyntaxTreeNode, width: int, palette: Palette, first: int | None = None
) -> list[Text]:
    number = int(node.attrs.get("start", 1)) if first is None else first
    lines: list[Text] = []
    for index, item in enumerate(node.children):
        sign = f"{number + index}. " if node.type == "ordered_list" else "• "
        inner = _stacked(item.children, max(1, width - len(sign)), palette) or [_blank()]
        loose = any(child.type == "paragraph" and not child.hidden for child in item.children)
        if index and loose:
            lines.append(_blank())
        lines += _prefixed(inner, Text(sign, palette["marker"]), Text(" " * len(sign)), width)
    return lines


def _prefixed(lines: Sequence[Text], first: Text, rest: Text, width: int) -> list[Text]:
    """Puts a prefix before each line, if the width has room for it."""
    if cell_len(first.plain) >= width:
        return list(lines)
    return [
        Text("", end="").append_text(first if index == 0 else rest).append_text(line)
        for index, line in enumerate(lines)
    ]


def _paragraph(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    return _wrapped(_inline(node.children, palette, palette["text"]), min(width, PROSE_CELLS))


def _heading(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    sign = Text("#" * int(node.tag[1:]) + " ", palette["heading"])
    room = min(width, PROSE_CELLS) - len(sign)
    lines = _wrapped(_inline(node.children, palette, palette["heading"]), room)
    return _prefixed(lines, sign, Text(" " * len(sign)), width)


def _quote(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    bar = Text("▎ ", palette["quote"])
    return _prefixed(_stacked(node.children, max(1, width - 2), palette), bar, bar, width)


def _rule(_node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    return [Text("─" * min(width, PROSE_CELLS), palette["table-line"], end="")]


def _inner_code(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    """Draws code inside an item or a quote, or indented code."""
    return _code(node.content.removesuffix("\n"), node.info.split(" ")[0], width, palette)


def _shown_as_written(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    return _wrapped(Text(node.content, palette["text"], end=""), min(width, PROSE_CELLS))


def _table(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    rows = [
        [_inline(cell.children, palette, palette["text"]) for cell in row.children]
        for part in node.children
        for row in part.children
    ]
    for cell in rows[0]:
        cell.stylize(palette["strong"])
    widths = _column_widths(rows, width - 3 * (len(rows[0]) - 1))
    line_style = palette["table-line"]
    lines: list[Text] = []
    for index, row in enumerate(rows):
        cells = [_wrapped(cell, column) for cell, column in zip(row, widths, strict=True)]
        for height in range(max(map(len, cells))):
            line = Text("", end="")
            for column, cell in enumerate(cells):
                part = cell[height] if height < len(cell) else _blank()
                line.append(" │ " if column else "", line_style).append_text(part)
                line.append(" " * (widths[column] - cell_len(part.plain)))
            lines += folded(line, width)
        if index == 0:
            rule = "─┼─".join("─" * column for column in widths)
            lines += folded(Text(rule, line_style, end=""), width)[:1]
    return lines


def _column_widths(rows: Sequence[Sequence[Text]], room: int) -> list[int]:
    """Returns the natural widths, the widest columns narrowed until all fit."""
    columns = zip(*rows, strict=True)
    widths = [max(1, *(cell_len(cell.plain) for cell in column)) for column in columns]
    if sum(widths) <= room:
        return widths
    share = max(1, room // len(widths))
    for _ in widths:
        narrow = [column for column in widths if column <= share]
        wide = max(1, len(widths) - len(narrow))
        share = max(1, (room - sum(narrow)) // wide)
    return [min(column, share) for column in widths]


_NODES: Mapping[str, Callable[[SyntaxTreeNode, int, Palette], list[Text]]] = {
    "paragraph": _paragraph,
    "heading": _heading,
    "blockquote": _quote,
    "bullet_list": _list,
    "ordered_list": _list,
    "hr": _rule,
    "fence": _inner_code,
    "code_block": _inner_code,
    "table": _table,
}
_SPANS = {"strong": "strong", "em": "emphasis", "s": "strike"}


def _inline(nodes: Sequence[SyntaxTreeNode], palette: Palette, style: Style) -> Text:
    """Joins inline nodes into one text."""
    text = Text("", style, end="")
    for node in nodes:
        _append_inline(text, node, palette, Style())
    return text


def _append_inline(text: Text, node: SyntaxTreeNode, palette: Palette, style: Style) -> None:
    if node.type == "inline":
        for child in node.children:
            _append_inline(text, child, palette, style)
    elif node.type in _SPANS:
        for child in node.children:
            _append_inline(text, child, palette, style + palette[_SPANS[node.type]])
    elif node.type == "link":
        _append_link(text, node, palette, style + palette["link"])
    elif node.type == "image":
        text.append(f"[{node.content}]({node.attrs.get('src', '')})", style + palette["link"])
    elif node.type == "code_inline":
        text.append(node.content, style + palette["inline-code"])
    elif node.type in ("softbreak", "hardbreak"):
        text.append(" " if node.type == "softbreak" else "\n", style)
    else:
        text.append(node.content, style)


def _append_link(text: Text, node: SyntaxTreeNode, palette: Palette, style: Style) -> None:
    """Appends the words of a link and, if it differs, its target."""
    before = len(text)
    for child in node.children:
        _append_inline(text, child, palette, style)
    target = str(node.attrs.get("href", ""))
    if text.plain[before:] not in (target, target.removeprefix("mailto:")):
        text.append(f" ({target})", palette["quote"])


_CODE_STYLES = {
    ("Keyword",): "code-keyword",
    ("Operator", "Word"): "code-keyword",
    ("Name", "Tag"): "code-keyword",
    ("Literal", "String"): "code-string",
    ("Comment",): "code-comment",
    ("Literal", "Number"): "code-number",
    ("Name", "Function"): "code-name",
    ("Name", "Class"): "code-name",
    ("Name", "Decorator"): "code-name",
    ("Name", "Builtin"): "code-name",
}


def _highlighted(lines: Sequence[str], language: str, palette: Palette) -> list[Text] | None:
    """Returns one styled text per line of code, or None where no lexer keeps every character."""
    if not language or sum(map(len, lines)) > HIGHLIGHT_CHARACTERS:
        return None
    from rich.syntax import ANSISyntaxTheme, Syntax

    theme = ANSISyntaxTheme({kind: palette[style] for kind, style in _CODE_STYLES.items()})
    code = Syntax("", language, theme=theme).highlight("\n".join(lines))
    texts = code.split("\n", allow_blank=True)[: len(lines)]
    return texts if [text.plain for text in texts] == list(lines) else None


def strip_text(strip: Strip) -> str:
    """Returns the characters of a strip without the padding at its end."""
    return strip.text.rstrip()
