"""Passages: taken over where they stand now, stale until computed again, and nobody else's.

The first layer's keys and values know nothing but their token, so a model of one layer must say
the same after a passage that was taken over as after one that was computed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvq_runtime.engine import Engine
from kvq_runtime.sequence.passages import (
    FIRST_TOKENS,
    LEAST_BEFORE,
    LEAST_TOKENS,
    PassageCopy,
    PassageStore,
    PromptPassages,
    store_of,
)
from kvq_runtime.sequence.passes import run
from kvq_runtime.session.session import Session
from logits import prompt
from sequences import advance
from shelf import Shelf

HEAD, FIRST, SECOND, TEXT = prompt(5, 1), prompt(150, 2), prompt(90, 3), prompt(40, 4)
# Tokens of a passage right behind the head that are computed as the text's first ones.
NEXT_TO_HEAD = FIRST_TOKENS - len(HEAD)
KV = {"fp": 1e-3, "8:8": 2e-2, "4:4": 2e-1}


@pytest.fixture
def one_layer(shelf: Shelf) -> Iterator[Engine]:
    bundle = shelf.bundle(num_hidden_layers=1, max_position_embeddings=4096)
    with Engine.open(bundle, backend="float", threads=1) as opened:
        yield opened


@pytest.fixture
def engine(shelf: Shelf) -> Iterator[Engine]:
    bundle = shelf.bundle(max_position_embeddings=4096)
    with Engine.open(bundle, backend="float", threads=1) as opened:
        yield opened


def stored(engine: Engine) -> PassageStore:
    assert engine.backend.paged is not None
    return store_of(engine.backend.paged)


def logits(session: Session) -> np.ndarray:
    while advance(session.sequence):
        pass
    with session.sequence.forward([], rows=[-1]) as branch:
        return branch.logits[0]


def opened(engine: Engine, kv: str = "fp") -> Session:
    return engine.session(kv=kv, context_tokens=1000, edits=True)


def read(
    engine: Engine, ids: list[int], passages: Sequence[list[int]] = (), kv: str = "fp"
) -> tuple[np.ndarray, int]:
    """Returns the logits after a prompt, and how many of its tokens are stale."""
    with opened(engine, kv) as session:
        session.prefill(ids, passages=passages)
        return logits(session), session.sequence.encoding.staleness.stale


def far(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kv", KV)
def test_a_passage_that_was_read_before_is_right_wherever_it_stands(
    one_layer: Engine, kv: str
) -> None:
    once = [*HEAD, *FIRST, *SECOND, *TEXT]
    actual, stale = read(one_layer, once, (FIRST, SECOND), kv)
    assert (stale, len(stored(one_layer))) == (0, 2)
    assert far(actual, read(one_layer, once, (), kv)[0]) < KV[kv]
    # SECOND stood behind 155 tokens: it is known before and behind other texts.
    for other in ([*HEAD, *SECOND, *TEXT], [*HEAD, *TEXT, *TEXT, *SECOND, *TEXT]):
        actual, stale = read(one_layer, other, (SECOND,), kv)
        assert stale == len(other) - max(FIRST_TOKENS, other.index(SECOND[0]))
        assert far(actual, read(one_layer, other, (), kv)[0]) < KV[kv]


def test_only_what_is_not_known_goes_through_the_model(engine: Engine) -> None:
    ids = [*HEAD, *FIRST, *SECOND, *TEXT]
    read(engine, ids, (FIRST, SECOND))
    with opened(engine) as session:
        session.prefill([*HEAD, *TEXT, *SECOND, *TEXT], passages=(SECOND,))
        assert session.stats().prompt_tokens == len(HEAD) + 2 * len(TEXT) + len(SECOND)
        assert session.stats().edits.taken_tokens == len(SECOND)
        assert not session.exact
        # Idle time makes it what a session has that computed it.
        assert session.refresh() == 0
        refreshed = logits(session)
    assert far(refreshed, read(engine, [*HEAD, *TEXT, *SECOND, *TEXT])[0]) < 1e-4


def test_what_was_copied_first_is_what_a_pass_stores(engine: Engine) -> None:
    """Checks bit for bit that a passage at its own place has the keys and values it had."""
    ids = [*HEAD, *FIRST, *SECOND, *TEXT]
    states = []
    for _ in range(2):
        with opened(engine) as session:
            session.prefill(ids, passages=(FIRST, SECOND))
            (cache,) = session.sequence.cache.parts
            states.append([cache.tail(layer, 0) for layer in range(2)])
    for computed, copied in zip(*states, strict=True):
        np.testing.assert_array_equal(computed[2], copied[2])
        for side in (0, 1):
            assert far(copied[side], computed[side]) < 3e-3
            # Keys are rotated back and again in float16; values are as they were.
            stop = len(HEAD) + len(FIRST) + len(SECOND)
            if side == 1:
                np.testing.assert_array_equal(computed[1][:stop], copied[1][:stop])


def test_an_edit_brings_a_known_passage_into_the_middle(one_layer: Engine) -> None:
    text = [*prompt(80, 5), *TEXT]
    read(one_layer, [*HEAD, *FIRST, *SECOND], (FIRST, SECOND))
    known = stored(one_layer).find("", SECOND)
    assert known is not None
    with opened(one_layer) as session:
        session.prefill([*HEAD, *text])
        edited = [*HEAD, *text[:60], *SECOND, *text[60:]]
        session.align(edited, edits=True)
        helpers = session.helpers(passages=session.passages(edited, (SECOND,)))
        while session.sequence.due():
            run(session.reading(helpers=helpers))
        assert session.stats().edits.taken_tokens == len(SECOND)
        actual = logits(session)
    assert far(actual, read(one_layer, edited)[0]) < 1e-3


def test_the_last_token_is_computed_and_short_texts_are(engine: Engine) -> None:
    read(engine, [*TEXT, *TEXT, *FIRST, *TEXT], (FIRST,))
    for ids, passages in (
        ([*HEAD, *FIRST], (FIRST,)),
        ([*HEAD, *FIRST[: LEAST_TOKENS - 1], *TEXT], (FIRST[: LEAST_TOKENS - 1],)),
        ([*HEAD, *FIRST[:-1], *TEXT], (FIRST,)),
    ):
        with opened(engine) as session:
            session.prefill(ids, passages=passages)
            stale = session.sequence.encoding.staleness.stale
            assert stale == (len(FIRST) - NEXT_TO_HEAD if ids[-1] == FIRST[-1] else 0)
            assert session.sequence.encoding.logits is not None


def test_a_copy_that_saw_only_the_beginning_does_for_its_own_place_alone() -> None:
    rows = np.zeros((1, 40, 1, 4), np.float16)
    early, late = (PassageCopy(rows, rows, before) for before in (LEAST_BEFORE - 1, LEAST_BEFORE))
    assert [early.does_after(n) for n in (0, LEAST_BEFORE - 1, 500)] == [False, True, False]
    assert [late.does_after(n) for n in (0, 1, LEAST_BEFORE, 500)] == [True] * 4


def test_a_copy_is_made_again_where_it_does_not_do(engine: Engine) -> None:
    store = stored(engine)
    read(engine, [*HEAD, *FIRST, *TEXT], (FIRST,))
    for ids, stale in (
        ([*TEXT, *TEXT, *FIRST, *TEXT], 0),
        ([*HEAD, *FIRST, *TEXT], 190 - NEXT_TO_HEAD),
    ):
        assert read(engine, ids, (FIRST,))[1] == stale
        passage = store.find("", FIRST)
        assert passage is not None
        assert passage.before == 80


def test_the_store_keeps_to_its_bytes_and_to_owners() -> None:
    rows = np.zeros((2, 32, 1, 4), np.float16)
    passage = PassageCopy(rows, rows, before=100)
    store = PassageStore(3 * passage.num_bytes)
    for number in range(4):
        store.add("me", [number] * 32, passage)
        store.find("me", [0] * 32)
    assert store.used_bytes == 3 * passage.num_bytes
    kept = [number for number in range(4) if store.find("me", [number] * 32) is not None]
    assert kept == [0, 2, 3]
    assert store.find("you", [0] * 32) is None
    store.add("me", [0] * 32, passage)
    assert (len(store), store.used_bytes) == (3, 3 * passage.num_bytes)
    large = np.zeros((2, 500, 1, 4), np.float16)
    store.add("me", [9] * 500, PassageCopy(large, large, before=100))
    assert store.find("me", [9] * 500) is None
    assert len(store) == 3


def test_models_that_keep_more_than_keys_compute_everything(shelf: Shelf) -> None:
    bundle = shelf.exported(shelf.family("lfm2"))
    with Engine.open(bundle, threads=1) as engine, opened(engine) as session:
        assert session.passages([*HEAD, *FIRST], (FIRST,)) is None
        session.prefill([*HEAD, *FIRST, *TEXT], passages=(FIRST,))
        assert len(stored(engine)) == 0


def test_places_stand_one_after_the_other() -> None:
    store = PassageStore()
    ids = [*TEXT, *SECOND, *FIRST, *SECOND]
    config: Any = None
    passages = PromptPassages(store, config, ids, (SECOND, FIRST, SECOND, TEXT))
    assert [tuple(place) for place in passages._places] == [(40, 130), (130, 280), (280, 370)]
