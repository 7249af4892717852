"""Parts of other files: which are chosen, and that they stay where they are."""

from kvq_apps.completion.document import TextDocument
from kvq_apps.completion.other_files import (
    BLOCK_LINES,
    MOST_BLOCKS,
    Block,
    blocks_of,
    names_in,
    related,
)


def filler(word: str, lines: int) -> str:
    return "".join(f"{word}_{number % 10} = {number}\n" for number in range(lines))


def test_blocks_are_all_lines_of_a_file_that_say_something() -> None:
    text = filler("alpha", BLOCK_LINES) + "\n" * BLOCK_LINES + filler("beta", 3)
    blocks = blocks_of("a.py", TextDocument(text))
    assert [(block.first, block.text) for block in blocks] == [
        (0, filler("alpha", BLOCK_LINES)), (2 * BLOCK_LINES, filler("beta", 3)),
    ]  # fmt: skip
    assert blocks_of("a.py", TextDocument("x" * 9000)) == ()


def test_names_are_words_of_three_letters_and_more() -> None:
    assert names_in("def open_it(x, é_one): return 17 + open_it") == {
        "def", "open_it", "é_one", "return",
    }  # fmt: skip


def test_the_blocks_most_like_the_text_at_the_cursor_are_chosen() -> None:
    text = (
        filler("alpha", 100) + "def total(invoice):\n    return invoice.amount\n" + filler("z", 60)
    )
    other_blocks = [
        *blocks_of("b.py", TextDocument(filler("alpha", 200))),
        *blocks_of("c.py", TextDocument("class Invoice:\n    amount: int\n    invoice: str\n")),
        *blocks_of("d.py", TextDocument(filler("gamma", 30))),
    ]
    at_total = related(
        other_blocks, TextDocument("def total(invoice):\n    return invoice.am"), (1, 20)
    )
    assert [name for name, _ in at_total] == ["c.py"]
    at_alpha = related(other_blocks, TextDocument(text), (30, 0))
    assert [name for name, _ in at_alpha] == ["b.py"] * MOST_BLOCKS
    # The most alike come in the order of their files, so that a moving cursor changes little.
    numbers = [int(part.split()[2]) for _, part in at_alpha]
    assert numbers == sorted(numbers)
    assert related(other_blocks, TextDocument("nothing alike"), (0, 3)) == ()
    assert related([], TextDocument(text), (30, 0)) == ()


def test_blocks_stay_while_they_are_good_enough() -> None:
    def block(*names: str) -> Block:
        return Block("a.py", 0, " ".join(names), frozenset(names))

    document = TextDocument("alpha beta gamma delta")
    blocks = [block("alpha", "beta", "gamma", "delta"), block("alpha", "beta", "gamma")]
    blocks += [block("alpha", str(number)) for number in range(6)]
    at_first = related(blocks[1:6], document, (0, 0))
    assert len(at_first) == MOST_BLOCKS
    assert ("a.py", "alpha beta gamma") in at_first
    assert related([block("alpha", "beta"), *blocks[1:]], document, (0, 0), at_first) == at_first
    # One of them is gone, or the best are much better.
    assert related(blocks[:1] + blocks[2:], document, (0, 0), at_first) != at_first
    poor = (("a.py", blocks[2].text),)
    assert blocks[0].text in [text for _, text in related(blocks, document, (0, 0), poor)]
