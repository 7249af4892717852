"""Draws a block as strips of a given width. Keeps nothing, and takes the text as data.

No HTML, no link escape codes, no markup but markdown: what the model wrote is either styled or
shown as it stands. Styles come by name from a palette, so themes decide all colours.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from kvq_apps.chat.blocks import Block
from kvq_apps.chat.visible import visible

Palette = Mapping[str, Style]

STYLES = (
    "text", "heading", "strong", "emphasis", "strike", "inline-code", "link", "quote", "marker",
    "table-line", "code", "code-keyword", "code-string", "code-comment", "code-number",
    "code-name",
)  # fmt: skip
HIGHLIGHT_CHARACTERS = 64 * 1024
# Longer lines of prose are hard to read; code and tables may be wider.
PROSE_CELLS = 100
_CONSOLE = Console(width=80, color_system=None, force_terminal=False)


def draw(block: Block, width: int, palette: Palette, *, highlight: bool = True) -> list[Strip]:
    """The strips of `block`, each at most `width` cells, a blank one first if it wants a gap."""
    width = max(1, width)
    if block.kind == "fence":
        lines = draw_code(block.source, block.language, width, palette, highlight=highlight)
    elif block.kind == "plain":
        lines = draw_plain(block.source, width, palette["text"])
    elif block.kind == "item":
        lines = _strips(_item_lines(block, width, palette))
    else:
        tree = SyntaxTreeNode(_parser().parse(visible(block.source)))
        lines = _strips(_stacked(tree.children, width, palette))
    return [Strip.blank(0), *lines] if block.gap else lines


def estimate(block: Block, width: int) -> int:
    """About how many strips `draw` would make, without drawing."""
    width = max(1, width if block.kind == "fence" else min(width, PROSE_CELLS))
    source = block.source
    lines = source.count("\n") + 1
    wrapped = lines + max(0, len(source) - lines * width // 2) // width
    return max(1, wrapped) + (block.gap is True) + (block.kind == "fence" and bool(block.language))


def draw_plain(text: str, width: int, style: Style) -> list[Strip]:
    """`text` as written, every character of it, words wrapped."""
    strips: list[Strip] = []
    for line in visible(text).expandtabs(4).split("\n"):
        strips += _strips(_wrapped(Text(line, style), min(width, PROSE_CELLS)))
    return strips


def draw_code(
    code: str, language: str, width: int, palette: Palette, *, highlight: bool
) -> list[Strip]:
    """Lines of code on their own background, under the name of their language."""
    strips: list[Strip] = []
    if language:
        name = Text(f" {visible(language)}", palette["code-comment"] + palette["code"])
        strips.append(_filled(name, width, palette["code"]))
    lines = visible(code).expandtabs(4).split("\n")
    texts = _highlighted(lines, language, palette) if highlight else None
    for text in texts or (Text(line) for line in lines):
        strips += code_line(text, width, palette["code"])
    return strips


def code_line(text: Text, width: int, style: Style) -> list[Strip]:
    """One line of code with a margin, folded where it is too long; no character is dropped."""
    text.style = style
    inner = max(1, width - 2)
    return [_filled(Text(" ", style) + part, width, style) for part in _folded(text, inner)]


def _filled(text: Text, width: int, style: Style) -> Strip:
    strip = _strip(text)
    return strip.extend_cell_length(width, style).crop(0, width)


@cache
def _parser() -> MarkdownIt:
    # Definitions of link targets would vanish from the screen, so they stay text.
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 20})
    return parser.enable(["table", "strikethrough"]).disable(["reference", "html_block"])


def _strip(text: Text) -> Strip:
    return Strip([segment for segment in text.render(_CONSOLE) if segment.text])


def _strips(texts: Iterable[Text]) -> list[Strip]:
    return [_strip(text) for text in texts]


def _wrapped(text: Text, width: int) -> list[Text]:
    """Lines of at most `width` cells, broken between words where that is possible."""
    width = max(1, width)
    if not {"\n", "\t"} & set(text.plain) and cell_len(text.plain) <= width:
        return [text]
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        lines += line.wrap(_CONSOLE, width, tab_size=4) if line.plain else [line]
    for line in lines:
        line.end = ""
    return lines


def _folded(text: Text, width: int) -> list[Text]:
    """Lines of at most `width` cells, broken between characters."""
    if cell_len(text.plain) <= width:
        return [text]
    ends: list[int] = []
    for part in chop_cells(text.plain, width):
        ends.append(len(part) + (ends[-1] if ends else 0))
    return list(text.divide(ends[:-1]))


def _lines_of(node: SyntaxTreeNode, width: int, palette: Palette) -> list[Text]:
    draw_node = _NODES.get(node.type, _shown_as_written)
    return draw_node(node, width, palette)


def _stacked(nodes: Sequence[SyntaxTreeNode], width: int, palette: Palette) -> list[Text]:
    """The lines of several nodes, a blank line between two; items of a list stay together."""
    lines: list[Text] = []
    for index, node in enumerate(nodes):
        if index and not _tight(nodes[index - 1], node):
            lines.append(_blank())
        lines += _lines_of(node, width, palette)
    return lines


def _tight(before: SyntaxTreeNode, after: SyntaxTreeNode) -> bool:
    if after.type in ("bullet_list", "ordered_list") and before.type == "paragraph":
        return before.map is not None and after.map is not None and before.map[1] == after.map[0]
    return False


def _blank() -> Text:
    return Text("", end="")


def _item_lines(block: Block, width: int, palette: Palette) -> list[Text]:
    """The one item of a top-level list, with the number it has there."""
    tree = SyntaxTreeNode(_parser().parse(visible(block.source)))
    lists = tree.children
    if len(lists) != 1 or lists[0].type not in ("bullet_list", "ordered_list"):
        return _stacked(lists, width, palette)
    return _list(lists[0], width, palette, first=block.number)


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
    """`lines` with something before each; nothing where the width has no room for it."""
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
    """Code inside an item or a quote, or indented code."""
    code = node.content.removesuffix("\n").expandtabs(4).split("\n")
    highlighted = _highlighted(code, node.info.split(" ")[0], palette)
    lines: list[Text] = []
    for text in highlighted or [Text(line) for line in code]:
        text.style = palette["code"]
        for part in _folded(text, max(1, width - 2)):
            padding = " " * max(0, width - 1 - cell_len(part.plain))
            lines.append(Text.assemble(" ", part, padding, style=palette["code"], end=""))
    return lines


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
            lines += _folded(line, width)
        if index == 0:
            rule = "─┼─".join("─" * column for column in widths)
            lines += _folded(Text(rule, line_style, end=""), width)[:1]
    return lines


def _column_widths(rows: Sequence[Sequence[Text]], room: int) -> list[int]:
    """Natural widths, the widest columns made narrower until all fit."""
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
    """One text of all inline nodes."""
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
    """The words of a link and, when it says something else, where it goes."""
    before = len(text)
    for child in node.children:
        _append_inline(text, child, palette, style)
    target = str(node.attrs.get("href", ""))
    if text.plain[before:] not in (target, target.removeprefix("mailto:")):
        text.append(f" ({target})", palette["quote"])


def _highlighted(lines: Sequence[str], language: str, palette: Palette) -> list[Text] | None:
    """One text per line of code, or None when no rules for the language are known."""
    if not language or sum(map(len, lines)) > HIGHLIGHT_CHARACTERS:
        return None
    lexer = _lexer(language)
    if lexer is None:
        return None
    texts = [Text("", end="") for _ in lines]
    row = 0
    for kind, value in lexer.get_tokens("\n".join(lines)):
        style = palette.get(_code_style(kind), Style.null())
        for index, part in enumerate(value.split("\n")):
            row += index > 0
            if part and row < len(texts):
                texts[row].append(part, style)
    whole = [text.plain for text in texts] == list(lines)
    return texts if whole else None


@cache
def _lexer(language: str) -> Any:
    from pygments.lexers import find_lexer_class_by_name
    from pygments.util import ClassNotFound

    try:
        return find_lexer_class_by_name(language)(stripnl=False, ensurenl=False)
    except (ClassNotFound, ValueError):
        return None


_CODE_STYLES = (
    ("Token.Keyword", "code-keyword"),
    ("Token.Operator.Word", "code-keyword"),
    ("Token.Literal.String", "code-string"),
    ("Token.Comment", "code-comment"),
    ("Token.Literal.Number", "code-number"),
    ("Token.Name.Function", "code-name"),
    ("Token.Name.Class", "code-name"),
    ("Token.Name.Decorator", "code-name"),
    ("Token.Name.Tag", "code-keyword"),
    ("Token.Name.Builtin", "code-name"),
)


@cache
def _code_style(kind: Any) -> str:
    """The palette's name for a pygments token type."""
    name = str(kind)
    return next((style for prefix, style in _CODE_STYLES if name.startswith(prefix)), "code")


def strip_text(strip: Strip) -> str:
    """The characters of a strip without the padding at its end."""
    return strip.text.rstrip()
