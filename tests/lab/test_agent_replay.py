"""`kvq bench --suite agent`: the turns, what is counted of them, and what it refuses."""

import json
from typing import Any

import pytest

from kvq import native_library
from kvq_apps.cli import main
from kvq_lab import agent_replay
from kvq_lab.agent_turns import AgentTurn, agent_turns
from shelf import Shelf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native_library.available(), reason=native_library.why_not()),
]


def text_of(turn: AgentTurn) -> str:
    return json.dumps([turn.tools, turn.messages])


def test_the_forms_change_their_prompts_as_they_say() -> None:
    turns = agent_turns(200, 20)
    assert len(turns) == 200
    assert turns == agent_turns(200, 20)
    assert [turn.form for turn in turns[:4]] == ["dated", "tooled"] * 2
    talks = {form: [turn for turn in turns if turn.form == form] for form in
             ("dated", "tooled", "thinking", "cutting")}  # fmt: skip
    assert {len(talk) for talk in talks.values()} == {50}
    first, second = talks["dated"][:2]
    assert first.messages[0] != second.messages[0]
    assert second.messages[1 : len(first.messages)] == first.messages[1:]
    assert [len(turn.tools) for turn in talks["tooled"][::6][:4]] == [2, 3, 4, 5]
    # A thought is gone as soon as its task is over.
    assert "reasoning_content" in text_of(talks["thinking"][4])
    assert "reasoning_content" not in text_of(talks["thinking"][5])
    assert text_of(talks["cutting"][12]).count("removed to save room") == 6
    assert len(talks["cutting"][30].messages) < len(talks["dated"][30].messages) / 2


def test_both_ways_are_counted(shelf: Shelf, capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(agent_replay, "RESULT_LINES", 8)
    bundle = str(shelf.bundle(max_position_embeddings=8192))
    words = ("bench", bundle, "--suite", "agent", "--repeat", "12", "--context", "8192")
    assert main([*words, "--threads", "1", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (report["turns"], report["left_out"]) == (12, 0)
    rows = {(row["way"], row["form"]): row for row in report["rows"]}
    exact, moved = rows["exact", "dated"], rows["moved", "dated"]
    # The date stands near the front: nearly all of the prompt is read again, or nearly nothing.
    assert exact["turns"] == moved["turns"] == 2
    assert exact["read_again"] > 0.8
    assert moved["read_again"] < 0.1
    assert moved["read_tokens"] < exact["read_tokens"]
    assert rows["exact", "all"]["same"] == 1
    assert rows["moved", "all"]["turns"] == 8
    assert exact["first_p95_s"] >= exact["first_p50_s"] > 0


@pytest.mark.parametrize(
    ("peer", "complaint"),
    [("llama.cpp", "the suite agent has llama-server=PROGRAM"),
     ("llama-server=llama-server", "reads GGUF files; measure one of these")],
)  # fmt: skip
def test_what_it_refuses(
    peer: str, complaint: str, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(shelf.bundle()), "--suite", "agent", "--peer", peer]) == 2
    assert complaint in capsys.readouterr().err
