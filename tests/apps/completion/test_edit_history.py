"""The edit history: hunks as a person sees them, which together make the last text of the first."""

import random

import pytest

from kvq_apps.completion.document import LineChange, Position, TextDocument
from kvq_apps.completion.edit_history import (
    MOST_BYTES,
    MOST_HUNKS,
    SAME_EDIT_LINES,
    SAME_EDIT_S,
    EditHistory,
)

URI = "file:///a.py"
LETTERS = ["a", "b ", "\n", "\r\n", "c\nd", "", "\n\n", "\U0001f44b", "\r"]


def typed(
    history: EditHistory, document: TextDocument, line: int, column: int, text: str, now: float
) -> None:
    """Types `text` key by key, a tenth of a second each."""
    for key in text:
        place = Position(line, column)
        history.add(URI, document.replace(place, place, key), now)
        now += 0.1
        line, column = (line + 1, 0) if key == "\n" else (line, column + 1)


def hunks(history: EditHistory) -> list[tuple[int, str, str]]:
    return [(hunk.change.first, hunk.old, hunk.new) for hunk in history]


@pytest.mark.parametrize("seed", range(40))
def test_the_hunks_make_the_last_text_of_the_first(seed: int) -> None:
    draw = random.Random(seed)
    document = TextDocument("".join(draw.choices(LETTERS, k=30)))
    first, now = document.lines(), 0.0
    history = EditHistory()
    for _ in range(200):
        if len(history) == MOST_HUNKS - 1:
            break
        line = draw.randrange(document.num_lines)
        start = Position(line, draw.randrange(4))
        end = Position(line + draw.choice([0, 0, 0, 1, 3]), draw.randrange(4))
        before = document.lines()
        change = document.replace(*sorted((start, end)), "".join(draw.choices(LETTERS, k=2)))
        assert tuple(before[change.first : change.first + len(change.old)]) == change.old
        history.add(URI, change, now)
        now += draw.choice([0.1, 0.1, 2 * SAME_EDIT_S])
    lines = list(first)
    for hunk in history:
        start, stop = hunk.change.first, hunk.change.first + len(hunk.change.old)
        assert tuple(lines[start:stop]) == hunk.change.old
        lines[start:stop] = hunk.change.new
    assert lines == document.lines()
    for hunk in reversed(list(history)):
        lines = hunk.undone(lines)
    assert lines == first


def test_keys_on_a_line_are_its_hunk_and_other_places_have_their_own() -> None:
    document, history = TextDocument("def f(a):\n    return a\n\n\nf(1)\n"), EditHistory()
    typed(history, document, 0, 7, "bc", 0.0)
    assert hunks(history) == [(0, "def f(a):\n", "def f(abc):\n")]
    # A line below is written on: it joins. Far below, or later, is another hunk.
    typed(history, document, 1, 12, "bc\n    # end", 1.0)
    assert hunks(history) == [
        (0, "def f(a):\n    return a\n", "def f(abc):\n    return abc\n    # end\n")
    ]
    typed(history, document, 5, 3, "2", 3.0)
    typed(history, document, 5, 4, "3", 3.1 + 2 * SAME_EDIT_S)
    assert hunks(history)[1:] == [(5, "f(1)\n", "f(12)\n"), (5, "f(12)\n", "f(123)\n")]
    assert [hunk.removed_words() for hunk in history] == [["a"], ["1"], ["12"]]


def test_what_is_typed_and_taken_back_is_no_hunk() -> None:
    document, history = TextDocument("one\n"), EditHistory()
    typed(history, document, 0, 3, "xy", 0.0)
    history.add(URI, document.replace(Position(0, 3), Position(0, 5), ""), 0.5)
    assert hunks(history) == []


def test_documents_do_not_mix_and_the_history_is_bounded() -> None:
    history = EditHistory()
    history.add(URI, LineChange(0, ("a\n",), ("b\n",)), 0.0)
    history.add("file:///b.py", LineChange(0, ("b\n",), ("c\n",)), 0.1)
    assert [hunk.uri for hunk in history] == [URI, "file:///b.py"]
    for place in range(2 * MOST_HUNKS):
        history.add(URI, LineChange(3 * place, ("a\n",), ("b\n",)), 1.0)
    assert len(history) == MOST_HUNKS
    # So many lines are not one edit any more, and what is too large leaves nothing before it.
    many = ("a\n",) * SAME_EDIT_LINES
    history.add(URI, LineChange(0, (), many), 2.0)
    history.add(URI, LineChange(0, (), ("b\n",)), 2.1)
    assert [len(hunk.change.new) for hunk in history][-2:] == [SAME_EDIT_LINES, 1]
    history.add(URI, LineChange(0, (), ("x" * MOST_BYTES,)), 3.0)
    assert hunks(history) == []
