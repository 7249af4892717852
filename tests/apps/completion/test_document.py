"""Documents against plain strings, blocks against the whole, rules against golden drafts."""

import random
import tracemalloc
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_apps.completion.document import Encoding, Position, TextDocument
from kvq_apps.completion.suggestions import (
    Completion,
    CursorContext,
    Suggestion,
    apply_rules,
    cursor_context,
    filter_suggestions,
    whole_lines,
)
from kvq_apps.completion.token_blocks import MOST_CHARACTERS, BlockTokenizer
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.bundle import Bundle
from shelf import Shelf

# Line ends of the protocol, and characters that other readers take for line ends.
ALPHABET = "ab \t\n\r\x0c\u2028\x85\u00e9\u4f60\U0001f44be\u0301("
# With half of a pair of UTF-16, which no tokenizer takes.
BROKEN = f"{ALPHABET}\ud83d"
SOURCE = (
    "def f(x):\n    \u00e9 = [x,\r\n  1]\n\n    return '\U0001f44b' + y\n\nclass A:\n    z = 1\n"
    * 2
)
WIDTHS = {
    "utf-8": lambda text: len(text.encode("utf-8", "surrogatepass")),
    "utf-16": lambda text: len(text.encode("utf-16-le", "surrogatepass")) // 2,
    "utf-32": len,
}


def lines_of(text: str) -> list[str]:
    """By the protocol, in plain loops."""
    lines, at = [""], 0
    while at < len(text):
        end = text[at : at + 2] if text[at : at + 2] == "\r\n" else text[at]
        lines[-1] += end
        at += len(end)
        if end in ("\n", "\r", "\r\n"):
            lines.append("")
    return lines


def offset(text: str, position: Position, encoding: str) -> int:
    """The place of a position in `text`, clamped as the protocol says."""
    return place_in(lines_of(text), position, encoding)


def place_in(lines: list[str], position: Position, encoding: str) -> int:
    if position.line >= len(lines):
        return sum(map(len, lines))
    bare = lines[position.line].rstrip("\r\n")
    column = 0
    while column < len(bare) and WIDTHS[encoding](bare[: column + 1]) <= position.character:
        column += 1
    return sum(map(len, lines[: position.line])) + column


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(BROKEN, max_size=40),
    encoding=st.sampled_from(sorted(WIDTHS)),
    edits=st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 9), st.integers(0, 6), st.integers(0, 9),
            st.text(BROKEN, max_size=6),
        ),
        max_size=8,
    ),
)  # fmt: skip
def test_edits_are_those_of_a_string(
    text: str, encoding: Encoding, edits: list[tuple[int, int, int, int, str]]
) -> None:
    document = TextDocument(text)
    for line, character, last, stop, new in edits:
        start, end = Position(line, character), Position(last, stop)
        first, after = sorted((offset(text, start, encoding), offset(text, end, encoding)))
        place = document.place(start, encoding)
        assert document.text_around(place) == (
            text[: offset(text, start, encoding)], text[offset(text, start, encoding) :]
        )  # fmt: skip
        bare = document.line(place[0])
        assert document.units(*place, encoding) == WIDTHS[encoding](bare[: place[1]])
        text = text[:first] + new + text[after:]
        document.replace(start, end, new, encoding)
        assert document.text == text
        assert document.num_lines == len(lines_of(text))


@pytest.fixture(scope="module")
def tokenizers(shelf: Shelf) -> list[Tokenizer]:
    bundles = (shelf.bundle(), shelf.embedded("nano"))
    tokenizers = [Bundle.open(bundle).tokenizer() for bundle in bundles]
    return [tokenizer for tokenizer in tokenizers if tokenizer is not None]


@pytest.mark.slow
def test_ten_thousand_edits_of_one_text(tokenizers: list[Tokenizer]) -> None:
    """LSP-5, LSP-7: the text is a string's, its tokens those of the whole, in every unit.

    What stands before the cursor and behind it is encoded apart, as a prompt has it.
    """
    chance, text = random.Random(7), SOURCE
    document, blocks = TextDocument(text), BlockTokenizer(tokenizers[1])
    encoded: list[int] = []
    for number in range(10_000):
        encoding = chance.choice(tuple(WIDTHS))
        line = chance.randrange(document.num_lines + 1)
        start = Position(line, chance.randrange(30))
        end = Position(line, start.character + chance.choice([0, 0, 1, 2]))
        if chance.random() < 0.03:
            end = Position(line + 2, chance.randrange(9))
        new = "".join(chance.choices(ALPHABET, k=chance.choice([0, 1, 1, 2])))
        if len(text) > 240:
            new = ""
        elif len(text) < 100:
            new = SOURCE
        lines = lines_of(text)
        first, after = sorted(place_in(lines, place, encoding) for place in (start, end))
        text = text[:first] + new + text[after:]
        document.replace(start, end, new, encoding)
        before, behind = document.text_around(document.place(start, encoding))
        assert before + behind == text
        done = blocks.encoded_characters
        if number % 10 == 0:
            for part in (before, behind):
                assert blocks.encode(part) == tokenizers[1].encode(part)
            encoded.append(blocks.encoded_characters - done)
    # A token is a character at least.
    assert sorted(encoded)[int(0.95 * len(encoded))] < 4 * 64


def test_a_key_encodes_its_block_only(tokenizers: list[Tokenizer]) -> None:
    blocks = BlockTokenizer(tokenizers[1])
    text = "".join(f"def f{n}(x):\n    y = x + {n}\n    return y\n\n" for n in range(200))
    blocks.encode(text)
    before = blocks.encoded_characters
    changed = text.replace("y = x + 77\n", "y = x + 778\n")
    assert blocks.encode(changed) == tokenizers[1].encode(changed)
    assert blocks.encoded_characters - before < 60


class OnePiece:
    """A tokenizer that writes any text as one token, so that blocks are not the whole."""

    def encode(self, text: str) -> list[int]:
        return [hash(text)]


def test_what_is_remembered_of_a_text_that_is_encoded_whole_is_bounded() -> None:
    blocks = BlockTokenizer(cast(Tokenizer, OnePiece()))
    text = "x" * (MOST_CHARACTERS // 4)
    tracemalloc.start()
    for key in range(20):
        blocks.encode(text + "y" * key)
    peak_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert peak_bytes < 2.5 * MOST_CHARACTERS


@pytest.mark.parametrize(
    ("draft", "before", "rest", "below", "left"),
    [
        ("a, b)", "foo(", ")", "", "a, b"),
        ("a, b)", "foo(", "", "", "a, b)"),
        ("a, b))", "foo(", "", "", "a, b))"),
        ("arg) + [b]]", "foo(", ")", "", "arg"),
        ("key] + y", "[", "]", "", "key"),
        ("first\nsecond", "", "", "", "first"),
        ("\nsecond", "", "", "", ""),
        ("word\r\nx", "", "", "", "word"),
        ("caf\ufffd", "", "", "", "caf"),
        ("ab, ab, ab, ab, ", "", "", "", "ab,"),
        ("return x", "    ", "", "    return x", ""),
        ("return x", "    ", "", "    return y", "return x"),
        ("range(10):", "for i in ", ":", "", "range(10)"),
        ("len(x)", "foo(", ")", "", "len(x)"),
        ("len(x))", "foo(", ")", "", "len(x)"),
        ("b = c[0]", "f(a[", "])", "", "b = c[0]"),
        ("name(", "", "(x)", "", "name"),
        ("1000", "x = ", "", "", "1000"),
        ('"""One."""', "    ", "", "", '"""One."""'),
        ("x", "", "", "", ""),
        ("   ", "", "", "", ""),
        ("value  ", "", "", "", "value"),
    ],
)
def test_what_of_a_draft_is_shown(
    draft: str, before: str, rest: str, below: str, left: str
) -> None:
    assert apply_rules(draft, CursorContext(before, rest, below)) == left


@pytest.mark.parametrize(
    ("text", "place", "indent"),
    [
        ("def f(x):\n    \n", (1, 4), 1),
        ("def f(x):\n    ", (0, 9), 1),
        ('def f(x):\n    """Return x."""\n    ', (2, 4), 1),
        ("class A:\n    def f(self):\n\n        ", (3, 8), 5),
        ("if (a) {\n  \n}\n", (1, 2), 1),
        ("\tfor x in y:\n\t\t", (1, 2), 2),
        # The block has lines already, the line goes on, nothing is opened, or a comment ends so.
        ("def f(x):\n    \n    return x\n", (1, 4), 0),
        ("def f(x): return x\n", (0, 9), 0),
        ("x = 1\n", (1, 0), 0),
        ("# such as:\n", (1, 0), 0),
        ("", (0, 0), 0),
        ("def f(x):\n\n\n\n\n\n", (5, 0), 0),
    ],
)
def test_where_a_block_begins(text: str, place: tuple[int, int], indent: int) -> None:
    assert cursor_context(TextDocument(text), place).indent == indent


def test_a_body_is_shown_whole_and_cut_at_lines() -> None:
    context = cursor_context(TextDocument("def f(x):\n    \n"), (1, 4))
    body = "y = x\n    return y\n"
    assert [draft.text for draft in filter_suggestions(context, [(body, ())])] == [body.rstrip()]
    assert whole_lines("y = x\n    retu") == "y = x"
    assert whole_lines("y = x\n") == "y = x\n"
    assert whole_lines("one line") == "one line"


def test_texts_that_differ_by_spaces_are_shown_once() -> None:
    context = cursor_context(TextDocument("x = \n"), (0, 4))
    texts = ["f(a, b)", "f(a,b)", "f(a, c)", " f(a, b)"]
    drafts = [(text, ((len(text), -float(number)),)) for number, text in enumerate(texts, 1)]
    assert [(draft.text, draft.logprob) for draft in filter_suggestions(context, drafts)] == [
        ("f(a, b)", -1.0),
        ("f(a, c)", -3.0),
    ]


def suggestion(*tokens: tuple[str, float]) -> Suggestion:
    """Returns a suggestion of these tokens, each with its log-probability."""
    text, logprob, steps = "", 0.0, list[tuple[int, float]]()
    for token, token_logprob in tokens:
        text, logprob = text + token, logprob + token_logprob
        steps.append((len(text), logprob))
    return Suggestion(text=text, logprob=logprob, steps=tuple(steps))


@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        # All of it, exactly at the limit; what the rules cut off no longer counts.
        ([("f(", -0.25), ("x)", -0.25)], "f(x)"),
        ([("f(", -0.25), ("x)", -0.5)], "f("),
        ([("f(", -0.25), ("x", -0.5), (")", -9.0)], "f("),
        # No part of a word, and no blank at the end.
        ([("first", -0.1), ("_name", -1.0)], ""),
        ([("a.", -0.1), ("first", -0.1), ("_name", -1.0)], "a."),
        ([("the", -0.1), (" end", -0.1), (" of", -1.0)], "the end"),
        ([("the ", -0.1), ("end", -1.0)], "the"),
        # Hardly anything.
        ([("(", -0.1), ("x", -1.0)], ""),
        ([("x", -1.0), ("yz", -0.1)], ""),
        # Of several lines the whole ones, of the first a part.
        ([("a = 1\n", -0.1), ("b", -0.1), (" = 2", -1.0)], "a = 1"),
        ([("a = 1", -0.1), ("\nb", -1.0)], "a = 1"),
        ([("a =", -0.1), (" 1\nb", -1.0)], "a ="),
    ],
)
def test_the_likely_part_of_a_suggestion(tokens: list[tuple[str, float]], part: str) -> None:
    assert suggestion(*tokens).likely_part(-0.5).text == part


def test_without_steps_a_suggestion_is_shown_whole() -> None:
    whole = Suggestion(text="f(x)", logprob=-9.0)
    assert whole.likely_part(-0.5) == whole


def test_what_was_typed_of_a_suggestion_is_certain() -> None:
    whole = suggestion(("ab", -0.5), ("cd", -0.25), ("ef", -2.0))
    assert whole.after(2).text == "cdef"
    assert whole.after(2).steps == ((2, -0.25), (4, -2.25))
    # Inside a token the token is certain.
    assert whole.after(3).steps == ((1, 0.0), (3, -2.0))
    assert whole.after(0) == whole
    assert whole.after(2).logprob == pytest.approx(-2.25)


def test_equal_parts_are_shown_once_and_nothing_likely_is_said() -> None:
    drafts = (
        suggestion(("f(", -0.1), ("a", -9.0)),
        suggestion(("f(", -0.2), ("b", -9.0)),
        suggestion(("g()", -0.3)),
        suggestion(("h()", -9.0)),
    )
    shown = Completion(drafts=drafts).likely_part()
    assert [(draft.text, draft.logprob) for draft in shown.drafts] == [("f(", -0.1), ("g()", -0.3)]
    assert shown.why_not is None
    assert Completion(drafts=drafts[3:]).likely_part() == Completion(drafts=(), why_not="unlikely")
    assert Completion(drafts=(), why_not="filtered").likely_part().why_not == "filtered"


@pytest.mark.parametrize(
    ("before", "draft", "below", "left"),
    [
        ("    a, ", "bc)", ")", "bc"),
        ("    a, ", "bc, cd", ")", "bc, cd"),
        ("    f(", "ab)", ")", "ab)"),
        ("    ", "[a], b]", "]", "[a], b"),
        ("    a, ", "bc)", "x = 1", "bc)"),
    ],
)
def test_a_bracket_that_the_next_line_closes_is_not_closed_twice(
    before: str, draft: str, below: str, left: str
) -> None:
    assert apply_rules(draft, CursorContext(before, "", below)) == left


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "def f(x):\n", "    return x\n", "\n", "  \n", "\t", "x = 1", "\r\n", " ", "    ",
                "'''", "\n\n", "\u00e9t\u00e9", "\U0001f44b", "    if y:\n", "# a\n", ")", "  ",
                "123\n",
            ]
        ),
        max_size=30,
    ),
    edits=st.lists(
        st.tuples(
            st.integers(0, 200), st.integers(0, 30),
            st.sampled_from(["", "\n", "  ", "x", "\n    y\n", "(", "\t\n"]),
        ),
        max_size=12,
    ),
)  # fmt: skip
def test_a_text_that_changes_encodes_as_the_whole(
    tokenizers: list[Tokenizer], pieces: list[str], edits: list[tuple[int, int, str]]
) -> None:
    for tokenizer in tokenizers:
        text, blocks = "".join(pieces), BlockTokenizer(tokenizer)
        for start, count, new in edits:
            text = text[:start] + new + text[start + count :]
            for part in (text[:start], text[start:], text):
                assert blocks.encode(part) == tokenizer.encode(part)


def test_a_part_of_a_long_text_begins_at_the_same_line_while_somebody_types() -> None:
    document = TextDocument("".join(f"line number {n}\n" for n in range(3000)))
    before, after = document.text_around((2000, 3), 4000)
    assert 4000 <= len(before) < 4000 + 65 * 17
    assert before.endswith("1999\nlin")
    assert after.startswith("e number 2000\n")
    assert 4000 <= len(after) < 4100
    first = before[:20]
    for key in range(40):
        document.replace(Position(2000, 3 + key), Position(2000, 3 + key), "x")
        before, _ = document.text_around((2000, 4 + key), 4000)
        assert before.startswith(first)
    assert document.text_around((0, 0), 10)[0] == ""
    copy = document.copy()
    document.replace(Position(0, 0), Position(0, 1), "")
    assert copy.text == "l" + document.text
