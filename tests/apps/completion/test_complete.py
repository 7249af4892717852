"""Completions of a file that is being edited, and `kvq complete`."""

import fnmatch
import glob
import heapq
import json
import keyword
import os
import sched
import shlex
import textwrap
import threading
import time
import tokenize
from collections.abc import Sequence
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq.errors import UsageError
from kvq_apps.cli import main
from kvq_apps.completion import completion_engine as module
from kvq_apps.completion.completion_engine import CompletionEngine
from kvq_apps.completion.document import Position, TextDocument
from kvq_apps.completion.prompts import MOST_OWNERS, OwnedPrompts
from kvq_apps.names.engine import Engine
from kvq_lab.typing_sessions import PROGRAM
from kvq_runtime.sequence.passages import FIRST_TOKENS
from kvq_runtime.sequence.passes import forward_all
from kvq_runtime.serving import pool
from kvq_runtime.session.session import Session
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
LINES_BEFORE = 5
# Parts of other files.
OTHER_PARTS = [
    (f"{name}.py", f"def {name}(value):\n    return value\n" * 9) for name in ("abc", "xyz")
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine.open(threads=1) as opened:
        yield opened


def completions(engine: Engine, *, chunk_tokens: int = 256, **settings: Any) -> CompletionEngine:
    return CompletionEngine(
        engine,
        writer_named("branches"),
        session_options={"kv": "fp", "context_tokens": 1024},
        chunk_tokens=chunk_tokens,
        **settings,
    )


def test_a_key_costs_its_own_tokens(engine: Engine) -> None:
    completer, document = completions(engine), TextDocument(TEXT)
    first = completer.complete(document, PLACE)
    assert (first.reused_tokens, first.why_not) == (0, None)
    assert len(first.drafts) >= 1
    prompt = first.encoded_tokens
    # Typing moves the cursor's place in the prompt with it.
    document.replace(Position(*PLACE), Position(*PLACE), " len")
    typed = completer.complete(document, (11, 20))
    assert typed.encoded_tokens <= 8
    assert typed.reused_tokens >= prompt - 4
    # The same place again: nothing but the last token.
    again = completer.complete(document, (11, 20))
    assert again.encoded_tokens <= 1
    assert [draft.text for draft in again.drafts] == [draft.text for draft in typed.drafts]
    # A word is not encoded before its end is typed: only the last token before it, for its logits.
    costs = []
    for column, key in enumerate("(line", 20):
        document.replace(Position(11, column), Position(11, column), key)
        costs.append(completer.complete(document, (11, column + 1)).encoded_tokens)
    assert 0 < costs[0] <= 3
    assert costs[1] <= 3
    assert max(costs[2:]) <= 1
    document.replace(Position(11, 20), Position(11, 25), "")
    # An edit elsewhere is not the file once more.
    document.replace(Position(9, 4), Position(9, 9), "count")
    assert completer.complete(document, (11, 20)).encoded_tokens <= 16
    completer.close()


def test_each_beginning_of_a_suggestion_has_its_probability(engine: Engine) -> None:
    """A token after the other, so that the likely part of a line can be shown alone."""
    completer = completions(engine)
    document = TextDocument("import os\n\n\ndef read(path):\n    with open(\n")
    drafts = completer.complete(document, (4, 14)).drafts
    completer.close()
    assert max(len(draft.steps) for draft in drafts) > 1
    for draft in drafts:
        ends, sums = zip(*draft.steps, strict=True)
        assert ends[-1] >= len(draft.text)
        assert all(before < after for before, after in pairwise(ends))
        assert all(after < before for before, after in pairwise((0.0, *sums)))
        assert sums[-1] == draft.logprob


def test_no_owner_finds_encoded_what_another_one_sent(engine: Engine) -> None:
    owned = OwnedPrompts(engine.tokenizer)
    first = owned.for_owner("one")
    ids = first.fit(TEXT, "", 512).ids
    assert first._blocks.encoded_characters == len(TEXT)
    assert owned.for_owner("one") is first
    other = owned.for_owner("two")
    assert other._blocks.encoded_characters == 0
    assert other.fit(TEXT, "", 512).ids == ids
    assert other._blocks.encoded_characters == len(TEXT)
    for number in range(MOST_OWNERS):
        owned.for_owner(str(number))
    assert owned.for_owner("one") is not first


def test_a_jump_costs_the_lines_between(engine: Engine) -> None:
    """However the model orders the two texts, what a jump does not pass over stays cached."""
    completer, text = completions(engine), PROGRAM.read_text("utf-8")
    document = TextDocument(text[: text.index("\n", 3000) + 1])
    first = completer.complete(document, (60, 0))
    passed = 0
    for line in (70, 40, 44):
        completion = completer.complete(document, (line, 0))
        lines = range(*sorted((line, passed or 60)))
        passed = line
        between = sum(len(engine.tokenizer.encode(document.line(number))) + 1 for number in lines)
        assert completion.encoded_tokens <= between + 16 < first.encoded_tokens / 2
    completer.close()


def test_drafts_cost_less_where_nobody_needs_their_exact_chances(engine: Engine) -> None:
    with engine.session(context_tokens=1024, draft_tokens=96) as session:
        session.prefill(engine.tokenizer.encode(TEXT[:150]))
        writer = writer_named("branches")
        every = session.drafts(3, 12, method=writer)
        some = session.drafts(3, 12, method=writer, exact=False)
        assert [draft.ids for draft in some] == [draft.ids for draft in every]
        for draft, other in zip(some, every, strict=True):
            assert draft.logprobs == pytest.approx(other.logprobs, abs=0.1)
            assert draft.logprobs != other.logprobs


def half_typed(count: int) -> list[tuple[str, str]]:
    """Lines that end one or two letters into a name, and its rest, from Python's own library."""
    pairs = list[tuple[str, str]]()
    for library in (textwrap, shlex, heapq, fnmatch, glob, sched):
        text = Path(str(library.__file__)).read_text("utf-8")
        lines = text.split("\n")
        for token in tokenize.generate_tokens(StringIO(text).readline):
            row, column = token.start[0] - 1, token.start[1] + 1 + len(pairs) % 2
            is_known = token.type != tokenize.NAME or keyword.iskeyword(token.string)
            if not is_known and len(token.string) > 3 and row >= LINES_BEFORE:
                before = "\n".join([*lines[row - LINES_BEFORE : row], lines[row][:column]])
                pairs.append((before, token.string[column - token.start[1] :]))
    return pairs[:: len(pairs) // count][:count]


def begun_right(completer: CompletionEngine, count: int) -> int:
    """Of `count` names that are half typed how many a suggestion goes on with."""
    right = 0
    for before, rest in half_typed(count):
        completion = completer.complete(
            TextDocument(before), (LINES_BEFORE, len(before.rpartition("\n")[2]))
        )
        right += any(draft.text.startswith(rest) for draft in completion.drafts)
    completer.close()
    return right


def one_suggestion(engine: Engine, **settings: bool) -> CompletionEngine:
    options = {"kv": "fp", "context_tokens": 1024}
    return CompletionEngine(
        engine, writer_named("branches"), drafts=1, tokens=4, session_options=options, **settings
    )


@pytest.mark.slow
def test_a_word_is_gone_on_with_where_its_typing_stopped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: 99 of 200 names, 7 where the prompt's last token stays; exact 17 of 40."""
    healed = begun_right(one_suggestion(engine), 200)
    exact = begun_right(one_suggestion(engine, exact=True), 40)
    monkeypatch.setattr(module, "heal", lambda tokenizer, ids: (list(ids), b""))
    plain = begun_right(one_suggestion(engine), 200)
    assert healed >= 80
    assert exact >= 12
    assert plain <= 20


@pytest.mark.real
def test_a_real_model_goes_on_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    if (bundle := os.environ.get("KVQ_REAL_MODEL")) is None:
        pytest.skip("KVQ_REAL_MODEL names no bundle")
    with Engine.open(bundle) as engine:
        healed = begun_right(one_suggestion(engine), 40)
        monkeypatch.setattr(module, "heal", lambda tokenizer, ids: (list(ids), b""))
        plain = begun_right(one_suggestion(engine), 40)
    assert healed >= 20
    assert healed > 2 * plain


def test_a_function_gets_a_body_that_ends_with_it(engine: Engine) -> None:
    completer = completions(engine)
    document = TextDocument("def total(values):\n    \n\n\nprint(total([1, 2]))\n")
    (draft,) = completer.complete(document, (1, 4)).drafts
    completer.close()
    lines = draft.text.split("\n")
    assert len(lines) > 1
    assert all(line.startswith("    ") or not line for line in lines[1:])
    body = ("def total(values):\n    " + draft.text).split("\n")
    compile("\n".join(body), "draft", "exec")


@pytest.mark.parametrize("drafts", [1, 3, 9])
def test_a_long_beginning_leaves_room_for_what_follows(engine: Engine, drafts: int) -> None:
    """Rows of signs and deep indentations are tokens of many bytes; each may need a row."""
    options = {"kv": "fp", "context_tokens": 1024}
    completer = CompletionEngine(
        engine, writer_named("branches"), drafts=drafts, session_options=options
    )
    for line in ("#" + "-" * 40, " " * 24, "x = " + "=" * 16, "a_rather_long_name_of_a_var"):
        completion = completer.complete(TextDocument(f"{TEXT}\n{line}"), (14, len(line)))
        assert completion.why_not in (None, "filtered"), line
    completer.close()


def test_a_backend_that_writes_no_several_writes_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for several it refuses before it reads anything."""
    monkeypatch.setattr(type(engine.backend), "takes_trees", False)
    completer, document = completions(engine), TextDocument(TEXT)
    document.replace(Position(*PLACE), Position(*PLACE), " len")
    assert [draft.text for draft in completer.complete(document, (11, 20)).drafts] == ["(line)"]
    completer.close()
    with pytest.raises(UsageError, match=r"3 suggestions .* on the onnx backend: ask for one"):
        CompletionEngine(engine, writer_named("branches"), drafts=3)


def test_exactly_what_a_fresh_session_says(engine: Engine) -> None:
    completer, document = completions(engine, exact=True), TextDocument(TEXT)
    completer.complete(document, PLACE)
    document.replace(Position(9, 4), Position(9, 9), "count")
    completion = completer.complete(document, PLACE)
    fresh = completions(engine, exact=True).complete(document, PLACE)
    assert [draft.text for draft in completion.drafts] == [draft.text for draft in fresh.drafts]
    for draft, other in zip(completion.drafts, fresh.drafts, strict=True):
        assert draft.logprob == pytest.approx(other.logprob, abs=1e-3)
    completer.close()


def test_typing_behind_a_frozen_file_is_exact(engine: Engine) -> None:
    """EFIM: what is cached never precedes a change, token for token a fresh prefill (LSP-23)."""
    completer, document = completions(engine, exact=True), TextDocument(TEXT)
    completer.complete(document, PLACE)
    column = PLACE[1]
    for key in " len(li":
        document.replace(Position(11, column), Position(11, column), key)
        column += 1
        completion = completer.complete(document, (11, column))
        assert completion.encoded_tokens <= 3
        session = completer._pool.served.slots.all[0].session
        assert session.stats().edits.stale_tokens == 0
        with engine.session(kv="fp", context_tokens=1024) as fresh:
            fresh.prefill(session.tokens)
            np.testing.assert_allclose(logits(fresh), logits(session), atol=2e-3)
    # Taking letters back goes on from there; an edit elsewhere begins anew.
    document.replace(Position(11, column - 1), Position(11, column), "")
    assert completer.complete(document, (11, column - 1)).encoded_tokens <= 2
    document.replace(Position(9, 4), Position(9, 9), "count")
    assert completer.complete(document, (11, column - 1)).encoded_tokens > 8
    completer.close()


def logits(session: Session) -> np.ndarray:
    with session.sequence.forward([], rows=[-1]) as outputs:
        return outputs.logits[0]


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_a_cancelled_request_leaves_the_next_one_right(
    passes: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LSP-11: in the prompt's passes and in the drafts', before the pass that comes next."""
    fresh = completions(engine).complete(TextDocument(TEXT), PLACE)
    completer, made, over = completions(engine, chunk_tokens=32), list[int](), threading.Event()

    def forward_until_cancelled(calls: Sequence[Any]) -> list[Any]:
        made.append(len(calls))
        if len(made) > passes:
            over.set()
            while not all(job.cancelled for job in completer._pool.running):
                time.sleep(0.001)
        return forward_all(calls)

    monkeypatch.setattr(pool, "forward_all", forward_until_cancelled)
    cut = completer.complete(TextDocument(TEXT), PLACE, cancel=over.is_set)
    monkeypatch.undo()
    assert cut.why_not == "cancelled"
    completion = completer.complete(TextDocument(TEXT), PLACE)
    assert len(made) == passes + 1
    assert [draft.text for draft in completion.drafts] == [draft.text for draft in fresh.drafts]
    # The same text under another name is the same text (LSP-22).
    assert completer.complete(TextDocument(TEXT), PLACE).encoded_tokens <= 1
    completer.close()


@pytest.mark.parametrize("case", ["alone", "with others", "each with the other"])
def test_each_of_two_files_stays_in_the_cache(engine: Engine, case: str) -> None:
    """Going to and fro costs nothing where there is a session for each, and a reading otherwise."""
    texts = [TEXT, TEXT.upper().replace("COUNT", "sum of")[::-1]]
    parts_of_both = {
        "alone": [(), ()],
        "with others": [OTHER_PARTS, OTHER_PARTS],
        "each with the other": [[("second.py", texts[1])], [("first.py", texts[0])]],
    }[case]
    requests = list(zip(map(TextDocument, texts), [PLACE, (2, 0)], parts_of_both, strict=True))
    for files in (1, 2):
        completer = completions(engine, files=files)
        for document, place, parts in requests:
            assert completer.complete(document, place, other_parts=parts).encoded_tokens > 40
        costs = [
            completer.complete(document, place, other_parts=parts).encoded_tokens
            for document, place, parts in requests
        ]
        assert min(costs) > 40 if files == 1 else max(costs) <= 1
        completer.close()


def test_parts_of_other_files_are_read_once_for_all_files(engine: Engine) -> None:
    """A second file finds what the first one read, in another order and behind another part."""
    padding = ("padding.py", "".join(f"value_{number} = {number}\n" for number in range(20)))
    completer = completions(engine, files=2)
    other_parts = [(name, text.replace("value", "number")) for name, text in OTHER_PARTS]
    first = completer.complete(TextDocument(TEXT), PLACE, other_parts=[padding, *other_parts])
    assert first.reused_tokens == 0
    alone = completions(engine).complete(TextDocument("import re\n"), (1, 0))
    assert alone.encoded_tokens < 20
    other = completer.complete(TextDocument("import re\n"), (1, 0), other_parts=other_parts[::-1])
    assert other.encoded_tokens <= alone.encoded_tokens + FIRST_TOKENS
    assert other.reused_tokens > 150
    completer.close()


def test_where_edits_keep_nothing_no_other_file_is_read(engine: Engine) -> None:
    completer = completions(engine, exact=True)
    alone = completer.complete(TextDocument(TEXT), PLACE)
    again = completer.complete(TextDocument(TEXT), PLACE, other_parts=OTHER_PARTS)
    assert again.encoded_tokens <= 1
    assert again.reused_tokens + again.encoded_tokens == alone.encoded_tokens
    completer.close()


def test_reading_ahead_leaves_nothing_to_encode(engine: Engine) -> None:
    completer, seen = completions(engine, chunk_tokens=32), list[tuple[int, int]]()
    assert completer.read(TextDocument(TEXT), PLACE, progress=lambda *counts: seen.append(counts))
    assert seen[-1][0] == seen[-1][1] > 32
    assert completer.complete(TextDocument(TEXT), PLACE).encoded_tokens <= 1
    assert not completer.read(TextDocument(f"import re\n{TEXT[::-1]}"), (3, 0), cancel=lambda: True)
    completer.close()


def test_the_command_prints_what_an_editor_shows(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a b.py"
    file.write_text(TEXT)
    assert main(["complete", f"{file}:12:17", "--json", "--kv", "fp"]) == 0
    report = json.loads(capsys.readouterr().out)
    completion = completions(engine).complete(TextDocument(TEXT), PLACE)
    assert [draft["text"] for draft in report["drafts"]] == [
        draft.text for draft in completion.drafts
    ]
    assert report["encoded_tokens"] == completion.encoded_tokens
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
        (("{file}:1", "--drafts", "1,2"), "'1,2' is not a whole number"),
    ],
)
def test_wrong_places_are_refused(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text(TEXT)
    assert main(["complete", *(word.format(file=file) for word in words)]) == 2
    assert says in capsys.readouterr().err
