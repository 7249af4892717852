"""`kvq bench --suite drafts`: its texts, its replay, what it counts and refuses; never how fast."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulated import emulated_library
from kvq import native_library
from kvq.class_cache import ClassCache
from kvq.errors import UsageError
from kvq_apps.bench.suite import Setup
from kvq_apps.cli import main
from kvq_lab import drafting
from kvq_lab.drafting import DraftJob, Replay
from kvq_lab.workloads import Workload, workloads
from kvq_runtime.config import Sampling, SessionRequest
from kvq_runtime.engine import open_files
from kvq_runtime.session.session import Session
from rule_backend import RuleBackend
from shelf import Shelf

pytestmark = pytest.mark.slow


def test_each_workload_is_a_prompt_and_an_answer_and_some_repeat() -> None:
    works = {work.name: work for work in workloads()}
    assert len(works) == 6
    assert all(len(work.prompt) > 400 and len(work.answer) > 400 for work in works.values())

    def repeated(work: Workload) -> float:
        """Share of the answer's words that follow the same three words in the prompt."""
        words, answer = work.prompt.split(), work.answer.split()
        known = set(zip(words, words[1:], words[2:], words[3:], strict=False))
        runs = list(zip(answer, answer[1:], answer[2:], answer[3:], strict=False))
        return sum(run in known for run in runs) / len(runs)

    assert repeated(works["code edit"]) > 0.5
    assert repeated(works["chat turns"]) > 0.4
    assert repeated(works["summary with quotes"]) > 0.4
    assert repeated(works["free prose"]) == 0
    assert "positions" in works["code edit"].answer
    assert json.loads(works["JSON rewriting"].answer)["qwen3-0.6b"]["checked"] is True


def test_a_replayed_text_is_what_a_greedy_session_writes() -> None:
    """Whatever the model itself would choose; a wrong draft chooses along the text as well."""
    backend = RuleBackend(lambda tokens: 0, vocab_size=50)
    replay = Replay(backend)
    replay.text = np.random.default_rng(0).integers(1, 50, 60).tolist()
    session: Session = Session(
        backend=replay,  # type: ignore[arg-type]
        config=backend.session_config(SessionRequest()),
    )
    session.prefill(replay.text[:20])
    steps = list(session.generate(45, sampling=Sampling(temperature=0)))
    assert [step.token for step in steps] == [*replay.text[20:], 0, 0, 0, 0, 0]
    assert len(backend.passes) > 40


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> None:
    """Two short workloads, and a tiny model for the shape and its tokenizer."""
    text = "The quick brown fox jumps over the lazy dog. " * 2
    short = (
        Workload(name="again", prompt=text, answer=text),
        Workload(name="other", prompt=text, answer="A page holds sixty-four tokens"),
    )
    monkeypatch.setattr(drafting, "workloads", lambda: short)
    monkeypatch.setattr(drafting, "resolve_model", lambda _: shelf.bundle())
    monkeypatch.setattr("kvq_apps.bench.model_shapes.shape_bundle", lambda *_, **__: shelf.bundle())


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("source", ["model", "shape"])
def test_every_drafter_has_a_row_of_every_workload(
    source: str, shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [str(shelf.bundle())] if source == "model" else ["--shape", "qwen3-0.6b"]
    words = ["--suite", "drafts", "--repeat", "1", "--threads", "1", "--json"]
    assert main(["bench", *model, *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["suite"], data["repeat"], data["replayed"]) == ("drafts", 1, source == "shape")
    cases = [(row["workload"], row["drafter"]) for row in data["rows"]]
    assert cases == [
        (work, drafter) for work in ("again", "other") for drafter in drafting.ANY_MODELS
    ]
    for row in data["rows"]:
        # With one repetition the median and the best are the same.
        assert row["ratio"] == pytest.approx(row["tok_s"] / row["plain_tok_s"])
        assert row["best_ratio"] == pytest.approx(row["ratio"])
        assert 0 <= row["draft_share"] < 1
        assert row["tokens_per_round"] >= 1
    rows = {(row["workload"], row["drafter"]): row for row in data["rows"]}
    if source == "shape":
        assert rows["again", "lookup"]["accepted_share"] > 0.9
        assert rows["again", "lookup"]["tokens_per_round"] > 4
        assert rows["other", "lookup"]["tokens_per_round"] < 1.5
    (passes,) = data["passes"]
    assert [int(count) for count in passes["ms"]] == list(range(1, 17))
    drafting.print_report({**data, "passes": [{**passes, "ms": {1: 2.0, 2: 3.0}, "hi_ms": 1.5}]})
    out = capsys.readouterr().out
    assert "again" in out
    assert "upper nibbles (f): 0.75" in out


@pytest.mark.usefixtures("few")
def test_prompts_are_filled_up_and_chosen_drafters_measured(
    shelf: Shelf, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(shelf.bundle(max_position_embeddings=2048))
    words = ["--suite", "drafts", "--repeat", "1", "--threads", "1", "--json", "--predict", "5"]
    chosen = ["--context", "200,600", "--drafters", "suffix"]
    assert main(["bench", model, *words, *chosen]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(row["prompt_tokens"], row["drafter"]) for row in data["rows"]] == [
        (context, "suffix") for context in (200, 200, 600, 600)
    ]
    assert {row["new_tokens"] for row in data["rows"]} == {5}
    assert [row["context"] for row in data["passes"]] == [200, 600]


def test_what_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--repeat 0 is not possible"):
        DraftJob(replay=True, repeat=0)
    for words in (["--kv-policy", "h2o"], ["--peer", "llama.cpp"], ["--kv-read", "25%"]):
        assert main(["bench", "--suite", "drafts", *words]) == 2
        assert "--suite drafts knows " in capsys.readouterr().err
    assert main(["bench", "--suite", "drafts", "--drafters", "lookup,guess"]) == 2
    assert "--draft 'guess' is unknown" in capsys.readouterr().err
    assert Path("a.png").exists() is False


@pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
def test_drafts_are_measured_on_a_device(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_library(shelf)
    model, used = open_files(shelf.bundle()), list[str]()
    opened = ClassCache.__init__

    def noted(cache: ClassCache, *positional: Any, storage: Any, **named: Any) -> None:
        used.append(storage.device)
        opened(cache, *positional, storage=storage, **named)

    monkeypatch.setattr(ClassCache, "__init__", noted)
    monkeypatch.setattr(drafting, "_PASSES", 1)
    monkeypatch.setattr(drafting, "_MOST_ROWS", 2)
    short = Workload(name="again", prompt="The quick brown", answer="fox jumps")
    monkeypatch.setattr(drafting, "workloads", lambda: (short,))
    monkeypatch.setattr(drafting, "resolve_model", lambda _: shelf.bundle())
    setup = Setup(
        files=model, session_options={}, threads=1, progress=lambda *_: None,
        device="emulated",
    )  # fmt: skip
    job = drafting.DraftJob(replay=True, repeat=1, tokens=3, drafters=("quantspec",))
    data = drafting.measure(setup, job)
    assert data["device"] == "emulated"
    assert set(used) == {"emulated"}
    assert [row["drafter"] for row in data["rows"]] == ["quantspec"]
    assert all(row["hi_ms"] > 0 for row in data["passes"])
