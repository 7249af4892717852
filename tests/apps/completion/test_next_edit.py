"""Where the next edit is looked for, when an answer is over, and what it changes."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvq_apps.completion.completion_engine import CompletionEngine
from kvq_apps.completion.document import LineChange, Position, TextDocument
from kvq_apps.completion.edit_history import EditedLines, EditHistory, NextEdit
from kvq_apps.completion.next_edit import (
    MOST_PLACES,
    NextEditor,
    changed_lines,
    regions,
    rejoined,
)
from kvq_apps.names.engine import Engine
from kvq_models.next_edits import FORMS
from kvq_runtime.serving.outbox import Delta, Finished, Report, TokenLog
from kvq_specdraft import writer_named

URI = "file:///a.py"
TEXT = "def f(name):\n    return name\n\n\nf(name=1)\nb = 2\nc = 3\nf(name=4)\n"
OLD = ["a = 1\n", "b = name\n", "c = 3\n", "d = 4\n", "e = 5\n"]


def after_rename(text: str = TEXT, old: str = "name") -> tuple[TextDocument, list[EditedLines]]:
    """A text whose first line got another name, and the edit."""
    document, history = TextDocument(text), EditHistory()
    column = document.line(0).index(old)
    ends = Position(0, column), Position(0, column + len(old))
    history.add(URI, document.replace(*ends, "title"), 0.0)
    return document, list(history)


def test_lines_with_a_replaced_word_are_looked_at_from_the_cursor_on() -> None:
    document, edits = after_rename()
    lines = document.lines()
    assert list(regions(lines, (0, 11), URI, edits, FORMS["diff"])) == [(1, 2), (4, 5), (7, 8)]
    assert list(regions(lines, (5, 0), URI, edits, FORMS["diff"])) == [(7, 8), (1, 2), (4, 5)]
    # A form that shows more than a line begins at the cursor, and asks nothing twice.
    assert list(regions(lines, (0, 11), URI, edits, FORMS["zeta-2.1"])) == [(0, 6), (2, 9)]
    # In another file the same words count.
    assert list(regions(["name\n"], (0, 0), "file:///b.py", edits, FORMS["diff"])) == [(0, 1)]
    many = ["name\n", "x\n"] * 9
    assert len(list(regions(many, (0, 0), URI, edits, FORMS["diff"]))) == MOST_PLACES


def test_where_no_word_was_replaced_calls_are_looked_at() -> None:
    document, history = TextDocument(TEXT), EditHistory()
    history.add(URI, document.replace(Position(0, 10), Position(0, 10), ", more"), 0.0)
    result = regions(document.lines(), (0, 16), URI, list(history), FORMS["diff"])
    assert list(result) == [(4, 5), (7, 8)]


@pytest.mark.parametrize(
    ("written", "words", "whole"),
    [
        ("a = 1\nb = title\n", ["name"], None),
        ("a = 1\nb = title\nc = 3\nd =", ["name"], None),
        ("a = 1\nb = title\nc = 3\nd = 4\n", ["name"], "a = 1\nb = title\nc = 3\nd = 4\ne = 5\n"),
        # As long as a replaced word follows, another change may.
        ("x = 1\na = 1\n", ["name"], None),
        ("x\na = 1\nb = name\nc = 3\n", ["name"], "x\na = 1\nb = name\nc = 3\nd = 4\ne = 5\n"),
        # Copies are no change; but behind the last replaced word none is expected.
        ("a = 1\nb = name\nc = 3\n", [], None),
        ("a = 1\nb = name\nc = 3\n", ["name"], "".join(OLD)),
    ],
)
def test_an_answer_is_over_where_it_is_the_old_text_again(
    written: str, words: list[str], whole: str | None
) -> None:
    result = rejoined(OLD, written.splitlines(keepends=True), words)
    assert result == (None if whole is None else whole.splitlines(keepends=True))


def test_changes_are_lines_and_white_space_is_none() -> None:
    new = ["a = 1\n", "b = title\n", "c  =  3\n", "x\n", "d = 4\n"]
    assert list(changed_lines(10, OLD[:4], new)) == [
        LineChange(11, ("b = name\n", "c = 3\n"), ("b = title\n", "c  =  3\n", "x\n"))
    ]
    assert list(changed_lines(0, ["a\r\n"], ["a  "])) == []
    assert list(changed_lines(0, ["a"], ["b\n"])) == [LineChange(0, ("a",), ("b",))]


class Scripted:
    """Writes what it is told, token by token, and counts its pieces."""

    def __init__(self, *answers: str, reason: str = "stop") -> None:
        self.prompts: list[list[int]] = []
        self.pulled = 0
        self._answers, self._reason = list(answers), reason

    def __call__(self, ids: list[int], *_: Any) -> Iterator[Any]:
        self.prompts.append(ids)
        for text in self._answers.pop(0).splitlines(keepends=True):
            self.pulled += 1
            yield Delta(index=0, text=text, logs=(TokenLog(token=1, logprob=-0.25),))
        yield Finished(index=0, reason=self._reason, report=Report())


def next_edit_of(
    engine: Engine, script: Scripted, form: str, edits: Sequence[EditedLines], text: TextDocument
) -> NextEdit:
    editor = NextEditor(engine.tokenizer, "a model", script)
    return editor.next_edit(text, (0, 11), URI, edits, form, lambda: False)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(threads=1) as opened:
        yield opened


def test_places_are_asked_until_one_changes(engine: Engine) -> None:
    document, edits = after_rename()
    script = Scripted("    return name", "f(title=1)")
    result = next_edit_of(engine, script, "diff", edits, document)
    assert result.changes == (LineChange(4, ("f(name=1)\n",), ("f(title=1)\n",)),)
    assert (result.places, result.logprob, result.why_not) == (2, -0.25, None)
    assert result.prompt_tokens == sum(map(len, script.prompts))
    assert engine.tokenizer.decode(script.prompts[1]).endswith("@@ @@\n-f(name=1)\n+")
    script = Scripted("    return name", "f(name=1)", "f(name=4)")
    assert next_edit_of(engine, script, "diff", edits, document).why_not == "nothing else changes"


def test_an_answer_is_not_waited_for_behind_its_changes(engine: Engine) -> None:
    text = TEXT + "d = 5\n" * 9
    document, edits = after_rename(text)
    script = Scripted(text.replace("name", "title"))
    result = next_edit_of(engine, script, "zeta", edits, document)
    assert [change.first for change in result.changes] == [1, 4, 7]
    # Two lines behind the last place of the word.
    assert script.pulled == 10


@pytest.mark.parametrize(("answer", "reason"), [("", "stop"), ("f(x)\n", "length"), (TEXT, "stop")])
def test_nothing_is_made_of_a_cut_answer_or_one_that_takes_back(
    answer: str, reason: str, engine: Engine
) -> None:
    document, edits = after_rename()
    script = Scripted(*[answer] * 9, reason=reason)
    assert next_edit_of(engine, script, "zeta", edits, document).changes == ()


def test_text_that_spells_the_end_of_an_answer_is_left_alone(engine: Engine) -> None:
    document, edits = after_rename(f"{TEXT}<|editable_region_end|>\n")
    script = Scripted()
    assert next_edit_of(engine, script, "zeta", edits, document).changes == ()
    assert script.prompts == []


def test_the_embedded_model_writes_and_a_files_session_stays(engine: Engine) -> None:
    completions = CompletionEngine(
        engine, writer_named("branches"), drafts=1, tokens=4, next_edits=True,
        session_options={"context_tokens": 512}, chunk_tokens=64,
    )  # fmt: skip
    document, edits = after_rename()
    first = completions.complete(document, (5, 5))
    for form in ("diff", "zeta", "diff", "zeta"):
        result = completions.next_edit(document, (0, 11), uri=URI, edits=edits, form=form)
        assert result.places >= 1
        assert result.prompt_tokens > 0
    again = completions.complete(document, (5, 5))
    assert again.drafts == first.drafts
    assert again.encoded_tokens <= 2
    assert not completions.next_edit(
        document, (0, 11), uri=URI, edits=edits, cancel=lambda: True
    ).changes
    completions.close()
