"""Completions of a file that is being edited, and `kvq complete`."""

import json
from pathlib import Path

import pytest

from kvq_apps.cli import main
from kvq_apps.completion.document import Document, Position
from kvq_apps.completion.engine import CompletionEngine
from kvq_apps.engine import Engine
from kvq_specdraft import writer_named

TEXT = """import os


def read_lines(path):
    with open(path) as file:
        return file.readlines()


def count_words(path):
    total = 0
    for line in read_lines(path):
        total +=
    return total
"""
PLACE = (11, 16)


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine.open(threads=1) as opened:
        yield opened


def completions(engine: Engine, **settings: bool) -> CompletionEngine:
    options = {"kv": "fp", "context_tokens": 1024}
    return CompletionEngine(engine, writer_named("branches"), session_options=options, **settings)


def test_a_key_costs_its_own_tokens(engine: Engine) -> None:
    own, document = completions(engine), Document(TEXT)
    first = own.complete(document, PLACE)
    assert (first.reused_tokens, first.why_not) == (0, None)
    assert len(first.drafts) >= 1
    prompt = first.encoded_tokens
    # Typing moves the cursor's place in the prompt with it.
    document.replace(Position(*PLACE), Position(*PLACE), " len")
    typed = own.complete(document, (11, 20))
    assert 0 < typed.encoded_tokens <= 8
    assert typed.reused_tokens >= prompt - 4
    # The same place again: nothing but the last token.
    again = own.complete(document, (11, 20))
    assert again.encoded_tokens <= 1
    assert [one.text for one in again.drafts] == [one.text for one in typed.drafts]
    # An edit elsewhere is not the file once more.
    document.replace(Position(9, 4), Position(9, 9), "count")
    assert own.complete(document, (11, 20)).encoded_tokens <= 16
    own.close()


def test_exactly_what_a_fresh_session_says(engine: Engine) -> None:
    own, document = completions(engine, exact=True), Document(TEXT)
    own.complete(document, PLACE)
    document.replace(Position(9, 4), Position(9, 9), "count")
    found = own.complete(document, PLACE)
    fresh = completions(engine).complete(document, PLACE)
    assert [one.text for one in found.drafts] == [one.text for one in fresh.drafts]
    for one, other in zip(found.drafts, fresh.drafts, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    own.close()


def test_a_cancelled_request_leaves_the_next_one_right(engine: Engine) -> None:
    own, document = completions(engine), Document(TEXT)
    cut = own.complete(document, PLACE, cancel=lambda: True)
    assert (cut.drafts, cut.why_not) == ((), "cancelled")
    found = own.complete(document, PLACE)
    fresh = completions(engine).complete(document, PLACE)
    assert [one.text for one in found.drafts] == [one.text for one in fresh.drafts]
    own.close()


def test_the_command_prints_what_an_editor_shows(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a b.py"
    file.write_text(TEXT)
    assert main(["complete", f"{file}:12:17", "--json", "--kv", "fp"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = completions(engine).complete(Document(TEXT), PLACE)
    assert [one["text"] for one in report["drafts"]] == [one.text for one in found.drafts]
    assert report["encoded_tokens"] == found.encoded_tokens
    assert main(["complete", f"{file}:12", "--kv", "fp", "--drafts", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines in ([report["drafts"][0]["text"]], [])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("{file}",), "is no place"),
        (("{file}:0",), "counted from 1"),
        (("{file}:99",), "14 lines; there is no line 99"),
        (("/nowhere.py:1",), "cannot be read"),
        (("a", "b", "{file}:1"), "one model and one place"),
        (("{file}:1", "--drafts", "1,2"), "one number of --drafts"),
    ],
)
def test_wrong_places_are_refused(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text(TEXT)
    assert main(["complete", *(word.format(file=file) for word in words)]) == 2
    assert says in capsys.readouterr().err
