"""`kvq bench --suite edit`: its recordings, what each way encodes, its tables; never how fast."""

import importlib.util
import json
from pathlib import Path
from typing import cast

import pytest

from kvq.errors import DataError
from kvq_apps.cli import main
from kvq_lab import editing
from kvq_lab.edit_quality import edit_cases
from kvq_lab.editing import chunks_kept, counts
from kvq_lab.typing_sessions import LONG, SHORT, TEXTS, TypingSession
from kvq_models.control import ControlTokens
from kvq_models.tokenizer import Tokenizer
from kvq_runtime.bundle.bundle import Bundle
from shelf import Shelf

pytestmark = pytest.mark.slow

RECORDER = Path(__file__).parents[2] / "apps/lab/record_typing.py"


@pytest.fixture(scope="module")
def tokenizer(shelf: Shelf) -> Tokenizer:
    of_nano = Bundle.open(shelf.embedded("nano")).tokenizer()
    assert of_nano is not None
    return of_nano


def test_the_recordings_are_what_their_script_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("record_typing", RECORDER)
    assert spec is not None
    assert spec.loader is not None
    recorder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    recorder.record(tmp_path)
    for name in (*SHORT, LONG):
        file = f"{name}.json"
        assert (tmp_path / file).read_bytes() == (TEXTS / file).read_bytes()
    kinds = {now.kind for name in SHORT for now in TypingSession.read(name).moments()}
    assert kinds == {"open", "key", "jump", "paste", "delete", "undo", "rename"}


class OneToken:
    """Any text is one token, as runs of line ends are to a large vocabulary."""

    control = ControlTokens()

    def encode(self, text: str) -> list[int]:
        return [1] if text else []


def test_a_file_of_blank_lines_has_nothing_to_edit() -> None:
    with pytest.raises(DataError, match="too short to edit"):
        edit_cases(cast(Tokenizer, OneToken()), ["\n" * 400], limit=3, context_tokens=4096, seed=1)


def test_a_session_ends_with_what_was_typed() -> None:
    (*_, last) = TypingSession.read("typing").moments()
    assert last.prefix.endswith(
        "        found = [tool for tool in self.tools.values() if tool.borrower == person]\n"
        "        return sorted(found, key=lambda tool: tool.due or datetime.date.max)\n"
    )
    assert last.suffix.startswith("\n    def renew(self")
    compile(last.prefix + last.suffix, "typing", "exec")


def test_a_long_file_costs_what_is_typed(tokenizer: Tokenizer) -> None:
    """292 events in 17 500 tokens: at most 1 500 tokens, where a prefix cache takes millions."""
    moments = list(TypingSession.read(LONG).moments())
    assert len(moments) == 293
    assert sum(now.kind == "key" for now in moments) == 284
    assert 17_000 < len(tokenizer.encode(moments[0].suffix)) < 18_000
    row = next(counts(LONG, tokenizer))
    assert row["way"] == "edits"
    assert row["tokens"] <= 1_500
    assert row["tokens_a_key_most"] <= 8


def test_every_way_leads_to_the_same_prompt(tokenizer: Tokenizer) -> None:
    moments = list(TypingSession.read("jumping").moments())
    for way in editing.ways(tokenizer):
        before: list[int] = []
        for now in moments[::6]:
            prompt, made = way.prompt(now), list(before)
            for start, stop, new in reversed(way.changes(before, prompt)):
                made[start:stop] = new
            assert made == prompt
            before = prompt


def test_chunks_are_kept_where_they_only_move_left() -> None:
    text = list(range(1000))
    # What is gone is dropped, and both long runs behind it stay.
    assert chunks_kept(text, [*text[:100], *text[150:]]) == [(100, 150, [])]
    # What is new stands before the run: the prompt never goes on with it.
    assert chunks_kept(text, [*text[:100], -1, *text[100:]]) == [
        (100, 1000, [-1, *text[100:]])
    ]  # fmt: skip
    # A run shorter than the least is not looked at twice.
    assert chunks_kept(text, [*text[:100], *text[800:]]) == [(100, 1000, text[800:])]


def test_the_suite_has_a_row_of_every_way_and_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(editing, "SHORT", ("renaming",))
    monkeypatch.setattr(editing, "LONG", "renaming")
    words = ["--suite", "edit", "nano", "--repeat", "4", "--kv", "fp", "--threads", "1"]
    assert main(["bench", *words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["session"] for row in data["counts"]} == {"renaming"}
    rows = {(row["way"], row["kv"]): row for row in data["passes"]}
    assert len(rows) == 6
    edits, anew = rows["edits", "fp"], rows["prefix", "fp"]
    assert edits["tokens_a_key"] < 4 < 100 < anew["tokens_a_key"]
    assert edits["compared"] == anew["compared"] == 1
    assert anew["kl_nats"] < 1e-6
    assert anew["same_top_1"] == 1
    editing.print_report(data)
    assert "same top 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--context", "64"), "knows no --context"),
        (("--peer", "transformers"), "knows no --peer"),
        (("--repeat", "0"), "give 1 or more"),
    ],
)
def test_what_it_cannot_measure_is_refused(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--suite", "edit", "nano", *words]) == 2
    assert says in capsys.readouterr().err
