"""Edits through a model (PIE): exact where they must be, near where they may differ, refreshed."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import kvq_models
from kvq_apps.evaluation.editing import edit_cases, editing
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_runtime.engine import Engine
from kvq_runtime.session import Session, unseen
from logits import prompt
from shelf import Shelf

MODELS = Path(kvq_models.__path__[0])
FP, QUANTIZED = {"kv": "fp"}, {"kv": "8:8"}
TEXT = prompt(300)


@pytest.fixture(scope="module")
def engine(shelf: Shelf) -> Iterator[Engine]:
    with Engine.open(shelf.bundle(max_position_embeddings=4096), threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def one_layer(shelf: Shelf) -> Iterator[Engine]:
    bundle = shelf.bundle(num_hidden_layers=1, max_position_embeddings=4096)
    with Engine.open(bundle, backend="reference", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def exact(shelf: Shelf) -> Iterator[Engine]:
    """In float32: rounded activations would turn a difference of 1e-7 into one of 1e-2."""
    bundle = shelf.bundle(max_position_embeddings=4096)
    with Engine.open(bundle, backend="reference", threads=1) as opened:
        yield opened


def logits(session: Session) -> np.ndarray:
    """Those after the text, once nothing is pending."""
    while session.sequence.advance():
        pass
    with session.sequence.forward([], rows=[-1]) as held:
        return held.logits[0]


def fresh(engine: Engine, ids: list[int], **kv: str) -> np.ndarray:
    with engine.session(context_tokens=1000, **kv) as session:
        session.prefill(ids)
        return logits(session)


def edited(engine: Engine, start: int, stop: int, new: list[int], tail: int, **kv: str):
    """Logits after an edit, and tokens that went through the model for them."""
    with engine.session(context_tokens=1000, **kv) as session:
        session.prefill(TEXT)
        kept = session.edit(start, stop, new, reencode_tail=tail)
        ran = session.pending_tokens
        assert kept + ran == len(session.tokens)
        return logits(session), ran


def test_only_new_tokens_and_the_tail_go_through_the_model(engine: Engine) -> None:
    """PIE-10; and the edit of nothing changes nothing (PIE-1)."""
    new = prompt(7, 1)
    for tail in (1, 16):
        assert edited(engine, 90, 95, new, tail, **QUANTIZED)[1] == len(new) + tail
    with engine.session(**QUANTIZED) as session:
        session.prefill(TEXT)
        before = session.sequence.state()
        assert session.edit(50, 50, []) == len(TEXT)
        assert session.sequence.state().cache == before.cache
        assert (session.sequence.state().logits == before.logits).all()


@pytest.mark.parametrize("kv", [FP, QUANTIZED], ids=str)
def test_an_edit_of_one_layer_is_exact(one_layer: Engine, kv: dict[str, str]) -> None:
    """PIE-5: keys and values of the first layer know nothing but their token and position."""
    new = prompt(5, 1)
    for start, stop in ((90, 95), (120, 120), (200, 230)):
        found, _ = edited(one_layer, start, stop, new, 1, **kv)
        wanted = fresh(one_layer, [*TEXT[:start], *new, *TEXT[stop:]], **kv)
        assert np.abs(found - wanted).max() < (1e-3 if kv == FP else 2e-2) * np.abs(wanted).max()


def test_where_all_that_follows_is_encoded_again_an_edit_is_a_prompt(engine: Engine) -> None:
    """PIE-6 and PIE-9, bit for bit; an edit at the start takes the full path."""
    new = prompt(5, 1)
    for start, stop, tail in ((295, 300, 1), (300, 300, 1), (0, 3, 1), (90, 95, 205)):
        text = [*TEXT[:start], *new, *TEXT[stop:]]
        found, _ = edited(engine, start, stop, new, tail, **FP)
        with engine.session(context_tokens=1000, **FP) as session:
            session.prefill(TEXT)
            session.align(text)
            assert (logits(session) == found).all()
        np.testing.assert_allclose(found, fresh(engine, text, **FP), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kv", [FP, QUANTIZED], ids=str)
def test_a_refresh_makes_an_edited_text_exact(exact: Engine, kv: dict[str, str]) -> None:
    """In pieces that may be interrupted, with answers and a saved session in between."""
    with exact.session(context_tokens=1000, **kv) as session:
        session.prefill(TEXT)
        for start in (250, 90, 60):
            session.edit(start, start + 3, prompt(5, start))
        session.prefill()
        stats = session.stats()
        assert (stats.edits, stats.edited_tokens, stats.recomputed_edits) == (3, 15, 0)
        assert stats.stale_tokens == len(session.tokens) - 65 - 2 * 5 - 1
        left = [stats.stale_tokens, session.refresh(50)]
        session.edit(100, 101, [])
        session.refresh(10, cancel=lambda: True)
        other = exact.session(context_tokens=1000, **kv)
        other.restore(session.capture())
        while left[-1]:
            left.append(other.refresh(40))
        assert all(after < before for before, after in pairwise(left[2:]))
        found, text = logits(other), list(other.tokens)
        wanted = fresh(exact, text, **kv)
        assert np.abs(found - wanted).max() < (1e-4 if kv == FP else 0.05) * np.abs(wanted).max()
        assert not any(other.sequence.staleness.per_page(64))
        other.close()


def test_answers_rollback_and_save_go_on_from_an_edited_text(
    engine: Engine, tmp_path: Path
) -> None:
    """A fork, a saved and a rolled back session write what the edited one writes."""
    with engine.session(context_tokens=1000, **QUANTIZED) as session:
        session.prefill(TEXT)
        session.edit(90, 95, prompt(9, 2))
        session.save(tmp_path / "one.kvq")  # with a gap
        written = [step.token for step in session.generate(12)]
        session.rollback(len(written) + 200)
        assert len(session.tokens) == 104
        assert session.stats().stale_tokens == 5
        other = engine.session(context_tokens=1000, **QUANTIZED)
        other.load(tmp_path / "one.kvq")
        assert other.pending_tokens == 10
        fork = other.sequence.fork()
        while fork.advance():
            pass
        assert [step.token for step in other.generate(12)] == written
        assert fork.tokens == other.tokens[: len(fork.tokens)]
        fork.close()
        other.close()


@pytest.mark.parametrize("budget", [None, "45%"], ids=["whole", "tight"])
def test_many_edits_waste_no_room(engine: Engine, budget: str | None) -> None:
    """Pages that edits have emptied most are encoded again before anything has to be given up."""
    kv = QUANTIZED | ({} if budget is None else {"kv_budget": budget})
    chance = np.random.default_rng(0)
    with engine.session(context_tokens=512, **kv) as session:
        session.prefill(TEXT)
        for _ in range(250):
            start = int(chance.integers(8, len(TEXT) - 20))
            size = int(chance.integers(1, 9))
            session.edit(start, start + size, prompt(size, start))
            session.prefill()
        stats = session.stats()
        assert stats.edits == 250
        assert stats.recomputed_edits < 40
        assert stats.kv_bytes <= stats.kv_budget
        if budget is None:
            assert stats.evicted_share == 0
        assert len(list(session.generate(150, stop_ids=()))) == 150


@pytest.mark.slow
def test_an_edit_is_nearer_than_the_text_left_as_it_was(tmp_path: Path) -> None:
    """On the embedded model; `kvq eval --task edit` measures it at length."""
    texts = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("kvq/*.py"))]
    bundle = export_model(MODELS / "default", tmp_path / "bundle", ExportOptions(quality=False))
    with Engine.open(bundle.path, threads=1) as engine:
        cases = edit_cases(engine.tokenizer, texts, limit=20, context_tokens=1500, seed=1)
        found = editing(
            lambda: engine.session(context_tokens=1500, kv="8:8"),
            lambda: engine.session(context_tokens=1500, kv="fp"),
            cases,
            unseen,
        )
    assert found.value < 0.3 * float(found.details["kld_ignored"])  # type: ignore[arg-type]
