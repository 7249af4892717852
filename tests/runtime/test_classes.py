"""Sessions of a model whose layers are of several classes, some of which read others' keys."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvq import Engine, Sampling, native_library
from kvq.errors import BackendError, SnapshotError, UnsupportedModelError, UsageError
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_runtime.bundle.bundle import Bundle
from kvq_runtime.session.session import Session
from kvq_specdraft import drafter_named
from shelf import EIGHT, Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())

GREEDY = Sampling(temperature=0)
IDS = np.random.default_rng(0).integers(1, 384, 700).tolist()
NEW = [*IDS[:300], 5, 6, 7, 8, *IDS[305:]]
CONTEXT = {"context_tokens": 1200}


@pytest.fixture(scope="module")
def source(shelf: Shelf) -> Path:
    return shelf.family("gemma4", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def bundle(shelf: Shelf, source: Path) -> Bundle:
    return Bundle.open(shelf.exported(source, EIGHT))


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> Iterator[Engine]:
    with Engine(bundle, threads=2) as opened:
        yield opened


def greedy(session: Session, count: int = 40) -> list[int]:
    return [step.token for step in session.generate(count, sampling=GREEDY, stop_ids=[])]


@pytest.mark.parametrize("drafter", ["lookup", "recycle", "quantspec"])
def test_guessed_tokens_change_nothing(engine: Engine, drafter: str) -> None:
    text = (IDS[:60] * 6)[:300]
    with engine.session(kv="8:8", **CONTEXT) as plain:
        plain.prefill(text)
        expected = greedy(plain)
    with engine.session(kv="8:8", draft=lambda: drafter_named(drafter), **CONTEXT) as drafted:
        drafted.prefill(text)
        assert greedy(drafted) == expected


def test_an_edited_text_becomes_the_one_read_anew(bundle: Bundle) -> None:
    """Uses float activations, as a rounded one may flip."""
    with (
        Engine(bundle, threads=2, backend="float") as engine,
        engine.session(kv="fp", edits=True, **CONTEXT) as moved,
        engine.session(kv="fp", **CONTEXT) as fresh,
    ):
        moved.prefill(IDS)
        assert moved.edit(300, 305, [5, 6, 7, 8]) > 600
        moved.prefill()
        while moved.refresh(64):
            pass
        assert moved.exact
        fresh.prefill(NEW)
        ours, theirs = (np.concatenate(list(session.logits([3, 4]))) for session in (moved, fresh))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.005)


@pytest.mark.parametrize("share", ["60%", "25%", "12%"])
def test_a_tight_budget_is_never_exceeded(engine: Engine, share: str) -> None:
    with engine.session(context_tokens=8000, kv_budget=share) as session:
        session.prefill((IDS * 11)[:7000])
        greedy(session, 100)
        stats = session.stats()
        assert 0 < stats.kv_bytes_peak <= session.config.budget_bytes
    assert (stats.held.evicted_share > 0) == (share != "60%")


def test_policies_hear_of_every_layer_that_reads(engine: Engine, tmp_path: Path) -> None:
    """Looks at pages without a window, which one reads; the budget holds all that windows see."""
    tight = {"context_tokens": 4000, "kv_budget": "40%", "policy": "h2o"}
    with engine.session(**tight) as session, engine.session(**tight) as other:
        session.prefill(IDS * 2)
        greedy(session, 20)
        windowed, whole = session.sequence.cache.parts
        assert (windowed.arena.kv_shared_layers, windowed.arena.probed_shared_layers) == (2, 0)
        assert whole.arena.probed_shared_layers == 1
        attention = whole.evidence().attention
        assert attention is not None
        # One query gives all pages together less than 1.
        assert attention.recent_mass.sum() > 1
        session.save(tmp_path / "session")
        expected = greedy(session)
        other.load(tmp_path / "session")
        assert greedy(other) == expected
        # A session that was saved without this evidence is refused.
        capture = session.capture()
        before = {key: capture.identity[key] for key in capture.identity if key != "evidence"}
        with pytest.raises(SnapshotError, match=r"another evidence: None, this session has .* 1 r"):
            other.restore(replace(capture, identity=before))
    with engine.session(context_tokens=4000) as whole:
        assert "evidence" not in whole.capture().identity


def test_a_rollback_beyond_a_window_is_computed_anew(engine: Engine) -> None:
    with (
        engine.session(kv="fp", **CONTEXT) as back,
        engine.session(kv="fp", **CONTEXT) as fresh,
    ):
        back.prefill(IDS)
        back.rollback(600)
        back.prefill(IDS[100:300])
        fresh.prefill(IDS[:300])
        assert back.tokens == fresh.tokens
        assert greedy(back, 20) == greedy(fresh, 20)


def test_what_layers_that_are_read_cannot_do_is_refused(
    engine: Engine, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match="cannot be predicted"):
        engine.session(predict="50%").prefill(IDS[:100])
    options = ExportOptions(quality=False, calibrate=False, predict="3")
    with pytest.raises(UsageError, match="predict is of models whose layers are alike"):
        export_model(source, tmp_path / "predicting", options)
    options = ExportOptions(quality=False, calibrate=False, format="gguf")
    with pytest.raises(UnsupportedModelError, match="does not compute layers that read the keys"):
        export_model(source, tmp_path / "file", options)
