"""Sessions of models whose layers have sliding windows: budgets, rollbacks, edits, saving."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvq import native_library
from kvq_runtime.config import Sampling
from kvq_runtime.engine import Engine
from kvq_runtime.session.session import Session
from logits import prompt
from shelf import EIGHT, Shelf

pytestmark = pytest.mark.skipif(not native_library.available(), reason=native_library.why_not())
CONTEXT = 2400
TEXT = prompt(2000)
GREEDY = Sampling(temperature=0)


@pytest.fixture(params=["gemma3", "mistral-window"], scope="module")
def engine(request: pytest.FixtureRequest, shelf: Shelf) -> Iterator[Engine]:
    """Opens models with a window in three layers of four, and in all of them."""
    source = shelf.family(request.param, max_position_embeddings=CONTEXT)
    with Engine.open(shelf.exported(source, EIGHT), threads=1) as opened:
        yield opened


def opened(engine: Engine, **options: Any) -> Session[Any]:
    defaults = {"context_tokens": CONTEXT, "kv_budget": f"{CONTEXT}tok", "chunk_tokens": 64}
    return engine.session(**defaults | options)


def goes_on(session: Session[Any], tokens: int = 24) -> list[int]:
    return [step.token for step in session.generate(tokens, sampling=GREEDY, stop_ids=[])]


def test_what_windows_leave_behind_changes_no_token(engine: Engine) -> None:
    with opened(engine) as session, opened(engine, edits=True) as full:
        assert session.stats().kv_budget < full.stats().kv_budget
        for each in (session, full):
            each.prefill(TEXT)
        assert goes_on(session) == goes_on(full)
        assert session.stats().held.evicted_share == full.stats().held.evicted_share == 0.0


@pytest.mark.parametrize("back", [100, 1500])
def test_a_rollback_is_exact_or_computes_again(engine: Engine, back: int) -> None:
    """Compares with a cache that keeps everything, and a session that never read further."""
    with opened(engine) as session, opened(engine, edits=True) as full, opened(engine) as fresh:
        for each in (session, full):
            each.prefill(TEXT)
            each.rollback(back)
        assert len(session.tokens) == 2000 - back
        assert session.sequence.cache.tokens == (1900 if back == 100 else 0)
        fresh.prefill(TEXT[:-back])
        assert goes_on(session) == goes_on(full if back == 100 else fresh)


def test_an_edit_out_of_sight_is_computed_again(engine: Engine) -> None:
    new = TEXT[:500] + prompt(7)[::-1] + TEXT[510:]
    with opened(engine) as session, opened(engine) as fresh, opened(engine, edits=True) as full:
        for each in (session, full):
            each.prefill(TEXT)
            each.align(new, edits=True)
        assert session.sequence.encoding.edit_counts.recomputed_edits == 1
        assert full.sequence.encoding.edit_counts.recomputed_edits == 0
        assert len(full.sequence.due()) < 100 < len(session.sequence.due())
        fresh.prefill(new)
        assert goes_on(session) == goes_on(fresh)


def test_a_saved_session_knows_what_is_gone(engine: Engine, tmp_path: Path) -> None:
    with opened(engine) as session, opened(engine) as other:
        session.prefill(TEXT)
        session.save(tmp_path / "one")
        other.load(tmp_path / "one")
        assert goes_on(session) == goes_on(other)
        other.rollback(1500)
        assert other.sequence.cache.tokens == 0
