"""Edits through a model (PIE): exact where they must be, near where they may differ, refreshed.

PIE-1, 5, 6 and 9 to 11 are here; PIE-1 to 4, 7, 8 and 10 beside the cache, in `kvq/test_edits.py`.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvq_lab.edit_quality import EditCase, edit_cases, editing
from kvq_runtime.backends import paged
from kvq_runtime.engine import Engine
from kvq_runtime.sequence.staleness import MOST_SEGMENTS, NEXT_TOKENS, Staleness
from kvq_runtime.session.session import Session, no_progress
from logits import divergence, prompt
from numpy_cache import cache as numpy_cache
from sequences import advance
from shelf import Shelf

FP, QUANTIZED = {"kv": "fp"}, {"kv": "8:8"}
TEXT = prompt(300)
# Texts that a trained model reads: programs of forty lines and more.
CONTEXT = 850
Again = tuple[int | None, int]


@pytest.fixture(scope="module")
def engine(shelf: Shelf) -> Iterator[Engine]:
    with Engine.open(shelf.bundle(max_position_embeddings=4096), threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def one_layer(shelf: Shelf) -> Iterator[Engine]:
    bundle = shelf.bundle(num_hidden_layers=1, max_position_embeddings=4096)
    with Engine.open(bundle, backend="float", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def exact(shelf: Shelf) -> Iterator[Engine]:
    """Opens a float32 engine: rounded activations would turn 1e-7 into 1e-2."""
    bundle = shelf.bundle(max_position_embeddings=4096)
    with Engine.open(bundle, backend="float", threads=1) as opened:
        yield opened


def logits(session: Session) -> np.ndarray:
    """Returns the logits after the text, once nothing is pending."""
    while advance(session.sequence):
        pass
    with session.sequence.forward([], rows=[-1]) as branch:
        return branch.logits[0]


def fresh(engine: Engine, ids: list[int], **kv: str) -> np.ndarray:
    with engine.session(context_tokens=1000, **kv) as session:
        session.prefill(ids)
        return logits(session)


def edited(engine: Engine, start: int, stop: int, new: list[int], again: Again, **kv: str):
    """Returns logits after an edit, and the tokens that went through the model for them."""
    with engine.session(context_tokens=1000, **kv) as session:
        session.prefill(TEXT)
        kept = session.edit(start, stop, new, reencode_next=again[0], reencode_tail=again[1])
        ran = session.pending_tokens
        assert kept + ran == len(session.tokens)
        return logits(session), ran


def test_only_new_tokens_the_next_and_the_tail_go_through_the_model(engine: Engine) -> None:
    """Checks PIE-10; and that the edit of nothing changes nothing (PIE-1)."""
    new = prompt(7, 1)
    for again, count in (((0, 1), 1), ((0, 16), 16), ((16, 1), 17), ((None, 4), len(new) + 4)):
        assert edited(engine, 90, 95, new, again, **QUANTIZED)[1] == len(new) + count
    with engine.session(**QUANTIZED) as session:
        session.prefill(TEXT)
        before = session.sequence.state()
        assert session.edit(50, 50, []) == len(TEXT)
        assert session.sequence.state().cache == before.cache
        assert (session.sequence.state().logits == before.logits).all()


@pytest.mark.parametrize("kv", [FP, QUANTIZED], ids=str)
def test_an_edit_of_one_layer_is_exact(one_layer: Engine, kv: dict[str, str]) -> None:
    """Checks PIE-5: first-layer keys and values know nothing but their token and position."""
    new = prompt(5, 1)
    for start, stop in ((90, 95), (120, 120), (200, 230)):
        actual, _ = edited(one_layer, start, stop, new, (0, 1), **kv)
        expected = fresh(one_layer, [*TEXT[:start], *new, *TEXT[stop:]], **kv)
        assert (
            np.abs(actual - expected).max() < (1e-3 if kv == FP else 2e-2) * np.abs(expected).max()
        )


def test_where_all_that_follows_is_encoded_again_an_edit_is_a_prompt(engine: Engine) -> None:
    """Checks PIE-6 and PIE-9, bit for bit; an edit at the start takes the full path."""
    new = prompt(5, 1)
    places = (295, 300, (0, 1)), (300, 300, (0, 1)), (0, 3, (0, 1)), (90, 95, (0, 205))
    for start, stop, again in (*places, (90, 95, (205, 0))):
        text = [*TEXT[:start], *new, *TEXT[stop:]]
        actual, _ = edited(engine, start, stop, new, again, **FP)
        with engine.session(context_tokens=1000, **FP) as session:
            session.prefill(TEXT)
            session.align(text)
            assert (logits(session) == actual).all()
        np.testing.assert_allclose(actual, fresh(engine, text, **FP), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kv", [FP, QUANTIZED], ids=str)
def test_a_refresh_makes_an_edited_text_exact(exact: Engine, kv: dict[str, str]) -> None:
    """Refreshes in interrupted pieces, with answers and a saved session in between."""
    with exact.session(context_tokens=1000, **kv) as session:
        session.prefill(TEXT)
        for start in (250, 90, 60):
            session.edit(start, start + 3, prompt(5, start))
        session.prefill(prompt(20, 4))  # computed from stale tokens, so it is stale too
        stats = session.stats()
        assert (stats.edits.edits, stats.edits.edited_tokens, stats.edits.recomputed_edits) == (
            3,
            15,
            0,
        )
        assert stats.edits.stale_tokens == len(session.tokens) - 65 - 5
        left = [stats.edits.stale_tokens, session.refresh(50)]
        session.edit(100, 101, [])
        session.refresh(10, cancel=lambda: True)
        other = exact.session(context_tokens=1000, **kv)
        other.restore(session.capture())
        while left[-1]:
            left.append(other.refresh(40))
        assert all(after <= before for before, after in pairwise(left[2:]))
        actual, text = logits(other), list(other.tokens)
        expected = fresh(exact, text, **kv)
        assert (
            np.abs(actual - expected).max() < (1e-4 if kv == FP else 0.05) * np.abs(expected).max()
        )
        assert not (other.sequence.encoding.staleness.ages > 0).any()
        other.close()


def test_exact_means_the_same_text_and_not_the_same_bits(engine: Engine, exact: Engine) -> None:
    """Checks that only pages that begin elsewhere, and rounding, make a difference."""
    off: dict[str, float] = {}
    for name, opened, kv in ("pages", engine, QUANTIZED), ("float32", exact, FP):
        with opened.session(context_tokens=1000, **kv) as session:
            session.prefill(TEXT)
            session.edit(90, 91, prompt(2, 9))
            session.prefill()
            assert not session.exact
            session.refresh()
            assert session.exact
            assert list(session.tokens) == [*TEXT[:90], *prompt(2, 9), *TEXT[91:]]
            expected = fresh(opened, list(session.tokens), **kv)
            off[name] = float(np.abs(logits(session) - expected).max() / np.abs(expected).max())
    assert off["float32"] < 1e-4
    assert 1e-4 < off["pages"] < 0.1


def test_answers_rollback_and_save_go_on_from_an_edited_text(
    engine: Engine, tmp_path: Path
) -> None:
    """Checks that a fork, a saved and a rolled back session write what the edited one writes."""
    with engine.session(context_tokens=1000, **QUANTIZED) as session:
        session.prefill(TEXT)
        session.edit(90, 95, prompt(9, 2))
        session.save(tmp_path / "one.kvq")  # with a gap
        written = [step.token for step in session.generate(12)]
        session.rollback(len(written) + 180)
        assert len(session.tokens) == 124
        assert session.stats().edits.stale_tokens == 124 - 99 - 9
        other = engine.session(context_tokens=1000, **QUANTIZED)
        other.load(tmp_path / "one.kvq")
        assert other.pending_tokens == 9 + 9 + 1
        fork = other.sequence.fork()
        while advance(fork):
            pass
        assert [step.token for step in other.generate(12)] == written
        assert fork.tokens == other.tokens[: len(fork.tokens)]
        fork.close()
        other.close()


@pytest.mark.parametrize("budget", [None, "45%"], ids=["whole", "tight"])
def test_many_edits_waste_no_room(engine: Engine, budget: str | None) -> None:
    """Checks that the emptiest pages are encoded again before anything has to be given up."""
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
        assert stats.edits.edits == 250
        assert stats.edits.recomputed_edits < 40
        assert stats.kv_bytes <= stats.kv_budget
        if budget is None:
            assert stats.held.evicted_share == 0
        assert len(list(session.generate(150, stop_ids=()))) == 150


class World:
    """Holds what each token saw when it was encoded, None in gaps: the truth."""

    def __init__(self, count: int) -> None:
        self.made = 0
        self.staleness = Staleness()
        self.encoded: list[tuple[object, ...] | None] = []
        self.ids: list[int] = []
        self.insert(0, 0, count)
        self.encode()

    def insert(self, start: int, stop: int, count: int) -> None:
        new = range(self.made, self.made + count)
        self.made += count
        if stop < len(self.ids):
            self.staleness.mark_edited(start, stop, count, len(self.ids))
        else:
            self.staleness.cut(start)
        self.ids[start:stop], self.encoded[start:stop] = new, [None] * count

    def open(self, start: int, stop: int) -> None:
        self.staleness.mark_pending(start, stop, len(self.ids))
        self.encoded[start:stop] = [None] * (stop - start)

    def encode(self) -> None:
        while None in self.encoded:
            first = self.encoded.index(None)
            self.encoded[first] = self.ids[first], hash(tuple(self.encoded[:first]))
            self.staleness.mark_encoded(first, first + 1)

    def fresh(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        for token in self.ids:
            rows.append((token, hash(tuple(rows))))
        return rows


def test_what_is_not_stale_saw_the_text_as_it_is() -> None:
    """Checks 300 histories of edits, new text and refreshes at any time; refreshing ends."""
    chance = np.random.default_rng(5)
    for _ in range(300):
        world = World(int(chance.integers(1, 60)))
        for _ in range(int(chance.integers(1, 40))):
            size, count = len(world.ids), int(chance.integers(0, 6))
            if chance.random() < 0.5:
                start = int(chance.integers(0, size + 1))
                world.insert(start, min(size, start + int(chance.integers(0, 6))), count)
            elif world.staleness.stale:
                start, stop = world.staleness.next_to_refresh()
                world.open(start, min(stop, start + 1 + count))
            world.encode()
            ages = np.zeros(len(world.ids), np.int32)
            ages[: len(world.staleness.ages)] = world.staleness.ages
            pairs = zip(ages, world.encoded, world.fresh(), strict=True)
            assert all(actual == expected for age, actual, expected in pairs if age == 0)
        for _ in range(3 * len(world.ids)):
            if not world.staleness.stale:
                break
            world.open(*world.staleness.next_to_refresh())
            world.encode()
        assert world.encoded == world.fresh()


def test_idle_time_goes_behind_the_edits_first() -> None:
    """Checks that the last edit comes first; of many runs that moved apart, the smallest one."""
    world = World(400)
    for start in (300, 200, 100):
        world.insert(start, start + 2, 5)
        world.encode()
    behind = [(start, start + NEXT_TOKENS) for start in (311, 208, 105)]
    runs = []
    for _ in range(4):
        runs.append(world.staleness.next_to_refresh())
        world.open(*runs[-1])
        world.encode()
    assert runs[:3] == behind
    assert runs[3][0] == 105 + NEXT_TOKENS
    world = World(400)
    for number in range(MOST_SEGMENTS + 1):
        world.insert(10 + 20 * number - (number == 7), 12 + 20 * number, 2)
        world.encode()
    assert world.staleness.next_to_refresh() == (132, 149)


def conflicting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves keys where they were rotated to, although they are seen from where they stand."""
    monkeypatch.setattr(numpy_cache, "_turned_back", lambda delta, inv_freq: lambda rows: rows)


@pytest.fixture(scope="module")
def written(shelf: Shelf) -> tuple[Path, list[str]]:
    """Makes a trained model, and programs that it never saw."""
    texts = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("kvq/*.py"))]
    return shelf.embedded("nano"), texts


def after_edits(session: Session, case: EditCase) -> np.ndarray:
    """Returns logits of what follows in a session that holds the text before."""
    for change in case.changes:
        session.edit(change.start, change.stop, change.new_ids, reencode_next=0)
    return np.concatenate(list(session.logits(case.following)))


@pytest.mark.slow
def test_moving_is_nearer_than_splicing(
    written: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks PIE-11, over 21 edits of a trained model."""
    bundle, texts = written
    monkeypatch.setattr(paged, "storage_on", lambda device: numpy_cache.NumpyCache)
    moved, spliced = list[float](), list[float]()
    with Engine.open(bundle, backend="float", threads=1) as engine:
        cases = edit_cases(engine.tokenizer, texts, limit=21, context_tokens=CONTEXT, seed=1)[:21]
        for case in cases:
            with engine.session(context_tokens=CONTEXT, kv="fp") as session:
                session.prefill(case.after)
                expected = np.concatenate(list(session.logits(case.following)))
            with engine.session(context_tokens=CONTEXT, kv="fp") as session:
                session.prefill(case.before)
                before = session.sequence.state()
                moved.append(divergence(expected, after_edits(session, case)))
                session.sequence.restore(before)
                with monkeypatch.context() as patch:
                    conflicting(patch)
                    spliced.append(divergence(expected, after_edits(session, case)))
    assert np.mean(moved) < 0.1 * np.mean(spliced)


@pytest.mark.slow
def test_what_ways_to_edit_cost(
    written: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs `kvq eval --task edit` in short: each way is where it must be among the others."""
    monkeypatch.setattr("kvq_lab.edit_quality.LINE_TOKENS", 8)
    bundle, texts = written
    with Engine.open(bundle, backend="float", threads=1) as engine:
        cases = edit_cases(engine.tokenizer, texts, limit=10, context_tokens=CONTEXT, seed=1)
        result = editing(
            lambda: engine.session(context_tokens=CONTEXT, kv="fp"),
            lambda: engine.session(context_tokens=CONTEXT, kv="fp"),
            cases,
            no_progress,
        )
    table = {(row["way"], row["edits"]): row for row in result.details["rows"]}
    nats = {key: row["kld"] for key, row in table.items()}
    assert nats["edit", 1] == result.value
    assert result.value < 0.3 * nats["ignored", 1]
    for edits in (1, 10):
        assert nats["full", edits] == 0
        assert table["full", edits]["same_top_1"] == table["full", edits]["same_line"] == 1
        assert nats["refreshed", edits] < 1e-5
        assert nats["edit", edits] < nats["moved", edits]
        assert nats["edit, to full", edits] == nats["edit", edits]
        assert table["moved", edits]["encoded"] < table["edit", edits]["encoded"]
        assert table["edit", edits]["encoded"] < table["full", edits]["encoded"]
