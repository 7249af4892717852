"""Sessions of gpt-oss: sinks, windows with a cache of their own, experts with clamps.

Trees of it are tested in `test_other_mixers.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emulated import emulated_library
from kvq import native_library
from kvq.errors import BackendError, UsageError
from kvq_export.config import ExportOptions
from kvq_export.export import export_model
from kvq_runtime.engine import Engine
from kvq_runtime.session.session import Session
from kvq_specdraft import drafter_named
from logits import divergence, generated, prompt
from shelf import EIGHT, Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
CONTEXT, STEPS = 600, 24
TEXT = prompt(300)


@pytest.fixture(scope="module")
def source(shelf: Shelf) -> Path:
    return shelf.family("gpt-oss")


@pytest.fixture(scope="module")
def engine(source: Path, shelf: Shelf) -> Iterator[Engine]:
    with Engine.open(shelf.exported(source, EIGHT), threads=1) as opened:
        yield opened


def opened(engine: Engine, **options: Any) -> Session[Any]:
    defaults = {"context_tokens": CONTEXT, "kv": "fp", "draft": lambda: None, "chunk_tokens": 64}
    return engine.session(**defaults | options)


@pytest.mark.parametrize("drafter", ["lookup", "quantspec"])
@pytest.mark.parametrize("kv", ["fp", "8:8"])
def test_drafters_change_nothing(engine: Engine, drafter: str, kv: str) -> None:
    answers = []
    for draft in (None, drafter_named(drafter)):
        with opened(engine, kv=kv, draft=lambda drafter=draft: drafter) as session:
            session.prefill(TEXT)
            answers.append(generated(session, 40))
            session.rollback(30)
            session.prefill(TEXT[:20])
            answers[-1] += generated(session, STEPS)
    assert answers[0] == answers[1]


def test_what_is_saved_goes_on(engine: Engine, tmp_path: Path) -> None:
    with opened(engine, kv="4:4") as session, opened(engine, kv="4:4") as other:
        session.prefill(TEXT)
        session.save(tmp_path / "saved")
        expected = generated(session, STEPS)
        other.load(tmp_path / "saved")
        assert generated(other, STEPS) == expected


def test_an_edit_is_near_what_is_computed_anew(engine: Engine) -> None:
    new = [*TEXT[:80], 5, 6, 7, *TEXT[90:]]
    with opened(engine, edits=True) as session, opened(engine) as fresh:
        session.prefill(TEXT)
        session.align(new, edits=True)
        for other, text in ((session, []), (fresh, new)):
            other.prefill(text)
        assert session.tokens == fresh.tokens == tuple(new)
        actual, expected = session.sequence.encoding.logits, fresh.sequence.encoding.logits
        assert actual is not None
        assert expected is not None
        assert 0 < np.abs(actual - expected).mean() < 0.05 * expected.std()


def test_a_window_holds_no_more_than_it_sees(engine: Engine) -> None:
    """Holds 24 tokens, beside a chunk and a draft; the other layer keeps the text."""
    sizes = []
    for context in (2_000, 4_000):
        with opened(engine, kv="8:8", context_tokens=context, kv_budget=f"{context}tok") as session:
            session.prefill(prompt(1_500))
            assert len(generated(session, STEPS)) == STEPS
            window, whole = session.sequence.cache.parts
            assert (window.arena.spec.windows, whole.arena.spec.windows) == ((24,), (0,))
            assert len(window.columns()[0]) < 8 < 22 <= len(whole.columns()[0])
            sizes.append([part.arena.num_bytes for part in (window, whole)])
    grown = np.divide(sizes[1], sizes[0])
    assert grown[0] < 1.05 < 1.7 < grown[1]


@pytest.mark.parametrize("name", ["float"])
def test_other_backends_answer_alike(engine: Engine, name: str) -> None:
    ids = TEXT[:150]
    path = engine.backend.bundle.path
    with opened(engine) as session:
        actual = np.concatenate(list(session.logits(ids)))
    with Engine.open(path, threads=1, backend=name) as other, opened(other) as session:
        expected = np.concatenate(list(session.logits(ids)))
    nats = [divergence(expected[i : i + 1], actual[i : i + 1]) for i in range(len(ids))]
    assert np.median(nats) < 0.01
    assert divergence(np.roll(expected, 1, axis=0), actual) > 1


def test_what_it_cannot_do_is_refused_by_name(
    engine: Engine, source: Path, tmp_path: Path, shelf: Shelf
) -> None:
    emulated_library(shelf)
    with pytest.raises(BackendError, match="a gpt_oss model differ in their heads or windows"):
        Engine.open(engine.backend.bundle.path, threads=1, device="emulated")
    with pytest.raises(UsageError, match="predict is of models whose layers are alike"):
        export_model(source, tmp_path / "predicting", ExportOptions(predict="1"))
