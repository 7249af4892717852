"""A model that people use, SmolLM2-135M-Instruct, as `kvq pull smollm2-135m` makes it.

`KVQ_REAL_MODEL` names the bundle. Everything is greedy; what is asserted was seen with room to
spare.
"""

import json
import os
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvq import Engine, Sampling
from kvq_apps.cli import main
from kvq_runtime.answer.constraint import Constraint

pytestmark = pytest.mark.real

GREEDY = Sampling(temperature=0)
# Of the files here the one that nobody edits.
TEXT = str(Path(__file__).parents[2] / "LICENSE")
CODE = '''def parse_line(line):
    """Splits "name = value" and drops the spaces around both."""
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def parse_lines(text):
    """A dictionary of all lines of a text that hold an equals sign."""
    found = {}
    for line in text.splitlines():
'''


@pytest.fixture(scope="module")
def name() -> str:
    named = os.environ.get("KVQ_REAL_MODEL")
    if named is None:
        pytest.skip("KVQ_REAL_MODEL names no bundle; `kvq pull smollm2-135m` makes one")
    return named


@pytest.fixture(scope="module")
def engine(name: str) -> Iterator[Engine]:
    with Engine.open(name) as opened:
        yield opened


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_answers_sensibly_and_keeps_to_a_form(engine: Engine) -> None:
    said = engine.chat("Explain gravity in two sentences.", 40, sampling=GREEDY)
    assert "force" in said
    pattern = engine.chat(
        "How many legs does a cat have? Answer with a digit.",
        8,
        sampling=GREEDY,
        constraint=Constraint.regex("[0-9] legs"),
    )
    assert pattern.endswith(" legs")


def test_it_expects_the_text_of_a_licence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("eval", "-m", name, "--task", "ppl", "--context", "1024", "--max-tokens", "2048")
    report = report_of(capsys, *words, "--kv", "fp", TEXT)
    assert 7 < report["value"] < 28


def test_a_cache_of_few_bits_stays_near_an_unquantised_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("eval", "-m", name, "--task", "kld", "--context", "1024", TEXT)
    wide = report_of(capsys, *words, "--kv", "8:8", "--max-tokens", "1024")
    narrow = report_of(capsys, *words, "--kv", "4:2", "--max-tokens", "1024")
    assert wide["value"] < 0.01
    assert wide["value"] < narrow["value"] < 0.3
    assert wide["same_top_1"] > 0.95


@pytest.mark.parametrize("context", [4096, 8192])
def test_pass_keys_are_found_in_a_long_text(
    context: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is expected behind "The pass key is"; what is written there may be a definition."""
    words = ("eval", "-m", name, "--task", "passkey", "--context", str(context - 64))
    report = report_of(capsys, *words, "--trials", "1", "--depths", "0.2,0.8")
    assert report["answer_nats"] < 1  # a digit by chance: 2.3


def test_guessed_tokens_change_nothing(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO()))
    words = ("run", "-m", name, "-n", "48", "--temp", "0", "--kv", "fp", CODE)
    plain = report_of(capsys, *words, "--draft", "none")
    for drafter in ("auto", "lookup", "quantspec"):
        assert report_of(capsys, *words, "--draft", drafter)["text"] == plain["text"], drafter
    assert "line" in plain["text"]


def test_an_edited_text_goes_on_as_one_that_was_read_whole(engine: Engine) -> None:
    """Edits that are read again whole are exact; what moved is near."""
    ids = engine.tokenizer.encode(CODE * 6, start=True)
    start = 40
    new = engine.tokenizer.encode(" and comments", start=False)
    changed = [*ids[:start], *new, *ids[start:]]
    with engine.session(kv="8:8") as fresh:
        fresh.prefill(changed)
        expected = [step.token for step in fresh.generate(24, sampling=GREEDY)]
    with engine.session(kv="8:8") as moved:
        moved.prefill(ids)
        assert moved.edit(start, start, new) > 0
        moved.prefill()
        tokens = [step.token for step in moved.generate(24, sampling=GREEDY)]
    same = np.array(tokens) == np.array(expected)
    assert same[:8].mean() >= 0.5


def test_a_predicted_prompt_becomes_what_a_computed_one_is(engine: Engine) -> None:
    ids = engine.tokenizer.encode(CODE * 4, start=True)
    with engine.session(kv="fp") as computed:
        computed.prefill(ids)
        expected = [step.token for step in computed.generate(16, sampling=GREEDY)]
    with engine.session(kv="fp", predict="50%") as predicted:
        predicted.prefill(ids)
        assert predicted.stats().edits.predicted_tokens > len(ids) / 2
        assert not predicted.exact
        while predicted.refresh(max_tokens=256):
            pass
        assert predicted.exact
        assert predicted.stats().edits.predicted_tokens == 0
        assert [step.token for step in predicted.generate(16, sampling=GREEDY)] == expected


def test_several_drafts_differ_and_none_changes_the_text(engine: Engine) -> None:
    with engine.session(kv="4:4", draft_tokens=64) as session:
        session.prefill(CODE)
        before = session.tokens
        drafts = session.drafts(3, 12)
        assert session.tokens == before
        assert len({draft.text for draft in drafts}) == 3
        assert all(draft.logprob <= 0 for draft in drafts)
        plain = "".join(step.text for step in session.generate(12, sampling=GREEDY))
    assert plain.startswith(drafts[0].text)


def test_a_saved_session_goes_on_where_it_was(engine: Engine, tmp_path: Path) -> None:
    with engine.session() as first:
        first.prefill(CODE)
        first.save(tmp_path / "session")
        expected = [step.token for step in first.generate(24, sampling=GREEDY)]
    with engine.session() as second:
        second.load(tmp_path / "session")
        assert [step.token for step in second.generate(24, sampling=GREEDY)] == expected
