"""Streamed markdown: the strips of the whole whatever the pieces, and text that stays text."""

import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from textual.strip import Strip

from chat_pilot import PALETTE
from kvq_apps.chat import streamed_markdown as document_module
from kvq_apps.chat.markdown import draw, estimate, folded, strip_text
from kvq_apps.chat.markdown_blocks import (
    BLOCK_CHARACTERS,
    LINE_CHARACTERS,
    BlockScanner,
    MarkdownBlock,
    code_fences,
    plain_blocks,
)
from kvq_apps.chat.streamed_markdown import StreamedMarkdown
from kvq_apps.terminal.output import storable, visible

# The same examples every time; a person hunting for faults sets another seed and more of them.
SETTINGS = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
LINES = [
    *("", "", "plain words in a row", "**bold** and *thin* `code`", "# Title", "Under\n===", "---"),
    *("- item", "  - nested", "1. one", "7) seven", "    indented", "```python", "```", "~~~"),
    *("> said", "| a | b |\n|---|---|\n| 1 | 2 |", "[link](http://x.y)", "[ref]: http://x"),
    *("<script>x</script>", "[bold]no markup[/bold]", "\x1b[31mred\x1b[0m", "\ttab", "``` a`b"),
    *("你好 👩\u200d👩\u200d👧 e\u0301", "def f(): return 'x'  # y", "*", "-", "1.", "word " * 40),
    "x" * 90,
]
texts = st.lists(st.sampled_from(LINES) | st.text(max_size=12), max_size=24).flatmap(
    lambda lines: st.sampled_from(["\n", "\n\n", "\r\n", "\r"]).map(lambda end: end.join(lines))
)


def blocks_of(text: str) -> list[MarkdownBlock]:
    scanner = BlockScanner()
    return [*scanner.feed(storable(text)), *scanner.finish()]


def strips_of(blocks: list[MarkdownBlock], width: int = 40) -> list[Strip]:
    return [strip for block in blocks for strip in draw(block, width, PALETTE)]


def lines_of(text: str, width: int = 40) -> list[str]:
    return [strip_text(strip) for strip in strips_of(blocks_of(text), width)]


@pytest.mark.slow
@settings(SETTINGS, max_examples=500)
@given(text=texts, seed=st.integers(0, 2**32), width=st.sampled_from([1, 7, 40, 120]))
def test_streamed_blocks_are_those_of_the_whole_and_fit(text: str, seed: int, width: int) -> None:
    generator = random.Random(seed)
    document, streamed, rest = StreamedMarkdown(), [], storable(text)
    while rest:
        size = generator.choice([1, 1, 2, 5, 30])
        piece, rest = rest[:size], rest[size:]
        streamed += document.feed(piece)
        document.draw_tail(width, PALETTE, closed=generator.random() < 0.3)
    streamed += document.finish()
    assert streamed == blocks_of(text)
    # A block is drawn from what it says alone, so equal blocks are equal strips.
    strips = strips_of(streamed, width)
    assert all(strip.cell_length <= width or width < 4 for strip in strips)


@settings(SETTINGS, max_examples=200)
@given(
    parts=st.lists(
        st.sampled_from(
            ["some words", "# Head", "- a\n- b\n  more", "1. x\n2. y\n\n   z", "> q\n> r",
             "```\ncode\n\nmore\n```", "| a | b |\n|---|---|\n| c | d |", "Up\n--", "***",
             "- a\n\n  b\n- c", "3. k\n4. l", "- [x](y)\n  - deep\n    - deeper"]
        ),
        max_size=6,
    )
)  # fmt: skip
def test_blocks_say_what_one_parse_of_the_whole_says(parts: list[str]) -> None:
    text = "\n\n".join(parts)
    whole = draw(MarkdownBlock(kind="markdown", source=text), 60, PALETTE)
    words = " ".join(map(strip_text, whole)).split()
    numbers = {f"{number}." for number in range(10)}
    # Two lists in a row are one list to a whole parse, which renumbers the second.
    assert [word for word in " ".join(lines_of(text, 60)).split() if word not in numbers] == [
        word for word in words if word not in numbers
    ]


def test_the_open_end_shows_what_there_is_so_far() -> None:
    for text in ("# Tit", "para\n\n- it", "```python\nx = 1\ny", "| a |\n|---|\n| b"):
        document = StreamedMarkdown()
        strips = strips_of(document.feed(text))
        strips += document.draw_tail(40, PALETTE, closed=True) or []
        assert "".join(map(strip_text, strips)) == "".join(lines_of(text))


def test_constructs_are_drawn() -> None:
    assert lines_of("# A **b**\n\none *two*\nthree") == ["# A b", "", "one two three"]
    assert lines_of("- a\n  - b\n- c") == ["• a", "  • b", "• c"]
    assert lines_of("1. a\n1. b\n\n1. c") == ["1. a", "2. b", "", "3. c"]
    assert lines_of("9) a\n10) b") == ["9. a", "10. b"]
    assert lines_of("> a\n> b\n\nc") == ["▎ a b", "", "c"]
    assert lines_of("| a | bc |\n|---|---|\n| def | g |") == ["a   │ bc", "────┼───", "def │ g"]
    assert lines_of("a\n---\nb", 5) == ["## a", "", "b"]
    assert lines_of("***", 5) == ["─────"]
    assert lines_of("```py\nx = 1\n\ny\n```\nz") == [" py", " x = 1", "", " y", "", "z"]
    assert lines_of("[w](http://a) <http://b>") == ["w (http://a) http://b"]


def test_styles_come_from_the_palette() -> None:
    def styled(text: str, part: str) -> object:
        strips = strips_of(blocks_of(text))
        return next(s.style for strip in strips for s in strip if part in s.text and s.style)

    assert styled("a **b** c", "b") == PALETTE["text"] + PALETTE["strong"]
    assert styled("`b`", "b") == PALETTE["text"] + PALETTE["inline-code"]
    assert styled("# b", "b") == PALETTE["heading"]
    assert styled("```python\ndef f(): 1\n```", "def") == PALETTE["code"] + PALETTE["code-keyword"]
    assert styled("```nosuch\ndef\n```", "def") == PALETTE["code"]


@pytest.mark.parametrize(
    "text",
    ["[bold]x[/bold]", "<script>alert(1)</script>", "&amp;", "[a]: http://b", "\\[red]", "|a|b|"],
)
def test_model_text_is_shown_as_it_stands(text: str) -> None:
    assert lines_of(text, 60) == [text.replace("&amp;", "&").replace("\\[", "[")]


@settings(SETTINGS, max_examples=100)
@given(text=st.text(st.characters(codec=None, exclude_categories=()), max_size=80))
@example(text="0\t0")
def test_no_control_character_reaches_the_screen(text: str) -> None:
    for block in [*blocks_of(text), *plain_blocks(text), *blocks_of(f"```\n{text}")]:
        for strip in draw(block, 30, PALETTE):
            drawn = strip.text
            assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in drawn), repr(drawn)
            drawn.encode()
    storable(text).encode()
    assert len(visible(text)) == len(text)


def test_escape_codes_are_pictures() -> None:
    assert visible("\x1b[31m\x00\x7f\x9b\u202e") == "␛[31m␀␡\ufffd\ufffd"
    assert lines_of("\x1b]52;c;AAAA\x07") == ["␛]52;c;AAAA␇"]


def test_a_line_of_a_megabyte_is_cut_into_pieces_and_nothing_is_lost() -> None:
    text = "word " * 200_000
    blocks = blocks_of(text)
    lines = [line for block in blocks for line in block.source.split("\n")]
    assert max(map(len, lines)) <= LINE_CHARACTERS
    assert "".join(lines) == text
    assert {block.kind for block in blocks} == {"plain"}


def test_a_paragraph_without_end_is_cut() -> None:
    blocks = blocks_of("some words\n" * 20_000)
    assert max(len(block.source) for block in blocks) <= BLOCK_CHARACTERS + 16
    assert sum(block.source.count("some") for block in blocks) == 20_000


def test_wide_characters_are_folded_without_loss() -> None:
    code = "你好世界" * 10
    drawn = strips_of(blocks_of(f"```\n{code}\n```"), 11)
    assert "".join(strip.text.strip() for strip in drawn) == code
    assert all(strip.cell_length <= 11 for strip in drawn)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("result = compute(first_value)", ["result = ", "compute(", "first_value)"]),
        ("    return something", ["    return ", "something"]),
        ("abcdefghijklmnopqrstuvwxyz", ["abcdefghijkl", "mnopqrstuvwx", "yz"]),
        ("x = 1", ["x = 1"]),
        ("a " * 12, ["a a a a a a ", "a a a a a a "]),
        ("            deeply", ["            ", "deeply"]),
        ("", [""]),
    ],
)
def test_code_breaks_between_words(code: str, lines: list[str]) -> None:
    block = MarkdownBlock(kind="fence", source=code, gap=False)
    drawn = [strip.text for strip in draw(block, 14, PALETTE)]
    assert [line[1:].rstrip() for line in drawn] == [line.rstrip() for line in lines]


@SETTINGS
@given(st.text("ab_ .(字\u0301", max_size=80), st.integers(3, 30))
def test_folded_code_fits_and_keeps_every_character(code: str, width: int) -> None:
    text = Text(code)
    parts = folded(text, width)
    assert "".join(part.plain for part in parts) == code
    assert all(cell_len(part.plain) <= width for part in parts)


def test_list_items_freeze_one_by_one() -> None:
    scanner = BlockScanner()
    closed = scanner.feed("".join(f"- item {number}\n" for number in range(200)))
    assert [block.source for block in closed] == [f"- item {number}" for number in range(199)]
    assert [block.source for block in scanner.tail()] == ["- item 199"]
    assert scanner.feed("") == []


def test_an_open_fence_draws_only_its_new_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now, full, single = [100.0], [], []
    monkeypatch.setattr(document_module, "monotonic", lambda: now[0])
    original = document_module.code_line
    monkeypatch.setattr(
        document_module, "draw", lambda block, *a, **k: full.append(block) or draw(block, *a, **k)
    )
    monkeypatch.setattr(
        document_module, "code_line", lambda text, *a: single.append(text) or original(text, *a)
    )
    tail, lines = StreamedMarkdown(), []
    for number in range(100):
        lines.append(f"x = {number}")
        now[0] += 0.01
        block = MarkdownBlock(kind="fence", source="\n".join(lines), language="python", gap=False)
        strips = tail.draw_blocks([block], 40, PALETTE)
        assert [strip_text(strip) for strip in strips] == [
            " python",
            *(f" {line}" for line in lines),
        ]
    # One second: highlighted every 250 ms at most, otherwise two lines per call.
    assert len(full) <= 6
    assert len(single) <= 2 * 100


def test_the_tail_is_not_drawn_more_often_than_every_66_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(document_module, "monotonic", lambda: now[0])
    document = StreamedMarkdown()
    drawn = 0
    for _ in range(1000):
        now[0] += 0.001
        document.feed("w ")
        drawn += document.draw_tail(40, PALETTE, closed=False) is not None
    assert 2 <= drawn <= 16


def test_estimates_are_near() -> None:
    for text in ("word " * 300, "- a", "```python\n" + "x = 1\n" * 50 + "```"):
        for block in blocks_of(text):
            drawn = len(draw(block, 60, PALETTE))
            assert drawn / 2 <= estimate(block, 60) <= drawn * 2


def test_code_fences() -> None:
    text = "a\n```python\nx\ny\n```\nb\n```\nz\n```"
    assert code_fences(text) == ["x\ny", "z"]
    assert code_fences("no code") == []
    assert code_fences("1. so:\n   ~~~sh\n   a\n     b\n\n   ~~~~\n```x```\n````\nopen\n```\n") == [
        "a\n  b\n", "open\n```"
    ]  # fmt: skip
    # A parser of Markdown ends the list at the code, so that its fence is empty.
    assert code_fences("1. Do this:\n   ```python\nx = 1\n   ```\n") == ["x = 1"]


def test_prose_is_at_most_100_columns_wide_and_code_is_not() -> None:
    words, code = "word " * 60, "x = " + "1 + " * 40 + "1"
    text = f"{words}\n\n# {words}\n\n- {words}\n\n> {words}\n\n```\n{code}\n```\n"
    lines = [strip_text(strip) for block in blocks_of(text) for strip in draw(block, 180, PALETTE)]
    prose = [line for line in lines if "word" in line]
    assert 95 <= max(map(len, prose)) <= 104  # 100 and the mark of a list or a quote
    assert any(code in line for line in lines)
    plain = draw(MarkdownBlock(kind="plain", source=words), 180, PALETTE)
    assert {len(strip_text(strip)) <= 100 for strip in plain} == {True}
